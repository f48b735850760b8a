"""Room recipes: whether a checkpoint on disk is the one the recipe names."""

import hashlib
from pathlib import Path

from images.errors import Problem
from recipes.load import Loaded


def sha256(file: Path) -> str:
    """The sha256 of a file as hex digits."""
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def observed_files(loaded: Loaded) -> dict[str, str | None]:
    """Hash what lies in the model's folder: sha256 by name; None for a file the recipe names and isn't there.

    Files the recipe doesn't name count too: an added tokenizer file changes what the engine reads.
    Raises Problem if the folder itself is missing.
    """
    if loaded.recipe.model.path is None:
        return dict.fromkeys(loaded.recipe.model.files)
    folder = loaded.folder / loaded.recipe.model.path
    if not folder.is_dir():
        raise Problem(f"{loaded.mark('model', 'path')}: the model folder {folder} isn't there")
    try:
        present = {file.name: sha256(file) for file in sorted(folder.iterdir()) if file.is_file()}
    except OSError as error:
        raise Problem(f"the model's file {error.filename} can't be read: {error.strerror}") from error
    return {**dict.fromkeys(loaded.recipe.model.files), **present}


def differing_files(wanted: dict[str, str], observed: dict[str, str | None]) -> list[str]:
    """Names of files that differ from the recipe: changed, missing or added."""
    return sorted(name for name in wanted.keys() | observed.keys() if wanted.get(name) != observed.get(name))
