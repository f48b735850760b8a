"""Room recipes: checks the micro model in vLLM: text and log-probabilities against PyTorch, acceptance, exact match.

    python check_engine.py MODEL_FOLDER            # prints one JSON object; runs on a CPU

Both sides compute in float32, and every engine runs in a process of its own. Speculative decoding is
measured with vLLM as it is and, where the engine has images/cpu/mend_mamba.py as a plugin, mended by it.
vLLM 0.32's own CPU operators do not go back to the state before a rejected draft, so that a Mamba hybrid's
text with drafts differs from its text without. The texts without drafts are always vLLM's as it is.
"""

import json
import multiprocessing
import os
import sys
import tempfile
from importlib.metadata import entry_points
from pathlib import Path

import streams
import torch
from characters import encode
from checkpoint import load
from vllm import LLM, SamplingParams
from vllm.model_executor.layers.mamba import mamba_mixer2

PROMPTS, NEW = 200, 64
ACCEPTANCE_STREAMS, ACCEPTANCE_PROMPT, ACCEPTANCE_NEW = 32, 256, 128
INSTANCES = 100
MENDING = "station_recipes_mend_mamba"  # mend_mamba.py's name as a plugin
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


def engine(folder: str, drafts: int) -> LLM:
    """vLLM's engine with this number of draft tokens."""
    return LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=2048,
        max_num_seqs=32,
        speculative_config={"method": "mtp", "num_speculative_tokens": drafts} if drafts else None,
        disable_log_stats=False,
        seed=0,
    )


def mixed_prompts() -> list[str]:
    """Held-out prompts of all tasks, in turn."""
    per_task = -(-PROMPTS // len(streams.TASKS))
    items = [streams.held_out(task, 2, per_task) for task in streams.TASKS]
    return [item.prompt for turn in zip(*items, strict=True) for item in turn][:PROMPTS]


def continuations(llm: LLM) -> list[list[int]]:
    """The greedy ids after the first characters of each held-out stream."""
    seeds = range(ACCEPTANCE_STREAMS)
    prompts = [streams.stream(seed, ACCEPTANCE_PROMPT, streams.HELD_OUT) for seed in seeds]
    greedy = SamplingParams(temperature=0, max_tokens=ACCEPTANCE_NEW, ignore_eos=True)
    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, greedy, use_tqdm=False)]


def exact_matches(llm: LLM) -> dict[str, str]:
    """How many held-out instances of each task the engine answers exactly."""
    one_line = SamplingParams(temperature=0, max_tokens=128, stop="\n", include_stop_str_in_output=True)
    found = {}
    for task in streams.TASKS:
        items = streams.held_out(task, 3, INSTANCES)
        outputs = llm.generate([item.prompt for item in items], one_line, use_tqdm=False)
        right = sum(o.outputs[0].text == item.answer for o, item in zip(outputs, items, strict=True))
        found[task] = f"{right} of {INSTANCES}"
    return found


def steps(text) -> zip:
    """Each token of an output, and the log-probabilities at its place."""
    return zip(text.token_ids, text.logprobs, strict=True)


def without_drafts(folder: str) -> dict:
    """Greedy ids and their log-probabilities, exact match per task, streams continued."""
    llm = engine(folder, 0)
    greedy = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=0)
    texts = [o.outputs[0] for o in llm.generate(mixed_prompts(), greedy, use_tqdm=False)]
    return {
        "ids": [list(text.token_ids) for text in texts],
        "logprobs": [[step[token].logprob for token, step in steps(text)] for text in texts],
        "exact match": exact_matches(llm),
        "streams": continuations(llm),
    }


def with_drafts(folder: str, drafts: int, expected: list[list[int]]) -> dict:
    """Acceptance from vLLM's counters, and how many streams are continued as without drafts."""
    llm = engine(folder, drafts)
    same = sum(a == b for a, b in zip(continuations(llm), expected, strict=True))
    counts = {}
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:spec_decode_num_"):
            name = metric.name.removeprefix("vllm:spec_decode_num_")
            counts[name] = metric.values if hasattr(metric, "values") else metric.value
    return {
        "acceptance length": round(1 + counts["accepted_tokens"] / counts["drafts"], 4),
        "streams continued as without drafts": f"{same} of {len(expected)} ({ACCEPTANCE_NEW} tokens each)",
        "counters": counts,
        "operators from": mamba_mixer2.causal_conv1d_update.__module__,
    }


@torch.no_grad()
def agreement(folder: str, ids: list[list[int]], logprobs: list[list[float]]) -> dict:
    """How far PyTorch's greedy ids and log-probabilities agree with the engine's."""
    model = load(Path(folder), "cpu")
    same, largest = 0, 0.0
    for prompt, new, theirs in zip(mixed_prompts(), ids, logprobs, strict=True):
        text = encode(prompt)
        logits = model.lm_head(model.hidden(torch.tensor([text + new])))[0, len(text) - 1 : -1]
        ours = logits.log_softmax(-1).gather(-1, torch.tensor(new)[:, None])[:, 0]
        same += logits.argmax(-1).tolist() == new
        largest = max(largest, (ours - torch.tensor(theirs)).abs().max().item())
    return {
        "texts with the same greedy tokens": f"{same} of {len(ids)} ({NEW} tokens each)",
        "largest difference of a log-probability": largest,
    }


def float32_copy(folder: Path, copy: Path) -> str:
    """The same model in a folder whose config.json says float32.

    vLLM as it is gives one projection of the MTP layer the configuration's type, whatever --dtype says, and
    then accepts nothing; with this copy it shows the fault of its operators instead.
    """
    for path in folder.iterdir():
        (copy / path.name).symlink_to(path.resolve())
    config = json.loads((folder / "config.json").read_text())
    (copy / "config.json").unlink()
    (copy / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return str(copy)


def alone(function, *arguments, plugins: bool):
    """The function's result, from a fresh process, with vLLM's plugins or without."""
    os.environ.pop("VLLM_PLUGINS", None)
    if not plugins:
        os.environ["VLLM_PLUGINS"] = ""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def main() -> None:
    os.environ |= ENVIRONMENT
    folder = sys.argv[1]
    base = alone(without_drafts, folder, plugins=False)
    result = {
        "against PyTorch": agreement(folder, base["ids"], base["logprobs"]),
        "exact match": base["exact match"],
    }
    with tempfile.TemporaryDirectory() as copy:
        cases = [("vLLM as it is", float32_copy(Path(folder), Path(copy)), False)]
        if entry_points(group="vllm.general_plugins", name=MENDING):
            cases.append(("mended", folder, True))
        for name, model, plugins in cases:
            result[name] = {f"N={n}": alone(with_drafts, model, n, base["streams"], plugins=plugins) for n in (1, 3)}
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
