"""The real CPU engine says what it is, and what it makes of the recipes' command lines."""

import pytest

from images.engine import Engine, ensure_engine
from images.errors import EngineProblem
from images.probe import EngineFacts, Flag, probe, resolved_config, unknown_names
from recipes.check import engine_findings
from recipes.load import load_recipe, recipe_ids
from recipes.spec import serving_spec

MICRO = [name for name in recipe_ids() if name.startswith("micro/")]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return ensure_engine("cpu")


@pytest.fixture(scope="module")
def facts(engine: Engine, tmp_path_factory) -> EngineFacts:
    return probe(engine, tmp_path_factory.mktemp("cache"))


def test_the_engine_says_what_it_is(facts: EngineFacts, engine: Engine):
    assert facts.version == engine.version == "0.32.0"
    assert (facts.platform, facts.cuda, facts.arch_list, facts.flashinfer) == ("cpu", None, (), None)
    assert facts.torch.startswith("2.13.0")
    assert "VLLM_CPU_KVCACHE_SPACE" in facts.env and "VLLM_USE_V1" not in facts.env


def test_the_engine_says_what_its_flags_accept(facts: EngineFacts):
    assert facts.flags["--async-scheduling"] == Flag(None, negatable=True)
    assert "--no-async-scheduling" in facts.spellings()
    assert set(facts.flags["--mamba-ssm-cache-dtype"].choices) >= {"auto", "float16", "float32"}
    assert not facts.flags["--mamba-ssm-cache-dtype"].negatable
    assert "flashinfer" in facts.flags["--mamba-backend"].choices, "an enumeration, which the parser itself leaves open"


@pytest.mark.parametrize("recipe_id", MICRO)
def test_the_engine_knows_every_name_a_micro_recipe_uses(facts: EngineFacts, recipe_id):
    spec = serving_spec(load_recipe(recipe_id))
    flags = [argument for argument in spec.argv if argument.startswith("-")]
    assert len(flags) > 8
    assert unknown_names(facts, flags, spec.env) == []


def test_the_engine_does_not_know_the_names_published_commands_still_set(facts: EngineFacts):
    dead = ["VLLM_ATTENTION_BACKEND", "VLLM_USE_FLASHINFER_MOE_FP4", "VLLM_USE_V1"]
    said = unknown_names(facts, ["--mamba-ssm-dtype"], dead)
    assert "--mamba-ssm-cache-dtype" in said[0]
    assert [name for name, line in zip(dead, said[1:], strict=True) if name in line] == dead


def test_the_command_line_of_micro_mtp1_resolves_to_what_it_declares(engine: Engine):
    spec = serving_spec(load_recipe("micro/mtp1"))
    assert resolved_config(engine, spec.argv, spec.env) == {
        "async_scheduling": False,
        "dtype": "float32",
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "mamba_backend": "triton",
        "mamba_cache_dtype": "auto",
        "mamba_cache_mode": "none",
        "mamba_ssm_cache_dtype": "float32",
        "max_cudagraph_capture_size": None,
        "max_num_seqs": 16,
        "num_speculative_tokens": 1,
        "philox_rounds": 0,
        "speculative_method": "mtp",
        "stochastic_rounding": False,
    }


def test_what_a_command_line_leaves_out_or_asks_in_vain_is_seen(engine: Engine):
    spec = serving_spec(load_recipe("micro/base"))
    dropped = {"--no-enable-prefix-caching", "--no-async-scheduling"}
    argv = [argument for argument in spec.argv if argument not in dropped]
    argv += ["--async-scheduling", "--mamba-cache-philox-rounds", "5"]
    answer = resolved_config(engine, argv, spec.env)
    assert answer["enable_prefix_caching"] is True and answer["mamba_cache_mode"] == "align", "vLLM's defaults"
    assert answer["async_scheduling"] is False, "the CPU engine forces it off"
    assert answer["philox_rounds"] == 5 and answer["stochastic_rounding"] is False, "accepted, and without effect"
    assert answer["speculative_method"] is None and answer["num_speculative_tokens"] is None


def test_a_command_line_the_engine_refuses_is_said_with_its_words(engine: Engine):
    spec = serving_spec(load_recipe("micro/base"))
    with pytest.raises(EngineProblem, match="mamba-ssm-cache-dtype: invalid choice: 'float8'"):
        resolved_config(engine, [*spec.argv, "--mamba-ssm-cache-dtype", "float8"], spec.env)


def test_every_setting_of_the_default_recipe_is_one_the_engine_keeps():
    assert engine_findings("micro/fp16-mamba-state") == []
