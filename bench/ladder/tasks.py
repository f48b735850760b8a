"""Room bench: the task about ladders: it parses, calls, prints, exits."""

from pathlib import Path

from invoke import Exit, task

from bench.tasks import RUNS, given
from images.errors import UsageProblem

BOOTS = 3


@task(
    iterable=["engine_path", "guard", "join"],
    help={
        "recipe": "a family, such as micro",
        "show": "print what each rung changes and what was published; nothing is run",
        "rungs": "only these rungs, separated by commas; default: all of the ladder, in its order",
        "boots": f"lives of the server a rung (default {BOOTS}); when resuming: in all",
        "windows": "measured loads a boot instead of the recipes' number",
        "shape": "IN/OUT/STREAMS or IN/OUT/STREAMS/PROMPTS instead of the recipes' load, such as 512/512/256",
        "order": "interleaved (boot 1 of every rung, then boot 2; the default) or replicated (rung after rung)",
        "keep-if-better": "keep a rung's change only if this metric gets better beyond noise, such as output_tok_s",
        "guard": "with --keep-if-better: a metric that may not get worse (default ttft_p95_ms and tpot_p95_ms)",
        "without-quality": "with --keep-if-better: changes may be kept though no quality suite was asked",
        "resume": "a ladder's folder: go on with what is left; finished boots are kept",
        "join": "a folder of the same ladder, from another card or host; give it once for each, and they become one",
        "port": "port on 127.0.0.1 instead of the recipes'",
        "runtime": "process or docker; default: as the recipes say",
        "gpu": "the UUID of the one GPU to use, on a machine that has several",
        "engine-python": "an interpreter that has vLLM, for the rungs' engine: how a GPU host without Docker is used",
        "engine-path": "with --engine-python: a folder for its PYTHONPATH; may be repeated",
        "caches": "a file of compiled kernels (--keep-caches) to restore before the first boot",
        "keep-caches": "file to save compiled kernels and tuning in, after every boot",
        "out": "folder for ladders (default .runs in the repository)",
        "json": "print ladder.json instead of tables",
    },
)
def ladder(
    _c,
    recipe="",
    show=False,
    rungs=None,
    boots=0,
    windows=0,
    shape=None,
    order=None,
    keep_if_better=None,
    guard=None,
    without_quality=False,
    resume=None,
    join=None,
    port=0,
    runtime=None,
    gpu=None,
    engine_python=None,
    engine_path=None,
    caches=None,
    keep_caches=None,
    out=RUNS,
    json=False,
):
    """Measure a family rung by rung: each change alone, its effect proved, published beside measured."""
    from bench.ladder.climb import Visit
    from bench.plan import Options
    from recipes.check import print_ladder

    if show:
        if not recipe:
            raise UsageProblem("--show needs --recipe FAMILY; the table of a ladder that was run: ./inv verdict FOLDER")
        asked = {"--rungs": rungs, "--shape": shape, "--boots": boots, "--windows": windows, "--resume": resume}
        named = [name for name, value in asked.items() if value]
        if named:
            raise UsageProblem(f"--show prints the whole ladder as it was published: leave {', '.join(named)} out")
        print_ladder(recipe, json)
        return
    if join:
        raise Exit(code=_joined([Path(folder) for folder in join], Path(out), json))
    if bool(recipe) == bool(resume):
        raise UsageProblem(
            "ladder needs --recipe FAMILY, or --resume FOLDER. To look at it only: --recipe FAMILY --show"
        )
    options = Options(None, port, 0, 0, runtime, **given(gpu, engine_python, engine_path))
    if guard and not keep_if_better and not resume:
        raise UsageProblem("--guard names what a change may not worsen: it goes with --keep-if-better METRIC")
    only = [name.strip() for name in rungs.split(",")] if rungs and resume else None
    files = [Path(file) if file else None for file in (caches, keep_caches)]
    if resume:
        fixed = {"--windows": windows, "--shape": shape, "--order": order, "--keep-if-better": keep_if_better}
        _refuse_fixed({**fixed, "--guard": guard, "--without-quality": without_quality})
        folder = Path(resume)
        setting = _resumed(folder, boots, only)
    else:
        keep = keep_if_better
        setting = _asked(recipe, rungs, boots, windows, shape, order, keep, guard, not without_quality)
        folder = None
    raise Exit(code=_climb(folder, Path(out), setting, Visit(options, only, *files), json))


def _refuse_fixed(given: dict[str, object]) -> None:
    named = [name for name, value in given.items() if value]
    if named:
        raise UsageProblem(
            f"{', '.join(named)}: a ladder that is resumed keeps what it was begun with. Start a new one"
        )


def _asked(family, rungs, boots, windows, shape, order, keep, guard, quality):
    """The setting of a new ladder, checked against the library."""
    from bench.ladder.setting import Setting, require_setting
    from recipes.compose import rungs_of

    if "/" in family:
        raise UsageProblem(f"--recipe {family}: a ladder is a family's: --recipe {family.split('/')[0]}; see --rungs")
    names = [loaded.recipe.id.split("/", maxsplit=1)[1] for loaded in rungs_of(family, rungs)]
    ordered = order or ("replicated" if keep else "interleaved")
    guards = list(guard) or (["ttft_p95_ms", "tpot_p95_ms"] if keep else [])
    setting = Setting(family, names, boots or BOOTS, windows, ordered, shape, keep, guards, quality)
    require_setting(setting)
    return setting


def _resumed(folder: Path, boots: int, only: list[str] | None):
    """The setting of a ladder that goes on: more boots may be asked for, and rungs that it has may be chosen."""
    from bench.ladder.setting import read_setting, require_setting

    before = read_setting(folder)
    unknown = [name for name in only or [] if name not in before.rungs]
    if unknown:
        raise UsageProblem(f"--rungs {unknown[0]}: this ladder has {', '.join(before.rungs)}")
    if boots and boots < before.boots:
        raise UsageProblem(
            f"--boots {boots}: this ladder was begun with {before.boots} a rung, and isn't cut short once figures are "
            "known: Ctrl-C ends it, and its table says what is left"
        )
    more = {"boots": boots, "begun_with": before.begun_with or before.boots} if boots > before.boots else None
    setting = read_setting(folder, more)
    require_setting(setting)
    return setting


def _joined(folders: list[Path], root: Path, as_json: bool) -> int:
    from bench.ladder.join import join_ladders
    from bench.ladder.show import show

    return show(*join_ladders(folders, root), as_json)


def _climb(folder: Path | None, root: Path, setting, visit, as_json: bool) -> int:
    from bench.ladder.climb import climb, new_ladder, require_ready
    from bench.ladder.show import show

    _, rungs = require_ready(setting, visit)  # what can't be is said before a folder is made
    folder = folder or new_ladder(root, setting, rungs)
    return show(folder, climb(folder, setting, visit), as_json)
