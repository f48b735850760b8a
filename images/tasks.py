"""Room images: the tasks `./inv image.…`: each parses, calls one function, prints, and sets the exit code."""

from dataclasses import asdict
from pathlib import Path

from invoke import Collection, Exit, task

PLAIN = "allow plain http for registries on this machine (loopback addresses)"
PLAIN_HOST = "allow plain http for this one registry, HOST[:PORT]; anyone on the way can read and change what is sent"
SOURCE = "an image of the Docker engine by name or id, or docker://NAME of a registry"
DIFFER = 3  # as in NOT_REPRODUCED: the answer is no, and nothing failed


def _wire(plain_http: bool, plain_http_host: str | None):
    from images.registry import Wire

    return Wire(plain_http, plain_http_host)


def _say(result: object, as_json: bool, lines: list[tuple[str, str]]) -> None:
    """Print a task's result: one line of JSON, or a table of names and values."""
    from images.console import emit_json, out, table

    if as_json:
        emit_json({"schema": 1, **asdict(result)})
    else:
        out().print(table("", ("", ""), lines))


@task(
    positional=["image"],
    help={
        "image": SOURCE,
        "out": "file to write, such as engine.oci.tar; its SHA-256 goes to FILE.sha256",
        "platform": "os/arch, such as linux/arm64; default: the engine image's own, of a registry this machine's",
        "plain-http": PLAIN,
        "plain-http-host": PLAIN_HOST,
        "json": "print JSON",
    },
)
def save(_c, image, out="", platform=None, plain_http=False, plain_http_host=None, json=False):
    """Save an image as an OCI archive with its SHA-256; nothing is replaced."""
    from images.errors import UsageProblem
    from images.transport import save_image

    if not out:
        raise UsageProblem("image.save needs --out FILE, such as --out engine.oci.tar")
    saved = save_image(image, Path(out), platform, _wire(plain_http, plain_http_host))
    lines = [
        ("file", f"{saved.file} ({saved.size / 1e6:,.1f} MB)"),
        ("sha256", f"{saved.sha256} (in {saved.file}.sha256)"),
        ("image id", saved.image_id),
        ("manifest", saved.manifest_digest),
        ("platform", saved.platform),
    ]
    lines += [("registry gave", saved.source_digest)] if saved.source_digest else []
    _say(saved, json, lines)


@task(
    positional=["file"],
    help={
        "file": "an archive that image.save wrote",
        "sha256": "its SHA-256, 64 hex digits; default: FILE.sha256 beside it",
        "tag": "name to give it instead of the one it was saved under",
        "any-platform": "load it although this engine can't run it",
        "json": "print JSON",
    },
)
def load(_c, file, sha256=None, tag=None, any_platform=False, json=False):
    """Check an archive and load it into the Docker engine: the image id is the one that was saved."""
    from images.transport import load_image

    loaded = load_image(Path(file), sha256, tag, any_platform)
    lines = [
        ("image id", loaded.image_id + (" (was there already)" if loaded.already_there else "")),
        ("tag", loaded.tag or "none: the archive has no name; give one with --tag, or use the id"),
        ("platform", loaded.platform),
    ]
    _say(loaded, json, lines)


@task(
    positional=["image"],
    help={
        "image": f"{SOURCE}, or an archive FILE.tar",
        "to": "where to: REGISTRY/NAME[:TAG]; default tag: the image's own",
        "platform": "of a registry's image with several platforms the one to take; default: this machine's",
        "all": "every platform, and the index that names them",
        "expect": "the digest recorded for IMAGE: an error if it is another now",
        "move-tag": "let TAG name this image although it names another one there",
        "verify": "pull it back whole and compare every blob",
        "plain-http": PLAIN,
        "plain-http-host": PLAIN_HOST,
        "json": "print JSON",
    },
)
def mirror(
    _c,
    image,
    to="",
    platform=None,
    all=False,  # noqa: A002
    expect=None,
    move_tag=False,
    verify=False,
    plain_http=False,
    plain_http_host=None,
    json=False,
):
    """Push an image to another registry, and prove that it comes back under the same digest."""
    from images.errors import UsageProblem
    from images.mirror import mirror_image
    from images.registry import DIGEST

    if not to:
        raise UsageProblem("image.mirror needs --to REGISTRY/NAME[:TAG]")
    if expect and not DIGEST.fullmatch(expect):
        raise UsageProblem(f"--expect {expect}: wanted sha256: and 64 hex digits")
    wire = _wire(plain_http, plain_http_host)
    mirrored = mirror_image(image, to, wire, platform, all, verify, expect, move_tag)
    lines = [
        ("mirrored", mirrored.reference),
        ("tag", mirrored.tag),
        ("platform", ", ".join(mirrored.platforms)),
        ("image id", mirrored.image_id or "one a platform"),
        (
            "proof",
            "pulled back whole, every blob the same" if mirrored.verified else "manifest and configuration came back",
        ),
    ]
    _say(mirrored, json, lines)


@task(
    iterable=["ref"],
    help={
        "image": "an engine image of images/, such as cuda: asks what its image.yaml declares",
        "ref": "NAME@sha256:… to ask instead, once each: the upstream one first, then its mirrors",
        "platform": "platform of the declared digest; default: this machine's",
        "plain-http": PLAIN,
        "plain-http-host": PLAIN_HOST,
        "json": "print JSON",
    },
)
def where(_c, image=None, ref=None, platform=None, plain_http=False, plain_http_host=None, json=False):
    """Ask whether an image is still to be had upstream, and from its mirrors; ends with 1 if from none."""
    from images.console import emit_json, out, table
    from images.declared import pull_references
    from images.errors import UsageProblem
    from images.registry import reachable, retention

    if bool(image) == bool(ref):
        raise UsageProblem("image.where needs either --image NAME or --ref NAME@sha256:… (once each)")
    refs = ref or pull_references(image, platform)
    states = reachable(refs, _wire(plain_http, plain_http_host))
    if json:
        answers = [{key: value for key, value in asdict(state).items() if key != "manifest"} for state in states]
        emit_json({"schema": 1, "summary": retention(states), "references": answers})
    else:
        out().print(table("", ("reference", "state", "why"), [(s.reference, s.state, s.reason) for s in states]))
        out().print(retention(states))
    raise Exit(code=0 if any(state.state == "ok" for state in states) else 1)


@task(
    positional=["a", "b"],
    iterable=["allow"],
    help={
        "a": "an image of the Docker engine, by name or id",
        "b": "another",
        "allow": "glob of paths that may differ, without the leading slash; `*` matches / too; once each",
        "json": "print everything as JSON",
    },
)
def diff(_c, a, b, allow=None, json=False):
    """Say how two images differ: configuration, packages, files; ends with 3 when they do."""
    from images.console import emit_json, out
    from images.differences import differences, print_images_difference

    found = differences(a, b, allow or ())
    if json:
        emit_json(found.as_json())
    else:
        print_images_difference(found, out())
    raise Exit(code=0 if found.equal else DIFFER)


@task(
    positional=["image"],
    help={"image": "an image of the Docker engine, by name or id", "out": "file to write (default: print)"},
)
def software(_c, image, out=None):
    """List an image's Debian packages and Python distributions as CycloneDX 1.6 JSON."""
    from images.console import emit_json, note
    from images.software import software_list, write_software_list

    found = software_list(image)
    if out:
        write_software_list(found, Path(out))
        note(f"{len(found.get('components', []))} packages are in {out}")
    else:
        emit_json(found)


ns = Collection(save, load, mirror, where, diff, software)
