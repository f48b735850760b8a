"""What is said once of this machine holds for every task, is checked, and can be taken back."""

import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import plan
from bench.ladder.climb import Visit, require_ready
from bench.ladder.setting import Setting
from images.build import Built
from images.docker_engine import DockerProblem
from images.errors import EngineProblem, UsageProblem
from recipes import engine_image
from recipes.adopted import OPTIONS, Site, from_options
from recipes.load import load_recipe
from recipes.lock import with_revision
from recipes.machine import machine_facts as machine_facts_here
from recipes.machine import require_applies, why_not
from recipes.saying import change_site
from recipes.site import OwnSite, accept_image, own_site, site_file
from recipes.weights import require_weights, snapshot
from tests.unit.test_findings import SOUND, Recorded, machine_facts

ROOT = Path(__file__).parents[2]

FAMILY, REPO = "nemotron-3.5-super-vl", "nvidia/NVIDIA-Nemotron-3.5-Super-VL-120B-A12B-NVFP4"
COMMIT, IMAGE = "0123456789abcdef0123456789abcdef01234567", "sha256:" + "ab" * 32
STATION = {"gpus": [{"uuid": "GPU-1", "name": "NVIDIA GB300"}]}


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("STATION_RECIPES_STATE", str(tmp_path / "state"))
    return tmp_path


def say(**said) -> None:
    given = {"gpu": None, "cache": None, "mirrors": [], "images": [], "revisions": [], "forget": [], "as_json": True}
    change_site(**{**given, **said})


def test_a_confirmed_commit_lets_the_published_recipe_run_and_is_what_is_served_and_locked():
    before = load_recipe(FAMILY).recipe
    with pytest.raises(UsageProblem, match=f"inv site --model-revision {REPO}=COMMIT"):
        require_applies(before, STATION)
    say(revisions=[f"{REPO}={COMMIT}"])
    loaded = load_recipe(FAMILY)
    assert why_not(loaded.recipe, STATION) is None
    assert loaded.recipe.model.revision == with_revision(loaded, None).recipe.model.revision == COMMIT
    assert load_recipe("micro").recipe.model.revision is None
    say(forget=[f"revisions.{REPO}"])
    assert load_recipe(FAMILY).recipe == before


def test_an_image_that_was_accepted_for_an_engine_is_its_recipes_until_it_is_forgotten():
    accept_image("cuda", IMAGE)
    say(cache="/data/cache", mirrors=["registry.example.org/vllm"])
    site = load_recipe(FAMILY).site
    assert (site.image, site.cache, site.mirrors) == (IMAGE, "/data/cache", ["registry.example.org/vllm"])
    assert load_recipe("micro").site.image is None, "another engine"
    say(forget=["images.cuda", "cache"])
    assert (load_recipe(FAMILY).site.image, own_site().cache) == (None, None)


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({"gpu": "0"}, "^--gpu 0: wanted the UUID of a GPU"),
        ({"cache": "cache"}, "^--cache cache: wanted an absolute folder"),
        ({"mirrors": ["One/vllm"]}, "^--mirror One/vllm: wanted a registry's repository"),
        ({"gpu": "0", "cache": "cache"}, "^--gpu 0: .*\n--cache cache: "),
        ({"images": ["cuda"]}, "--image cuda: wanted ENGINE=sha256"),
        ({"images": ["cuda=latest"]}, "^--image cuda=latest: wanted ENGINE=sha256"),
        ({"revisions": [f"{REPO}=main"]}, f"^--model-revision {REPO}=main: wanted OWNER/NAME="),
        ({"images": [f"cudda={IMAGE}"]}, "--image cudda=…: unknown engine 'cudda'; did you mean cuda"),
        ({"images": [f"rocm={IMAGE}"]}, "unknown engine 'rocm'; there are: cpu, cuda"),
        ({"revisions": [f"{REPO.replace('Super', 'Supper')}={COMMIT}"]}, f"unknown model's repository .*{REPO}"),
        ({"revisions": [f"x/y={COMMIT}"]}, f"unknown model's repository 'x/y'; there are: {REPO}"),
        ({"forget": ["images.cuda"]}, "nothing is said of it"),
        ({"forget": ["cahce"]}, "did you mean cache"),
        ({"forget": ["mirrors.registry.example.org/vllm"]}, "nothing is said of it"),
        ({"forget": ["cache./data"]}, "nothing is said of it"),
        ({"forget": ["mirrors."]}, "nothing is said of it"),
        ({"forget": ["nonsense"]}, "nothing is said of it"),
    ],
)
def test_what_cannot_be_is_refused_and_what_was_said_stays(said, wanted):
    say(cache="/data/cache")
    before = site_file().read_bytes()
    with pytest.raises(UsageProblem, match=wanted):
        say(**said)
    assert site_file().read_bytes() == before


def test_every_value_of_a_site_has_the_option_that_says_it():
    assert set(OwnSite.model_fields) | set(Site.model_fields) - {"image"} == set(OPTIONS)
    with pytest.raises(UsageProblem, match="^--port 80: wanted a port from 1024"):
        from_options(Site, {"port": 80})


def test_one_mirror_is_forgotten_alone_and_the_others_are_asked_in_the_order_they_were_said_in():
    say(mirrors=["one.example.org/vllm", "two.example.org/vllm", "three.example.org:5000/vllm"])
    say(forget=["mirrors.two.example.org/vllm"])
    assert own_site().mirrors == ["one.example.org/vllm", "three.example.org:5000/vllm"]
    with pytest.raises(UsageProblem, match="did you mean mirrors.three.example.org:5000/vllm"):
        say(forget=["mirrors.three.example.org/vllm"])
    say(forget=["mirrors.one.example.org/vllm", "mirrors.three.example.org:5000/vllm"])
    assert "mirrors" not in site_file().read_text()


def test_a_spoilt_file_is_named_with_the_key_that_is_wrong():
    site_file().parent.mkdir()
    site_file().write_text("gpu: 3\n")
    with pytest.raises(UsageProblem, match=r"site\.yaml:1: gpu"):
        load_recipe("micro")


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "fifo"])
def test_what_is_no_file_in_its_place_is_said_and_not_taken_for_nothing(make):
    site_file().parent.mkdir()
    make(site_file())
    with pytest.raises(UsageProblem, match=r"site\.yaml"):
        load_recipe("micro")


BROKEN = {
    "no YAML": lambda file: file.write_text("gpu: [\n"),
    "two wrong types": lambda file: file.write_text("gpu: 3\nmirrors: 4\n"),
    "link to nowhere": lambda file: file.symlink_to("nowhere"),
    "folder": Path.mkdir,
}


@pytest.mark.parametrize("spoil", BROKEN.values(), ids=BROKEN)
def test_a_spoilt_site_makes_no_recipe_look_broken_and_is_said_once_with_the_way_out(inv, state: Path, spoil):
    """Tasks that look at recipes show them as if nothing were said; those that use what is said end at once."""
    env = {"STATION_RECIPES_STATE": str(state / "door")}
    file = state / "door" / "site.yaml"
    before = inv("list", "--json", **env).stdout
    file.parent.mkdir()
    spoil(file)
    said, way = "The site.yaml of this machine is broken, no recipe is", "./inv site --forget all"
    way = "Move that folder away" if file.is_dir() else way
    for task in (["check", "--all"], ["ladder", "--show", "--recipe", "micro"], ["list", "--json"]):
        looked = inv(*task, **env)
        assert (looked.returncode, looked.stderr.count(said), looked.stderr.count(way)) == (0, 1, 1), looked.stderr
        assert f"  {file}:" in looked.stderr and str(file) not in looked.stdout
    assert looked.stdout == before
    for task in (["reproduce"], ["render", "--recipe", "micro-cuda"], ["build", "--image", "cpu"], ["site"]):
        ended = inv(*task, **env)
        assert (ended.returncode, ended.stderr.count(said), ended.stderr.count(way)) == (2, 1, 1), ended.stderr
        assert ended.stdout == ""


@pytest.mark.parametrize("spoil", BROKEN.values(), ids=BROKEN)
def test_a_ladder_is_judged_from_its_folder_alone_whatever_this_machine_s_site_says(inv, state: Path, spoil):
    folder = sorted((ROOT / "results/h200").rglob("ladder.json"))[0].parent
    env = {"STATION_RECIPES_STATE": str(state / "door")}
    before = inv("verdict", str(folder), "--json", **env)
    (state / "door").mkdir()
    spoil(state / "door" / "site.yaml")
    after = inv("verdict", str(folder), "--json", **env)
    assert (after.returncode, after.stdout, after.stderr) == (before.returncode, before.stdout, before.stderr)
    assert before.returncode == 7 and json.loads(before.stdout)["family"] == "micro-cuda"


@pytest.mark.parametrize("spoil", BROKEN.values(), ids=BROKEN)
def test_a_spoilt_site_is_forgotten_whole_and_nothing_that_is_not_ours_with_it(state: Path, spoil):
    site_file().parent.mkdir()
    spoil(site_file())
    if site_file().is_dir():
        with pytest.raises(UsageProblem, match="Move that folder away"):
            say(forget=["gpu"])
        with pytest.raises(UsageProblem, match=r"site\.yaml: can't be written: Is a directory"):
            say(forget=["all"])
        return
    with pytest.raises(UsageProblem, match="no recipe is"):
        say(forget=["gpu"], cache="/data/cache")
    say(forget=["all"], cache="/data/cache")
    assert own_site().model_dump(exclude_defaults=True) == {"cache": "/data/cache"}
    say(forget=["all"])
    assert own_site().model_dump(exclude_defaults=True) == {}


def test_a_link_in_the_way_is_replaced_and_not_followed(state: Path):
    site_file().parent.mkdir()
    (state / "precious").write_text("precious")
    site_file().with_name("site.yaml.partial").symlink_to(state / "precious")
    say(cache="/data/cache")
    assert (state / "precious").read_text() == "precious" and not site_file().is_symlink()


def test_two_that_say_something_at_once_are_both_heard():
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: say(mirrors=[f"registry.example.org/{number}"]), range(16)))
    assert len(own_site().mirrors) == 16


def test_weights_that_are_not_in_the_cache_are_told_with_the_ways_to_them(state: Path):
    recipe = load_recipe(FAMILY).recipe
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"revision": COMMIT})})
    with pytest.raises(UsageProblem, match=r"is not in .*huggingface.*--no-serve.*\./inv site --cache"):
        require_weights(recipe, state)
    snapshot(state, recipe.model).mkdir(parents=True)
    require_weights(recipe, state)
    require_weights(load_recipe("micro").recipe, state)


def test_on_a_station_the_published_recipe_s_plan_is_whole_once_commit_image_and_weights_are_there(
    state: Path, monkeypatch
):
    """The README's steps, with a Station's facts in place of a Station: it has a second, smaller GPU for its screen."""
    for name, text in SOUND["files"].items():
        if text is not None and "SecureBoot" not in name:
            (state / "root" / name).parent.mkdir(parents=True, exist_ok=True)
            (state / "root" / name).write_text(text)
    facts = machine_facts.collect(state / "root", Recorded(SOUND), folders=["/"])
    built = Built("cuda", "build", IMAGE, None, "id", "0.32.0", "linux/arm64", 1, False, ())
    monkeypatch.setattr(plan, "held_image", lambda name, image: replace(built, name=name, id=image))
    proved_on = []
    monkeypatch.setattr(plan, "verify_image", lambda built, device: proved_on.append(device))
    monkeypatch.setattr(plan, "docker_engine", lambda: SimpleNamespace(devices_by_cdi=True))
    for said, wanted in (
        ({}, "needs a confirmed commit"),
        ({"revisions": [f"{REPO}={COMMIT}"], "images": [f"cuda={IMAGE}"], "cache": str(state)}, "is not in"),
    ):
        say(**said) if said else None
        with pytest.raises(UsageProblem, match=wanted):
            plan.plan_for(load_recipe(FAMILY), plan.Options(), facts)
    folder = snapshot(state, load_recipe(FAMILY).recipe.model)
    folder.mkdir(parents=True)
    found = plan.plan_for(load_recipe(FAMILY), plan.Options(), facts)
    gb300 = next(gpu["uuid"] for gpu in facts["gpus"] if "GB300" in gpu["name"])
    assert (found.box.image, found.box.device, found.box.cache) == (IMAGE, f"nvidia.com/gpu={gb300}", state)
    assert found.box.device == proved_on[-1]
    assert found.weights == folder
    assert found.tokenizer_for_client == snapshot(Path("/cache"), found.loaded.recipe.model)
    assert found.spec.argv[:4] == ("serve", REPO, "--revision", COMMIT)
    monkeypatch.setattr(plan, "docker_engine", lambda: SimpleNamespace(devices_by_cdi=False))
    with pytest.raises(DockerProblem, match="older than 25"):
        plan.plan_for(load_recipe(FAMILY), plan.Options(), facts)


@pytest.fixture
def station_over_ssh(tmp_path: Path, monkeypatch):
    """A Docker engine on another machine: an `ssh` that runs what it is given here, and keeps its words."""
    program = tmp_path / "ssh"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/said\nfor last; do :; done\nexec sh -c "$last"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("DOCKER_HOST", "ssh://root@station:2222")
    monkeypatch.setattr(plan, "machine_facts", lambda: {"slug": "this computer"})
    monkeypatch.setattr(plan, "plan_for", lambda *asked: asked)
    return program


def test_the_machine_of_a_run_is_the_docker_engine_s_where_that_is_another_one(station_over_ssh, tmp_path):
    for options, away in (
        (plan.Options("nemotron-h-synthetic"), True),
        (plan.Options("micro", runtime="docker"), True),
        (plan.Options(runtime="docker"), True),
        (plan.Options("micro"), False),
        (plan.Options("nemotron-h-synthetic", engine_python=sys.executable), False),
        (plan.Options("nemotron-h-synthetic", url="http://127.0.0.1:1"), False),
    ):
        _, _, machine, elsewhere = plan.gather(options)
        assert elsewhere is away
        assert (machine["slug"] != "this computer" and bool(machine["cpu"]["cores"])) is away
    assert "-p 2222 -- root@station python3 -c" in (tmp_path / "said").read_text()
    station_over_ssh.write_text("#!/bin/sh\necho 'Permission denied (publickey).' >&2; exit 255\n")
    with pytest.raises(EngineProblem, match=r"ssh://root@station:2222, .* Permission denied .* Wanted: ssh without"):
        plan.gather(plan.Options("nemotron-h-synthetic"))


def test_an_address_without_a_host_is_said(station_over_ssh, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "ssh://")
    with pytest.raises(UsageProblem, match="ssh:// names no host of a Docker engine"):
        plan.gather(plan.Options("micro", runtime="docker"))


def test_what_stays_or_measures_this_machine_is_refused_where_the_docker_engine_is_another_s(station_over_ssh):
    with pytest.raises(UsageProblem, match=r"the Docker engine is at ssh://root@station:2222, .* \./inv provision"):
        plan.gather(plan.Options("micro", runtime="docker", here=True))
    with pytest.raises(UsageProblem, match="--host localhost, and the Docker engine is at ssh://root@station:2222"):
        plan.gather_service("micro", "localhost", 0)


def test_a_ladder_says_that_it_measures_no_other_machine_s_engine(station_over_ssh, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("DOCKER_HOST", "ssh://root@station:2222")
    with pytest.raises(UsageProblem, match="only reproduce and quality measure another machine's"):
        plan.plan_for(load_recipe("micro"), plan.Options(runtime="docker"), machine_facts_here())
    setting = Setting("micro", ["base"], 1, 1, "interleaved", None, None, [], True)
    with pytest.raises(UsageProblem, match="only reproduce and quality measure another machine's"):
        require_ready(setting, Visit(plan.Options(runtime="docker")))
    monkeypatch.setattr(plan, "choose_runtime", lambda loaded, asked: "docker")
    with pytest.raises(UsageProblem, match=r"runs in a container: name the one that is to run there, --recipe NAME"):
        plan.gather(plan.Options())


def test_a_recipe_with_an_api_key_is_served_by_provisioning_only():
    loaded = load_recipe("micro")
    runtime = loaded.recipe.runtime.model_copy(update={"api_key_env": "VLLM_API_KEY"})
    loaded = replace(loaded, recipe=loaded.recipe.model_copy(update={"runtime": runtime}))
    for way in plan.RUNTIMES:
        with pytest.raises(UsageProblem, match=r"wants an API key .* \./inv provision serves it"):
            plan.plan_for(loaded, plan.Options(runtime=way), machine_facts_here())


def test_an_image_is_proved_on_the_gpu_that_is_named_or_the_only_one(monkeypatch, capsys, tmp_path):
    asked = {"gpus": []}
    monkeypatch.setattr(engine_image, "engine_host", lambda: "")
    monkeypatch.setattr(engine_image, "machine_facts", lambda: asked)
    monkeypatch.setattr(engine_image, "docker_engine", lambda: SimpleNamespace(devices_by_cdi=True))
    monkeypatch.setattr(engine_image, "CDI_FOLDERS", (tmp_path,))
    computing = SimpleNamespace(returncode=0, stdout="")
    monkeypatch.setattr(engine_image, "run", lambda argv: computing)
    assert (engine_image.proof_device("cuda"), capsys.readouterr().err) == (None, "")
    asked["gpus"] = [{"uuid": "GPU-0001"}]
    assert engine_image.proof_device("cuda") is None and "./inv provision writes it" in capsys.readouterr().err
    (tmp_path / "nvidia.yaml").touch()
    computing.stdout = "4711\n"
    assert engine_image.proof_device("cuda") is None and "GPU-0001 is in use" in capsys.readouterr().err
    computing.stdout = ""
    assert (engine_image.proof_device("cuda"), engine_image.proof_device("cpu")) == ("nvidia.com/gpu=GPU-0001", None)
    asked["gpus"].append({"uuid": "GPU-0002"})
    assert engine_image.proof_device("cuda") is None and "./inv site --gpu UUID" in capsys.readouterr().err
    say(gpu="GPU-0002")
    assert engine_image.proof_device("cuda") == "nvidia.com/gpu=GPU-0002"
    monkeypatch.setattr(engine_image, "docker_engine", lambda: SimpleNamespace(devices_by_cdi=False))
    assert engine_image.proof_device("cuda") is None and "older than 25" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--image", "cpu", "--archs", "9.0a"], "the cpu image has no GPU kernels"),
        (["--image", "cuda", "--source", "build", "--archs", "10.3a,banana"], "--archs banana: wanted GPU archit"),
        (
            ["--image", "cuda", "--base", "a@b", "--again"],
            "--base, --again: cuda is pulled as it is; .*: --source build",
        ),
        (["--image", "cpu", "--out", "F"], "--out is the file of a recipe's lock: it needs --recipe"),
        (["--recipe", "micro", "--out", "F", "--no-lock"], "--out is the file of a recipe's lock: it needs --recipe"),
        (["--image", "cpu", "--verify", "--no-proof"], "take one of them"),
    ],
)
def test_a_build_is_told_nothing_that_it_would_not_heed(inv, asked, said):
    answer = inv("build", *asked, DOCKER_HOST="unix:///nowhere.sock")
    assert answer.returncode == 2 and re.search(said, answer.stderr.replace("\n", " ")), answer.stderr


def test_site_through_the_front_door(inv, state: Path):
    env = {"STATION_RECIPES_STATE": str(state / "door")}
    assert "Nothing is said of this machine" in inv("site", **env).stdout
    told = json.loads(inv("site", "--model-revision", f"{REPO}={COMMIT}", "--json", **env).stdout)
    assert told["revisions"] == {REPO: COMMIT}
    assert COMMIT in inv("site", **env).stdout
    for said, told in (("--gpu", "1"), "gpu"), (("--image", f"cudda={IMAGE}"), "did you mean cuda"):
        wrong = inv("site", *said, **env)
        assert wrong.returncode == 2 and told in wrong.stderr and "Traceback" not in wrong.stderr
