"""Room bench: from a plan to a sealed run: boots × windows, whatever happens on the way is recorded."""

import gzip
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from urllib.parse import urlsplit

from tokenizers import Tokenizer

from bench.contained import measure_contained
from bench.load import warm_up
from bench.noise import with_noise_floor
from bench.prompts import as_jsonl, digest, load_tokenizer, make_prompts, window_seed
from bench.quality.answers import save_answers
from bench.quality.runner import ask_suite
from bench.quality.suites import suite_items
from bench.record import Plan, Recorder, anonymous, environment_record, now, stored_measures
from bench.runfolder import dump_json, new_run, seal, window_folder, write_bytes, write_recipe, write_text
from bench.watch import Watch
from bench.window import Order, Target, measure_window
from images.console import note, stage
from images.declaration import declaration
from images.docker_engine import find_image
from images.errors import EngineProblem, OutsideProblem, Problem, UsageProblem
from recipes.machine import gpu_device, load_machines, machine_profile
from recipes.model_files import observed_files
from recipes.run import docker, process
from recipes.run.fetch import fetch_json
from recipes.run.jit import found, look
from recipes.run.managed import managed
from recipes.run.process import Server
from recipes.run.supervised import interrupts_held
from recipes.run.tokenizer import fetch_tokenizer
from recipes.serving import hosted_path

WARM_UP_WAVES = 2
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


def measure(plan: Plan, root: Path, on_made: Callable[[Path], None] = lambda _run: None) -> Path:
    """Make a run and return its folder, sealed: complete, or with the failure that ended it recorded.

    `on_made` gets the folder as soon as it is there. Whatever goes wrong ends here: a fault of the engine, Ctrl-C, a
    full disk, a fault of our own. Everything that was started is gone. Raises RunProblem only when the folder can't
    be made at all.
    """
    recorder = Recorder(plan)
    run, interrupted = new_run(plan.loaded.recipe, root), False
    try:
        on_made(run)
        recorder.write(run)
        write_recipe(run, plan.loaded.recipe)
        if plan.resolved is not None:
            write_text(run / "resolved.json", anonymous(dump_json(plan.resolved), plan))
        identity = None if plan.url else plan.engine.identity
        machine = with_noise_floor({**plan.machine, **stored_measures(plan)}, identity, plan.loaded.recipe)
        write_text(run / "machine.json", dump_json(machine))
        _boots(plan, run, recorder)
        recorder.succeeded()
    except KeyboardInterrupt:
        interrupted = True
        recorder.failed("interrupted", outside=True)
    except Problem as problem:
        recorder.failed(anonymous(str(problem), plan), outside=isinstance(problem, OutsideProblem))
    except OSError as error:
        said = anonymous(f"{error.strerror or error}: {error.filename or ''}".removesuffix(": "), plan)
        recorder.failed(said, outside=True)
    except Exception as error:  # a fault of ours must not cost the evidence
        recorder.failed(anonymous(f"a fault of this tool: {type(error).__name__}: {error}", plan))
    with interrupts_held(again=interrupted):
        _close(run, recorder)
    return run


def _close(run: Path, recorder: Recorder) -> None:
    """Write the manifest and the seal; on a full disk the run stays as it is, unsealed, and that is said."""
    try:
        recorder.manifest["finished"] = now()
        recorder.write(run)
        lines = [f"{value}  {name}\n" for name, value in sorted(recorder.prompt_digests.items())]
        write_text(run / "prompts.sha256", "".join(lines))
        seal(run)
    except OSError as error:
        failure = recorder.manifest["failure"]
        cause = f" It had ended because of: {failure['cause']}" if failure else ""
        note(f"✘ The run in {run} could not be closed: {error.strerror}. Free some space and run again.{cause}")


def _boots(plan: Plan, run: Path, recorder: Recorder) -> None:
    load = plan.loaded.recipe.benchmark
    for boot in range(plan.first_boot, plan.first_boot + load.boots):
        recorder.stage = f"boot {boot}"
        with _target(plan, run / "boots" / str(boot), boot, recorder) as target:
            recorder.manifest["engine"]["answered"].append(engine_version(target.url))
            if plan.load:
                _measure_boot(plan, run, boot, target, recorder)
            if boot == plan.first_boot and plan.loaded.recipe.quality:
                recorder.stage = "quality"
                _measure_quality(plan, run, target)


@contextmanager
def _target(plan: Plan, folder: Path, boot: int, recorder: Recorder) -> Iterator[Target]:
    folder.mkdir(parents=True)
    if plan.url is not None:
        yield Target(plan.url, plan.spec.served_name, lambda: True)
        return
    log = folder / "server.log"
    try:
        with ExitStack() as stack:
            caches = None if plan.box else look(plan.engine)
            doing = "looking at the service" if plan.service else "starting the engine"
            with stage(f"boot {boot}: {doing}") as update:
                server = stack.enter_context(_serve(plan, log, update))
            caches = caches and asdict(found(caches, look(plan.engine)))
            _record_boot(plan, folder, boot, server, recorder, caches)
            yield Target(server.url, server.served_name, server.alive, log, server.processes)
    finally:
        if log.exists():
            with interrupts_held(), suppress(OSError):  # on a full disk the rest of the run matters more
                text = anonymous(log.read_text(errors="replace"), plan)
                write_bytes(folder / "server.log.gz", gzip.compress(text.encode(), mtime=0))
                log.unlink()


def _serve(plan: Plan, log: Path, progress: Callable[[str], None]) -> AbstractContextManager[Server]:
    if plan.box is None:
        return process.serve(plan.spec, plan.engine, log, progress)
    if plan.service:
        files = observed_files(plan.loaded) if plan.spec.model_path else {}
        return managed(plan.spec, plan.box, hosted_path(plan.loaded), files, log, progress)
    return docker.serve(plan.spec, plan.box, log, progress)


def _record_boot(plan: Plan, folder: Path, boot: int, server: Server, recorder: Recorder, caches: dict | None) -> None:
    rendered = [*plan.engine.command(), *plan.spec.argv]
    argv = {"rendered": rendered, "live": server.argv}
    write_text(folder / "argv.json", dump_json({key: [anonymous(a, plan) for a in argv[key]] for key in argv}))
    write_text(folder / "env.json", anonymous(dump_json(_environment(plan, server)), plan))
    took_s = None if server.boot_s is None else round(server.boot_s, 1)
    lasting = {"since": server.since} if server.since else {}
    recorder.manifest["boots"].append(
        {"boot": boot, "boot_s": took_s, "image": server.image, "caches": caches, **lasting}
    )


def _environment(plan: Plan, server: Server) -> dict:
    image = find_image(plan.engine.id) if plan.box else None
    return environment_record(plan.spec, server.env, image.environment if image else None)


def _measure_boot(plan: Plan, run: Path, boot: int, target: Target, recorder: Recorder) -> None:
    recipe = plan.loaded.recipe
    load = recipe.benchmark
    tokenizer = load_tokenizer(plan.spec.model_path or plan.weights or fetch_tokenizer(plan.spec, recipe.model))
    recorder.stage = f"boot {boot} warm-up"
    count = WARM_UP_WAVES * load.concurrency
    with stage(f"boot {boot}: warming up with {count} requests") as update:
        prompts = make_prompts(load, tokenizer, window_seed(load.seed, boot, 0), count)
        watch = Watch(target.url, target.alive)
        expected = warm_up(
            target.url, target.model, load, prompts, watch, lambda done, total: update(f"{done}/{total}", done, total)
        )
    recorder.choose_clients(expected)
    for window in range(1, load.windows + 1):
        recorder.stage = f"boot {boot} window {window}"
        _measure_window(plan, run, (boot, window), target, tokenizer, recorder)


def _measure_window(
    plan: Plan, run: Path, place: tuple[int, int], target: Target, tokenizer: Tokenizer, recorder: Recorder
) -> None:
    load = plan.loaded.recipe.benchmark
    folder = window_folder(run, *place)
    title = f"boot {place[0]}: window {place[1]}"
    said = f"{title}, {load.prompts} requests of {load.input_len}+{load.output_len} tokens, {load.concurrency} streams"
    with stage(said) as update:
        prompts = make_prompts(load, tokenizer, window_seed(load.seed, *place), load.prompts)
        name = f"boots/{place[0]}/w{place[1]}"
        recorder.prompt_digests[name] = digest(as_jsonl(prompts, load.output_len))
        order = Order(plan.tokenizer_for_client, load, prompts, recorder.clients, *gpus_of(plan))

        def progress(done: int, total: int) -> None:
            update(f"{done}/{total} requests", done, total)

        if plan.box is None:
            sent = measure_window(order, target, plan.engine, folder, progress)
        else:
            sent = measure_contained(order, target, plan.spec, plan.box, plan.engine, folder, progress)
    recorder.load_applied(place, sent.streams, sent.prompts, sent.start_skew_s)


def gpus_of(plan: Plan) -> tuple[list[str], str | None]:
    """The UUIDs of the GPUs that a plan's engine runs on; or none, and why."""
    recipe = plan.loaded.recipe
    if declaration(recipe.engine.image).device != "cuda":
        return [], "the engine runs on the CPU"
    if plan.url and urlsplit(plan.url).hostname not in LOOPBACK:
        return [], "the server is not known to run on this machine"
    try:
        device = gpu_device(recipe, plan.machine, machine_profile(plan.machine, load_machines()))
    except UsageProblem as problem:
        return [], str(problem)
    return [device.rpartition("=")[2]], None


def _measure_quality(plan: Plan, run: Path, target: Target) -> None:
    quality = plan.loaded.recipe.quality
    for suite in quality.suites:
        items = suite_items(suite, quality.seed, quality.items)
        with stage(f"quality suite {suite}, {len(items)} items") as update:
            answers = ask_suite(
                target.url,
                target.model,
                items,
                quality.concurrency,
                Watch(target.url, target.alive),
                progress=lambda done, total: update(f"{done}/{total} items", done, total),
            )
        save_answers(run, suite, answers)


def engine_version(url: str) -> str:
    """What the engine answers on /version; 'unknown' when it doesn't say."""
    try:
        answer = fetch_json(f"{url}/version")
    except EngineProblem:
        return "unknown"
    version = answer.get("version") if isinstance(answer, dict) else None
    return version if isinstance(version, str) and version.isprintable() else "unknown"


def require_url(url: str) -> str:
    """Check the address of somebody's server.

    Raises UsageProblem unless it is http(s)://host[:port], without a password: it is stored in the run.
    """
    try:
        parts = urlsplit(url)
        plain = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0 and url.isprintable()
    except ValueError:
        plain = False
    if not plain or parts.path.strip("/") or parts.query or parts.fragment:
        raise UsageProblem(f"--url {url!r}: wanted http://HOST:PORT, such as http://127.0.0.1:8000")
    if parts.username is not None or parts.password is not None:
        raise UsageProblem(
            "--url: leave user and password out; the address is stored in the run, which is meant to be shown"
        )
    return url.rstrip("/")


def quality_only(plan: Plan) -> Plan:
    """The same plan with nothing but the quality suites, and only the claims about them.

    Raises UsageProblem when the recipe has no suite.
    """
    recipe = plan.loaded.recipe
    if recipe.quality is None:
        raise UsageProblem(f"{recipe.id} has no quality suite")
    claims = [claim for claim in recipe.claims if claim.metric == "exact_match"]
    return replace(plan, loaded=replace(plan.loaded, recipe=recipe.model_copy(update={"claims": claims})))


def require_model(plan: Plan) -> None:
    """Refuse a server at `plan.url` that doesn't answer, or doesn't serve the recipe's model name.

    Raises Problem saying what answered instead.
    """
    url, wanted = plan.url, plan.spec.served_name
    try:
        answer = fetch_json(f"{url}/v1/models")
    except EngineProblem as problem:
        raise EngineProblem(f"no vLLM server answers at {url}: {problem}. Start one, or check --url.") from problem
    models = answer.get("data") if isinstance(answer, dict) else None
    named = [model.get("id") for model in models or [] if isinstance(model, dict)]
    served = [name for name in named if isinstance(name, str) and name.isprintable()]
    if wanted not in served:
        raise EngineProblem(f"the server at {url} serves {', '.join(served) or 'nothing'}, the recipe wants {wanted!r}")
