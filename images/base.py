"""Room images: what an image is built on: a Debian root made here, or an image that a person names by digest."""

import hashlib
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from images.command import run, run_shown, tail
from images.console import note
from images.declaration import PYTHON_OF, Build
from images.docker_engine import LABEL, DockerEngine, find_image
from images.errors import EngineProblem, UsageProblem
from images.index import cache_root

DIGEST = re.compile(r"\S+@sha256:[0-9a-f]{64}")
# A Debian root made twice from the same packages has the same bytes.
EPOCH = "1735689600"  # 2025-01-01
# By this, mmdebstrap knows that packages are Debian's. Ubuntu and DGX OS don't have it unless somebody installed it.
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
UPSTREAM_SOURCES = """Types: deb
URIs: http://deb.debian.org/debian
Suites: {suite} {suite}-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""


@dataclass(frozen=True)
class BaseImage:
    """A base that the engine holds. `reference` goes after FROM; `python` is its own Python's version.

    `install`: the packages that the build must still install with apt (a Debian root already has them).
    """

    reference: str
    id: str
    suite: str
    python: str
    install: tuple[str, ...]


def ensure_base(build: Build, named: str | None, engine: DockerEngine, log: Path) -> BaseImage:
    """Return the base of a build: the named image, the declared one, or a Debian root made once.

    Raises UsageProblem for a name without digest or an unknown system, EngineProblem when it can't be had.
    """
    wanted = named or build.base.image
    if wanted:
        return _named_base(wanted, build, engine)
    return _debian_root(build, engine, log)


def _named_base(wanted: str, build: Build, engine: DockerEngine) -> BaseImage:
    if not DIGEST.fullmatch(wanted) and not re.fullmatch(r"sha256:[0-9a-f]{64}", wanted):
        raise UsageProblem(
            f"--base {wanted}: wanted NAME@sha256:<64 hex digits>. A tag can be moved to another image; read "
            f"the digest with: docker image inspect --format '{{{{index .RepoDigests 0}}}}' {wanted}"
        )
    image = find_image(wanted)
    if image is None:
        pulled = run(["docker", "pull", "--platform", engine.platform, wanted])
        image = find_image(wanted) if pulled.returncode == 0 else None
        if image is None:
            raise EngineProblem(f"the base {wanted} is not here and can't be pulled: {pulled.stderr.strip()[-300:]}")
    if image.platform != engine.platform:
        raise EngineProblem(
            f"the base {wanted} is for {image.platform}, the Docker engine runs {engine.platform}: name the base's "
            "digest for that platform"
        )
    suite = _suite(image.id)
    if suite not in PYTHON_OF:
        raise UsageProblem(
            f"the base {wanted} is {suite or 'no Debian or Ubuntu'}; wanted one of {', '.join(PYTHON_OF)}"
        )
    return BaseImage(wanted, image.id, suite, PYTHON_OF[suite], tuple(build.packages))


def _suite(image: str) -> str:
    """The code name in the image's /etc/os-release, read without a network."""
    asked = run(["docker", "run", "--rm", "--network", "none", "--entrypoint", "cat", image, "/etc/os-release"])
    found = re.search(r'^VERSION_CODENAME="?([a-z]+)', asked.stdout, re.MULTILINE)
    return found[1] if found else ""


def _debian_root(build: Build, engine: DockerEngine, log: Path) -> BaseImage:
    """Make a Debian root of the declared packages and import it; one that was made is used again."""
    packages = sorted(build.packages)
    recipe = hashlib.sha256(f"{build.base.suite} {engine.platform} {packages}".encode()).hexdigest()[:12]
    tag = f"station-recipes/base:{build.base.suite}-{recipe}"
    image = find_image(tag)
    if image is None:
        if build.base.suite == "noble":
            raise UsageProblem("a root of noble (Ubuntu) can't be made here: name its image with --base NAME@sha256:…")
        _import_root(build.base.suite, packages, engine, tag, log)
        image = find_image(tag)
        if image is None:
            raise EngineProblem(f"the base {tag} was imported and is gone again")
    return BaseImage(tag, image.id, build.base.suite, build.base.python, ())


def _require_packages() -> None:
    """Raise EngineProblem naming each package that a Debian root needs of this machine and that is not here."""
    here = {"mmdebstrap": shutil.which("mmdebstrap"), "debian-archive-keyring": KEYRING.exists()}
    missing = [package for package, found in here.items() if not found]
    if missing:
        raise EngineProblem(
            f"a Debian root is made with mmdebstrap and Debian's keys ({KEYRING}); not installed: "
            f"{', '.join(missing)} (Debian, Ubuntu: apt install {' '.join(missing)}). Or name a base of your own: "
            "--base NAME@sha256:…"
        )


def _import_root(suite: str, packages: list[str], engine: DockerEngine, tag: str, log: Path) -> None:
    _require_packages()
    note(f"Making the base: Debian {suite} with {', '.join(packages)}, once")
    folder = cache_root() / "bases"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        root = Path(name) / "root.tar"
        sources = Path(name) / "debian.sources"
        sources.write_text(UPSTREAM_SOURCES.format(suite=suite))
        # Whatever mirror made it, the root names upstream: an image must not carry this machine's settings.
        hooks = [
            f"--customize-hook=upload {sources} /etc/apt/sources.list.d/debian.sources",
            '--customize-hook=rm -f "$1"/etc/apt/sources.list "$1"/etc/resolv.conf "$1"/etc/hostname',
            "--customize-hook=find $1/var/log $1/var/cache -type f -delete",
        ]
        arch = engine.platform.removeprefix("linux/")
        argv = ["mmdebstrap", "--quiet", "--variant=minbase", f"--architectures={arch}", *hooks]
        argv += [f"--include={','.join(packages)}", suite, str(root)]
        code = run_shown(argv, "making the Debian root", log, env={**os.environ, "SOURCE_DATE_EPOCH": EPOCH})
        if code != 0:
            raise EngineProblem(
                f"{tail(log)}\n\nThe Debian root could not be made: its last words are above, whole log: {log}"
            )
        change = f"LABEL {LABEL}.base={suite}"
        imported = run(["docker", "import", "--platform", engine.platform, "--change", change, str(root), tag])
        if imported.returncode != 0:
            raise EngineProblem(f"the base could not be imported: {imported.stderr.strip()[-300:]}")
