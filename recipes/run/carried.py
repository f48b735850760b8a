"""Room recipes: a model's folder brought to another machine's Docker engine, as a volume of it."""

import hashlib
import io
import tarfile
from pathlib import Path

import docker
from docker.errors import DockerException
from docker.types import Mount

from images.docker_engine import LABEL
from images.errors import EngineProblem

LARGEST_BYTES = 2_000_000_000


def carry(client: docker.DockerClient, image: str, folder: Path) -> str:
    """Copy a folder into a volume of the engine and return the volume's name; the same content is the same volume.

    Raises EngineProblem for a folder too large to be carried each time, or when the engine refuses.
    """
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    if size > LARGEST_BYTES:
        raise EngineProblem(
            f"{folder} has {size / 1e9:.1f} GB and the Docker engine is on another machine: bring the model "
            "there first (./inv provision does), and name it by repo and revision"
        )
    packed, digest = _packed(folder)
    name = f"station-recipes-model-{digest[:16]}"
    try:
        client.volumes.create(name, labels={f"{LABEL}.kind": "model"})
        mount = Mount("/model", name, type="volume")
        labels = {f"{LABEL}.kind": "carrier"}
        holder = client.containers.create(image, entrypoint=["true"], mounts=[mount], labels=labels)
        try:
            holder.put_archive("/model", packed)
        finally:
            holder.remove(force=True)
    except DockerException as error:
        raise EngineProblem(f"{folder} could not be copied to the Docker engine's machine: {error}") from error
    return name


def _packed(folder: Path) -> tuple[bytes, str]:
    """The files of a folder as a tar of the same bytes for the same content, and its sha256."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as tar:
        for file in sorted(path for path in folder.iterdir() if path.is_file()):
            entry = tarfile.TarInfo(file.name)
            content = file.read_bytes()
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))
    return whole.getvalue(), hashlib.sha256(whole.getvalue()).hexdigest()
