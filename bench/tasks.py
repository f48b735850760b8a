"""Room bench: the tasks about runs that exist, and about this machine's noise: each parses, calls, prints, exits."""

from pathlib import Path

from invoke import Exit, task

from images.errors import UsageProblem
from recipes.tasks import RECIPE

# The options that say which GPU and which engine a recipe is served with, of every task that serves one.
GIVEN = {
    "gpu": "the UUID of the one GPU to use, on a machine that has several",
    "engine-python": "an interpreter that has vLLM, for the recipe's engine: a GPU host without Docker",
    "engine-path": "with --engine-python: a folder for its PYTHONPATH; may be repeated",
}
RUNS = str(Path(__file__).resolve().parent.parent / ".runs")


def given(gpu: str | None, python: str | None, paths: list[str] | None) -> dict:
    """The values of GIVEN as bench.plan.Options takes them.

    Raises UsageProblem for folders of an interpreter that isn't named.
    """
    from images.given import require_interpreter

    require_interpreter(python, paths or ())
    return {"gpu": gpu, "engine_python": python, "engine_paths": tuple(paths or ())}


def finish(run: Path, as_json: bool) -> None:
    """Judge a fresh run, print it, end with its exit code; the run's folder is the last line."""
    from bench.report.text import print_verdict
    from bench.verdict import EXIT_CODES, write_verdict
    from images.console import emit_json, out
    from images.yaml_source import shown

    verdict = write_verdict(run)
    if as_json:
        emit_json({**verdict, "run": shown(run)})
    else:
        print_verdict(verdict, out())
        print(f"\n{shown(run)}")
    raise Exit(code=EXIT_CODES[verdict["state"]])


@task(
    positional=["run"],
    iterable=["boot"],
    help={
        "run": "a run's or a ladder's folder, or a result file of `vllm bench serve --save-detailed` made elsewhere",
        "recipe": "for a result file: the recipe whose claims it is held against",
        "boot": "for a result file: a further one, of another boot of the server; may be repeated",
        "out": "for a result file: the folder for runs (default .runs in the repository)",
        "json": "print verdict.json instead of tables",
    },
)
def verdict(_c, run, recipe=None, boot=None, out=RUNS, json=False):
    """Judge a run again from its folder alone; writes verdict.json there. Or judge a result file made elsewhere."""
    from bench.exchange.incoming import import_vllm
    from bench.ladder.show import is_ladder, judge_ladder

    if is_ladder(Path(run)):
        raise Exit(code=judge_ladder(Path(run), json))
    if Path(run).name in {"verdict.json", "ladder.json", "manifest.json"} and Path(run).is_file():
        raise UsageProblem(f"{run} is part of a run or ladder: give its folder, {Path(run).parent}")
    if Path(run).is_file():
        if not recipe:
            raise UsageProblem(f"{run} is a result file: say which recipe's claims to hold it against, --recipe NAME")
        finish(import_vllm([Path(run), *map(Path, boot)], recipe, Path(out)), json)
    if recipe or boot:
        raise UsageProblem(f"{run} is no result file; --recipe and --boot are for those: a run has its own recipe")
    finish(Path(run), json)


@task(
    positional=["run"],
    help={
        "run": "a run's folder",
        "to": "vllm (its detailed JSON, one file a window), csv (a row a window) or inferencex (its aggregate row)",
        "out": "file to write; - prints it",
    },
)
def export(_c, run, to="", out=""):
    """Write a run in another tool's form; the verdict's state and the figures' status go with it."""
    from bench.exchange.outgoing import export as write
    from bench.exchange.outgoing import exported
    from images.yaml_source import shown

    if not to or not out:
        raise UsageProblem("export needs --to vllm|csv|inferencex and --out FILE")
    if out != "-":
        for file in write(Path(run), to, Path(out)):
            print(shown(file))
        return
    texts = list(exported(Path(run), to, Path(out)).values())
    if len(texts) > 1:
        raise UsageProblem(f"the run has {len(texts)} windows, and {to}'s form is one file a window: --out FILE")
    print(texts[0], end="")


@task(
    iterable=["engine_path"],
    help={
        "recipe": f"{RECIPE}: make an A/A run of it and keep its noise floor",
        "run": "take the noise floor of this run of this machine, of three boots at least",
        "boots": "lives of the server (default 5)",
        "port": "port on 127.0.0.1 instead of the recipe's",
        "runtime": "process or docker; default: as the recipe says",
        **GIVEN,
        "out": "folder for runs (default .runs in the repository)",
        "json": "print JSON",
    },
)
def noise(
    _c,
    recipe=None,
    run=None,
    boots=5,
    port=0,
    runtime=None,
    gpu=None,
    engine_python=None,
    engine_path=None,
    out=RUNS,
    json=False,
):
    """Measure this machine's noise floor: one recipe, boot after boot. Bare: show what is known."""
    from bench.measure import measure
    from bench.noise import print_noise, require_question
    from bench.plan import Options, gather

    require_question(recipe, run, boots)
    options = Options(recipe, port, boots, 0, runtime, here=True, **given(gpu, engine_python, engine_path))
    made = measure(gather(options), Path(out)) if recipe else None
    raise Exit(code=print_noise(made or (Path(run) if run else None), made is not None, json))
