"""The micro family on the real engine: a wrong model or a wrong engine never ends REPRODUCED."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from bench.measure import measure, quality_only
from bench.record import Plan
from bench.verdict import write_verdict
from images.engine import ensure_engine
from recipes.load import LIBRARY, load_recipe, with_options
from recipes.machine import machine_facts
from recipes.schema import Proof
from recipes.spec import serving_spec
from tests.disturbed import failed
from tests.ports import free_port

MENDED = """
import sys; sys.path.insert(0, sys.argv[1])
import torch, torch.nn.functional as F
from mend_mamba import conv_update, state_update
torch.manual_seed(0)
requests, drafts, channels, kernel, heads, width, states = 5, 3, 12, 4, 4, 3, 6
for attempt in range(20):
    lengths = torch.randint(1, drafts + 2, (requests,))
    accepted = torch.tensor([int(torch.randint(1, drafts + 2, ())) for _ in range(requests)])
    bounds = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]); total = int(bounds[-1])
    slots = torch.randperm(40)[: requests * (drafts + 1)].view(requests, drafts + 1)
    x = torch.randn(total, channels); weight, bias = torch.randn(channels, kernel), torch.randn(channels)
    state = torch.randn(40, channels, kernel - 1 + drafts); before = state.clone()
    out = conv_update(x, state, weight, bias, "silu", conv_state_indices=slots, num_accepted_tokens=accepted, query_start_loc=bounds)
    for r in range(requests):
        past = before[slots[r, 0]][:, accepted[r] - 1 : accepted[r] - 1 + kernel - 1]
        for t in range(bounds[r], bounds[r + 1]):
            past = torch.cat([past, x[t][:, None]], 1)
            assert torch.allclose(out[t], F.silu((past[:, -kernel:] * weight).sum(1) + bias), atol=1e-5)
        assert torch.equal(state[slots[r, 0]][:, : kernel - 2 + lengths[r]], past[:, 1:])
    xs, dt = torch.randn(total, heads, width), torch.randn(total, heads)[..., None].expand(-1, -1, width)
    a = -torch.rand(heads)[:, None, None].expand(-1, width, states); d = torch.randn(heads)[:, None].expand(-1, width)
    dt_bias = torch.randn(heads)[:, None].expand(-1, width)
    b, c = torch.randn(total, 2, states), torch.randn(total, 2, states)
    state = torch.randn(40, heads, width, states); before = state.clone(); out = torch.zeros(total, heads, width)
    state_update(state, xs, dt, a, b, c, d, dt_bias, state_batch_indices=slots, out=out, num_accepted_tokens=accepted, cu_seqlens=bounds)
    for r in range(requests):
        now = before[slots[r, accepted[r] - 1]]
        for step, t in enumerate(range(bounds[r], bounds[r + 1])):
            pace = F.softplus(dt[t] + dt_bias)[..., None]
            b_heads, c_heads = (each[t].repeat_interleave(heads // 2, 0)[:, None, :] for each in (b, c))
            now = now * torch.exp(pace * a) + pace * xs[t][..., None] * b_heads
            assert torch.allclose(out[t], (now * c_heads).sum(-1) + d * xs[t], atol=1e-4)
            assert torch.allclose(state[slots[r, step]], now, atol=1e-5)
print("equal")
"""


def test_the_mended_operators_equal_a_token_by_token_reference(tmp_path: Path):
    images = LIBRARY.parent.parent / "images" / "cpu"
    argv = [str(ensure_engine("cpu").python), "-c", MENDED, str(images)]
    answer = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)
    assert answer.stdout.strip() == "equal", answer.stderr[-1500:]


def quality_run(tmp_path: Path, library: Path = LIBRARY, recipe_id: str = "micro/base", **update: object) -> dict:
    """Serve a recipe, ask its suite with 10 items a task, and judge."""
    loaded = with_options(load_recipe(recipe_id, library), port=free_port())
    quality = loaded.recipe.quality.model_copy(update={"items": 10})
    loaded = replace(loaded, recipe=loaded.recipe.model_copy(update={"quality": quality, **update}))
    plan = Plan(loaded, ensure_engine("cpu"), serving_spec(loaded), machine_facts(), load=False)
    return write_verdict(measure(quality_only(plan), tmp_path / "runs"))


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_a_flipped_weight_byte_or_another_tokenizer_is_never_reproduced(tmp_path: Path, file: str):
    library = tmp_path / "library"
    shutil.copytree(LIBRARY, library)
    victim = library / "micro" / "model" / file
    data = bytearray(victim.read_bytes())
    if file == "model.safetensors":
        data[len(data) // 2] ^= 1
    else:
        swapped = victim.read_text().replace('"a": 70', '"a": SWAP').replace('"b": 71', '"b": 70').replace("SWAP", "71")
        data = bytearray(swapped.encode())
    assert data != victim.read_bytes()
    victim.write_bytes(data)
    verdict = quality_run(tmp_path, library)
    assert verdict["state"] == "NOT_COMPARABLE"
    assert {claim["reason"] for claim in verdict["claims"]} == {f"not the claim's model: {file} differ"}


def test_the_engine_s_own_draft_operators_are_caught_as_not_reproduced(tmp_path: Path):
    """vLLM 0.32's CPU operators corrupt text with drafts: what the quality claims are for."""
    recipe = load_recipe("micro/mtp1").recipe
    engine = recipe.engine.model_copy(update={"env": {**recipe.engine.env, "VLLM_PLUGINS": ""}})
    verdict = quality_run(tmp_path, recipe_id="micro/mtp1", engine=engine, proof=Proof())
    assert verdict["state"] == "NOT_REPRODUCED"
    assert verdict["quality"]["micro-tasks"]["all"]["share"] < 0.9


def test_without_its_proof_of_effect_the_mended_rung_is_invalid(tmp_path: Path):
    recipe = load_recipe("micro/mtp1").recipe
    engine = recipe.engine.model_copy(update={"env": {**recipe.engine.env, "VLLM_PLUGINS": ""}})
    verdict = quality_run(tmp_path, recipe_id="micro/mtp1", engine=engine)
    assert verdict["state"] == "INVALID"
    assert failed(verdict, "run") == {"log_proof"}
