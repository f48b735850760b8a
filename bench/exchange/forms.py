"""Room bench: a judged run as vLLM's JSON, as CSV, as InferenceX's row; state and status go with each figure. Pure."""

import csv
import io

import numpy as np

from bench.analyse import PERCENTILES, Arrays, analyse_window, latencies_ms, succeeded
from bench.evidence import Evidence, Window

OF_THE_GPU = {"power_w": "power_w", "gpu_busy_pct": "utilisation_pct", "sm_clock_mhz": "sm_clock_mhz"}
VLLM_PERCENTILES = (50, 95, 99)


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
