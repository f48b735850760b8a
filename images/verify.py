"""Room images: an image proved from outside: its own `verify` run in it without a network, and its layers searched."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from secrets import token_hex
from subprocess import DEVNULL, PIPE, Popen

from images.build import Built
from images.command import run
from images.console import stage
from images.declaration import declaration
from images.docker_engine import LABEL, find_image
from images.errors import ImageProblem
from images.index import cache_root
from images.secrets import secrets_in
from images.verify_checks import Finding
from images.written import write_whole

SCHEMA = 2  # proofs of schema 1 passed over layers that the engine keeps compressed
IMAGES = Path(__file__).resolve().parent
TOGETHER = """
import sys, types
checks = types.ModuleType("verify_checks")
checks.__file__ = {home!r}
sys.modules["verify_checks"] = checks
exec(compile({checks!r}, checks.__file__, "exec"), checks.__dict__)
exec(compile({verify!r}, "verify", "exec"), {{"__name__": "__main__"}})
"""
HOME = "/opt/station-recipes"


def verify_image(built: Built, again: bool = False, device: str | None = None) -> list[Finding]:
    """Prove an image; an earlier proof of the same image counts, unless `again`.

    `device` is the CDI name of a GPU, for the checks that need one: with it a proof made without one doesn't count.
    Raises ImageProblem, naming what was found and wanted, when a check fails.
    """
    kept = cache_root() / "proofs" / f"{built.id.removeprefix('sha256:')[:32]}.json"
    findings = None if again else _read(kept, device is not None)
    fresh = findings is None
    if fresh:
        findings = [*inside(built, device), *layers(built.id)]
    failed = [finding for finding in findings if finding.ok is False]
    if failed:
        kept.unlink(missing_ok=True)
        lines = "\n".join(f"  {each.id}: found {each.found}; wanted {each.wanted}" for each in failed)
        raise ImageProblem(f"the image {built.reference} is not what it must be:\n{lines}")
    if fresh:
        _keep(kept, findings, device is not None)
    return findings


def inside(built: Built, device: str | None = None, options: Sequence[str] = ()) -> list[Finding]:
    """Run the image's verify in a container as a recipe's is: no network, read-only, no privileges.

    Raises ImageProblem when it can't be run at all.
    """
    build = declaration(built.name).sources.build
    uid = build.uid if build else 1000
    name = f"station-recipes-verify-{token_hex(4)}"
    argv = ["docker", "run", "--rm", "--name", name, "--network", "none", "--read-only", "--cap-drop", "ALL"]
    argv += ["--label", f"{LABEL}.kind=verify", "--security-opt", "no-new-privileges", "--user", f"{uid}:{uid}"]
    argv += [
        "--tmpfs",
        f"/cache:exec,uid={uid},gid={uid},mode=0755",
        "--tmpfs",
        "/tmp:exec,mode=1777",  # noqa: S108 the container's own
        "--shm-size",
        "2g",
    ]
    argv += ["--device", device] if device else []
    program = None
    if built.source == "pull":  # upstream's image has no verify of ours: it comes in on the standard input
        program = as_one_program(built.name)
        argv += ["--interactive", "--entrypoint", "python3", built.id, "-", "--upstream"]
    else:
        argv += ["--entrypoint", f"{HOME}/verify", built.id]
    argv += ["--platform", built.platform, "--version", built.version, "--uid", str(uid), *options]
    image = find_image(built.id)
    for arch in image.labels.get(f"{LABEL}.cuda-archs", "").split() if image else []:
        argv += ["--cuda-arch", arch]
    with Popen(argv, stdin=PIPE if program else DEVNULL, stdout=PIPE, stderr=PIPE, text=True) as process:
        try:
            if program:
                with process.stdin as source, suppress(BrokenPipeError):
                    source.write(program)
            findings = list(_shown(built.name, process.stdout))
        except BaseException:  # the container does not end with the program that started it
            run(["docker", "kill", name])
            raise
        said = process.stderr.read().strip()
    if not findings:
        raise ImageProblem(
            f"verify could not be run in the image {built.reference}: {said[-500:] or 'it said nothing'}"
        )
    return findings


def as_one_program(name: str) -> str:
    """An image's verify and the checks it is made of as one program, to be read from the standard input."""
    checks, verify = (file.read_text() for file in (IMAGES / "verify_checks.py", IMAGES / name / "verify"))
    return TOGETHER.format(home=f"{HOME}/verify_checks.py", checks=checks, verify=verify)


def _shown(name: str, lines: Iterable[str]) -> Iterator[Finding]:
    with stage(f"proving the image {name} from within, without a network") as update:
        for line in lines:
            finding = Finding(**json.loads(line))
            update(f"{'✔' if finding.ok else '–' if finding.ok is None else '✘'} {finding.id}")
            yield finding


def layers(reference: str) -> list[Finding]:
    """Search every layer, the history, the environment and the labels for secrets."""
    with stage("searching the image's layers for secrets"):
        found = secrets_in(reference)
    return [Finding("secrets", not found, "; ".join(found[:5]) or "none", "none in any layer")]


def _read(file: Path, with_gpu: bool) -> list[Finding] | None:
    try:
        kept = json.loads(file.read_text())
        counts = kept["schema"] == SCHEMA and (kept.get("gpu", False) or not with_gpu)
        return [Finding(**each) for each in kept["findings"]] if counts else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _keep(file: Path, findings: list[Finding], with_gpu: bool) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    told = {"schema": SCHEMA, "gpu": with_gpu, "findings": [asdict(each) for each in findings]}
    write_whole(file, json.dumps(told, indent=1).encode())
