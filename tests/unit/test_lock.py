"""A lock fixes what a recipe runs, and says what would differ elsewhere."""

import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from images.errors import Problem, UsageProblem
from recipes.load import LIBRARY, load_recipe
from recipes.lock import Images, as_text, differences, lock_here, locked_recipe, make_lock, parse_images, with_revision

SUPER = "nemotron-3.5-super-vl/fp16-mamba-state"
IMAGE = "vllm/vllm-openai@sha256:" + "b" * 64
FACTS = {"slug": "cpu-x86-64", "gpus": [], "pci_gpus": []}
REVISION = "a" * 40


def locked(name: str = "micro/mtp1", images: dict | None = None, revision: str | None = None) -> dict:
    return make_lock(with_revision(load_recipe(name), revision), FACTS, Images(images or {}))


def test_locking_twice_gives_the_same_bytes_whatever_the_machine():
    here = locked()
    elsewhere = make_lock(load_recipe("micro/mtp1"), {**FACTS, "slug": "another"}, Images({}))
    assert as_text(here) == as_text(locked())
    assert differences(here, elsewhere) == [], "machine facts are recorded, not compared"


def test_a_lock_holds_no_path_of_this_machine():
    lock = locked()
    assert lock["argv"][:2] == ["serve", "{model}"]
    assert str(load_recipe("micro").folder) not in as_text({**lock, "machine": None})


def test_every_difference_is_named_with_both_values():
    here = json.loads(as_text(locked()))
    here["env"]["OMP_NUM_THREADS"] = "2"
    here["argv"].append("--seed")
    here["model"]["files"]["config.json"] = "0" * 64
    lines = differences(locked(), here)
    assert 'env.OMP_NUM_THREADS: locked "1", here "2"' in lines
    assert any(line.startswith("argv[") and 'here "--seed"' in line for line in lines)
    assert any(line.startswith("model.files.config.json: locked") for line in lines)


def test_an_unconfirmed_revision_blocks_the_lock_with_the_command_that_resolves_it():
    with pytest.raises(
        UsageProblem, match=r"base.yaml:\d+: the revision of nvidia/.* --model-revision <40 hex digits>"
    ):
        with_revision(load_recipe(SUPER), None)
    with pytest.raises(UsageProblem, match="wanted the full commit"):
        with_revision(load_recipe(SUPER), "3f1bcfd82")


def test_a_container_recipe_needs_its_image_by_digest():
    with pytest.raises(UsageProblem, match="name its image"):
        locked(SUPER, revision=REVISION)
    lock = locked(SUPER, {"linux/arm64": IMAGE}, REVISION)
    assert lock["argv"][lock["argv"].index("--revision") + 1] == REVISION
    assert lock["engine"]["images"] == {"linux/arm64": IMAGE}


@pytest.mark.parametrize(
    "text",
    ["vllm/vllm-openai:latest", "linux/arm64=vllm/vllm-openai:v0.32.0", f"linux/riscv={IMAGE}", "linux/arm64=", ""],
)
def test_an_image_without_a_digest_is_refused(text):
    with pytest.raises(UsageProblem, match="NAME@sha256"):
        parse_images([text])


def test_a_lock_written_and_checked_through_the_front_door(inv, tmp_path):
    file = tmp_path / "micro.lock.json"
    assert inv("lock", "--recipe", "micro", "--out", str(file)).returncode == 0
    assert inv("lock", "--check", str(file)).returncode == 0
    lock = json.loads(file.read_text())
    file.write_text(json.dumps({**lock, "env": {**lock["env"], "OMP_NUM_THREADS": "4"}}))
    answer = inv("lock", "--check", str(file))
    assert answer.returncode == 5
    assert 'env.OMP_NUM_THREADS: locked "4", here "1"' in answer.stdout


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"schema": 2}',
        '{"schema": 1, "recipe": {"id": 5}, "model": {"revision": null}, "engine": {"images": {}}}',
    ],
)
def test_what_is_no_lock_is_one_clear_error(inv, tmp_path, content):
    file = tmp_path / "x.lock.json"
    file.write_text(content)
    answer = inv("lock", "--check", str(file))
    assert answer.returncode == 2
    assert "x.lock.json" in answer.stderr and "Traceback" not in answer.stderr


@pytest.fixture(scope="module")
def whole() -> str:
    """A lock of micro/mtp1, as text."""
    return as_text(locked())


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner))
DEEP = json.loads("[" * 400 + "]" * 400)


def parts(value: object, path: tuple = ()) -> list[tuple]:
    """Where each value of a lock lies."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(deeper for key, each in inside for deeper in parts(each, (*path, key)))]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 10_000), value=VALUES)
@example(place=0, value={"schema": 1, "recipe": {"id": 5}, "model": {"revision": None}, "engine": {"images": {}}})
@example(place=0, value={"schema": 1, "recipe": DEEP})
@example(place=0, value={"schema": 1, "recipe": [["id"]], "model": 1, "engine": []})
def test_a_damaged_lock_of_any_shape_is_one_clear_error_or_a_named_difference(whole, tmp_path, place, value):
    lock = json.loads(whole)
    every = parts(lock)
    if path := every[place % len(every)]:
        holder = lock
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = value
    else:
        lock = value
    file = tmp_path / "x.lock.json"
    file.write_text(json.dumps(lock))
    for read in (lambda: lock_here(file, FACTS)[2], lambda: locked_recipe(file)):
        try:
            said = str(read())
        except Problem as problem:
            said = str(problem)
        assert said.encode()


def test_a_lock_needs_to_be_told_what_to_do(inv):
    assert inv("lock").returncode == 2
    assert inv("lock", "--recipe", "micro", "--model-revision", REVISION).returncode == 2
    assert inv("lock", "--recipe", "micro", "--out", "/nonexistent/x.json").returncode == 2


def test_a_lock_renders_the_same_bytes_again_or_says_what_differs(inv, tmp_path):
    file, image = tmp_path / "micro.lock.json", "engine@sha256:" + "d" * 64
    inv("lock", "--recipe", "micro", "--out", str(file))
    first = inv("render", "--lock-file", str(file), "--target", "compose", "--image", image)
    assert first.returncode == 0 and "services:" in first.stdout
    assert inv("render", "--lock-file", str(file), "--target", "compose", "--image", image).stdout == first.stdout
    assert inv("render", "--lock-file", str(file)).returncode == 2, "a process recipe's lock has no image of its own"
    lock = json.loads(file.read_text())
    images = dict.fromkeys(("linux/amd64", "linux/arm64"), image)
    file.write_text(json.dumps({**lock, "engine": {**lock["engine"], "images": images}}))
    another = inv("render", "--lock-file", str(file), "--image", "engine@sha256:" + "e" * 64)
    assert another.returncode == 2 and "fixes its image" in another.stderr and another.stdout == ""
    file.write_text(json.dumps({**lock, "argv": [*lock["argv"], "--seed", "1"]}))
    changed = inv("render", "--lock-file", str(file), "--image", image)
    assert changed.returncode == 2
    assert 'locked "--seed", here null' in changed.stderr


def test_recipes_locks_and_runs_are_compared_with_each_other(inv, tmp_path):
    file = tmp_path / "base.lock.json"
    inv("lock", "--recipe", "micro/base", "--out", str(file))
    run = next((LIBRARY.parent.parent / "results" / "cpu-x86-64" / "micro").glob("*-micro-mtp1-*"))
    for first in ("micro/base", str(file)):
        found = json.loads(inv("diff", first, str(run), "--json").stdout)
        assert [None, '--speculative-config {"method":"mtp","num_speculative_tokens":1}'] in found["argv_env"]
    for other in (str(tmp_path / "gone"), str(run.parent), "results"):
        said = inv("diff", "micro/base", other)
        assert said.returncode == 2 and "is no run's folder" in said.stderr and "there are:" not in said.stderr


def test_a_lock_of_another_commit_than_is_confirmed_here_differs(inv, tmp_path):
    env, file = {"STATION_RECIPES_STATE": str(tmp_path / "state")}, tmp_path / "super.lock.json"
    asked = ["lock", "--recipe", SUPER, "--image", f"linux/arm64={IMAGE}", "--model-revision", REVISION]
    assert inv(*asked, "--out", str(file), **env).returncode == 0
    assert inv("lock", "--check", str(file), **env).returncode == 0, "nothing is confirmed here: the lock's is taken"
    repo = load_recipe(SUPER).recipe.model.repo
    assert inv("site", "--model-revision", f"{repo}={'b' * 40}", **env).returncode == 0
    checked = inv("lock", "--check", str(file), **env)
    assert checked.returncode == 5 and f'model.revision: locked "{REVISION}", here "{"b" * 40}"' in checked.stdout
