"""Room bench: result files of `vllm bench serve` as a run."""

from pathlib import Path

import numpy as np
from pydantic import ValidationError

from bench.analyse import Arrays
from bench.arrays import save_window
from bench.load import compact
from bench.record import now, tool_version
from bench.runfolder import SCHEMA, dump_json, new_run, read_result, seal, window_folder, write_recipe, write_text
from images.errors import RunProblem, UsageProblem
from recipes.load import load_recipe
from recipes.model_files import sha256
from recipes.rules import TABLE_VERSION
from recipes.schema import Benchmark, Recipe

# All that is ever read of a result file. Its summaries are not: some of them lie, and all can be computed.
ARRAYS = ("start_times", "ttfts", "latencies", "input_lens", "output_lens", "itls", "errors")
TOLD = ("date", "backend", "model_id")
COMPLETIONS = ("openai", "vllm")
MOST = 4e9  # seconds of a clock that began in 1970 pass
MOST_GAP_S = 4e3  # the microseconds of it are kept as a uint32


def import_vllm(files: list[Path], recipe_id: str, root: Path) -> Path:
    """Make a run of result files of `vllm bench serve --save-detailed`, each taken as one boot; its folder.

    The run knows nothing of the machine, the engine, the weights and the settings, so that its claims are
    NOT_COMPARABLE and the guards that need a server's counters can't check. Raises RunProblem for a file
    that isn't such a result, UsageProblem where the files disagree about their load, or make more than one run holds;
    nothing is made then.
    """
    recipe = load_recipe(recipe_id).recipe
    _refuse_copies(files)
    results = [read_result(file) for file in files]
    windows = [_arrays_of(file, result) for file, result in zip(files, results, strict=True)]
    loads = {(_concurrency(file, result), _asked(result)) for file, result in zip(files, results, strict=True)}
    if len(loads) != 1:
        raise UsageProblem(
            f"the files are of different loads (streams, prompts): {sorted(loads)}; judge them one by one"
        )
    concurrency, prompts = loads.pop()
    subject = _as_loaded(recipe, concurrency, prompts, len(files))
    differs = [
        said for result, arrays in zip(results, windows, strict=True) for said in _differs(recipe, result, arrays)
    ]
    run = new_run(subject, root)
    write_recipe(run, subject)
    why = "an imported file tells nothing of the machine"
    machine = {"slug": "unknown", "noise_floor": None, "client_ceiling": None}
    write_text(
        run / "machine.json", dump_json({**machine, "reasons": dict.fromkeys(("noise_floor", "client_ceiling"), why)})
    )
    write_text(run / "manifest.json", dump_json(_manifest(run, subject, files, results, list(dict.fromkeys(differs)))))
    for boot, arrays in enumerate(windows, start=1):
        save_window(window_folder(run, boot, 1), arrays)
    seal(run)
    return run


def _refuse_copies(files: list[Path]) -> None:
    """Raise UsageProblem for a file that is there twice: each boot counts once."""
    seen: dict[str, Path] = {}
    for file in (file for file in files if file.is_file()):
        first = seen.setdefault(sha256(file), file)
        if first is not file:
            raise UsageProblem(f"{file} has the same bytes as {first}: each is to be of another boot of the server")


def _arrays_of(file: Path, result: object) -> Arrays:
    """The raw arrays of a result file.

    Raises RunProblem naming the file and what is wrong with it.
    """
    if not isinstance(result, dict):
        raise RunProblem(f"{file}: wanted one result of vllm bench serve, found a {type(result).__name__}")
    missing = [name for name in ARRAYS if not isinstance(result.get(name), list)]
    if missing:
        raise RunProblem(
            f"{file}: no {', '.join(missing)}: make it with `vllm bench serve --save-result --save-detailed` "
            "of a version that saves them"
        )
    lengths = {name: len(result[name]) for name in ARRAYS}
    if len(set(lengths.values())) != 1 or not result["errors"]:
        raise RunProblem(f"{file}: the lists are empty or of different lengths: {lengths}")
    texts = result.get("generated_texts")
    texts = texts if isinstance(texts, list) and len(texts) == len(result["errors"]) else [None] * len(result["errors"])
    try:
        gaps_s = np.concatenate([np.asarray(gaps, np.float64) for gaps in result["itls"]])
        _refuse_odd(file, "itls", gaps_s, MOST_GAP_S)  # before it is made whole numbers, which no such thing becomes
        read = {name: result[name] for name in ARRAYS}
        arrays = compact({**read, "generated_texts": [text if isinstance(text, str) else "" for text in texts]})
    except (ValueError, TypeError, OverflowError, AttributeError) as error:
        raise RunProblem(f"{file}: the lists hold something else than numbers and texts: {error}") from error
    for name in ("start_s", "ttft_s", "e2e_s", "input_tokens", "output_tokens"):
        _refuse_odd(file, name, arrays[name], MOST)
    if not all(isinstance(text, str) for text in texts):
        arrays.pop("looping", None)  # texts that aren't there were not looked at
    return arrays


def _refuse_odd(file: Path, name: str, values: np.ndarray, most: float) -> None:
    if not ((values >= 0) & (values <= most)).all():
        raise RunProblem(f"{file}: {name} holds numbers that are negative, not finite or absurd")


def _asked(result: dict) -> int:
    """How many requests were asked for; a file that doesn't say asked for those it has."""
    asked = result.get("num_prompts")
    return asked if isinstance(asked, int) and not isinstance(asked, bool) and asked > 0 else len(result["errors"])


def _concurrency(file: Path, result: dict) -> int:
    """The streams of the closed loop; without a limit all requests were in flight at once."""
    limit = result.get("max_concurrency")
    if limit is None:
        return min(_asked(result), 4096)
    if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= 4096:
        raise RunProblem(f"{file}: max_concurrency is {limit!r}, wanted 1 to 4096")
    return limit


def _as_loaded(recipe: Recipe, concurrency: int, prompts: int, boots: int) -> Recipe:
    """The recipe with the files' load. Raises UsageProblem for one that no run can have: it couldn't be read again."""
    told = {"concurrency": concurrency, "prompts": prompts, "boots": boots, "windows": 1}
    try:
        load = Benchmark.model_validate({**recipe.benchmark.model_dump(), **told})
    except ValidationError as errors:
        first = errors.errors(include_url=False)[0]
        what = {"boots": "files, each a boot", "prompts": "requests (num_prompts)"}.get(
            first["loc"][0], first["loc"][0]
        )
        raise UsageProblem(f"{first['input']} {what}: {first['msg'].lower()} in one run") from None
    return recipe.model_copy(update={"benchmark": load})


def _differs(recipe: Recipe, result: dict, arrays: Arrays) -> list[str]:
    """How a file's load differs from the recipe's, in words, as far as it can be seen."""
    load, said = recipe.benchmark, []
    streams = result.get("max_concurrency")
    if streams != load.concurrency:
        said.append(f"{streams or 'all'} streams, the recipe has {load.concurrency}")
    if result.get("backend") not in COMPLETIONS:
        said.append(f"backend {result.get('backend')!r}: a chat template adds tokens to the prompts")
    if result.get("request_rate") not in ("inf", None):
        said.append(f"sent at {result['request_rate']} requests/s, not as a closed loop")
    others = int((arrays["input_tokens"] != load.input_len).sum())
    if others:
        said.append(f"{others} of {len(arrays['input_tokens'])} prompts not of {load.input_len} tokens")
    return [text[:200] for text in said]


def _manifest(run: Path, recipe: Recipe, files: list[Path], results: list[dict], differs: list[str]) -> dict:
    told = [{name: str(result.get(name))[:200] for name in TOLD} for result in results]
    named = [{"name": file.name, "sha256": sha256(file), **said} for file, said in zip(files, told, strict=True)]
    return {
        "schema": SCHEMA,
        "run": run.name,
        "recipe": recipe.id,
        "started": now(),
        "finished": now(),
        "planned_windows": len(files),
        "tool": tool_version(),
        "engine": {"name": None, "identity": None, "patches": [], "client": None, "answered": []},
        "model": {"files": None},
        "rules": TABLE_VERSION,
        "seed": None,
        "url": None,
        "imported": {"files": named, "differs": differs},
        "boots": [],
        "failure": None,
    }
