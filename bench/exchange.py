"""Room bench: runs in other tools' words: vLLM's result files in; vLLM's JSON, CSV and InferenceX's row out."""

import csv
import io
from pathlib import Path

import numpy as np

from bench.analyse import PERCENTILES, Arrays, analyse_window, latencies_ms, succeeded
from bench.arrays import save_window
from bench.evidence import Evidence, Window, judging
from bench.load import compact
from bench.record import now, tool_version
from bench.runfolder import (
    SCHEMA,
    dump_json,
    dump_rows,
    new_run,
    read_result,
    seal,
    window_folder,
    write_recipe,
    write_text,
)
from bench.verdict import judged
from images.errors import RunProblem, UsageProblem
from recipes.load import load_recipe
from recipes.model_files import sha256
from recipes.rules import TABLE_VERSION
from recipes.schema import Recipe

# All that is ever read of a result file. Its summaries are not: some of them lie, and all can be computed.
ARRAYS = ("start_times", "ttfts", "latencies", "input_lens", "output_lens", "itls", "errors")
TOLD = ("date", "backend", "model_id")
OF_THE_GPU = {"power_w": "power_w", "gpu_busy_pct": "utilisation_pct", "sm_clock_mhz": "sm_clock_mhz"}
TARGETS = ("vllm", "csv", "inferencex")
COMPLETIONS = frozenset({"openai", "vllm"})
VLLM_PERCENTILES = (50, 95, 99)
MOST = 4e9  # seconds of a clock that began in 1970 pass
MOST_GAP_S = 4e3  # the microseconds of it are kept as a uint32


def import_vllm(files: list[Path], recipe_id: str, root: Path) -> Path:
    """Make a run of result files of `vllm bench serve --save-detailed`, each taken as one boot; its folder.

    The run knows nothing of the machine, the engine, the weights and the settings, so that its claims are
    NOT_COMPARABLE and the guards that need a server's counters can't check. Raises RunProblem for a file
    that isn't such a result, UsageProblem where the files disagree about their load.
    """
    recipe = load_recipe(recipe_id).recipe
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
    load = recipe.benchmark.model_copy(
        update={"concurrency": concurrency, "prompts": prompts, "boots": boots, "windows": 1}
    )
    return recipe.model_copy(update={"benchmark": load})


def _differs(recipe: Recipe, result: dict, arrays: Arrays) -> list[str]:
    """How a file's load differs from the recipe's, in words, as far as it can be seen."""
    load, said = recipe.benchmark, []
    streams = result.get("max_concurrency")
    if streams != load.concurrency:
        said.append(f"{streams or 'all'} streams, the recipe has {load.concurrency}")
    if result.get("backend") not in COMPLETIONS:
        said.append(f"backend {result.get('backend')!r}: a chat template adds tokens to the prompts")
    if result.get("request_rate") not in {"inf", None}:
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


def export(run: Path, target: str, out: Path) -> list[Path]:
    """Write a run in another tool's form; the files written. vLLM's form has one file a window.

    Raises UsageProblem for an unknown target or a place that can't be written.
    """
    if target not in TARGETS:
        raise UsageProblem(f"no such form: {target!r}; there are {', '.join(TARGETS)}")
    evidence, verdict = judged(run)
    with judging(str(run)):
        texts = _texts(run, target, out, evidence, verdict)
    if not texts:
        raise UsageProblem(f"{run} has no finished window to export")
    for file, text in texts.items():
        try:
            write_text(file, text)
        except OSError as error:
            raise UsageProblem(f"{file} can't be written: {error.strerror}") from error
    return list(texts)


def _texts(run: Path, target: str, out: Path, evidence: Evidence, verdict: dict) -> dict[Path, str]:
    """What is written, by file."""
    if target == "csv":
        return {out: csv_text(evidence, verdict, run.resolve().name)}
    if target == "inferencex":
        return {out: dump_json(inferencex_row(evidence, verdict))}
    single = len(evidence.windows) == 1
    names = {id(each): out if single else _beside(out, each) for each in evidence.windows}
    return {names[id(each)]: dump_rows(vllm_result(evidence, verdict, each)) for each in evidence.windows}


def _beside(out: Path, window: Window) -> Path:
    return out.with_name(f"{out.stem}-b{window.boot}-w{window.number}{out.suffix}")


def figures_count(verdict: dict) -> bool:
    """Whether what was timed in a run counts: no guard voided it."""
    return verdict["output_tok_s"]["whole"] is not None


def _standing(evidence: Evidence, verdict: dict) -> dict:
    """What goes with every exported figure: what it is, and what the verdict says of it."""
    return {
        "recipe": verdict["recipe"],
        "machine": verdict["machine"],
        "status": verdict["status"],
        "state": verdict["state"],
        "failed_guards": [guard["id"] for guard in verdict["guards"] if guard["ok"] is False],
        **_bounds(verdict),
        "claims": [
            {name: claim[name] for name in ("id", "metric", "published", "status", "measured", "state", "reason")}
            for claim in verdict["claims"]
        ],
        "imported": evidence.manifest.imported is not None,
    }


def _bounds(verdict: dict) -> dict[str, str | None]:
    """What set the rate, if it wasn't the GPU, and what ran outside CUDA graphs; in words, None where neither did."""
    return {
        "host_bound": (verdict["server_cpu"] or {}).get("limits"),
        "outside_cuda_graphs": (verdict["setting"]["cuda_graphs"] or {}).get("said"),
    }


def vllm_result(evidence: Evidence, verdict: dict, window: Window) -> dict:
    """One window as `vllm bench serve --save-detailed` writes it, by its definitions, with the verdict beside it.

    Percentiles are interpolated and over successful requests only, as there. Left out are the fields that
    count chunks for tokens (max_output_tokens_per_s, itl summaries) or seconds for moments
    (max_concurrent_requests). A run whose timing is void has its arrays and no summary. Texts are null: few
    were kept.
    """
    arrays, load = window.arrays, evidence.recipe.benchmark
    good = succeeded(arrays)
    counts = arrays["chunks"].astype(np.int64) - (arrays["ttft_s"] > 0)
    gaps = np.split(arrays["gaps_us"] * 1e-6, np.cumsum(counts)[:-1])
    date = evidence.manifest.model_dump().get("started")
    result = {
        "date": date,
        "endpoint_type": "openai",
        "backend": "openai",
        "label": None,
        "model_id": evidence.recipe.model.served_name,
        "tokenizer_id": evidence.recipe.model.served_name,
        "num_prompts": load.prompts,
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": load.concurrency,
        **(_vllm_summary(arrays, good) if figures_count(verdict) else {}),
        "completed": int(good.sum()),
        "failed": int((~good).sum()),
        "input_lens": arrays["input_tokens"].tolist(),
        "output_lens": np.where(good, arrays["output_tokens"], 0).tolist(),
        "start_times": arrays["start_s"].tolist(),
        "ttfts": arrays["ttft_s"].tolist(),
        "latencies": arrays["e2e_s"].tolist(),
        "itls": [[round(gap, 6) for gap in each.tolist()] for each in gaps],
        "generated_texts": [None] * len(good),
        "errors": arrays["error"].tolist(),
    }
    return {**result, "station_recipes": _standing(evidence, verdict)}


def _vllm_summary(arrays: Arrays, good: np.ndarray) -> dict:
    tokens_in, tokens_out = (
        int(arrays[name][good].astype(np.int64).sum()) for name in ("input_tokens", "output_tokens")
    )
    ends = arrays["start_s"] + arrays["e2e_s"]
    wall = float(ends.max() - arrays["start_s"].min())
    ttft, e2e, tokens = (arrays[name][good] for name in ("ttft_s", "e2e_s", "output_tokens"))
    several = tokens > 1
    tpot = (e2e - ttft)[several] / (tokens[several] - 1)
    figures = {}
    for name, values in (("ttft", ttft), ("tpot", tpot), ("e2el", e2e)):
        if len(values) == 0:
            continue
        milliseconds = values * 1e3
        figures |= {f"mean_{name}_ms": float(milliseconds.mean()), f"median_{name}_ms": float(np.median(milliseconds))}
        figures |= {f"std_{name}_ms": float(milliseconds.std())}
        figures |= {f"p{p}_{name}_ms": float(np.percentile(milliseconds, p)) for p in VLLM_PERCENTILES}
    return {
        "duration": wall,
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": float(good.sum() / wall),
        "request_goodput": None,
        "output_throughput": tokens_out / wall,
        "total_token_throughput": (tokens_in + tokens_out) / wall,
        **figures,
    }


def csv_text(evidence: Evidence, verdict: dict, run: str) -> str:
    """A row a window: what it is, rates, streams, percentiles as in verdict.json (ms). Empty is not known."""
    load = evidence.recipe.benchmark
    valid = figures_count(verdict)
    rows = []
    for window in evidence.windows:
        result = analyse_window(window.arrays, load.concurrency) if valid else None
        figures = {
            "whole_tok_s": result and result.whole,
            "steady_tok_s": result and result.steady,
            "little_tok_s": result and result.little,
            "per_user_tok_s": result and result.per_user,
            "n_eff": result and result.n_eff,
            "peak_in_flight": result and result.peak_in_flight,
            "acceptance_length": verdict["acceptance_length"],
            "energy_j_per_token": verdict["energy_j_per_token"],
            **{name: (verdict["conditions"] or {}).get(key) for name, key in OF_THE_GPU.items()},
        }
        latency = latencies_ms([window.arrays])
        for name in ("ttft", "tpot", "e2e"):
            figures |= {f"{name}_p{p}_ms": latency[name][f"p{p}"] if valid else None for p in PERCENTILES}
        good = succeeded(window.arrays)
        rows.append(
            {
                "run": run,
                "recipe": verdict["recipe"],
                "machine": verdict["machine"],
                "status": verdict["status"],
                "state": verdict["state"],
                "boot": window.boot,
                "window": window.number,
                "concurrency": load.concurrency,
                "input_len": load.input_len,
                "output_len": load.output_len,
                "requests": len(good),
                "failed": int((~good).sum()),
                **{name: "" if value is None else f"{value:.6g}" for name, value in figures.items()},
                "failed_guards": " ".join(guard["id"] for guard in verdict["guards"] if guard["ok"] is False),
                **{name: said or "" for name, said in _bounds(verdict).items()},
            }
        )
    sink = io.StringIO()
    writer = csv.DictWriter(sink, list(rows[0]) if rows else ["run"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return sink.getvalue()


def inferencex_row(evidence: Evidence, verdict: dict) -> dict:
    """The run as a row of InferenceX's aggregate: rates a GPU, latencies in s, interactivity = 1 ÷ TPOT.

    Rates are whole-run ones, as theirs; a GPU is one that telemetry watched, not any in the machine, and what is a GPU
    is null where none was. Energy is whole-deployment GPU energy; power_valid is 1 only where
    the energy counter and the power's integral agree, 0 where they don't, absent without telemetry.
    """
    load = evidence.recipe.benchmark
    seen = [window.telemetry.meta["gpus"] for window in evidence.windows if window.telemetry]
    gpus = max((len(each) for each in seen), default=0) or None
    rate = verdict["output_tok_s"]["whole"]
    a_gpu = rate / gpus if rate and gpus else None
    row = {
        "hw": verdict["machine"],
        "conc": load.concurrency,
        "isl": load.input_len,
        "osl": load.output_len,
        "model": evidence.recipe.model.served_name,
        "framework": "vllm",
        "precision": evidence.recipe.model.quantization or evidence.recipe.model.dtype,
        "tp": gpus,
        "output_tput_per_gpu": a_gpu,
        "input_tput_per_gpu": a_gpu and a_gpu * load.input_len / load.output_len,
        "tput_per_gpu": a_gpu and a_gpu * (1 + load.input_len / load.output_len),
        "joules_per_output_token": verdict["energy_j_per_token"],
    }
    if verdict["energy_j_per_token"] is not None:
        row["power_valid"] = 1
    elif "apart" in verdict["reasons"].get("energy_j_per_token", ""):
        row["power_valid"] = 0
    for name, theirs in (("ttft", "ttft"), ("tpot", "tpot"), ("e2e", "e2el")):
        found = (verdict["latency_ms"] or {}).get(name, {})
        for percentile, word in (("p50", "median"), ("p90", "p90"), ("p95", "p95"), ("p99", "p99")):
            value = found.get(percentile)
            row[f"{word}_{theirs}"] = None if value is None else value / 1e3
            if name == "tpot":
                row[f"{word}_intvty"] = 1e3 / value if value else None
    return {**row, "station_recipes": _standing(evidence, verdict)}
