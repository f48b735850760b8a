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
from bench.server_load import API_LIMIT, CORE_LIMIT, ServerLoad
from recipes.load import load_recipe, recipe_ids

ROOT = Path(__file__).parents[2]
HOST_BOUND = sorted((ROOT / "results/h200/nemotron-h-synthetic").rglob("recipe.yaml"))
SHARE = st.none() | st.floats(0, 1.1)


@given(SHARE, SHARE, st.none() | st.floats(0, 100))
def test_the_host_is_named_only_where_one_of_its_processes_had_no_time_left(api, core, busy):
    said = ServerLoad(api, core).limits(busy)
    api_bound = api is not None and api >= API_LIMIT
    core_bound = core is not None and core >= CORE_LIMIT and busy is not None and busy < 70
    assert (said is not None) == (api_bound or core_bound)
    assert api_bound == (said is not None and "--api-server-count" in said)


def test_a_cpu_engine_that_computes_all_the_time_is_not_called_host_bound():
    assert ServerLoad(0.1, 1.9).limits(None) is None
    assert ServerLoad(0.1, 1.0).limits(99.0) is None, "beside a busy GPU the engine core polls"


def test_a_run_whose_api_server_had_no_time_left_says_so_with_its_figures_and_what_to_do(inv):
    assert HOST_BOUND, "the published runs on the H200 are what this is about"
    for recipe in HOST_BOUND:
        answer = inv("verdict", str(recipe.parent))
        assert "→ Host-bound: the API server had no time left" in answer.stdout
        assert "--api-server-count starts more of them" in answer.stdout
        found = json.loads((recipe.parent / "verdict.json").read_text())["server_cpu"]
        assert 0.8 < found["api_server"] < 1 and 0.4 < found["engine_core"] < 0.8
        assert (
            f"API server {found['api_server']:.2f}, engine core {found['engine_core']:.2f} of a core" in answer.stdout
        )


@pytest.mark.parametrize(
    ("api", "core", "bound"), [(0.3, 1.0, "engine core"), (0.3, 0.5, None), (0.95, 0.5, "API server")]
)
def test_what_is_said_follows_the_processes_of_the_record(tmp_path, api, core, bound):
    run = tmp_path / "run"
    shutil.copytree(HOST_BOUND[0].parent, run)
    for file in run.glob("boots/*/w*/telemetry.npz"):
        with np.load(file) as packed:
            arrays = dict(packed)
        names = [process["name"] for process in json.loads(str(arrays["meta"]))["processes"]]
        start = arrays["time_s"][0]
        for column, name in enumerate(names[:3]):
            share = core if name.startswith("VLLM::") else api if column == 0 else 0.0
            arrays["process_cpu_s"][:, column] = (arrays["time_s"] - start) * share
        np.savez_compressed(file, **arrays)
    (run / "SHA256SUMS").unlink()
    seal(run)
    measured = measure_evidence(read_evidence(run))
    assert measured.server.api_server == pytest.approx(api, abs=1e-6)
    assert measured.server.engine_core == pytest.approx(core, abs=1e-6)
    assert (measured.limits is None) if bound is None else (bound in measured.limits)


def test_every_token_that_a_model_of_random_weights_can_choose_is_text():
    """A token without text makes the server decode the whole prompt again with every token: it, not the GPU, is slow."""
    dummies = [
        loaded for loaded in map(load_recipe, recipe_ids()) if loaded.recipe.engine.flags.get("load-format") == "dummy"
    ]
    folders = {loaded.folder / loaded.recipe.model.path for loaded in dummies}
    assert folders
    for folder in folders:
        size = json.loads((folder / "config.json").read_text())["vocab_size"]
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        special = set(tokenizer.get_added_tokens_decoder())
        assert [token for token in range(size) if token not in special and not tokenizer.decode([token])] == []


def test_two_runs_that_are_compared_say_which_of_them_the_host_held_back(inv):
    mine, theirs = (recipe.parent for recipe in HOST_BOUND[:2])
    answer = inv("compare", str(mine), str(theirs))
    assert "→ mine is host-bound: the API server had no time left" in answer.stdout
    assert "→ theirs is host-bound: the API server had no time left" in answer.stdout


def test_memory_of_a_card_that_others_used_too_is_nobody_s_figure():
    shared = sorted((ROOT / "results/h200/micro-cuda").rglob("verdict.json"))
    assert shared
    for verdict in map(json.loads, (file.read_text() for file in shared)):
        assert verdict["gpu_memory_gb"] is None and "gpu_alone" in verdict["reasons"]["gpu_memory_gb"]
