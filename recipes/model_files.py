"""Room recipes: whether a checkpoint on disk is the one the recipe names."""

import hashlib
import json
import os
from pathlib import Path

from images.errors import Problem
from recipes.load import LIBRARY, Loaded
from recipes.packed import unpack_model


def sha256(file: Path) -> str:
    """The sha256 of a file as hex digits."""
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def observed_files(loaded: Loaded, weights: Path | None = None) -> dict[str, str | None]:
    """Hash what lies in the model's folder: sha256 by name; None for a file the recipe names and isn't there.

    Files the recipe doesn't name count too: an added tokenizer file changes what the engine reads. Of a repository's
    model, whose folder is `weights`, those that the recipe names: its commit says the rest.
    Raises Problem if the folder itself is missing, or a file that the library keeps packed isn't what it should be.
    """
    model = loaded.recipe.model
    folder = loaded.folder / model.path if model.path else weights
    if folder is None:
        return dict.fromkeys(model.files)
    if not folder.is_dir():
        raise Problem(f"{loaded.mark('model', 'path')}: the model folder {folder} isn't there")
    faults = unpack_model(loaded.folder, folder, model.files) if loaded.folder.parent == LIBRARY else []
    if faults:
        raise Problem(f"the model's file {faults[0]}")
    try:
        files = sorted(file for file in folder.iterdir() if file.is_file() and (model.path or file.name in model.files))
        present = {file.name: sha256(file) for file in files}
    except OSError as error:
        raise Problem(f"the model's file {error.filename} can't be read: {error.strerror}") from error
    return {**dict.fromkeys(loaded.recipe.model.files), **present}


def told_files(weights: Path) -> dict[str, str]:
    """What a cache says of a commit's files without anybody hashing them again: a digest by name.

    Files that `provision` brought: their sha256, where size and time are still those of then. A hub's own cache: the
    blobs they are links to, which for large files are named by their sha256. Empty where nothing is known.
    """
    folder = weights.resolve()
    try:
        entries = json.loads(folder.with_name(f"{folder.name}.json").read_text())["files"]
        return {name: each["sha256"] for name, each in sorted(entries.items()) if _as_fetched(folder / name, each)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        links = sorted(file for file in weights.glob("*") if file.is_symlink())
        targets = {file.name: Path(os.readlink(file)) for file in links}
        return {name: target.name for name, target in targets.items() if target.parent.name == "blobs"}


def _as_fetched(file: Path, entry: dict) -> bool:
    try:
        seen = file.lstat()
    except OSError:
        return False
    return (seen.st_size, seen.st_mtime_ns) == (entry["size"], entry["mtime_ns"])


def differing_files(wanted: dict[str, str], observed: dict[str, str | None]) -> list[str]:
    """Names of files that differ from the recipe: changed, missing or added."""
    return sorted(name for name in wanted.keys() | observed.keys() if wanted.get(name) != observed.get(name))
