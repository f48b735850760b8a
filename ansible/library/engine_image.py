#!/usr/bin/python3
"""An engine's image in a host's Docker engine: looked for, pulled by digest, or loaded from an archive that is checked.

An Ansible module, standard library only. It removes no image and gives no tag that another image has.

    state=found   which of `references` the engine holds: the answer's `image` is its id there, or null
    state=pulled  pull the first of `references` that a registry still has
    state=loaded  load `archive` (an OCI archive, or one of `docker save`), after its SHA-256 was right
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

CHUNK = 1 << 20
SMALL_BYTES = 8 << 20  # no manifest or configuration is larger
IMAGE_ID = re.compile(r"sha256:[0-9a-f]{64}")
INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")


class ImageProblem(Exception):
    """What stands against having the image, with the way out."""


def docker(*argv: str, **options: object) -> subprocess.CompletedProcess:
    """Run a docker command; ImageProblem where there is no such program."""
    try:
        return subprocess.run(["docker", *argv], capture_output=True, text=True, check=False, **options)
    except FileNotFoundError:
        raise ImageProblem("there is no docker program: role docker_host installs it") from None


def find(references: list[str]) -> dict | None:
    """The first image that the engine holds, {image, platform}: its id there, whichever store it keeps images in."""
    for reference in references:
        answer = docker("image", "inspect", reference)
        if answer.returncode == 0:
            seen = json.loads(answer.stdout)[0]
            return {"image": seen["Id"], "platform": f"{seen['Os']}/{seen['Architecture']}"}
        said = answer.stderr.lower()
        if "no such image" not in said and "not found" not in said:
            raise ImageProblem(f"the Docker engine does not answer: {answer.stderr.strip()}")
    return None


def require_platform(found: str, wanted: str, what: str) -> None:
    """Raise ImageProblem for an image of another architecture: its programs would end with "exec format error"."""
    if wanted and found.split("/")[:2] != wanted.split("/")[:2]:
        raise ImageProblem(f"{what}: found an image for {found}, wanted {wanted}, this host's: name such a one")


def pull(references: list[str], platform: str) -> None:
    """Pull the first reference that a registry has. Where the registry tells the platform, it is asked before."""
    said = []
    for reference in references:
        told = docker("manifest", "inspect", "--verbose", reference)
        if told.returncode == 0:
            about = json.loads(told.stdout)
            if isinstance(about, dict):  # one platform; a list has one entry each, and Docker chooses
                kind = about.get("Descriptor", {}).get("platform") or {}
                if kind.get("architecture"):
                    require_platform(f"{kind.get('os')}/{kind['architecture']}", platform, reference)
        answer = docker("pull", "--quiet", *(["--platform", platform] if platform else []), reference)
        if answer.returncode == 0:
            return
        said.append(f"{reference}: {answer.stderr.strip() or answer.stdout.strip()}")
    raise ImageProblem("no registry gave the image. " + "; ".join(said))


def load(archive: Path, sha256: str, platform: str) -> None:
    """Load an archive into the Docker engine.

    Raises ImageProblem, and the engine has nothing new, for a file that is another than the one that was saved, that
    is no image, or an image of another platform.
    """
    if not archive.is_file():
        raise ImageProblem(f"{archive} is not there")
    found = file_sha256(archive)
    if found != sha256:
        raise ImageProblem(
            f"{archive}: {archive.stat().st_size} bytes with the SHA-256 {found}, wanted {sha256}: cut short or "
            "altered on its way. Remove it and run again"
        )
    try:
        with tarfile.open(archive, mode="r:") as tar:
            contents, config = read_layout(tar, platform)
    except (tarfile.TarError, KeyError, ValueError, TypeError, IndexError) as error:
        raise ImageProblem(f"{archive} is no archive of an image: {error}") from None
    require_platform(f"{config.get('os')}/{config.get('architecture')}", platform, str(archive))
    with archive.open("rb") as source:
        parts = [source] if contents is None else [io.BytesIO(as_member("manifest.json", contents)), source]
        said = feed(parts)
    if said:
        raise ImageProblem(f"the Docker engine did not take {archive}: {said}")


def feed(parts: list) -> str:
    """Hand streams to `docker load`, one after the other; returns what it said where it failed, else nothing."""
    argv = ["docker", "load", "--quiet"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            for part in parts:
                shutil.copyfileobj(part, process.stdin, CHUNK)
            process.stdin.close()
        except BrokenPipeError:
            pass  # it says why
        process.stdin = None
        said = process.communicate()[0].decode(errors="replace").strip()
    return said or "it ended without a word" if process.returncode != 0 else ""


def file_sha256(file: Path) -> str:
    """The SHA-256 of a file, 64 hex digits."""
    found = hashlib.sha256()
    with file.open("rb") as source:
        while data := source.read(CHUNK):
            found.update(data)
    return found.hexdigest()


def as_member(name: str, data: bytes) -> bytes:
    """A file as it stands in a tar, without the tar's end."""
    header = tarfile.TarInfo(name)
    header.size = len(data)
    return header.tobuf(tarfile.GNU_FORMAT) + data + b"\0" * (-len(data) % tarfile.BLOCKSIZE)


def read_layout(tar: tarfile.TarFile, platform: str) -> tuple[bytes | None, dict]:
    """Docker's table of contents for an OCI archive (None where it has its own), and the image's configuration.

    Where an archive holds several platforms, `platform` chooses. Raises KeyError, ValueError or TypeError for a tar
    that holds no image.
    """
    names = {name.removeprefix("./"): name for name in tar.getnames()}

    def read(name: str) -> dict | list:
        member = tar.getmember(names[name])
        if member.size > SMALL_BYTES:
            raise ValueError(f"its {name} has {member.size} bytes")
        return json.loads(tar.extractfile(member).read())

    if "manifest.json" in names:
        return None, read(read("manifest.json")[0]["Config"])
    entry = read("index.json")["manifests"][0]
    manifest = read(blob(entry["digest"]))
    if entry.get("mediaType") in INDEXES or "manifests" in manifest:
        listed = {f"{one['platform']['os']}/{one['platform']['architecture']}": one for one in manifest["manifests"]}
        if platform not in listed:
            raise ImageProblem(f"the archive is for {', '.join(sorted(listed))}, wanted {platform}, this host's")
        manifest = read(blob(listed[platform]["digest"]))
    layers = [names[blob(layer["digest"])] for layer in manifest["layers"]]
    name = (entry.get("annotations") or {}).get("io.containerd.image.name")
    tag = name if name and docker("image", "inspect", name).returncode != 0 else None  # another image's tag stays
    config = blob(manifest["config"]["digest"])
    contents = [{"Config": names[config], "RepoTags": [tag] if tag else None, "Layers": layers}]
    return json.dumps(contents).encode(), read(config)


def blob(digest: str) -> str:
    """Where an OCI archive has a blob."""
    if not IMAGE_ID.fullmatch(digest):
        raise ValueError(f"{digest!r} is no digest")
    return f"blobs/sha256/{digest[7:]}"


def bring(asked: dict, check: bool) -> dict:
    """Do what was asked; returns Ansible's result. With `check` nothing is done. Raises ImageProblem."""
    found = find(asked["references"])
    if found is None and asked["state"] != "found" and not check:
        if asked["state"] == "pulled":
            pull(asked["references"], asked["platform"])
        else:
            load(Path(asked["archive"]), asked["sha256"], asked["platform"])
        found = find(asked["references"])
        if found is None:
            raise ImageProblem(f"the Docker engine has no {', '.join(asked['references'])} although it took the image")
        changed = True
    else:
        changed = found is None and asked["state"] != "found"
    if found:
        require_platform(found["platform"], asked["platform"], found["image"])
    return {"changed": changed, **(found or {"image": None, "platform": None})}


def main() -> None:
    """Run as an Ansible module."""
    from ansible.module_utils.basic import AnsibleModule

    module = AnsibleModule(
        argument_spec={
            "state": {"choices": ["found", "pulled", "loaded"], "default": "found"},
            "references": {"type": "list", "elements": "str", "required": True},
            "platform": {"type": "str", "default": ""},
            "archive": {"type": "path"},
            "sha256": {"type": "str"},
        },
        required_if=[("state", "loaded", ["archive", "sha256"])],
        supports_check_mode=True,
    )
    try:
        module.exit_json(**bring(module.params, module.check_mode))
    except ImageProblem as problem:
        module.fail_json(msg=str(problem))


if __name__ == "__main__":
    main()
