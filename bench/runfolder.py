"""Room bench: a run as a folder: written once, sealed with SHA256SUMS, read back and checked."""

import json
import secrets
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from images.errors import RunProblem
from images.packed import gunzipped
from images.validate import validate
from images.written import PARTIAL, write_whole
from images.yaml_source import read_yaml
from recipes.load import as_data
from recipes.model_files import sha256
from recipes.schema import Recipe

SEAL = "SHA256SUMS"
DERIVED = frozenset({"verdict.json", "report.html", SEAL})
SCHEMA = 2  # 2: the counters' course, the host's identity, loops in texts; a run is judged by its own schema's guards
WIDTH = 240  # characters of a line of JSON
MAX_TEXT_BYTES = 50_000_000
MAX_RESULT_BYTES = 400_000_000
TEXT = "a text file of a run"


def dump_json(value: Any) -> str:
    """JSON the same way everywhere: sorted keys, a newline at the end, no NaN; what fits into a line stands in one."""
    plain = json.loads(json.dumps(value, sort_keys=True, allow_nan=False))
    return "\n".join(_laid_out("", plain, "")) + "\n"


def _laid_out(name: str, value: Any, indent: str) -> Iterator[str]:
    line = f"{indent}{name}{json.dumps(value)}"
    if len(line) <= WIDTH or not isinstance(value, dict | list) or not value:
        yield line
        return
    first, last = "{}" if isinstance(value, dict) else "[]"
    pairs = value.items() if isinstance(value, dict) else (("", each) for each in value)
    yield f"{indent}{name}{first}"
    for number, (key, inner) in enumerate(pairs, start=1):
        *lines, end = _laid_out(f"{json.dumps(key)}: " if key or first == "{" else "", inner, indent + "  ")
        yield from lines
        yield end + ("," if number < len(value) else "")
    yield f"{indent}{last}"


def dump_rows(value: dict[str, Any]) -> str:
    """JSON with one line a key of the first two levels: long lists stay short in bytes, and a diff stays readable."""
    lines = []
    for key in sorted(value):
        inner = value[key]
        if isinstance(inner, dict) and inner:
            rows = ",\n".join(f"  {json.dumps(name)}: {_compact(inner[name])}" for name in sorted(inner))
            lines.append(f" {json.dumps(key)}: {{\n{rows}\n }}")
        else:
            lines.append(f" {json.dumps(key)}: {_compact(inner)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True, allow_nan=False)


def write_text(file: Path, text: str) -> None:
    """Write a text file as `write_bytes` does."""
    write_bytes(file, text.encode())


def write_bytes(file: Path, data: bytes) -> None:
    """Write a file whole or not at all, as `write_whole` does, its folder too."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, data)


def new_run(recipe: Recipe, root: Path) -> Path:
    """Make the folder of a new run: <root>/<utc>-<family>-<rung>-<6 hex>."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    run = root / f"{stamp}-{recipe.id.replace('/', '-')}-{secrets.token_hex(3)}"
    try:
        run.mkdir(parents=True)
    except OSError as error:
        raise RunProblem(f"can't make the run's folder {run}: {error.strerror}") from error
    return run


def write_recipe(run: Path, recipe: Recipe) -> None:
    """Store the resolved recipe and its claims."""
    data = as_data(recipe)
    write_text(run / "recipe.yaml", yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=110))
    write_text(run / "claims.json", dump_json(data["claims"]))


def window_folder(run: Path, boot: int, window: int) -> Path:
    """The folder of a window, counted from 1."""
    return run / "boots" / str(boot) / f"w{window}"


def files_of(run: Path) -> list[Path]:
    """Every file that the seal covers, sorted by its path below the run."""
    files = (path for path in run.rglob("*") if not path.is_dir() or path.is_symlink())
    kept = [path for path in files if str(path.relative_to(run)) not in DERIVED and not _half_written(path)]
    return sorted(kept, key=lambda path: path.relative_to(run).as_posix())


def _half_written(path: Path) -> bool:
    """Whether this is what write_text leaves behind when it is killed by force; such a file is never read."""
    return path.name.startswith(".") and path.name.endswith(PARTIAL)


def seal(run: Path) -> None:
    """Write SHA256SUMS over everything measured. The run is immutable from here."""
    lines = [f"{sha256(path)}  {path.relative_to(run).as_posix()}\n" for path in files_of(run)]
    write_text(run / SEAL, "".join(lines))


def seal_faults(run: Path) -> list[str]:
    """What differs from the seal: changed, missing or added files; ['not sealed'] without one."""
    file = run / SEAL
    if not file.is_file():
        return ["not sealed"]
    refuse_large(file)
    sealed = {}
    for line in file.read_text(errors="replace").splitlines():
        digest, _, name = line.partition("  ")
        sealed[name] = digest
    present = {path.relative_to(run).as_posix(): path for path in files_of(run)}
    faults = [f"{name} is missing" for name in sealed.keys() - present.keys()]
    faults += [f"{name} was added" for name in present.keys() - sealed.keys()]
    common = sealed.keys() & present.keys()
    faults += [f"{name} was changed" for name in common if _differs(present[name], sealed[name])]
    return sorted(faults)


def _differs(file: Path, digest: str) -> bool:
    try:
        return file.is_symlink() or not file.is_file() or sha256(file) != digest
    except OSError:
        return True


def refuse_large(file: Path, most: int | None = None, kind: str = TEXT) -> None:
    """Raise RunProblem for a text file larger than any of its `kind`: it is read whole, and strangers write it.

    `most`: bytes; default: of a run's files.
    """
    most = MAX_TEXT_BYTES if most is None else most
    if file.stat().st_size > most:
        raise _too_large(file, most, kind)


def _too_large(file: Path, most: int, kind: str) -> RunProblem:
    return RunProblem(f"{file}: more than {most} bytes, the most that is read of {kind}")


def read_bytes(file: Path) -> bytes:
    """Read a text file of a run whole. Raises RunProblem for one that is too large."""
    refuse_large(file)
    return file.read_bytes()


def read_packed(file: Path, most: int | None = None, kind: str = TEXT) -> bytes:
    """Unpack a text file of a run, never more than `most` bytes of it, however much a stranger packed into it.

    `most`: as in `refuse_large`, for the file as well as for what is in it. Raises RunProblem for more than that, and
    for what is no gzip file.
    """
    most = MAX_TEXT_BYTES if most is None else most
    refuse_large(file, most, kind)
    try:
        data = gunzipped(file, most)
    except ValueError as error:
        raise RunProblem(f"{file}: {error}") from error
    if data is None:
        raise _too_large(file, most, kind)
    return data


def read_result(file: Path) -> Any:
    """Read the JSON that a load client saved: a number for each chunk of each request, so larger than a run's files.

    2,560 requests of 1,024 tokens without drafts take about 73 MB. Raises RunProblem as `read_json` does.
    """
    return _read_json(file, MAX_RESULT_BYTES, "a client's result file")


def read_json(file: Path) -> Any:
    """Read a JSON file of a run.

    Raises RunProblem naming the file and what is wrong with it.
    """
    return _read_json(file, None, TEXT)


def _read_json(file: Path, most: int | None, kind: str) -> Any:
    if not file.is_file():
        raise RunProblem(f"{file}: can't be read: no such file")
    refuse_large(file, most, kind)
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunProblem(f"{file}: can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise RunProblem(f"{file}: not valid JSON: {error}") from error


def _runs_inside(folder: Path) -> list[Path]:
    """The runs and ladders right below a folder, or below its runs/."""
    names = ("recipe.yaml", "ladder.json")
    return sorted(
        file.parent for name in names for each in (folder, folder / "runs") for file in each.glob(f"*/{name}")
    )


def read_recipe(run: Path) -> Recipe:
    """Read the resolved recipe of a run.

    Raises RunProblem when the folder is no run, UsageProblem when its recipe is of another schema.
    """
    file = run / "recipe.yaml"
    if not run.exists():
        raise RunProblem(f"{run}: there is no such folder. Runs lie below .runs/ and results/ of the repository")
    if not file.is_file() and (inside := _runs_inside(run)):
        raise RunProblem(f"{run} is no run folder, but holds {len(inside)} of them or of ladders, such as {inside[-1]}")
    if not file.is_file():
        raise RunProblem(
            f"{run} is no run folder: it has no recipe.yaml. Runs lie below .runs/ and results/ of the repository"
        )
    document = read_yaml(file)
    return validate(Recipe, document.data, document.marks)


def is_number(name: str) -> bool:
    """Whether a folder's name is a plain number."""
    return name.isascii() and name.isdigit() and len(name) < 6


def windows_of(run: Path) -> list[tuple[int, int, Path]]:
    """The windows that were finished, as (boot, window, folder), in order."""
    found = []
    for file in run.glob("boots/*/w*/client.npz"):
        boot, window = file.parent.parent.name, file.parent.name.removeprefix("w")
        if is_number(boot) and is_number(window):
            found.append((int(boot), int(window), file.parent))
    return sorted(found)
