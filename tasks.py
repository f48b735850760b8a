"""The front door's tasks: each parses, calls one function, prints, and sets the exit code."""

import os
import signal
import sys
from pathlib import Path

# Until the door is open, Ctrl-C ends us without a traceback: nothing has been begun.
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from invoke import Collection, Exit, task

from bench.handover.tasks import adopt, bundle, check, compare, list_, pull, push
from bench.ladder.tasks import ladder
from bench.tasks import GIVEN, RECIPE, RUNS, export, finish, given, noise, verdict
from images import tasks as image_tasks
from images.errors import UsageProblem
from images.front_door import open_door
from recipes.tasks import build, diff, doctor, lock, provision, render, site

ROOT = Path(__file__).resolve().parent
RUNTIME = "process or docker; default: as the recipe says"


@task(
    iterable=["engine_path"],
    help={
        "recipe": f"{RECIPE}; default: the one for this machine",
        "port": "port on 127.0.0.1 instead of the recipe's",
        "boots": "lives of the server instead of the recipe's number",
        "windows": "measured loads a boot instead of the recipe's number",
        "runtime": RUNTIME,
        **GIVEN,
        "out": "folder for runs (default .runs in the repository)",
        "json": "print verdict.json instead of tables",
    },
)
def reproduce(
    _c,
    recipe=None,
    port=0,
    boots=0,
    windows=0,
    runtime=None,
    gpu=None,
    engine_python=None,
    engine_path=None,
    out=RUNS,
    json=False,
):
    """Serve a recipe, measure it, judge its claims: the main job, from nothing to a verdict."""
    from bench.measure import measure
    from bench.plan import Options, gather

    options = Options(recipe, port, boots, windows, runtime, **given(gpu, engine_python, engine_path))
    finish(measure(gather(options), Path(out)), json)


@task(
    iterable=["engine_path"],
    help={
        "recipe": f"{RECIPE}; its engine's client is measured; default: the one for this machine",
        **{name: GIVEN[name] for name in ("engine-python", "engine-path")},
        "json": "print JSON",
    },
)
def ceiling(_c, recipe=None, engine_python=None, engine_path=None, json=False):
    """Measure, once a machine and engine, what one load client can do; runs then name it beside their number."""
    from bench.ceiling import client_engine, measure_ceiling, print_ceiling
    from bench.ceilings import store_ceiling
    from recipes.load import first_choice, load_recipe
    from recipes.machine import machine_facts

    machine = machine_facts()
    loaded = load_recipe(recipe or first_choice(machine["slug"])[0])
    engine = client_engine(loaded, engine_python, engine_path or ())
    found = measure_ceiling(engine, machine)
    print_ceiling(found, store_ceiling(engine, machine, found), json)


@task(
    help={
        "recipe": RECIPE,
        "url": "measure a server someone else started, such as http://127.0.0.1:8000",
        "host": "measure the service that provision made there; claims are judged. A name that ssh knows, or localhost",
        "windows": "measured loads instead of the recipe's number",
        "out": "folder for runs (default .runs in the repository)",
        "json": "print verdict.json instead of tables",
    },
)
def bench(_c, recipe=None, url=None, host=None, windows=0, out=RUNS, json=False):
    """Measure a running server with a recipe's benchmark: a provisioned service is judged, any other is not."""
    from bench.measure import measure, require_model, require_url
    from bench.plan import Options, gather, gather_service

    if not recipe or bool(url) == bool(host):
        raise UsageProblem(
            "bench needs --recipe, and --url or --host. To serve and measure in one go: ./inv reproduce --recipe …"
        )
    if host:
        os.environ.update({"DOCKER_HOST": f"ssh://{host}"} if host != "localhost" else {})
        finish(measure(gather_service(recipe, host, windows), Path(out)), json)
    plan = gather(Options(recipe, 0, 1, windows, url=require_url(url)))
    require_model(plan)
    finish(measure(plan, Path(out)), json)


@task(
    iterable=["engine_path"],
    help={
        "recipe": f"{RECIPE}; default: the one for this machine",
        "port": "port on 127.0.0.1 instead of the recipe's",
        "runtime": RUNTIME,
        **GIVEN,
        "json": "print the server's record",
    },
)
def serve(_c, recipe=None, port=0, runtime=None, gpu=None, engine_python=None, engine_path=None, json=False):
    """Start a recipe's server and leave it running; `./inv status` finds it, `./inv stop` ends it."""
    from bench.plan import Options, gather
    from recipes.run.servers import serve_recipe

    options = Options(recipe, port, runtime=runtime, here=True, **given(gpu, engine_python, engine_path))
    plan = gather(options)
    serve_recipe(plan.spec, plan.engine, plan.box, json)


@task(help={"json": "print JSON"})
def status(_c, json=False):
    """Show the servers that `./inv serve` started: ready, stuck or gone, and what they are doing."""
    from recipes.run.servers import show_servers

    show_servers(json)


@task(
    help={
        "port": "which server, when there are several",
        "drain": "seconds to wait until no request is in flight (default 60)",
        "json": "print JSON",
    }
)
def stop(_c, port=0, drain=60, json=False):
    """Stop a server: wait for its requests to finish, then end it; says how many were cut off."""
    from recipes.run.servers import stop_server

    stop_server(port or None, drain, json)


@task(
    iterable=["engine_path"],
    help={
        "recipe": f"{RECIPE}; default: the one for this machine",
        "run": "take the answers of this run instead of serving a recipe",
        "against": "a run to compare with, item by item (McNemar)",
        "port": "port on 127.0.0.1 instead of the recipe's",
        "runtime": RUNTIME,
        **GIVEN,
        "out": "folder for runs (default .runs in the repository)",
        "json": "print JSON instead of tables",
    },
)
def quality(
    _c,
    recipe=None,
    run=None,
    against=None,
    port=0,
    runtime=None,
    gpu=None,
    engine_python=None,
    engine_path=None,
    out=RUNS,
    json=False,
):
    """Serve a recipe and ask its quality suites, without a load; every item is kept in the run."""
    from bench.evidence import read_evidence
    from bench.measure import measure, quality_only
    from bench.plan import Options, gather

    if run and not against:
        raise UsageProblem("quality --run RUN needs --against RUN. To ask the suites: ./inv quality --recipe …")
    if run:
        _compare_quality(Path(against), Path(run), json)
        return
    if against:
        read_evidence(Path(against))  # a wrong folder is said before an engine is started
    options = Options(recipe, port, 1, 1, runtime, load=False, **given(gpu, engine_python, engine_path))
    made = measure(quality_only(gather(options)), Path(out))
    if against and not json:
        _compare_quality(Path(against), made, json)
    finish(made, json)


def _compare_quality(before: Path, after: Path, as_json: bool) -> None:
    """Print the paired difference of two runs' answers."""
    from bench.evidence import read_evidence
    from bench.quality.score import paired_differences
    from bench.report.text import print_paired
    from images.console import emit_json, out

    first, second = read_evidence(before), read_evidence(after)
    differences = paired_differences(first, second)
    if as_json:
        emit_json({"before": str(before), "after": str(after), "paired": differences})
        return
    print_paired(first.recipe.id, second.recipe.id, differences, out())


@task(
    help={
        "require": "markers that must not be skipped, separated by commas: engine,docker,host,browser",
        "only": "run only tests of these kinds, separated by commas; what is left out is counted",
        "k": "only tests whose names match, as pytest's -k",
    }
)
def test(_c, require="", only="", k=""):
    """Run the tests this host allows; what is left out is printed with its reason."""
    from tests.kinds import KINDS, run_tests

    required, chosen = ([name for name in names.split(",") if name] for names in (require, only))
    wrong = [name for name in [*required, *chosen] if name not in KINDS]
    if wrong:
        raise UsageProblem(f"no kind of test is called {', '.join(wrong)}; there are: {', '.join(KINDS)}")
    raise Exit(code=run_tests(chosen or list(KINDS), required, k))


@task(
    help={
        "image": "cpu, cuda, or control for ./inv's own environment; default with --check: all",
        "check": "only say whether the pins still answer what is asked for; needs no network",
        "upgrade": "take the newest versions that fit, not those pinned now",
        "json": "print the findings",
    }
)
def pins(_c, image=None, check=False, upgrade=False, json=False):
    """Resolve an environment's pins anew from its requirements, or check them without a network."""
    from images.pins import check_pins, chosen_sets, resolve

    if (check and upgrade) or not (image or check):
        raise UsageProblem("pins needs --check, or --image NAME (and --upgrade for newer versions), not both")
    sets = chosen_sets(image)
    if not check:
        resolve(sets[0], upgrade)
    raise Exit(code=check_pins(sets, json))


@task(help={"fix": "mend what can be mended"})
def lint(_c, fix=False):
    """Check style and imports with ruff."""
    import subprocess

    ruff = [sys.executable, "-m", "ruff"]
    commands = [
        [*ruff, "check", *(["--fix"] if fix else [])],
        [*ruff, "format", *([] if fix else ["--check"])],
    ]
    codes = [subprocess.run(command, cwd=ROOT, check=False).returncode for command in commands]
    raise Exit(code=max(codes))


ns = Collection(
    reproduce,
    bench,
    ceiling,
    quality,
    serve,
    status,
    stop,
    verdict,
    export,
    noise,
    build,
    pins,
    check,
    render,
    lock,
    diff,
    ladder,
    list_,
    doctor,
    provision,
    site,
    bundle,
    adopt,
    push,
    pull,
    compare,
    test,
    lint,
    image=image_tasks.ns,
)


if __name__ == "__main__":
    open_door(ns)
