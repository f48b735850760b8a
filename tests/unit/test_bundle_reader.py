"""A bundle is read without trust: one byte changed, a name, a link, a size or a lie refuses it, and nothing is left."""

import gzip
import io
import json
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from images.errors import BundleProblem, Problem
from recipes.bundle.layout import GB, SUMS, sums_text
from recipes.bundle.read import Limits, unpacked
from recipes.bundle.tar import BLOCK, Entry, header, read_tar, write_tar
from tests.bundles import files_of, forged, tar_of, tar_with, test_key, tiny_bundle, tree

BUNDLES = Path(__file__).parent.parent / "fixtures" / "bundles"
GOLDEN = gzip.decompress((BUNDLES / "schema-1.tar.gz").read_bytes())


def refusal(source: Path, folder: Path, limits: Limits | None = None) -> str:
    """Why a bundle is refused; it must be, and nothing of it may be left, there or anywhere beside."""
    before = tree(folder)
    with pytest.raises(BundleProblem) as problem:
        with unpacked(source, folder / "target", limits or Limits()):
            pass
    assert tree(folder) == before
    return str(problem.value)


def test_a_whole_bundle_is_read_and_says_what_it_is(tmp_path):
    with unpacked(tiny_bundle(tmp_path), tmp_path / "target", Limits()) as bundle:
        assert bundle.info.recipe == "tiny/more" and bundle.info.chain == ["tiny/base", "tiny/more"]
        assert bundle.signer == bundle.info.signer != None  # noqa: E711
        assert (bundle.folder / "recipes/tiny/model/model.safetensors").stat().st_size == 768
        assert files_of(tmp_path / "tiny.tar") == {
            name: data for name, data in tree(bundle.folder).items() if data != "folder"
        }


def test_every_single_byte_counts_in_a_signed_bundle(tmp_path):
    """Bytes all over, and close together where headers, hashes and the signature are: flipped one at a time."""
    data = bytearray(GOLDEN)
    source, where = tmp_path / "changed.tar", tmp_path / "room"
    where.mkdir()
    places = {*range(0, len(data), 211), *range(0, 8192, 11)}
    for place in sorted(places):
        data[place] ^= 1 << place % 8
        source.write_bytes(data)
        data[place] ^= 1 << place % 8
        refusal(source, where)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, len(GOLDEN) - 1), value=st.integers(0, 255))
def test_any_byte_changed_to_any_value_refuses_the_bundle(tmp_path, place, value):
    data = bytearray(GOLDEN)
    if data[place] != value:
        data[place] = value
        (tmp_path / "changed.tar").write_bytes(data)
        (tmp_path / "room").mkdir(exist_ok=True)
        refusal(tmp_path / "changed.tar", tmp_path / "room")


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(length=st.integers(0, len(GOLDEN) - 1))
def test_a_bundle_cut_short_anywhere_is_refused(tmp_path, length):
    (tmp_path / "cut.tar").write_bytes(GOLDEN[:length])
    (tmp_path / "room").mkdir(exist_ok=True)
    assert refusal(tmp_path / "cut.tar", tmp_path / "room")


@pytest.mark.parametrize("tail", [b"\0", b"\0" * 512, b"x", b"\0" * 10240, b"PK\x05\x06" + b"\0" * 18])
def test_something_after_the_end_is_refused(tmp_path, tail):
    (tmp_path / "long.tar").write_bytes(GOLDEN + tail)
    assert "after its end" in refusal(tmp_path / "long.tar", tmp_path)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.from_regex(r"[a-z0-9_][A-Za-z0-9._+@=-]{0,30}(/[a-z0-9_][A-Za-z0-9._+@=-]{0,30}){0,3}", fullmatch=True),
        st.binary(max_size=2000),
        max_size=6,
    )
)
def test_what_is_written_reads_back_and_is_the_same_bytes_again(files):
    entries = [Entry(name, data) for name, data in files.items()]
    first, second = io.BytesIO(), io.BytesIO()
    size = write_tar(entries, first, lambda _: None)
    write_tar(entries, second, lambda _: None)
    assert first.getvalue() == second.getvalue() and len(first.getvalue()) == size
    if files:
        found = {name: content.read(10**6) for name, content in read_tar(io.BytesIO(first.getvalue()), "it")}
        assert found == files
        with tarfile.open(fileobj=io.BytesIO(first.getvalue())) as other:
            assert {each.name: other.extractfile(each).read() for each in other} == files


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=3000))
def test_no_bytes_at_all_make_the_reader_fail_otherwise_than_by_refusing(noise):
    block = header("SHA256SUMS", len(noise))
    for data in (noise, block + noise, block[:300] + noise):
        try:
            for _name, content in read_tar(io.BytesIO(data), "it"):
                content.read(10**6)
        except BundleProblem:
            pass


HOSTILE = [
    ("/etc/cron.d/x", "absolute path"),
    ("../outside", "leads out"),
    ("recipes/../../outside", "leads out"),
    ("recipes/./x", "no name that a bundle's file has"),
    ("recipes//x", "no name that a bundle's file has"),
    (".git/hooks/post-checkout", "no name that a bundle's file has"),
    ("recipes/.hidden", "no name that a bundle's file has"),
    ("-rf", "no name that a bundle's file has"),
    ("recipes\\..\\x", "no name that a bundle's file has"),
    ("C:/x", "no name that a bundle's file has"),
    ("recipes/a b", "no name that a bundle's file has"),
    ("recipes/\x1b[2J", "no name that a bundle's file has"),
    ("recipes/é", "no name that a bundle's file has"),
    ("$(id)", "no name that a bundle's file has"),
    ("x\n0000  y", "no name that a bundle's file has"),
]


@pytest.mark.parametrize(("name", "why"), HOSTILE)
def test_a_hostile_name_is_refused_in_a_tar(tmp_path, name, why):
    file = tar_with(tmp_path, tarfile.TarInfo(name), b"payload", format=tarfile.USTAR_FORMAT)
    assert why in refusal(file, tmp_path)


@pytest.mark.parametrize(("name", "why"), [(name, why) for name, why in HOSTILE if not set(name) & set(" \n\\")])
def test_a_hostile_name_is_refused_in_the_list_of_hashes(tmp_path, name, why):
    assert why in refusal(_listed(tmp_path, name), tmp_path)


def _listed(folder: Path, name: str) -> Path:
    """A folder whose SHA256SUMS names a file that lies outside it, or can't be."""
    made = folder / "made"
    with unpacked(tiny_bundle(folder, signed=False), made, Limits()):
        pass
    text = (made / SUMS).read_text()
    (made / SUMS).write_text(text + f"{'0' * 64}  {name}\n")
    return made


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (tarfile.SYMTYPE, "a symbolic link"),
        (tarfile.LNKTYPE, "a hard link"),
        (tarfile.CHRTYPE, "a device"),
        (tarfile.BLKTYPE, "a device"),
        (tarfile.FIFOTYPE, "a named pipe"),
        (tarfile.DIRTYPE, "a folder's own entry"),
        (tarfile.GNUTYPE_SPARSE, "a sparse file"),
        (tarfile.CONTTYPE, "altered"),
        (b"Z", "altered"),
    ],
)
def test_links_devices_pipes_and_other_kinds_are_refused(tmp_path, kind, why):
    member = tarfile.TarInfo("recipes/tiny/base.yaml")
    member.type, member.linkname = kind, "/etc/passwd"
    assert why in refusal(tar_with(tmp_path, member, format=tarfile.USTAR_FORMAT), tmp_path)


@pytest.mark.parametrize(
    "change",
    [{"mode": 0o4755}, {"uid": 1000}, {"mtime": 1}, {"uname": "root"}, {"mode": 0o755}, {"gname": "x"}],
)
def test_a_header_with_an_owner_a_time_or_a_mode_is_not_ours(tmp_path, change):
    member = tarfile.TarInfo("bundle.json")
    for key, value in change.items():
        setattr(member, key, value)
    assert "altered" in refusal(tar_with(tmp_path, member, b"{}", format=tarfile.USTAR_FORMAT), tmp_path)


@pytest.mark.parametrize("kind", [b"L", b"K", b"x", b"g"])
def test_extended_headers_are_refused(tmp_path, kind):
    member = tarfile.TarInfo("recipes/tiny/base.yaml")
    member.type = kind
    file = tar_with(tmp_path, member, b"30 path=../../outside\n", format=tarfile.USTAR_FORMAT)
    assert "an extended header" in refusal(file, tmp_path)


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tars_of_other_kinds_are_refused(tmp_path, form):
    assert refusal(tar_with(tmp_path, tarfile.TarInfo("recipes/" + "x" * 300), b"x", format=form), tmp_path)


def test_ten_gigabytes_of_zeros_in_a_megabyte_are_refused_before_anything_is_written(tmp_path):
    packed = tmp_path / "zeros.tar.gz"
    with gzip.open(packed, "wb", compresslevel=1) as sink:
        for _ in range(100):
            sink.write(b"\0" * (1 << 20))
    assert "compressed (gzip)" in refusal(packed, tmp_path)
    sparse = tmp_path / "sparse.tar"
    sums = sums_text({"bundle.json": "0" * 64, "recipes/zeros": "0" * 64}).encode()
    with sparse.open("wb") as sink:
        sink.write(header(SUMS, len(sums)) + sums + b"\0" * (-len(sums) % BLOCK))
        sink.write(header("bundle.json", 8 * 1000**3))
        sink.truncate(10 * GB)  # a file with a hole: 10 GB long, a few kB on the disk
    assert sparse.stat().st_blocks * 512 < 1 << 20
    assert "more than 2 GB in all" in refusal(sparse, tmp_path)
    assert "the most it may have is" in refusal(sparse, tmp_path, Limits(total_bytes=100 * GB))


def test_a_header_that_announces_more_than_the_file_has_writes_no_more_than_there_is(tmp_path):
    files = files_of(tiny_bundle(tmp_path, signed=False))
    first = files.pop(SUMS)
    with (tmp_path / "liar.tar").open("wb") as sink:
        sink.write(header(SUMS, len(first)) + first + b"\0" * (-len(first) % BLOCK))
        sink.write(header("bundle.json", 1 << 20) + files["bundle.json"])
    assert "cut short" in refusal(tmp_path / "liar.tar", tmp_path)


def test_more_files_than_the_limit_are_refused(tmp_path):
    assert "more than 5 files" in refusal(tiny_bundle(tmp_path), tmp_path, Limits(entries=5))


def test_more_bytes_than_the_limit_are_refused(tmp_path):
    assert "--max-gb" in refusal(tiny_bundle(tmp_path), tmp_path, Limits(total_bytes=5000))


@pytest.mark.parametrize("name", ["unknown/file", "setup.py", "recipes", "engine", "LICENSE"])
def test_files_that_belong_to_no_part_are_refused(tmp_path, name):
    assert refusal(forged(tmp_path, {name: b"x"}), tmp_path)


def test_a_file_that_is_missing_added_or_swapped_is_named(tmp_path):
    files = files_of(tiny_bundle(tmp_path))
    without = {name: data for name, data in files.items() if name != "claims.json"}
    assert "SHA256SUMS has claims.json" in refusal(tar_of(tmp_path / "a.tar", without), tmp_path)
    last = dict(list(files.items())[:-1])
    assert "rules.json is missing" in refusal(tar_of(tmp_path / "b.tar", last), tmp_path)
    assert "nothing more" in refusal(tar_of(tmp_path / "c.tar", {**files, "zzz": b"x"}), tmp_path)
    changed = {**files, "README.md": files["README.md"] + b"x"}
    assert "README.md is altered" in refusal(tar_of(tmp_path / "d.tar", changed), tmp_path)


def test_two_names_that_differ_by_case_alone_and_a_file_that_is_a_folder_are_refused(tmp_path):
    assert "by case alone" in refusal(forged(tmp_path, {"recipes/tiny/BASE.yaml": b"x"}), tmp_path)
    (tmp_path / "two").mkdir()
    clash = forged(tmp_path / "two", {"recipes/tiny/base.yaml/x": b"x"})
    assert "a file and a folder" in refusal(clash, tmp_path)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (2, "bundle of schema 2; this version reads schema 1. Update"),
        (99, "bundle of schema 99"),
        (0, "no bundle of ours"),
        ("1", "no bundle of ours"),
        (True, "no bundle of ours"),
        (None, "no bundle of ours"),
    ],
)
def test_another_schema_is_refused_with_the_version_that_reads_it(tmp_path, schema, why):
    extra = {"new-part-of-schema-2": b"x"} if schema == 2 else {}
    assert why in refusal(forged(tmp_path, extra, {"schema": schema}), tmp_path)


def test_a_schema_that_is_read_no_more_names_the_last_version_that_did(tmp_path, monkeypatch):
    monkeypatch.setattr("recipes.bundle.layout.SCHEMA", 3)
    monkeypatch.setattr("recipes.bundle.layout.DROPPED", {1: "version 0.1.0 of this repository"})
    (tmp_path / "golden.tar").write_bytes(GOLDEN)
    said = refusal(tmp_path / "golden.tar", tmp_path)
    assert "schema 1, which this version reads no more. version 0.1.0 of this repository reads it" in said


def test_bundle_json_with_an_unknown_key_or_a_wrong_value_is_refused(tmp_path):
    assert "run_on_import" in refusal(forged(tmp_path, {}, {"run_on_import": "sh x"}), tmp_path)
    (tmp_path / "b").mkdir()
    assert "recipe" in refusal(forged(tmp_path / "b", {}, {"recipe": "../../x"}), tmp_path)


@pytest.mark.parametrize("text", [b"", b"[1]", b"{", b"[" * 100_000, b"\xff\xfe", b"null"])
def test_bundle_json_that_is_none_is_refused(tmp_path, text):
    assert "bundle.json" in refusal(forged(tmp_path, {"bundle.json": text}), tmp_path)


def test_a_signature_that_is_wrong_taken_away_or_put_on_is_refused(tmp_path):
    files = files_of(tiny_bundle(tmp_path))
    away = {name: data for name, data in files.items() if name != "SHA256SUMS.minisig"}
    assert "taken away" in refusal(tar_of(tmp_path / "a.tar", away), tmp_path)
    other = test_key(b"7" * 32).sign(files[SUMS])
    wrong = {**files, "SHA256SUMS.minisig": bytes(other) + b"\n"}
    assert "signature is wrong" in refusal(tar_of(tmp_path / "b.tar", wrong), tmp_path)
    (tmp_path / "u").mkdir()
    plain = files_of(tiny_bundle(tmp_path / "u", signed=False))
    on = {SUMS: plain[SUMS], "SHA256SUMS.minisig": files["SHA256SUMS.minisig"], **plain}
    assert "put on" in refusal(tar_of(tmp_path / "c.tar", on), tmp_path)
    comment = files["SHA256SUMS.minisig"].replace(b"signature of a", b"signature of b")
    altered = {**files, "SHA256SUMS.minisig": comment}
    assert "signature file is altered" in refusal(tar_of(tmp_path / "d.tar", altered), tmp_path)


def test_a_signature_file_that_says_the_same_in_other_bytes_is_refused(tmp_path):
    files = files_of(tiny_bundle(tmp_path))
    text = files["SHA256SUMS.minisig"].decode()
    lines = text.split("\n")
    last = lines[1][-2]  # before the =: two of its bits say nothing
    other = chr(ord(last) + 1) if last.isalnum() and chr(ord(last) + 1).isalnum() else chr(ord(last) - 1)
    loose = "\n".join([lines[0], lines[1][:-2] + other + "=", *lines[2:]])
    for number, changed in enumerate([text.replace("\n", "\r\n"), text + "\n", text[:-1], loose]):
        altered = {**files, "SHA256SUMS.minisig": changed.encode()}
        assert "signature" in refusal(tar_of(tmp_path / f"{number}.tar", altered), tmp_path)


def test_a_list_of_hashes_that_is_not_as_we_write_it_is_refused(tmp_path):
    files = files_of(tiny_bundle(tmp_path, signed=False))
    lines = files[SUMS].decode().splitlines(keepends=True)
    for number, changed in enumerate(
        [[*lines, lines[-1]], [*lines[:-2], lines[-1], lines[-2]], [*lines[:-1], lines[-1][:-1]]]
    ):
        altered = {**files, SUMS: "".join(changed).encode()}
        assert "not as we write it" in refusal(tar_of(tmp_path / f"{number}.tar", altered), tmp_path)


@pytest.fixture
def made(tmp_path) -> Path:
    """A bundle as a folder."""
    (tmp_path / "room").mkdir()
    with unpacked(tiny_bundle(tmp_path), tmp_path / "room" / "made", Limits()) as bundle:
        return bundle.folder


def spoil_link(made: Path) -> None:
    (made / "README.md").unlink()
    (made / "README.md").symlink_to("/etc/passwd")


def spoil_linked_folder(made: Path) -> None:
    (made / "quality").symlink_to("/etc")


def spoil_moved_folder(made: Path) -> None:
    (made / "recipes").rename(made.parent / "elsewhere")
    (made / "recipes").symlink_to(made.parent / "elsewhere")


def spoil_pipe(made: Path) -> None:
    (made / "README.md").unlink()
    os.mkfifo(made / "README.md")


def spoil_added(made: Path) -> None:
    (made / "recipes" / "tiny" / "model" / "modeling.py").write_text("import os")


def spoil_missing(made: Path) -> None:
    (made / "claims.json").unlink()


def spoil_changed(made: Path) -> None:
    file = made / "recipes" / "tiny" / "base.yaml"
    file.write_text(file.read_text().replace("8000", "8001"))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (spoil_link, "a symbolic link"),
        (spoil_linked_folder, "was added"),
        (spoil_moved_folder, "was added"),
        (spoil_pipe, "no plain file"),
        (spoil_added, "'recipes/tiny/model/modeling.py' was added"),
        (spoil_missing, "'claims.json' can't be read"),
        (spoil_changed, "recipes/tiny/base.yaml is altered"),
    ],
)
def test_a_folder_with_links_pipes_or_changed_files_is_refused(made, spoil, why):
    spoil(made)
    with pytest.raises(BundleProblem, match=why):
        with unpacked(made, made.parent / "target", Limits()):
            pass
    assert not (made.parent / "target").exists()


def test_the_golden_bundle_of_every_schema_still_reads_to_what_it_held(tmp_path):
    told = json.loads((BUNDLES / "schema-1.json").read_text())
    (tmp_path / "golden.tar").write_bytes(GOLDEN)
    with unpacked(tmp_path / "golden.tar", tmp_path / "target", Limits()) as bundle:
        assert {"recipe": bundle.info.recipe, "content": bundle.content, "signer": bundle.signer} == told


def test_what_is_no_bundle_at_all_is_one_clear_error(tmp_path):
    (tmp_path / "empty.tar").write_bytes(b"")
    (tmp_path / "zeros.tar").write_bytes(b"\0" * 10240)
    (tmp_path / "text.tar").write_text("hello " * 1000)
    (tmp_path / "folder").mkdir()
    for name in ("empty.tar", "zeros.tar", "text.tar", "folder", "absent.tar"):
        with pytest.raises(Problem, match="bundle|cut short|no such file"):
            with unpacked(tmp_path / name, tmp_path / "target", Limits()):
                pass
