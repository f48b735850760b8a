"""Recipes: what is accepted, what is refused, and that an error names file, line, key and remedy."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from images.errors import UsageProblem
from recipes.load import changes, first_choice, load_recipe, recipe_ids, resolve_id
from recipes.rules import RULES, broken_rules
from recipes.spec import flag_arguments, serving_spec

BASE = """\
schema: 1
id: fam/base
title: base
engine:
  image: cpu
  version: "0.32.0"
  flags:
    enforce-eager: true
    async-scheduling: false
    enable-prefix-caching: false
    max-model-len: 512
  env:
    OMP_NUM_THREADS: "1"
model:
  path: model
  served_name: m
  dtype: float32
  files:
    config.json: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
runtime: {port: 8000}
benchmark:
  prompt_source: random-text
  input_len: 64
  output_len: 32
  concurrency: 4
  prompts: 20
  temperature: 0
  seed: 1
"""
RUNG = """\
schema: 1
id: fam/rung
title: rung
extends: fam/base
engine:
  flags:
    max-num-seqs: 8
delta:
  changes: [engine.flags.max-num-seqs]
  reason: more
  source: a test
"""
LADDER = "schema: 1\nfamily: fam\ntitle: t\ndefault: base\nmachines: [any]\nrungs: [base, rung]\n"


@pytest.fixture
def library(tmp_path: Path) -> Path:
    write(tmp_path, "ladder", LADDER)
    write(tmp_path, "base", BASE)
    write(tmp_path, "rung", RUNG)
    return tmp_path


def write(library: Path, name: str, text: str) -> None:
    file = library / "fam" / f"{name}.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)


def test_every_recipe_in_the_library_is_good():
    for recipe_id in recipe_ids():
        assert broken_rules(load_recipe(recipe_id)) == []


def test_a_rung_inherits_everything_it_does_not_change(library: Path):
    base, rung = (load_recipe(name, library).recipe for name in ("fam/base", "fam/rung"))
    assert changes(base, rung) == ["engine.flags.max-num-seqs"]
    assert rung.engine.flags == {**base.engine.flags, "max-num-seqs": 8}


def test_unset_drops_an_inherited_flag(library: Path):
    text = RUNG.replace("  flags:\n    max-num-seqs: 8", "  unset: [max-model-len]").replace("num-seqs", "model-len")
    write(library, "rung", text)
    assert "max-model-len" not in load_recipe("fam/rung", library).recipe.engine.flags


WRONG_RUNGS = {
    "unknown top-level key": (
        ("title: rung", "titel: rung"),
        "rung.yaml:3: titel: unknown key; the nearest valid one is",
    ),
    "unknown nested key": (
        ("  flags:", "  flgas:"),
        "rung.yaml:6: engine.flgas: unknown key; the nearest valid one is 'flags'",
    ),
    "flag with dashes": (("    max-num-seqs: 8", "    --max-num-seqs: 8"), "such as 'max-num-seqs'"),
    "flag with underscores": (("    max-num-seqs: 8", "    max_num_seqs: 8"), "such as 'max-num-seqs'"),
    "inherited value repeated": (
        ("    max-num-seqs: 8", "    max-model-len: 512"),
        "rung.yaml:7: engine.flags.max-model-len: set to its inherited value 512; remove it",
    ),
    "undeclared change": (
        ("    max-num-seqs: 8", "    max-num-seqs: 8\n    seed: 3"),
        "rung.yaml:8: engine.flags.seed: changed, but delta.changes doesn't declare it",
    ),
    "declared but unchanged": (
        ("[engine.flags.max-num-seqs]", "[engine.flags.max-num-seqs, engine.env.FOO]"),
        "engine.env.FOO: declared in delta.changes, but not changed",
    ),
    "no delta": ((RUNG[RUNG.index("delta:") :], ""), "delta: missing"),
    "missing parent": (("extends: fam/base", "extends: fam/bsae"), "did you mean fam/base"),
    "extends itself": (
        ("extends: fam/base", "extends: fam/rung"),
        "extends goes round in a circle: fam/rung → fam/rung",
    ),
    "id is not the file": (("id: fam/rung", "id: fam/rang"), "id is 'fam/rang', the file says 'fam/rung'"),
    "unset of nothing": (("  flags:\n", "  unset: [nope]\n  flags:\n"), "rung.yaml:6: unknown inherited name 'nope'"),
    "env value not a string": (
        ("  flags:\n", "  env: {FOO: 1}\n  flags:\n"),
        "rung.yaml:6: engine.env.FOO: input should be a valid string, found 1",
    ),
    "yaml boolean as env": (
        ("  flags:\n", "  env: {FOO: no}\n  flags:\n"),
        "engine.env.FOO: input should be a valid string",
    ),
    "duplicate key": (
        ("title: rung", "title: rung\ntitle: again"),
        "rung.yaml:4: key 'title' stands twice (first on line 3)",
    ),
    "anchor": (("title: rung", "title: &a rung"), "rung.yaml:3: anchors and aliases aren't allowed"),
    "tag": (("title: rung", "title: !!python/object:os.system rung"), "rung.yaml:3: tag"),
    "key read as boolean": (
        ("title: rung", "title: rung\non: 1"),
        "rung.yaml:4: key True is read as bool; write it in quotes",
    ),
    "not YAML": (("title: rung", "title: [rung"), "not valid YAML"),
    "a list": ((RUNG, "- 1\n"), "rung.yaml:1: wanted a mapping"),
    "empty": ((RUNG, ""), "rung.yaml:1: wanted a mapping"),
    "bad hash": (
        ("engine:\n", "model: {files: {config.json: abc}}\nengine:\n"),
        "rung.yaml:5: model.files.config.json: string should match pattern",
    ),
    "public address": (
        ("engine:\n", "runtime: {host: 0.0.0.0}\nengine:\n"),
        "rung.yaml:5: runtime.host: input should be '127.0.0.1'",
    ),
    "too long": ((RUNG, RUNG + "# x" * 400_000), "the most a recipe file has"),
    "too deep": (("max-num-seqs: 8", "x: " + "[" * 40 + "]" * 40), "nested deeper than 32 levels"),
    "schema from the future": (("schema: 1", "schema: 2"), "rung.yaml:1: schema: input should be 1, found 2"),
}


@pytest.mark.parametrize("case", WRONG_RUNGS)
def test_a_wrong_recipe_is_one_clear_error(library: Path, case: str):
    (before, after), expected = WRONG_RUNGS[case]
    assert before in RUNG
    write(library, "rung", RUNG.replace(before, after))
    with pytest.raises(UsageProblem) as caught:
        load_recipe("fam/rung", library)
    assert expected in str(caught.value)


EAGER = "    enforce-eager: true\n"
ROUNDING = "enable-mamba-cache-stochastic-rounding: true\n"
FP16 = "    mamba-ssm-cache-dtype: float16\n"
FLASHINFER = "    mamba-backend: flashinfer\n"
CUDA_ONLY = {"rounding-fp16", "rounding-triton"}  # shown on a rung for CUDA: on a CPU another rule speaks first

BROKEN_RULES = {
    "async-declared": ("    async-scheduling: false\n", ""),
    "prefix-caching-declared": ("    enable-prefix-caching: false\n", ""),
    "omp-declared": ('  env:\n    OMP_NUM_THREADS: "1"\n', ""),
    "cpu-eager": ("enforce-eager: true", "enforce-eager: false"),
    "cpu-async": ("async-scheduling: false", "async-scheduling: true"),
    "cpu-mtp-prefix": (
        "enable-prefix-caching: false",
        "enable-prefix-caching: true\n    speculative-config: {method: mtp}",
    ),
    "enough-prompts": ("prompts: 20", "prompts: 16"),
    "context-fits": ("max-model-len: 512", "max-model-len: 95"),
    "ssm-dtype-explicit": ("  dtype: float32", "  dtype: float32\n  architecture: NemotronH_Omni_Reasoning_V3"),
    "mamba-config": (EAGER, f"{EAGER}    mamba-config: {{backend: flashinfer}}\n"),
    "rounding-fp16": (EAGER, f"{EAGER}    {ROUNDING}    mamba-cache-dtype: float16\n{FLASHINFER}"),
    "rounding-cpu": (EAGER, f"{EAGER}    {ROUNDING}{FP16}{FLASHINFER}"),
    "rounding-triton": (EAGER, f"{EAGER}    {ROUNDING}{FP16}    mamba-backend: triton\n"),
    "philox": (EAGER, f"{EAGER}    mamba-cache-philox-rounds: 5\n"),
    "ssu-algorithm": (EAGER, f"{EAGER}    mamba-ssu-algorithm: vertical\n    speculative-config: {{method: mtp}}\n"),
    "dead-env": ("  env:\n", '  env:\n    VLLM_USE_V1: "1"\n'),
    "old-method": (EAGER, f"{EAGER}    speculative-config: {{method: nemotron_h_mtp}}\n"),
    "moe-backend-pinned": ("  dtype: float32", "  dtype: float32\n  quantization: nvfp4"),
    "draft-moe-backend": (
        "  dtype: float32",
        "  dtype: float32\n  quantization: nvfp4",
        EAGER,
        f"{EAGER}    moe-backend: flashinfer_cutlass\n    speculative-config: {{method: mtp}}\n",
    ),
    "stop-after-drain": (EAGER, f"{EAGER}    shutdown-timeout: 60\n"),
    "set-elsewhere": (EAGER, f"{EAGER}    host: 0.0.0.0\n"),
    "machine-env": ("  env:\n", "  env:\n    LD_PRELOAD: /x.so\n"),
    "no-secret": ("  env:\n", "  env:\n    HF_TOKEN: hf_x\n"),
}


def test_every_rule_has_a_test():
    assert {rule.id for rule in RULES} == BROKEN_RULES.keys()


@pytest.mark.parametrize("rule", BROKEN_RULES)
def test_each_trap_is_caught_by_its_own_rule(library: Path, rule: str):
    edits = BROKEN_RULES[rule]
    text = BASE
    for before, after in zip(edits[::2], edits[1::2], strict=True):
        assert before in text
        text = text.replace(before, after)
    if rule in CUDA_ONLY:
        text += "applies: {device: cuda, reason: a test}\n"
    write(library, "base", text)
    lines = broken_rules(load_recipe("fam/base", library))
    assert [f"[rule {rule};" in line for line in lines] == [True], lines
    assert "base.yaml:" in lines[0]


def test_names_resolve_to_ids_and_unknown_ones_answer_with_the_nearest(library: Path):
    assert resolve_id("fam", library) == "fam/base"
    with pytest.raises(UsageProblem, match="did you mean fam/rung"):
        resolve_id("fam/rnug", library)


def test_a_machine_nobody_made_a_recipe_for_gets_the_embedded_family():
    recipe_id, reason = first_choice("cpu-x86-64")
    assert recipe_id.startswith("micro/")
    assert "cpu-x86-64" in reason


def test_flags_become_arguments():
    assert flag_arguments("a", True) == ["--a"]
    assert flag_arguments("async-scheduling", False) == ["--no-async-scheduling"]
    assert flag_arguments("port", 8000) == ["--port", "8000"]
    assert flag_arguments("seed", -1) == ["--seed=-1"], "a value that looks like an option stays a value"
    assert flag_arguments("names", ["x", "y z"]) == ["--names", "x", "y z"]


@given(st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.text())))
def test_a_map_flag_reaches_the_engine_as_the_same_json(value: dict):
    name, text = flag_arguments("speculative-config", value)
    assert name == "--speculative-config"
    assert json.loads(text) == value


def test_the_same_recipe_gives_the_same_argv_whatever_the_order_of_its_flags(library: Path):
    first = serving_spec(load_recipe("fam/base", library)).argv
    swapped = BASE.replace("    enforce-eager: true\n", "").replace(
        "    max-model-len: 512\n", "    max-model-len: 512\n    enforce-eager: true\n"
    )
    write(library, "base", swapped)
    assert serving_spec(load_recipe("fam/base", library)).argv == first


PITFALLS = {
    "no as a string flag": ("max-num-seqs: 8", "quantization: no", False),
    "on as a string flag": ("max-num-seqs: 8", "quantization: on", True),
    "a number with an exponent stays text, as YAML reads it": ("max-num-seqs: 8", "seed: 1e3", "1e3"),
    "an octal-looking string in quotes keeps its zeros": ("max-num-seqs: 8", 'seed: "0123"', "0123"),
}


@pytest.mark.parametrize("case", PITFALLS)
def test_yaml_s_own_readings_are_kept_and_shown(library: Path, case: str):
    before, after, read = PITFALLS[case]
    name = after.split(":")[0]
    write(library, "rung", RUNG.replace(before, after).replace("engine.flags.max-num-seqs", f"engine.flags.{name}"))
    value = load_recipe("fam/rung", library).recipe.engine.flags[name]
    assert value == read and type(value) is type(read)


WRONG_BASES = {
    "zero prompts": (
        "prompts: 20",
        "prompts: 0",
        "benchmark.prompts: input should be greater than or equal to 1, found 0",
    ),
    "negative temperature": ("temperature: 0", "temperature: -1", "benchmark.temperature: input should be greater"),
    "infinite temperature": ("temperature: 0", "temperature: .inf", "benchmark.temperature: input should be"),
    "concurrency as text": (
        "concurrency: 4",
        "concurrency: four",
        "benchmark.concurrency: input should be a valid integer",
    ),
    "fractional length": ("input_len: 64", "input_len: 64.5", "benchmark.input_len: input should be a valid integer"),
    "one token out": (
        "output_len: 32",
        "output_len: 1",
        "benchmark.output_len: input should be greater than or equal to 2",
    ),
    "huge length": ("input_len: 64", "input_len: 999999999", "benchmark.input_len: input should be less than"),
    "unknown prompts": (
        "random-text",
        "sharegpt",
        "benchmark.prompt_source: input should be 'task-stream' or 'random-text'",
    ),
    "privileged port": ("port: 8000", "port: 80", "runtime.port: input should be greater than or equal to 1024"),
    "unknown dtype": (
        "dtype: float32",
        "dtype: fp8",
        "model.dtype: input should be 'float32', 'bfloat16' or 'float16'",
    ),
    "path and repo": (
        "  path: model",
        "  path: model\n  repo: a/b",
        "model: value error, wanted either path (a folder) or repo",
    ),
    "no model source": ("  path: model\n", "", "model: value error, wanted either path"),
    "short revision": (
        "  path: model",
        "  repo: a/b\n  revision: 3f1bcfd82",
        "model.revision: string should match pattern",
    ),
    "flags as a string": (
        "  flags:\n    enforce-eager: true",
        '  flags: "--enforce-eager"\n  other:\n    enforce-eager: true',
        "engine.flags: input should be a valid dictionary",
    ),
    "a date that is none": ("title: base", "title: 2020-99-99\nextra: 1", "extra: unknown key"),
    "a number too long": ("seed: 1", "seed: " + "9" * 5000, "can't be read"),
    "a zero byte": ('OMP_NUM_THREADS: "1"', 'OMP_NUM_THREADS: "1\\0"', "zero byte"),
    "a model elsewhere": ("path: model", "path: ../../etc", "path must lie below the recipe's folder"),
    "an infinite tolerance": (
        "schema: 1",
        "schema: 1\nclaims: [{id: a, metric: output_tok_s, published: .nan, tolerance: .inf, status: claimed, machine: any, source: s}]",
        "claims.0.published: input should be a finite number",
    ),
    "a privileged container": (
        "runtime: {port: 8000}",
        "runtime: {port: 8000, privileged: true}",
        "runtime.privileged: unknown key",
    ),
    "all GPUs": ("runtime: {port: 8000}", "runtime: {port: 8000, gpus: all}", "runtime.gpus: unknown key"),
    "root in the container": (
        "runtime: {port: 8000}",
        "runtime: {port: 8000, user: 0}",
        "runtime.user: input should be greater",
    ),
    "null flag": ("enforce-eager: true", "enforce-eager: null", "engine.flags.enforce-eager"),
    "empty image": ("image: cpu", 'image: ""', "engine.image: string should have at least 1 character"),
    "version as a number": (
        'version: "0.32.0"',
        "version: 0.32",
        "engine.version: input should be a valid string, found 0.32",
    ),
    "unknown engine": ("image: cpu", "image: tpu", "no engine image 'tpu'"),
    "lower-case variable": ("OMP_NUM_THREADS", "omp_num_threads", "engine.env"),
    "missing benchmark": (BASE[BASE.index("benchmark:") :], "", "benchmark: missing; this key is needed"),
    "id with dots upwards": ("id: fam/base", "id: ../base", "id is '../base', the file says 'fam/base'"),
    "claim without tolerance": (
        "schema: 1",
        "schema: 1\nclaims: [{id: a, metric: output_tok_s, published: 1, status: claimed, machine: any, source: s}]",
        "claims.0.tolerance: missing",
    ),
    "claim of an unknown metric": (
        "schema: 1",
        "schema: 1\nclaims: [{id: a, metric: tps, published: 1, tolerance: 1, status: claimed, machine: any, source: s}]",
        "claims.0.metric: input should be 'output_tok_s'",
    ),
    "exact match of no suite": (
        "schema: 1",
        "schema: 1\nclaims: [{id: a, metric: exact_match, published: 1, tolerance: 1, status: claimed, machine: any, source: s}]",
        "exact_match needs a scope",
    ),
}


@pytest.mark.parametrize("case", WRONG_BASES)
def test_a_wrong_base_recipe_is_one_clear_error(library: Path, case: str):
    before, after, expected = WRONG_BASES[case]
    assert before in BASE
    write(library, "base", BASE.replace(before, after, 1))
    with pytest.raises(UsageProblem) as caught:
        broken_rules(load_recipe("fam/base", library))
    assert expected in str(caught.value)
    assert "base.yaml:" in str(caught.value)


@pytest.mark.parametrize(
    "content", ["", "[]", "schema: 1\n", LADDER.replace("base, rung", "base, gone"), LADDER + "x: 1\n"]
)
def test_a_wrong_ladder_file_is_one_clear_error(library: Path, content: str):
    write(library, "ladder", content)
    with pytest.raises(UsageProblem, match="ladder.yaml:"):
        load_recipe("fam/base", library)


def test_there_are_at_least_forty_kinds_of_wrong_recipe():
    assert len(WRONG_RUNGS) + len(WRONG_BASES) >= 40
