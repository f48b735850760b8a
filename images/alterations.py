"""Room images: what is added beside the engine's own packages: a second name, and the declared patches."""

import shutil
from pathlib import Path

from images.declaration import IMAGES, Declaration


def alter(facts: Declaration, site: Path, entry_points: str) -> None:
    """Write the additions of an engine into a site-packages folder, or one that will be copied over it.

    `entry_points` is the text of the engine distribution's own entry_points.txt.
    """
    if facts.distribution != "vllm":
        _add_name(facts, site, entry_points)
    for patch in facts.patches:
        _add_patch(IMAGES / facts.name / patch.file, site)


def alias_version(facts: Declaration) -> str:
    """The version under the name `vllm`, such as 0.32.0+cpu."""
    return f"{facts.version}+{facts.device}"


def patch_module(file: str) -> str:
    """The name that a patch has as a module beside the engine, and as a vLLM plugin."""
    return f"station_recipes_{Path(file).stem}"


def _add_name(facts: Declaration, site: Path, entry_points: str) -> None:
    """Give the engine's distribution the name `vllm` too: vLLM asks for its own version under that name,
    and chooses the CPU platform only when the answer contains `cpu`."""
    version = alias_version(facts)
    info = site / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


def _add_patch(file: Path, site: Path) -> None:
    """Put a declared patch beside vLLM, as a plugin that vLLM loads in every process of its own."""
    module = patch_module(file.name)
    shutil.copyfile(file, site / f"{module}.py")
    info = site / f"{module}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{module} = {module}:register\n")
