"""The published ladder as recipes: every figure of the claims, one change a rung, shown in the engine's terms."""

import json
import os
from pathlib import Path

import pytest

from images.errors import UsageProblem
from recipes.compare import difference, ladder_rows, overridden
from recipes.load import load_ladder, load_recipe
from recipes.machine import gpu_device, load_machines, machine_profile, why_not
from recipes.schema import Recipe
from recipes.spec import serving_spec

FAMILY = "nemotron-3.5-super-vl"
PUBLISHED = {
    "base": 6058,
    "mtp3": 7000,
    "async-scheduling": None,
    "flashinfer-mamba": 7800,
    "mtp1": 9500,
    "fp16-mamba-state": 11840,
}
NO_GPU = {"gpus": [], "pci_gpus": [], "cpu": {"flags": []}, "slug": "cpu-x86-64"}
OPEN = {
    "benchmark.prompts",
    "benchmark.seed",
    "benchmark.temperature",
    "engine.flags.enable-prefix-caching",
    "engine.flags.gpu-memory-utilization",
    "engine.flags.limit-mm-per-prompt",
    "engine.flags.max-model-len",
    "engine.flags.max-num-seqs",
    "model.quantization",
}


def gpu(pci_id: str, name: str, memory_mib: float) -> dict:
    return {"pci_id": pci_id, "name": name, "memory_mib": memory_mib}


def test_the_published_ladder_is_complete_and_its_steps_are_the_published_ones():
    rows = ladder_rows(FAMILY, NO_GPU)
    assert {row["rung"]: row["published_tok_s"] for row in rows} == PUBLISHED
    steps = {row["rung"]: row["published_step"] for row in rows}
    assert steps["fp16-mamba-state"] == pytest.approx(11840 / 9500 - 1)
    assert steps["flashinfer-mamba"] == pytest.approx(7800 / 7000 - 1), "against the last rung that has a figure"
    assert all(row["no_op_if"] for row in rows[1:]), "every published change can be a no-op, and the table says how"


@pytest.mark.parametrize("rung", [*PUBLISHED, "omp1"])
def test_every_rung_declares_what_the_publication_leaves_open_as_our_choice(rung):
    recipe = load_recipe(f"{FAMILY}/{rung}").recipe
    assert recipe.choices.keys() >= OPEN
    assert recipe.engine.version == "0.32.0rc1.dev190+g3f1bcfd82"
    assert recipe.engine.substitutes == ["0.32.0rc1", "0.32.0"]
    assert {claim.status for claim in recipe.claims} <= {"claimed"}
    assert {claim.machine for claim in recipe.claims} <= {"dgx-station-gb300"}


def test_philox_rounds_are_declared_where_they_are_set():
    assert "engine.flags.mamba-cache-philox-rounds" in load_recipe(f"{FAMILY}/fp16-mamba-state").recipe.choices


def test_the_omp_half_of_the_first_step_stands_alone():
    found = difference(f"{FAMILY}/base", f"{FAMILY}/omp1")
    assert found["argv_env"] == [["OMP_NUM_THREADS=72", "OMP_NUM_THREADS=1"]]
    assert found["other"] == []


def test_a_difference_names_flags_both_ways():
    found = difference("micro/base", "micro/mtp1")
    assert found["argv_env"] == [[None, '--speculative-config {"method":"mtp","num_speculative_tokens":1}']]
    backwards = difference("micro/mtp1", "micro/base")
    assert backwards["argv_env"] == [[after, before] for before, after in found["argv_env"]]
    assert difference("micro/mtp1", "micro/mtp1")["argv_env"] == []


@pytest.mark.parametrize(
    ("gpus", "name"),
    [
        ([], "cpu"),
        (
            [gpu("10de:2bb1", "NVIDIA RTX PRO 2000", 16000), gpu("10de:31c2", "NVIDIA GB300", 256703)],
            "dgx-station-gb300",
        ),
        (
            [gpu("10de:31c3", "NVIDIA GB300", 256703), gpu("10de:2bb1", "NVIDIA RTX PRO 2000", 16000)],
            "dgx-station-gb300",
        ),
        ([gpu("10de:2335", "NVIDIA H200", 143771)], "h200"),
        ([gpu("10de:2330", "NVIDIA H100 80GB HBM3", 81559)], "any-cuda"),
        ([gpu("10de:2204", "NVIDIA GeForce RTX 3090", 24576)], "cpu"),
    ],
)
def test_a_machine_is_recognised_by_its_gpus_in_any_order(gpus, name):
    assert machine_profile({**NO_GPU, "gpus": gpus}, load_machines()).name == name


def test_a_rung_that_does_not_apply_says_why():
    assert why_not(load_recipe("micro/fp16-mamba-state").recipe, NO_GPU) is None
    assert "forces asynchronous scheduling off" in why_not(load_recipe("micro/async-scheduling").recipe, NO_GPU)
    assert "NVIDIA GPU" in why_not(load_recipe(FAMILY).recipe, NO_GPU)
    station = {**NO_GPU, "gpus": [gpu("10de:31c2", "NVIDIA GB300", 256703)]}
    assert "confirmed commit" in why_not(load_recipe(FAMILY).recipe, station)


def test_every_family_s_rungs_have_the_published_names():
    for family in ("micro", FAMILY, "nemotron-h-synthetic"):
        assert load_ladder(family).rungs == list(PUBLISHED)


def test_the_exported_json_schema_is_in_step():
    stored = Path(__file__).resolve().parent.parent.parent / "recipes" / "recipe.schema.json"
    assert json.loads(stored.read_text()) == Recipe.model_json_schema(by_alias=True), (
        "write it anew: ./inv check --schema"
    )


def test_the_ladder_and_the_difference_through_the_front_door(inv):
    shown = json.loads(inv("ladder", "--recipe", FAMILY, "--show", "--json").stdout)
    assert shown["rungs"][-1]["published_tok_s"] == 11840
    beside = {row["rung"]: (row["on"], row["delta"]) for row in shown["beside"]}
    assert beside["omp1"] == ("base", ["OMP_NUM_THREADS=1"])
    assert not beside.keys() & {row["rung"] for row in shown["rungs"]}
    answer = inv("diff", "micro/base", "micro/mtp1")
    assert '+ --speculative-config {"method":"mtp","num_speculative_tokens":1}' in answer.stdout
    assert inv("diff", "micro/base", "micro/mpt1").returncode == 2
    assert inv("ladder", "--recipe", FAMILY).returncode == 2


@pytest.mark.parametrize("rung", PUBLISHED)
def test_every_synthetic_rung_says_so_and_fixes_its_acceptance_in_advance(rung):
    recipe = load_recipe(f"nemotron-h-synthetic/{rung}").recipe
    assert recipe.status == "synthetic"
    config = recipe.engine.flags.get("speculative-config", {})
    rates = {0: None, 1: [0.80], 3: [0.80, 0.55, 0.35]}[config.get("num_speculative_tokens", 0)]
    assert config.get("synthetic_acceptance_rates") == rates
    assert all(claim.machine == "dgx-station-gb300" for claim in recipe.claims)


def test_a_machine_s_own_variables_reach_the_engine():
    station = load_machines()["dgx-station-gb300"]
    assert serving_spec(load_recipe(FAMILY), station).env["FLASHINFER_CUDA_ARCH_LIST"] == "10.3a"


def test_exactly_one_gpu_is_chosen_by_what_it_is_and_never_by_index():
    recipe = load_recipe(FAMILY).recipe
    machines = load_machines()
    display = {**gpu("10de:2bb1", "NVIDIA RTX PRO 2000", 16000), "uuid": "GPU-d"}
    gb300 = {**gpu("10de:31c2", "NVIDIA GB300", 256703), "uuid": "GPU-g"}
    for gpus in ([display, gb300], [gb300, display]):
        facts = {**NO_GPU, "gpus": gpus}
        assert gpu_device(recipe, facts, machine_profile(facts, machines)) == "nvidia.com/gpu=GPU-g"
    for gpus in ([], [display], [gb300, {**gb300, "uuid": "GPU-h"}]):
        facts = {**NO_GPU, "gpus": gpus}
        with pytest.raises(UsageProblem, match="exactly one GPU"):
            gpu_device(recipe, facts, machine_profile(facts, machines))
    assert gpu_device(load_recipe("micro").recipe, NO_GPU, machines["cpu"]) is None


def test_a_rendered_file_through_the_front_door(inv, tmp_path):
    image = "ghcr.io/example/engine@sha256:" + "c" * 64
    file = tmp_path / "serve.sh"
    assert inv("render", "--recipe", "micro", "--image", image, "--out", str(file)).returncode == 0
    assert image in file.read_text() and os.access(file, os.X_OK)
    assert "services:" in inv("render", "--recipe", "micro", "--target", "compose", "--image", image).stdout
    assert inv("render", "--recipe", "micro", "--target", "podman", "--image", image).returncode == 2
    assert inv("render", "--recipe", "micro", "--image", "engine:latest").returncode == 2
    assert inv("render", "--recipe", FAMILY, "--image", image).returncode == 2, "no GPU here, and none was named"


def test_a_setting_that_the_engine_overrides_is_named():
    flags = {
        "async-scheduling": True,
        "max-num-seqs": 16,
        "speculative-config": {"num_speculative_tokens": 3},
        "seed": 1,
    }
    resolved = {"async_scheduling": False, "max_num_seqs": 16, "num_speculative_tokens": 1, "philox_rounds": None}
    assert overridden(flags, resolved) == [
        "async-scheduling: declared true, the engine makes it false",
        "speculative-config: declared 3, the engine makes it 1",
    ]


def test_a_rung_is_shown_against_what_it_extends():
    """micro's mtp1 extends mtp3: what lies between them in the published order doesn't run on a CPU."""
    deltas = {row["rung"]: row["delta"] for row in ladder_rows("micro", NO_GPU)}
    assert deltas["mtp1"] == ['--speculative-config {"method":"mtp","num_speculative_tokens":1}']
