"""Whether a rate is the GPU's or the host's: the server's own processes at work, beside how busy the GPU was."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from bench.evidence import read_evidence
from bench.measurement import measure_evidence
from bench.runfolder import seal
from bench.server_load import ServerLoad, limits_of, mean_load
from bench.telemetry.window import idle_share
from recipes.load import load_recipe, recipe_ids

ROOT = Path(__file__).parents[2]
RUNS = sorted(file.parent for file in (ROOT / "results/h200/nemotron-h-synthetic").rglob("recipe.yaml"))
# Steps and scheduling took turns, and the GPU was busy less than 70% of the time; in mtp3's second run it was 70.4%.
HOST_BOUND = [run for run in RUNS if "-base-" in run.name or run.name.endswith("-mtp3-1da051")]
SHARE = st.none() | st.floats(0, 1.1)


@given(SHARE, SHARE, st.none() | st.floats(0, 1), st.none() | st.floats(0, 100))
def test_the_host_is_named_only_where_the_gpu_had_time_left_and_something_of_the_host_had_none(api, core, idle, busy):
    said = ServerLoad(api, core, idle if core is not None else None, busy).limits or ""
    if busy is not None and busy >= 70:
        assert not said, "beside a busy GPU a full API server or a polling engine core holds nothing back"
    if "--api-server-count" in said:
        assert api >= 0.8 and idle >= 0.1
    elif said:
        assert idle < 0.1 and busy < 70


@pytest.mark.parametrize(
    ("api", "core", "idle", "busy", "words"),
    [
        (0.9, 0.57, 0.42, 45, "the engine waited for it 42% of the time"),
        (0.9, 0.57, 0.42, None, "the engine waited for it 42% of the time"),
        (0.9, 0.65, 0.02, 47, "the engine always had a step in hand"),
        (0.6, 1.01, 0.0, 43, "the engine always had a step in hand"),
        (0.9, 0.65, 0.02, 99, None),
        (0.5, 0.5, 0.5, 40, None),
        (0.1, 1.9, 0.0, None, None),
        (None, None, None, None, None),
    ],
)
def test_what_is_said_follows_the_load(api, core, idle, busy, words):
    said = ServerLoad(api, core, idle, busy).limits
    assert (said is None) if words is None else (words in said)


def test_where_one_of_two_windows_was_host_bound_both_are_counted():
    bound, free = ServerLoad(0.9, 0.5, 0.4, 45.0), ServerLoad(0.6, 0.5, 0.3, 60.0)
    assert limits_of([bound, free]).startswith("in 1 of 2 windows the API server was at its limit (0.90 of a core)")
    assert limits_of([bound, bound]) == bound.limits and limits_of([free]) is None and limits_of([]) is None
    assert mean_load([bound, free]).api_server == pytest.approx(0.75)


def test_a_published_run_that_was_host_bound_says_so_with_its_figures(inv):
    assert HOST_BOUND and len(RUNS) > len(HOST_BOUND), "the published runs on the H200 are what this is about"
    for run in RUNS:
        answer = inv("verdict", str(run))
        found = json.loads((run / "verdict.json").read_text())["server_cpu"]
        assert (found["limits"] is not None) == (run in HOST_BOUND)
        assert ("→ Host-bound:" in answer.stdout) == (f"→ Host-bound: {found['limits']}." in answer.stdout)
        assert ("→ Host-bound:" in answer.stdout) == (run in HOST_BOUND)
        assert (
            f"API server {found['api_server']:.2f}, engine core {found['engine_core']:.2f} of a core" in answer.stdout
        )


@pytest.mark.parametrize(
    ("names", "shares", "words"),
    [
        (["python3", "VLLM::EngineCor"], [0.3, 1.0], "the engine always had a step in hand (1.00 of a core)"),
        (["python3", "VLLM::EngineCor"], [0.95, 0.05], "the API server was at its limit (0.95 of a core)"),
        (["VLLM::APIServer", "VLLM::EngineCor"], [0.95, 0.05], "the API server was at its limit (0.95 of a core)"),
        (["nvcc", "VLLM::EngineCor"], [0.95, 0.05], None),
        ([7, "VLLM::EngineCor"], [0.95, 0.05], None),
        (["\x1b[31m", "x" * 100_000], [0.95, 0.05], None),
    ],
)
def test_what_is_said_follows_the_processes_of_the_record(tmp_path, names, shares, words):
    run = tmp_path / "run"
    shutil.copytree(HOST_BOUND[0], run)
    for file in run.glob("boots/*/w*/telemetry.npz"):
        with np.load(file) as packed:
            arrays = dict(packed)
        meta = json.loads(str(arrays["meta"]))
        servers = [index for index, process in enumerate(meta["processes"]) if process["role"] == "server"]
        arrays["process_cpu_s"][:, servers] = 0
        for index, name, share in zip(servers, names, shares, strict=False):
            meta["processes"][index]["name"] = name
            arrays["process_cpu_s"][:, index] = (arrays["time_s"] - arrays["time_s"][0]) * share
        for index in servers[len(names) :]:
            meta["processes"][index]["name"] = "left over"
        np.savez_compressed(file, **{**arrays, "meta": json.dumps(meta)})
    (run / "SHA256SUMS").unlink()
    seal(run)
    said = measure_evidence(read_evidence(run)).limits
    assert (said is None) if words is None else (words in said)


def test_a_window_as_long_as_no_real_one_is_not_cut_into_steps():
    run = read_evidence(HOST_BOUND[0])
    telemetry = run.windows[0].telemetry
    column = next(n for n, process in enumerate(telemetry.meta["processes"]) if process["name"].startswith("VLLM::"))
    assert idle_share(telemetry, (0.0, 1e15), column) is None


def test_two_runs_that_are_compared_say_which_of_them_the_host_held_back(inv):
    mine, theirs = HOST_BOUND[:2]
    answer = " ".join(inv("compare", str(mine), str(theirs)).stdout.split())
    assert "→ mine is host-bound: the engine always had a step in hand" in answer
    assert "→ theirs is host-bound: the engine always had a step in hand" in answer


def test_other_work_on_the_host_is_told_in_cores():
    """On the H200s a second engine shared the host; on the 2-core machine there was next to nothing else."""
    shared = [json.loads((run / "verdict.json").read_text())["server_cpu"]["others"] for run in RUNS]
    assert min(shared) > 1
    alone = [json.loads(file.read_text())["server_cpu"] for file in (ROOT / "results/cpu-x86-64").rglob("verdict.json")]
    assert alone and max(each["others"] for each in alone if each) < 1


def test_memory_of_a_card_that_others_used_too_is_nobody_s_figure():
    shared = sorted((ROOT / "results/h200/micro-cuda").rglob("verdict.json"))
    assert shared
    for verdict in map(json.loads, (file.read_text() for file in shared)):
        assert verdict["gpu_memory_gb"] is None and "gpu_alone" in verdict["reasons"]["gpu_memory_gb"]


def test_every_token_that_a_model_of_random_weights_can_choose_is_text():
    """A token without text makes the server decode the whole prompt again with every token: it, not the GPU, is slow."""
    every = [load_recipe(name) for name in recipe_ids()]
    dummies = [loaded for loaded in every if loaded.recipe.engine.flags.get("load-format") == "dummy"]
    folders = {loaded.folder / loaded.recipe.model.path for loaded in dummies}
    assert folders
    for folder in folders:
        size = json.loads((folder / "config.json").read_text())["vocab_size"]
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        special = set(tokenizer.get_added_tokens_decoder())
        assert [token for token in range(size) if token not in special and not tokenizer.decode([token])] == []
