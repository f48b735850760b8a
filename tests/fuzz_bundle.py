"""Fuzzes the reader of bundles: `python -m tests.fuzz_bundle SECONDS [SEED]`; no test, what it finds becomes one.

Whatever is fed, the reader either refuses with a Problem and leaves nothing, or what it read writes back to the very
bytes that were fed. Memory and files are limited, so that a bomb is a finding and not an outage.
"""

import hashlib
import io
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from images.errors import Problem
from recipes.bundle.adopt import Wishes, candidate
from recipes.bundle.git import parse_index
from recipes.bundle.layout import SUMS, sums_text
from recipes.bundle.read import Limits, unpacked
from recipes.bundle.tar import Entry, header, write_tar
from tests.bundles import files_of, tiny_bundle, tree

FACTS = {"slug": "cpu-x86-64", "architecture": "x86_64", "gpus": [], "pci_gpus": []}
WORDS = [b"..", b"/", b"\0", b"\xff", b"{", b"[" * 3000, b"!!python/object:os.system", b"&a *a", b"9" * 40, b"-1"]
WORDS += [b"0" * 12, b"ustar", b"\x1f\x8b", b"null", b"true", b'"schema": 2', b"1e999", b"\r\n", b"recipes/tiny/"]
LIMITS = Limits(total_bytes=5_000_000, entries=100)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A few random changes: bytes flipped, cut, doubled, moved, words put in."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(found) + 1)
        end = min(len(found), place + rng.choice((1, 2, 8, 100, 512, 5000)))
        kind = rng.randrange(6)
        if kind == 0 and place < len(found):
            found[place] = rng.randrange(256)
        elif kind == 1:
            del found[place:end]
        elif kind == 2:
            found[place:place] = found[place:end]
        elif kind == 3:
            found[place:end] = rng.choice(WORDS)
        elif kind == 4:
            found[place:place] = rng.choice(WORDS)
        else:
            found[place:end] = bytes(end - place)
    return bytes(found)


def as_tar(files: dict[str, bytes]) -> bytes:
    """A tar in our own form of any files; names that can't be are left to the header's own bytes."""
    sink = io.BytesIO()
    write_tar([Entry(name, data) for name, data in files.items()], sink, lambda _: None)
    return sink.getvalue()


def resealed(files: dict[str, bytes], rng: random.Random) -> bytes:
    """A bundle with one file mutated and its hashes right: what a stranger could make on purpose."""
    changed = dict(files)
    name = rng.choice([name for name in changed if name != SUMS])
    changed[name] = mutated(changed[name], rng)
    if rng.random() < 0.2:
        del changed[rng.choice([each for each in changed if each != SUMS])]
    changed.pop(SUMS)
    sums = sums_text({each: hashlib.sha256(data).hexdigest() for each, data in changed.items()})
    text = sums.encode() if rng.random() < 0.9 else mutated(sums.encode(), rng)
    names = [line.split("  ")[1] for line in sums.splitlines()]
    return as_tar({SUMS: text, **{each: changed[each] for each in names}})


def headers(data: bytes, rng: random.Random) -> bytes:
    """A header replaced by one of another name or size."""
    place = rng.randrange(0, len(data) // 512) * 512
    name = rng.choice(["bundle.json", "recipes/a", "x" * 99, "a/" * 50 + "b", SUMS])
    return data[:place] + header(name, rng.choice((0, 1, 511, 512, 513, 8**11 - 1))) + data[place + 512 :]


def main(seconds: float, seed: int) -> None:
    """Feed until the time is over; print what was found, and end with 1 for anything but a refusal."""
    resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
    rng, ends = random.Random(seed), time.monotonic() + seconds
    counts = {"fed": 0, "refused": 0, "read": 0, "adoptable": 0, "index": 0}
    with ExitStack() as stack:
        room = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fuzz-")))
        (room / "state").mkdir()
        os.environ["STATION_RECIPES_STATE"] = str(room / "state")
        for name in ("signed", "plain"):
            (room / name).mkdir()
        bundles = [tiny_bundle(room / "signed"), tiny_bundle(room / "plain", signed=False)]
        whole = [bundle.read_bytes() for bundle in bundles]
        files = files_of(bundles[1])
        fed, target = room / "fed.tar", room / "target"
        while time.monotonic() < ends:
            kind = rng.randrange(4)
            base = rng.choice(whole)
            data = (mutated(base, rng), resealed(files, rng), headers(base, rng), resealed(files, rng))[kind]
            fed.write_bytes(data)
            counts["fed"] += 1
            try:
                with unpacked(fed, target, LIMITS) as bundle:
                    counts["read"] += 1
                    names = [SUMS, *(["SHA256SUMS.minisig"] if bundle.signer else []), *bundle.files]
                    again = as_tar({name: (target / name).read_bytes() for name in names})
                    assert again == data, "what was read is not what was fed"
            except Problem:
                counts["refused"] += 1
            shutil.rmtree(target, ignore_errors=True)
            if kind == 3:
                try:
                    with candidate(fed, "fed", Wishes(limits=LIMITS), FACTS):
                        counts["adoptable"] += 1
                except Problem:
                    pass
                text = json.dumps({"schema": 1, "bundles": []}).encode()
                try:
                    parse_index(mutated(text, rng), "it")
                except Problem:
                    counts["index"] += 1
            left = sorted(path.name for path in room.iterdir())
            assert left == ["fed.tar", "plain", "signed", "state"], left
            assert set(tree(room / "state")) <= {"adopted"}, "something was left"
    print(counts)  # noqa: T201


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1)
