"""Room bench: what a ladder was asked to do: written once into its folder, and read again to resume."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from bench.runfolder import dump_json, read_json, write_text
from images.errors import RunProblem, UsageProblem
from recipes.load import Loaded, with_options
from recipes.schema import Benchmark

FILE = "plan.json"
ORDERS = ("interleaved", "replicated")
SHAPE = re.compile(r"(\d+)/(\d+)/(\d+)(?:/(\d+))?")
WAVES = 5
# What --keep-if-better may ask for, and which of its directions is better.
HIGHER = frozenset({"output_tok_s", "acceptance_length"})
OF_A_GPU = frozenset({"energy_j_per_token"})
MOST = 1000  # boots a rung, windows a boot
METRICS = ("output_tok_s", "ttft_p95_ms", "tpot_p95_ms", "e2e_p95_ms", "energy_j_per_token", "acceptance_length")


@dataclass(frozen=True)
class Setting:
    """A ladder as it was asked for. `shape` is IN/OUT/STREAMS[/PROMPTS] or None for the recipes' own load.

    `keep`: the metric of --keep-if-better, or None; `guards`: metrics that no kept change may worsen. `quality`:
    a change without a quality suite may be kept (False) or not (True). `begun_with`: the boots a rung that were
    asked for before any figure was known, where more were asked for since.
    """

    family: str
    rungs: list[str]
    boots: int
    windows: int
    order: Literal["interleaved", "replicated"]
    shape: str | None
    keep: str | None
    guards: list[str]
    quality: bool
    schema: int = 1
    begun_with: int | None = None

    def applied(self, loaded: Loaded) -> Loaded:
        """A rung with the ladder's load: its shape and windows, and one boot, since each boot is a run of its own.

        Raises UsageProblem for a shape that the schema refuses.
        """
        return with_options(shaped(loaded, self.shape), 0, 1, self.windows)


def require_setting(setting: Setting) -> None:
    """Raise UsageProblem for options that make no sense together, or a value that isn't one of those known."""
    if setting.order not in ORDERS:
        raise UsageProblem(f"--order {setting.order}: wanted {' or '.join(ORDERS)}")
    if setting.boots < 1 or setting.windows < 0:
        raise UsageProblem("--boots and --windows: wanted a number from 1 on")
    if not setting.rungs:
        raise UsageProblem("--rungs: wanted names of rungs, separated by commas")
    if setting.boots > MOST or setting.windows > MOST:
        raise UsageProblem(f"--boots and --windows: wanted {MOST} at most")
    for name, metrics in (("--keep-if-better", [setting.keep] if setting.keep else []), ("--guard", setting.guards)):
        wrong = [metric for metric in metrics if metric not in METRICS]
        if wrong:
            raise UsageProblem(f"{name} {wrong[0]}: wanted one of {', '.join(METRICS)}")
    if setting.keep and setting.order == "interleaved":
        raise UsageProblem("--keep-if-better decides rung by rung: it goes with --order replicated")


def shaped(loaded: Loaded, shape: str | None) -> Loaded:
    """The recipe with another load. Its claims fall away, all but those of exact answers: what a load has no part in.

    Rates, latencies, memory and acceptance, which depends on the text, were claimed of the recipe's own load.
    """
    if not shape:
        return loaded
    match = SHAPE.fullmatch(shape)
    if not match:
        raise UsageProblem(f"--shape {shape}: wanted IN/OUT/STREAMS or IN/OUT/STREAMS/PROMPTS, such as 512/512/256")
    tokens_in, tokens_out, streams, prompts = (int(part) if part else None for part in match.groups())
    load = loaded.recipe.benchmark
    changed = {
        "input_len": tokens_in,
        "output_len": tokens_out,
        "concurrency": streams,
        "prompts": prompts or WAVES * streams,
    }
    try:
        benchmark = Benchmark.model_validate({**load.model_dump(), **changed})
    except ValidationError as errors:
        first = errors.errors(include_url=False)[0]
        raise UsageProblem(f"--shape {shape}: {first['loc'][0]}: {first['msg'].lower()}") from None
    kept = [claim for claim in loaded.recipe.claims if claim.metric == "exact_match"]
    changes = {"benchmark": benchmark} | ({} if benchmark == load else {"claims": kept})
    return replace(loaded, recipe=loaded.recipe.model_copy(update=changes))


def write_setting(folder: Path, setting: Setting) -> None:
    """Write plan.json."""
    write_text(folder / FILE, dump_json(asdict(setting)))


def read_setting(folder: Path, changed: Mapping[str, object] | None = None) -> Setting:
    """Read plan.json of a ladder's folder; `changed` replaces some of it for this visit.

    Raises RunProblem where the folder is no ladder's.
    """
    if not (folder / FILE).is_file():
        raise RunProblem(
            f"{folder} is no ladder's folder: it has no {FILE}. ./inv ladder prints its folder as last line"
        )
    try:
        read = TypeAdapter(Setting).validate_python(read_json(folder / FILE))
    except ValidationError as errors:
        first = errors.errors(include_url=False)[0]
        raise RunProblem(f"{folder / FILE}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    try:
        require_setting(read)
    except UsageProblem as problem:
        raise RunProblem(f"{folder / FILE}: {problem}") from None
    return replace(read, **(changed or {}))
