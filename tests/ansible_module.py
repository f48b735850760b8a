"""A file of ansible/ as a module: they import nothing of ours, and nothing of ours imports them."""

import importlib.util
from pathlib import Path
from types import ModuleType

ANSIBLE = Path(__file__).resolve().parent.parent / "ansible"


def load(path: str) -> ModuleType:
    """The file below ansible/."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ANSIBLE / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
