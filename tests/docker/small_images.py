"""Small images made by hand in the real engine, each with a name of its own that is removed at the end."""

import hashlib
import io
import json
import random
import subprocess
import tarfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

NAME = "station-recipes-test"
RANDOM_MB = 16


def docker(*arguments: str, **options) -> str:
    """Run a docker command that must work; its output."""
    return subprocess.run(["docker", *arguments], check=True, capture_output=True, text=True, **options).stdout.strip()


class Engine:
    """The real engine, and what this test has put into it."""

    def __init__(self):
        self.names: list[str] = []

    def name(self) -> str:
        """A name nobody has yet; removed at the end, if it came to be."""
        self.names.append(f"{NAME}:{uuid.uuid4().hex[:12]}")
        return self.names[-1]

    def id(self, name: str) -> str | None:
        """The id under a name, or None."""
        answer = subprocess.run(
            ["docker", "image", "inspect", "-f", "{{.Id}}", name], capture_output=True, text=True, check=False
        )
        return answer.stdout.strip() or None

    def forget(self, name: str) -> None:
        """Remove a name, and its image if it was the last."""
        docker("image", "rm", name)

    def ids(self) -> set[str]:
        """Every image the engine has."""
        return set(docker("image", "ls", "--all", "--quiet", "--no-trunc").split())

    def load(self, layers: list[bytes], architecture: str = "amd64", **config) -> str:
        """Load an image made of these layers (tars); its name."""
        name = self.name()
        docker_load(layers, name, architecture, config)
        return name

    def close(self) -> None:
        """Remove what is left."""
        for name in self.names:
            subprocess.run(["docker", "image", "rm", "--force", name], capture_output=True, check=False)


def layer(*members: tuple) -> bytes:
    """A layer's tar from (path, content or None for a folder, attributes of tarfile.TarInfo …)."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, content, *more in members:
            header = tarfile.TarInfo(path)
            header.type, header.mode = (tarfile.DIRTYPE, 0o755) if content is None else (tarfile.REGTYPE, 0o644)
            header.size = len(content or b"")
            for key, value in more[0].items() if more else ():
                setattr(header, key, value)
            tar.addfile(header, io.BytesIO(content or b""))
    return sink.getvalue()


def configuration(layers: list[bytes], architecture: str, config: dict) -> bytes:
    """An image's configuration for these layers."""
    diff_ids = [f"sha256:{hashlib.sha256(data).hexdigest()}" for data in layers]
    return json.dumps(
        {
            "architecture": architecture,
            "os": "linux",
            "created": "2026-01-02T03:04:05Z",
            "config": {"Cmd": ["/none"], **config},
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        }
    ).encode()


def docker_load(layers: list[bytes], name: str, architecture: str, config: dict) -> None:
    """Put an image into the engine."""
    found = configuration(layers, architecture, config)
    files = {f"{number}.tar": data for number, data in enumerate(layers)}
    contents = [{"Config": "config.json", "RepoTags": [name], "Layers": list(files)}]
    files |= {"config.json": found, "manifest.json": json.dumps(contents).encode()}
    answer = subprocess.run(["docker", "load"], input=layer(*files.items()), capture_output=True, check=False)
    assert answer.returncode == 0, answer.stderr


@pytest.fixture
def engine() -> Iterator[Engine]:
    """The real engine; what the test names in it is gone at the end."""
    made = Engine()
    yield made
    made.close()


def _build(engine: Engine, folder: Path, text: str) -> str:
    """The way people make images: a root by `docker import`, a layer and a configuration by `docker build`."""
    base, name = engine.name(), engine.name()
    noise = random.Random(7).randbytes(RANDOM_MB << 20)
    root = layer(("etc", None), ("etc/motd", b"hello\n"), ("usr", None), ("usr/noise", noise))
    subprocess.run(["docker", "import", "-", base], input=root, check=True, capture_output=True)
    (folder / "added").write_text(text)
    (folder / "Dockerfile").write_text(
        f"FROM {base}\nCOPY added /opt/added\nENV GREETING=hello\nLABEL made-by=test\nUSER 10001\n"
        'HEALTHCHECK --interval=7s CMD ["/none"]\nENTRYPOINT ["/none"]\n'
    )
    docker("build", "--quiet", "--network", "none", "--tag", name, str(folder))
    return name


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image of two layers, 16 MB, with a HEALTHCHECK, labels and a user."""
    engine = Engine()
    yield _build(engine, tmp_path_factory.mktemp("small"), "one")
    engine.close()


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The same but for one file."""
    engine = Engine()
    yield _build(engine, tmp_path_factory.mktemp("twin"), "two")
    engine.close()
