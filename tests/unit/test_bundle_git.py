"""Bundles in a git repository: an index, versions given once; of a foreign repository nothing is ever checked out."""

import json
import subprocess
from pathlib import Path

import pytest

from images.errors import BundleProblem, Problem, UsageProblem
from images.registry import Wire
from recipes.bundle.git import bundle_of_git, parse_index, put_in_git
from recipes.bundle.read import Limits, unpacked
from recipes.bundle.source import Choice, brought
from recipes.catalogue import rows_of
from tests.bundles import RUNG, files_of, tiny_bundle, tree

FACTS = {"slug": "cpu-x86-64", "architecture": "x86_64", "gpus": [], "pci_gpus": []}
WHO = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "protocol.file.allow=always")


def git(folder: Path, *arguments: str) -> str:
    answer = subprocess.run(["git", "-C", str(folder), *WHO, *arguments], capture_output=True, text=True, check=True)
    return answer.stdout


@pytest.fixture
def repository(tmp_path) -> Path:
    """A team's repository with one bundle, committed."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    git(folder, "init", "-q")
    put_in_git(tiny_bundle(tmp_path), folder, Limits())
    commit(folder)
    return folder


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "x")


def fetched(repository: Path, folder: Path, recipe=None, version=None) -> Path:
    folder.mkdir()
    return bundle_of_git(f"file://{repository}", folder, recipe, version, None, Limits())


def test_a_bundle_comes_back_from_git_as_it_was_put_in(repository, tmp_path):
    with brought(f"git+file://{repository}", Choice(), Limits()) as local:
        with unpacked(local, tmp_path / "read", Limits()) as bundle:
            found = {name: data for name, data in tree(bundle.folder).items() if data != "folder"}
    assert found == files_of(tmp_path / "tiny.tar")
    (row,) = rows_of(f"git+file://{repository}", FACTS, Wire())
    assert (row.where, row.title, row.here) == (
        "git",
        "the same with more sequences",
        "may run here: ./inv adopt --check",
    )


def test_putting_the_same_in_again_changes_nothing_and_another_content_is_refused(repository, tmp_path):
    before = tree(repository / "bundles"), (repository / "index.json").read_bytes()
    put_in_git(tmp_path / "tiny.tar", repository, Limits())
    assert (tree(repository / "bundles"), (repository / "index.json").read_bytes()) == before
    (tmp_path / "o").mkdir()
    other = tiny_bundle(tmp_path / "o", rung=RUNG.replace("max-num-seqs: 8", "max-num-seqs: 4"))
    with pytest.raises(UsageProblem, match="a version is never given twice"):
        put_in_git(other, repository, Limits())
    assert (tree(repository / "bundles"), (repository / "index.json").read_bytes()) == before


def test_a_folder_that_is_no_working_tree_is_refused(tmp_path):
    with pytest.raises(UsageProblem, match="no working tree of git"):
        put_in_git(tiny_bundle(tmp_path), tmp_path, Limits())


def test_hooks_filters_and_modules_of_a_foreign_repository_never_act(repository, tmp_path):
    touched = tmp_path / "touched"
    for hook in ("post-checkout", "post-merge", "pre-commit"):
        file = repository / ".git/hooks" / hook
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\ntouch {touched}\n")
        file.chmod(0o755)
    (repository / ".gitattributes").write_text("* filter=evil\n")
    (repository / ".gitmodules").write_text(f'[submodule "x"]\n\tpath = x\n\turl = ext::sh -c "touch {touched}"\n')
    git(repository, "add", "-A")
    git(repository, "-c", "core.hooksPath=/dev/null", "commit", "-q", "-m", "evil")
    assert fetched(repository, tmp_path / "f").is_dir()
    assert not touched.exists()


def spoil_link(folder: Path) -> None:
    file = folder / "bundles/tiny/more/1/README.md"
    file.unlink()
    file.symlink_to("/etc/passwd")


def spoil_pointer(folder: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    (folder / "bundles/tiny/more/1/README.md").write_text(text)


def spoil_name(folder: Path) -> None:
    (folder / "bundles/tiny/more/1/.hidden").write_text("x")


def spoil_index(folder: Path) -> None:
    (folder / "index.json").unlink()


def spoil_path(folder: Path) -> None:
    told = json.loads((folder / "index.json").read_text())
    told["bundles"][0]["path"] = "bundles/nowhere"
    (folder / "index.json").write_text(json.dumps(told))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (spoil_link, "no plain file but a link"),
        (spoil_pointer, "only a pointer of Git LFS"),
        (spoil_name, "no name that a bundle's file has"),
        (spoil_index, "has no index.json"),
        (spoil_path, "which isn't there"),
    ],
)
def test_what_a_repository_may_not_hold_is_refused_with_its_reason(repository, tmp_path, spoil, why):
    spoil(repository)
    commit(repository)
    with pytest.raises(BundleProblem, match=why):
        fetched(repository, tmp_path / "f")


def test_a_few_trees_that_name_millions_of_files_are_not_listed_whole(repository, tmp_path):
    blob = git(repository, "rev-parse", "HEAD:index.json").strip()
    tree_id = _tree_of(repository, [("100644", "blob", blob, f"f{n}") for n in range(20)])
    for _ in range(5):  # 20 to the power of 6: 64 million files in six small trees
        tree_id = _tree_of(repository, [("040000", "tree", tree_id, f"d{n}") for n in range(20)])
    index = git(repository, "rev-parse", "HEAD:index.json").strip()
    for name in reversed(["bundles", "tiny", "more", "1"]):
        tree_id = _tree_of(repository, [("040000", "tree", tree_id, name)])
    inner = git(repository, "rev-parse", f"{tree_id}:bundles").strip()
    top = _tree_of(repository, [("040000", "tree", inner, "bundles"), ("100644", "blob", index, "index.json")])
    commit_id = git(repository, "commit-tree", top, "-m", "bomb").strip()
    git(repository, "update-ref", "HEAD", commit_id)
    with pytest.raises(BundleProblem, match="more than 20000 files"):
        fetched(repository, tmp_path / "f")


def _tree_of(repository: Path, entries: list[tuple[str, str, str, str]]) -> str:
    lines = "".join(f"{mode} {kind} {each}\t{name}\n" for mode, kind, each, name in entries)
    argv = ["git", "-C", str(repository), "mktree"]
    return subprocess.run(argv, input=lines, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(
    "change",
    [
        {"path": "../../etc"},
        {"path": "/etc"},
        {"path": "-x"},
        {"path": "a/../b"},
        {"recipe": "x"},
        {"version": "../1"},
        {"content": "1"},
        {"run": "x"},
    ],
)
def test_an_index_with_a_path_that_leads_out_or_a_wrong_value_is_refused(repository, change):
    told = json.loads((repository / "index.json").read_text())
    told["bundles"][0] |= change
    with pytest.raises(BundleProblem, match=f"index.json: bundles.0.{next(iter(change))}"):
        parse_index(json.dumps(told).encode(), "it")


def test_an_index_of_a_newer_schema_says_so():
    with pytest.raises(BundleProblem, match="of schema 2; this version reads 1"):
        parse_index(b'{"schema": 2, "bundles": "other"}', "it")


def test_of_several_versions_the_newest_is_taken_and_of_several_recipes_one_has_to_be_named(repository, tmp_path):
    told = json.loads((repository / "index.json").read_text())
    first = told["bundles"][0]
    second = {**first, "version": "2", "path": "bundles/tiny/more/2"}
    (repository / "bundles/tiny/more/1").rename(repository / "bundles/tiny/more/2")
    (repository / "index.json").write_text(json.dumps({"schema": 1, "bundles": [first, second]}))
    commit(repository)
    assert fetched(repository, tmp_path / "a").is_dir()
    with pytest.raises(BundleProblem, match="bundles/tiny/more/1, which isn't there"):
        fetched(repository, tmp_path / "b", version="1")
    with pytest.raises(UsageProblem, match="it has none of what was asked for; there is: tiny/more 1, tiny/more 2"):
        fetched(repository, tmp_path / "c", recipe="micro")
    other = {**second, "recipe": "tiny/base", "path": "bundles/tiny/base/1"}
    (repository / "index.json").write_text(json.dumps({"schema": 1, "bundles": [second, other]}))
    commit(repository)
    with pytest.raises(UsageProblem, match="name one with --recipe"):
        fetched(repository, tmp_path / "d")


def test_a_repository_that_is_not_there_is_one_clear_error(tmp_path):
    with pytest.raises(Problem, match="can't be cloned"):
        bundle_of_git(f"file://{tmp_path}/nothing", tmp_path, None, None, None, Limits())
