"""The house is in order: rooms import downwards only, files stay short, nothing of a machine is committed."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.evidence import read_evidence
from bench.runfolder import dump_json, seal_faults
from bench.verdict import judge

ROOT = Path(__file__).resolve().parent.parent.parent
ROOMS = ["images", "recipes", "bench"]
MODULES = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
ANSIBLE = list((ROOT / "ansible").rglob("*.py"))


def imported_rooms(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found & {*ROOMS, "tasks", "ansible", "tests"}


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_room_imports_only_what_lies_below_it(file: Path):
    room = file.relative_to(ROOT).parts[0]
    assert imported_rooms(file) <= set(ROOMS[: ROOMS.index(room) + 1])


@pytest.mark.parametrize("file", [*MODULES, *ANSIBLE, ROOT / "tasks.py"], ids=lambda file: str(file.relative_to(ROOT)))
def test_a_module_is_short_and_begins_with_its_room(file: Path):
    text = file.read_text()
    assert len(text.splitlines()) <= 400
    assert ast.get_docstring(ast.parse(text)), "a file starts with one sentence saying what room it is"


@pytest.mark.parametrize("file", ANSIBLE, ids=lambda file: str(file.relative_to(ROOT)))
def test_what_runs_on_a_host_imports_nothing_of_ours(file: Path):
    assert imported_rooms(file) <= {"ansible"}


def test_machine_facts_run_as_one_file_with_nothing_but_the_standard_library(tmp_path: Path):
    alone = tmp_path / "machine_facts.py"
    alone.write_bytes((ROOT / "ansible" / "library" / "machine_facts.py").read_bytes())
    argv = [sys.executable, "-I", "-S", str(alone), "--root", "/"]
    told = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(told.stdout)["schema"] == 1


def tracked() -> list[Path]:
    answer = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        pytest.skip("not a git checkout: there is no list of tracked files")
    return [ROOT / name for name in answer.stdout.split("\0") if name and (ROOT / name).exists()]


def test_the_tracked_tree_is_small():
    assert sum(file.stat().st_size for file in tracked()) < 20e6


def test_no_tracked_file_names_a_folder_of_somebody_s_machine():
    pattern = re.compile(rb"/(?:home|Users)/[a-z]+/|/root/\.|/tmp/[a-z]")
    for file in tracked():
        if file.suffix in {".py", ".md", ".yaml", ".json", ".txt", ".toml", ""} and file != Path(__file__):
            assert not pattern.search(file.read_bytes()), file


@pytest.mark.parametrize("run", sorted((ROOT / "results").rglob("recipe.yaml")), ids=lambda file: file.parent.name)
def test_every_published_run_is_sealed_and_judges_to_the_same_bytes_again(run: Path):
    folder = run.parent
    assert seal_faults(folder) == []
    assert dump_json(judge(read_evidence(folder))) == (folder / "verdict.json").read_text()
