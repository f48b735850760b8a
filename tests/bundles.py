"""Small bundles for tests: a synthetic recipe with a model of two files, and bundles forged from any files at all."""

import hashlib
import io
import json
import tarfile
from pathlib import Path

import minisign

from recipes.bundle.layout import SUMS, BundleInfo, sums_text
from recipes.bundle.sign import public_text
from recipes.bundle.tar import Entry, write_tar
from recipes.bundle.write import Carried, bundle_entries, sealed
from recipes.load import load_recipe
from recipes.lock import Images

MODEL = {"config.json": b'{"architectures": ["None"]}\n', "model.safetensors": bytes(range(256)) * 3}
BASE = """\
schema: 1
id: tiny/base
title: a recipe of a test, with two files for a model
engine:
  image: cpu
  version: "0.32.0"
  flags:
    enforce-eager: true
    async-scheduling: false
    enable-prefix-caching: false
    max-model-len: 512
  env:
    OMP_NUM_THREADS: "1"
model:
  path: model
  served_name: tiny
  dtype: float32
  files:
{files}
runtime: {{port: 8000}}
benchmark:
  prompt_source: random-text
  input_len: 64
  output_len: 32
  concurrency: 4
  prompts: 20
  temperature: 0
  seed: 1
"""
RUNG = """\
schema: 1
id: tiny/more
title: the same with more sequences
extends: tiny/base
engine:
  flags:
    max-num-seqs: 8
delta:
  changes: [engine.flags.max-num-seqs]
  reason: more at once
  source: a test
claims:
  - id: a claim
    metric: output_tok_s
    published: 100
    tolerance: 5
    status: claimed
    machine: h200-sxm
    source: a test's own
"""
LADDER = "schema: 1\nfamily: tiny\ntitle: tiny\ndefault: more\nmachines: [any]\nrungs: [base, more]\n"
# A key of tests alone: the same one every time, so that what it signs is too.
KEY_SEED = bytes(range(32))


def library(folder: Path, base: str = BASE, rung: str = RUNG, model: dict[str, bytes] = MODEL) -> Path:
    """A library with the family `tiny`."""
    family = folder / "tiny"
    (family / "model").mkdir(parents=True)
    for name, data in model.items():
        (family / "model" / name).write_bytes(data)
    lines = "\n".join(f"    {name}: {hashlib.sha256(data).hexdigest()}" for name, data in sorted(model.items()))
    (family / "base.yaml").write_text(base.format(files=lines))
    (family / "more.yaml").write_text(rung)
    (family / "ladder.yaml").write_text(LADDER)
    return folder


def test_key(seed: bytes = KEY_SEED) -> minisign.SecretKey:
    """A minisign key made from a seed, without a password."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = Ed25519PrivateKey.from_private_bytes(seed)
    made = minisign.KeyPair.generate().secret_key
    made._keynum_sk.key_id[:] = hashlib.sha256(seed).digest()[:8]
    made._keynum_sk.secret_key[:] = private.private_bytes_raw()
    made._keynum_sk.public_key[:] = private.public_key().public_bytes_raw()
    made._update_checksum()
    return made


test_key.__test__ = False


def tiny_entries(folder: Path, carried: Carried | None = None, signer: str | None = None, **texts):
    """Entries and bundle.json of the tiny recipe."""
    loaded = load_recipe("tiny", library(folder / "library", **texts))
    return bundle_entries(loaded, "1", Images({}), None, carried or Carried(), signer)


def tiny_bundle(folder: Path, signed: bool = True, carried: Carried | None = None, **texts) -> Path:
    """A whole bundle of the tiny recipe, signed by the tests' key."""
    key = test_key() if signed else None
    entries, info = tiny_entries(folder, carried, public_text(key) if key else None, **texts)
    ordered, _ = sealed(entries, info, key)
    return tar_of(folder / "tiny.tar", {entry.name: b"".join(entry.chunks()) for entry in ordered})


def tar_of(file: Path, files: dict[str, bytes]) -> Path:
    """A tar exactly as ours are, of any files in the given order."""
    with file.open("wb") as sink:
        write_tar([Entry(name, data) for name, data in files.items()], sink, lambda _: None)
    return file


def files_of(bundle: Path) -> dict[str, bytes]:
    """Name and content of every file of a bundle, in order."""
    with tarfile.open(bundle) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}


def forged(folder: Path, changes: dict[str, bytes | None], info: dict | None = None) -> Path:
    """A bundle whose hashes are right although its files were changed: what a stranger could make.

    `changes`: new content by name, None to leave a file out; `info`: keys of bundle.json.
    """
    files = files_of(tiny_bundle(folder, signed=False))
    if info:
        told = {**json.loads(files["bundle.json"]), **info}
        files["bundle.json"] = json.dumps(told).encode()
    for name, data in changes.items():
        files.pop(name, None)
        if data is not None:
            files[name] = data
    files.pop(SUMS)
    sums = sums_text({name: hashlib.sha256(data).hexdigest() for name, data in files.items()})
    names = [line.split("  ")[1] for line in sums.splitlines()]
    return tar_of(folder / "forged.tar", {SUMS: sums.encode(), **{name: files[name] for name in names}})


def tar_with(folder: Path, member: tarfile.TarInfo, data: bytes = b"", **options) -> Path:
    """A tar that any tool could write, with one member after our first file."""
    first = files_of(tiny_bundle(folder, signed=False))[SUMS]
    file = folder / "hostile.tar"
    with tarfile.open(file, "w", **options) as tar:
        head = tarfile.TarInfo(SUMS)
        head.size = len(first)
        tar.addfile(head, io.BytesIO(first))
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))
    return file


def tree(folder: Path) -> dict[str, bytes | str]:
    """Everything below a folder: content by name, a link's target, of a large file only its size."""
    return {path.relative_to(folder).as_posix(): _told(path) for path in sorted(folder.rglob("*"))}


def _told(path: Path) -> bytes | str:
    if path.is_symlink():
        return str(path.readlink())
    if not path.is_file():
        return "folder"
    size = path.stat().st_size
    return path.read_bytes() if size < 1 << 20 else f"{size} bytes"


__all__ = ["BundleInfo", "files_of", "forged", "library", "tar_of", "tar_with", "test_key", "tiny_bundle", "tree"]
