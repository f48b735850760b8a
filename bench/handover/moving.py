"""Room bench: `./inv push` and `./inv pull`: a bundle into a registry or a git repository, and out of them."""

import shutil
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from images.console import emit_json, out, table
from images.errors import UsageProblem
from images.registry import Wire
from images.staging import disk, workspace
from images.yaml_source import shown
from recipes.bundle.git import put_in_git
from recipes.bundle.layout import GB
from recipes.bundle.oci import push_bundle
from recipes.bundle.read import Limits, unpacked
from recipes.bundle.source import Choice, brought


def push_to(file: Path, to: str, wire: Wire, move_tag: bool, max_gb: int, as_json: bool) -> None:
    """Push a bundle and print where it is now.

    Raises UsageProblem for a folder where a tar is needed, and what `push_bundle` and `put_in_git` raise.
    """
    limits = Limits(total_bytes=max_gb * GB)
    if not file.exists():
        raise UsageProblem(f"{shown(file)}: there is no such file or folder")
    if Path(to).is_dir():
        entry, folder = put_in_git(file, Path(to), limits)
        if as_json:
            emit_json({"schema": 1, "folder": str(folder), **entry.model_dump()})
            return
        out().print(table("", ("", ""), [("in", shown(folder)), ("content", f"sha256:{entry.content}")]))
        words = f"git -C {to} add bundles index.json && git -C {to} commit -m 'add {entry.recipe} {entry.version}'"
        out().print(f"\nTo hand it on: {words} && git -C {to} push", markup=False)
        return
    if to.startswith(("/", ".", "~")):
        raise UsageProblem(f"--to {to}: there is no such folder, and a registry's name is NAME or HOST/NAME")
    if file.is_dir():
        raise UsageProblem(f"{shown(file)} is a folder; a registry takes the tar: ./inv bundle … --out FILE.tar")
    pushed = push_bundle(file, to.removeprefix("docker://"), wire, move_tag, limits)
    if as_json:
        emit_json({"schema": 1, **{key: value for key, value in asdict(pushed).items() if key != "file"}})
        return
    rows = [("pushed", pushed.reference), ("size", f"{pushed.size / 1e6:,.1f} MB")]
    out().print(table("", ("", ""), rows))
    out().print(f"\nTo adopt it: ./inv adopt docker://{pushed.reference.partition('@')[0]}", markup=False)


def pull_from(source: str, target: Path, choice: Choice, max_gb: int, as_json: bool) -> None:
    """Fetch a bundle, check every byte of it, and put it where it was asked for; nothing is replaced."""
    if target.exists() or target.is_symlink():
        raise UsageProblem(f"{shown(target)} is there already; nothing is replaced")
    if not target.parent.is_dir():
        raise UsageProblem(f"{shown(target)}: there is no folder {shown(target.parent)}")
    if Path(source).exists():
        raise UsageProblem(f"{source} is on this machine already: ./inv adopt {source} --check checks it")
    limits = Limits(total_bytes=max_gb * GB)
    with ExitStack() as stack:
        stack.enter_context(disk(target.parent))
        folder = stack.enter_context(workspace(target))
        local = stack.enter_context(brought(source, choice, limits))
        bundle = stack.enter_context(unpacked(local, folder / "read", limits, called=source))
        info, content = bundle.info, bundle.content
        fetched = folder / "read" if local.is_dir() else Path(shutil.move(local, folder / "bundle.tar"))
        fetched.rename(target)
    said = {"schema": 1, "file": str(target), "recipe": info.recipe, "version": info.version, "content": content}
    if as_json:
        emit_json(said)
    else:
        rows = [("file", shown(target)), ("recipe", f"{info.recipe}, version {info.version}")]
        out().print(table("", ("", ""), [*rows, ("content", f"sha256:{content}")]))
        out().print(f"\nTo adopt it: ./inv adopt {target}", markup=False)
