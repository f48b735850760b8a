"""Handing a recipe on, through the front door: one file, the same bytes everywhere, taken in whole."""

import json
import os
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.evidence import read_evidence
from bench.handover import adopting
from bench.handover.adopting import Taken, ladder_finding, take
from bench.handover.bundling import Wanted, write
from bench.handover.comparing import compare_runs
from bench.handover.moving import pull_from, push_to
from bench.handover.publish import RULES, examine
from bench.handover.runs import _other_work, carried_run, published_ladders
from bench.verdict import judge
from images.errors import BundleProblem, Problem
from images.registry import Wire
from recipes.bundle.layout import CarriedRun
from recipes.bundle.sign import public_text, secret_key
from recipes.bundle.source import Choice
from recipes.bundle.write import Carried, bundle_entries, write_bundle
from recipes.load import LIBRARY, as_data, load_recipe
from recipes.lock import Images
from recipes.schema import Recipe
from tests.bundles import BASE, files_of, library, test_key, tiny_bundle, tree
from tests.ports import free_port
from tests.runs import claim, recipe, write_run

ROOT = Path(__file__).resolve().parent.parent.parent
RUN = next((ROOT / "results/cpu-x86-64/micro").glob("*-micro-mtp1-1e8267"))


@pytest.fixture(scope="module")
def bundled(tmp_path_factory) -> tuple[Path, dict, float]:
    """micro's bundle with its published run, signed; what was printed; and how long it took."""
    folder = tmp_path_factory.mktemp("bundled")
    (folder / "key").write_bytes(bytes(test_key()) + b"\n")
    (folder / "key.pub").write_bytes(bytes(test_key().get_public_key()) + b"\n")
    argv = [str(ROOT / "inv"), "bundle", "--recipe", "micro", "--out", str(folder / "micro.tar"), "--with-results"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    answer = subprocess.run(
        [*argv, "--key", str(folder / "key"), "--json"], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    return folder / "micro.tar", json.loads(answer.stdout), used_s(before)


def used_s(before: resource.struct_rusage) -> float:
    """The time that programs of ours had a core since: what a quiet machine would take at most."""
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_the_bundle_of_micro_is_under_twenty_megabytes_in_under_five_seconds(bundled):
    file, told, seconds = bundled
    assert file.stat().st_size == told["size"] < 20e6
    assert seconds < 5


def test_it_holds_the_chain_the_model_the_lock_the_targets_the_rules_the_claims_the_suite_and_the_run(bundled):
    files = files_of(bundled[0])
    assert {f"recipes/micro/{name}.yaml" for name in ("base", "mtp3", "mtp1", "ladder")} <= files.keys()
    assert files["recipes/micro/mtp1.yaml"] == (LIBRARY / "micro/mtp1.yaml").read_bytes()
    assert files["recipes/micro/model/model.safetensors"] == (LIBRARY / "micro/model/model.safetensors").read_bytes()
    assert {name for name in files if name.startswith("rendered/")} == {
        "rendered/docker.sh",
        "rendered/compose.yaml",
        "rendered/station-recipes.service",
    }
    assert json.loads(files["lock.json"])["recipe"]["id"] == "micro/mtp1"
    assert len(json.loads(files["rules.json"])["rules"]) >= 23
    assert json.loads(files["claims.json"])[0]["id"] == "acceptance length"
    assert len(files["quality/micro-tasks.jsonl"].splitlines()) == 300
    runs = {name.split("/")[1] for name in files if name.startswith("results/")}
    info = bundled[1]["info"]
    assert runs == {run["name"] for run in info["runs"]} | set(info["ladders"]) and len(info["runs"]) >= 1
    readme = files["README.md"].decode()
    assert "1.99 ± 0.005" in readme and "micro/base → micro/mtp3 → micro/mtp1" in readme
    machine = json.dumps(json.loads(files["lock.json"]))
    assert str(ROOT) not in readme + machine and str(Path.home()) + "/" not in readme + machine


def test_another_clone_with_another_user_s_settings_writes_the_same_bytes(bundled, tmp_path):
    clone = tmp_path / "another place"
    shutil.copytree(
        ROOT, clone, ignore=lambda folder, names: {".git", ".venv", ".runs", "tests"} & set(names), symlinks=True
    )
    for file in clone.rglob("*"):
        os.utime(file, (1, 1), follow_symlinks=False)
    argv = [sys.executable, str(clone / "tasks.py"), "bundle", "--recipe", "micro/mtp1", "--out", "again.tar"]
    argv += ["--with-results", "--key", str(bundled[0].parent / "key")]
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TZ": "Asia/Tokyo", "LANG": "C", "PYTHONHASHSEED": "7"}
    answer = subprocess.run(
        ["sh", "-c", 'umask 077; exec "$@"', "sh", *argv],
        cwd=tmp_path,
        env={**env, "PYTHONUTF8": "1", "SOURCE_DATE_EPOCH": "99"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert (tmp_path / "again.tar").read_bytes() == bundled[0].read_bytes()


def test_adopting_shows_checks_and_keeps_it_and_touches_nothing_else(inv, bundled, tmp_path):
    library = tree(LIBRARY)
    env = {"STATION_RECIPES_STATE": str(tmp_path / "state"), "STATION_RECIPES_CACHE": str(tmp_path / "cache")}
    looked = inv("adopt", str(bundled[0]), "--check", "--no-doctor", "--port", str(free_port()), **env)
    assert looked.returncode == 0, looked.stdout + looked.stderr
    assert "acceptance length 1.99 ± 0.005" in looked.stdout and "Nothing was kept" in looked.stdout
    assert list((tmp_path / "state/adopted").iterdir()) == []
    key = str(bundled[0].parent / "key.pub")
    answer = inv(
        "adopt", str(bundled[0]), "--pubkey", key, "--as", "team-a", "--port", str(free_port()), "--json", **env
    )
    told = json.loads(answer.stdout)
    assert answer.returncode == 0 and told["reference"] == "micro/mtp1@team-a"
    assert {each["id"]: each["ok"] for each in told["findings"]} == {
        **dict.fromkeys(
            ("whole", "signed", "rendered", "rule table", "rules", "port", "machine", "engine build"), True
        ),
        **dict.fromkeys(("run", "quality micro-tasks"), True),
        **dict.fromkeys(["ladder"] if bundled[1]["info"]["ladders"] else [], True),
        **{
            each["id"]: each["ok"] for each in told["findings"] if each["id"] in {"preflight", "here already", "engine"}
        },
    }
    assert tree(LIBRARY) == library, "the repository's own recipes are as they were"
    listed = json.loads(inv("list", "--json", **env).stdout)["recipes"]
    mine = next(row for row in listed if row["id"] == "micro/mtp1@team-a")
    assert mine["where"] == "adopted" and mine["here"].startswith("runs here")
    assert mine["verdict"]["state"] == "REPRODUCED" and mine["verdict"]["machine"].endswith("(theirs)")
    shown = inv("check", "--recipe", "micro/mtp1@team-a", **env)
    assert shown.returncode == 0, shown.stdout
    same = inv("compare", str(RUN), "micro/mtp1@team-a", **env)
    assert same.returncode == 0 and "No gap to explain" in same.stdout


def bundling(**wanted: object):
    return lambda: write(Wanted(**{"recipe": "micro", "out": "x.tar", **wanted}))


def adopt_of(source: str, **asked: object):
    return lambda: take(Taken(source, **asked), as_json=False)


WRONG = [
    (bundling(out="/nowhere/x.tar"), "there is no folder /nowhere"),
    (bundling(out=str(ROOT)), "is a folder: name a file in it"),
    (bundling(version="../1"), "--version"),
    (bundling(key=Path("/dev/null")), "no minisign secret key"),
    (bundling(runs=(str(RUN.parent),)), "is no run folder"),
    (bundling(recipe="micro/base", runs=(str(RUN),)), "is a run of micro/mtp1, not of micro/base"),
    (bundling(recipe="nemotron-3.5-super-vl", with_results=True), "results/ has no run of nemotron-3.5-super-vl"),
    (bundling(recipe="nemotron-h-synthetic", with_engine=True), "runs in a container only: carry its image"),
    (bundling(with_engine=True, platform="linux/riscv64"), "--platform linux/riscv64"),
    (bundling(caches="/nowhere"), "wanted DEVICE or DEVICE=FOLDER"),
    (bundling(caches="cpu=/nowhere"), "there is no folder /nowhere"),
    (bundling(caches="sm_103a"), "this machine's own kernels are for cpu"),
    (adopt_of("/nowhere"), "there is no such file or folder"),
    (adopt_of("https://x/y"), "wanted a tar, a folder, docker://HOST/NAME:VERSION, or git+URL"),
    (adopt_of("git+ext::sh -c id"), "wanted https://, ssh://, file:// or a path"),
    (adopt_of("git+--upload-pack=id"), "wanted https://, ssh://, file:// or a path"),
    (adopt_of("x.tar", pubkey="nonsense"), "wanted a minisign public key"),
    (adopt_of("x.tar", site={"gpu": "0"}), "--gpu 0: wanted the UUID of a GPU"),
    (adopt_of(str(RUN), recipe="micro"), "choose a bundle of a git repository"),
    (lambda: push_to(Path("/nowhere"), "127.0.0.1:1/x", Wire(), False, 2, False), "there is no such file or folder"),
    (lambda: pull_from(str(RUN), Path("/nowhere/x"), Choice(), 2, False), "there is no folder /nowhere"),
    (lambda: compare_runs("/nowhere", "/nowhere", False), "is no run: wanted a run's folder"),
]


@pytest.mark.parametrize(("doing", "says"), WRONG, ids=[says[:40] for _, says in WRONG])
def test_wrong_usage_is_one_clear_error_and_writes_nothing(tmp_path, monkeypatch, doing, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STATION_RECIPES_STATE", str(tmp_path / "state"))
    with pytest.raises(Problem) as problem:
        doing()
    assert says in str(problem.value)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_wrong_usage_ends_with_two_and_no_traceback(inv, tmp_path):
    for arguments in (["bundle", "--recipe", "micro"], ["check", "--publish"]):
        answer = inv(*arguments, STATION_RECIPES_STATE=str(tmp_path))
        assert answer.returncode == 2 and "needs" in answer.stderr and "Traceback" not in answer.stderr


def test_a_bundle_is_never_replaced(bundled):
    with pytest.raises(Problem, match="nothing is replaced"):
        write(Wanted("micro", str(bundled[0])))


@pytest.mark.parametrize("as_folder", [False, True])
def test_what_appears_while_a_bundle_is_written_is_not_replaced_either(tmp_path, as_folder):
    out = tmp_path / "tiny.tar"
    entries, info = bundle_entries(
        load_recipe("tiny", library(tmp_path / "tiny")), "1", Images({}), None, Carried(), None
    )
    with pytest.raises(Problem, match="has appeared meanwhile"):
        write_bundle(entries, info, None, out, as_folder, lambda _: out.write_text("theirs"))
    assert out.read_text() == "theirs" and not list(tmp_path.glob(".*"))
    written = write_bundle(entries, info, None, tmp_path / "mine", as_folder)
    assert Path(written.file).is_dir() == as_folder and not list(tmp_path.glob(".*"))


def test_a_key_with_a_password_signs_with_it_and_only_with_it(tmp_path, monkeypatch):
    key = test_key()
    key.encrypt("right", opslimit=32768, memlimit=1 << 24)
    (tmp_path / "key").write_bytes(bytes(key) + b"\n")
    monkeypatch.setenv("STATION_RECIPES_MINISIGN_PASSWORD", "wrong")
    with pytest.raises(Problem, match="wrong password"):
        secret_key(tmp_path / "key")
    monkeypatch.setenv("STATION_RECIPES_MINISIGN_PASSWORD", "right")
    assert public_text(secret_key(tmp_path / "key")) == public_text(test_key())
    monkeypatch.delenv("STATION_RECIPES_MINISIGN_PASSWORD")
    with pytest.raises(Problem, match="has a password: give it in"):
        secret_key(tmp_path / "key")


def test_a_secret_is_not_bundled(tmp_path):
    token = "hf_" + "a" * 34
    with pytest.raises(BundleProblem, match="recipes/tiny/base.yaml seems to hold a Hugging Face token"):
        tiny_bundle(tmp_path, base=BASE.replace("a recipe of a test", f"a recipe {token}"))


def test_what_micro_needs_to_be_published_is_there_and_what_lacks_is_named(inv):
    good = json.loads(inv("check", "--publish", "--recipe", "micro", "--json").stdout)
    assert {rule["id"] for rule in good["rules"] if rule["ok"] is False} == set()
    lacks = inv("check", "--publish", "--recipe", "nemotron-3.5-super-vl")
    assert lacks.returncode == 2 and "is not confirmed (model.revision)" in lacks.stdout


def test_the_newest_ladder_of_each_machine_is_carried(tmp_path):
    for name in (
        "h200-sxm/micro/ladder-20260101T000000Z",
        "h200-sxm/micro/ladder-20260201T000000Z",
        "gb300/micro/ladder-1",
    ):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "ladder.json").write_text("{}")
    (tmp_path / "gb300/other/ladder-2").mkdir(parents=True)
    (tmp_path / "gb300/other/ladder-2/ladder.json").write_text("{}")
    found = published_ladders(load_recipe("micro").recipe, tmp_path)
    assert [name for name, _ in found] == ["gb300-ladder-1", "h200-sxm-ladder-20260201T000000Z"]


def test_a_ladder_whose_runs_are_not_what_was_sealed_is_told(tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path / "ladder" / "runs" / name, recipe())
    assert ladder_finding(tmp_path / "ladder").ok is True
    (tmp_path / "ladder/runs/b/machine.json").write_text('{"slug": "faster"}')
    found = ladder_finding(tmp_path / "ladder")
    assert found.ok is False and "1 of 2 runs are not whole: b: machine.json was changed" in found.found


def tiny_with_a_run(folder: Path, told: str) -> Path:
    """The tiny recipe's bundle with a run of it, which claims nothing about this machine: NOT_COMPARABLE in truth."""
    subject = load_recipe("tiny", library(folder / "of the run")).recipe
    run = write_run(folder / "a-run", subject)
    carried = CarriedRun(name="a-run", machine="cpu-x86-64", state=told)
    return tiny_bundle(folder, carried=Carried(runs=((carried, run),)))


def test_a_bundle_whose_carried_run_does_not_show_what_it_says_is_not_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("STATION_RECIPES_STATE", str(tmp_path / "state"))
    (tmp_path / "honest").mkdir()
    honest = tiny_with_a_run(tmp_path / "honest", "NOT_COMPARABLE")
    assert take(Taken(str(honest), check=True, doctor=False), as_json=True) in {0, 8}
    found = {each["id"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    assert found["run"]["ok"] is True, found["run"]
    false = tiny_with_a_run(tmp_path, "REPRODUCED")
    with pytest.raises(BundleProblem, match="told REPRODUCED on cpu-x86-64, judged here NOT_COMPARABLE"):
        take(Taken(str(false), doctor=False), as_json=True)
    assert list((tmp_path / "state/adopted").iterdir()) == []
    assert take(Taken(str(false), check=True, doctor=False), as_json=True) == 8, "it can be looked at"
    capsys.readouterr()
    assert take(Taken(str(honest), doctor=False), as_json=True) == 0


CLAIM = claim("output_tok_s", 100, 5)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"claims": []}, "told MEASURED on cpu-x86-64, judged here INCONCLUSIVE"),
        ({"engine.flags.max-num-seqs": 999}, "another engine.flags.max-num-seqs"),
        ({"status": "synthetic"}, "another status"),
    ],
)
def test_a_carried_run_is_judged_by_the_recipe_s_claims_and_is_of_the_recipe_as_it_is(tmp_path, changed, says):
    data = as_data(recipe(claims=[CLAIM]))
    subject = Recipe.model_validate(data)
    for key, value in changed.items():
        *path, last = key.split(".")
        place = data
        for part in path:
            place = place[part]
        place[last] = value
    ran = Recipe.model_validate(data)
    told = CarriedRun(
        name="run", machine="cpu-x86-64", state=judge(read_evidence(write_run(tmp_path / "run", ran)))["state"]
    )
    found = adopting._run_finding(tmp_path / "run", told, subject)
    assert found.ok is False and says in found.found
    if "claims" in changed:
        assert carried_run(tmp_path / "run", subject)[0].state == "INCONCLUSIVE"
        return
    with pytest.raises(BundleProblem, match=f"with {says}: run the recipe as it is now"):
        carried_run(tmp_path / "run", subject)


def test_a_claim_that_was_changed_since_its_run_is_not_proved_by_it():
    loaded = load_recipe("micro")
    moved = [
        each.model_copy(update={"published": 2.6}) if "length" in each.id else each for each in loaded.recipe.claims
    ]
    changed = replace(loaded, recipe=loaded.recipe.model_copy(update={"claims": moved}))
    proved = next(rule for rule in RULES if rule.id == "proved")
    assert proved.says(examine(loaded)) is None
    assert proved.says(examine(changed)) == "no published run reproduces 'acceptance length': NOT_REPRODUCED"


def test_a_commit_that_the_recipe_leaves_open_is_the_run_s_own():
    left_open = recipe(model={"repo": "a/b", "served_name": "m", "dtype": "float32"})
    at = left_open.model_copy(update={"model": left_open.model.model_copy(update={"revision": "a" * 40})})
    assert _other_work(at, left_open) == [] and _other_work(left_open, at) == ["model.revision"]


def test_a_bundle_that_asks_other_quality_items_is_kept_with_exit_code_8(bundled, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("STATION_RECIPES_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(adopting, "items_of", lambda _: {"micro-tasks": b"what a later version asks"})
    asked = Taken(str(bundled[0]), doctor=False, site={"port": free_port()})
    assert take(asked, as_json=True) == 8
    told = json.loads(capsys.readouterr().out)
    assert told["reference"] and "asks other items" in str(told["findings"])


def test_the_guide_names_every_rule_that_is_checked():
    text = (ROOT / "docs" / "contributing-recipes.md").read_text()
    for rule in RULES:
        assert f"**{rule.id}**" in text, rule.id
