"""Room bench: everything a verdict may rest on, read from a run folder alone."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, field_validator

from bench.arrays import FILE, read_arrays
from bench.counters import Counters, Series, as_series, difference
from bench.quality.answers import answer_files, read_suites
from bench.runfolder import SCHEMA, is_number, read_json, read_packed, read_recipe, seal_faults, windows_of
from bench.telemetry.store import Telemetry, read_telemetry
from images.errors import Problem, RunProblem
from recipes.load import as_data
from recipes.schema import Recipe, Text

MAX_LOG_BYTES = 200_000_000  # a server's log, unpacked


class Stored(BaseModel):
    """A JSON file of a run: the keys a verdict needs are checked, others may stand beside them."""

    model_config = ConfigDict(extra="allow", frozen=True)


class ImageRecord(Stored):
    """The container image that was to serve: its id, and how containers were to name it (a digest, or the id)."""

    id: str | None = None
    reference: str | None = None


class BootRecord(Stored):
    """What the manifest says of one boot: the id of the image that its container really had."""

    boot: int
    image: str | None = None
    boot_s: FiniteFloat | None = None
    caches: dict | None = None


class EngineRecord(Stored):
    """Which engine ran; `patches` are the declared changes to it, `image` its container image if it had one."""

    name: str | None = None
    identity: str | None = None
    answered: list[str] = []
    patches: list[dict] = []
    image: ImageRecord | None = None


class ModelRecord(Stored):
    """Which checkpoint was served: sha256 by file name, None for a file that was missing.

    `told`: of a hub's model, what the cache says of its files (see told_files): nobody hashed them.
    """

    files: dict[str, str | None] | None = None
    told: dict[str, Text] = {}


class Failure(Stored):
    """What ended a run early, and in which stage."""

    stage: Text
    cause: Text


class Imported(Stored):
    """Result files of somebody's load client, one a boot; `differs` is how their load differs from the recipe's."""

    files: list[dict] = []
    differs: list[Text] = []


class WindowLoad(Stored):
    """How the load of one window was applied: by how many client processes."""

    boot: int
    window: int
    clients: int


class Manifest(Stored):
    """manifest.json: the run's fingerprint. `schema_` says what a run of its time recorded."""

    schema_: int = Field(alias="schema", ge=1)
    planned_windows: int
    engine: EngineRecord
    model: ModelRecord
    boots: list[BootRecord] = []
    url: str | None = None
    imported: Imported | None = None
    load: list[WindowLoad] = []
    failure: Failure | None

    @field_validator("schema_")
    @classmethod
    def _one_we_know(cls, value: int) -> int:
        if value > SCHEMA:
            raise ValueError(f"{value}, this version reads up to {SCHEMA}: the run was made by a newer one, take that")
        return value

    @property
    def foreign(self) -> bool:
        """Whether somebody else ran the server: what it is and how it was set can't be known."""
        return self.url is not None or self.imported is not None


class MetricNoise(Stored):
    """How one metric scatters between boots, relative to its mean; `relative` is the noise floor."""

    relative: Annotated[FiniteFloat, Field(ge=0)]
    relative_sd: Annotated[FiniteFloat, Field(ge=0)]


class NoiseFloor(Stored):
    """The noise floor known when the run began: of what, and by which A/A run. Old ones tell less of what."""

    machine: str
    engine: str
    recipe: str | None = None
    load: dict | None = None
    hardware: dict | None = None
    run: Text
    boots: int
    metrics: dict[str, MetricNoise]


class ClientCeiling(Stored):
    """What one load client process on this machine could do with a whole core."""

    chunks_per_s: FiniteFloat | None = None
    limited_by: str | None = None


class Machine(Stored):
    """machine.json: facts of the machine."""

    slug: str
    cpu: dict = {}
    memory_gb: float | None = None
    gpus: list[dict] = []
    noise_floor: NoiseFloor | None = None
    client_ceiling: ClientCeiling | None = None
    reasons: dict | None = None


class LogLines(Stored):
    """How many lines the server's log had when a window began and ended."""

    before: int = Field(ge=0)
    after: int = Field(ge=0)


class CounterRecord(Stored):
    """counters.json of a window. `after` is None where /metrics could not be read any more."""

    before: dict[str, FiniteFloat]
    after: dict[str, FiniteFloat] | None
    series: dict[str, list[FiniteFloat | None]] | None = None
    host: dict[str, str | None] | None = None
    log_lines: LogLines | None = None


class LiveRecord(Stored):
    """argv.json or env.json of a boot: what was rendered and what ran.

    `undeclared`: what the engine's process had in its environment that an engine reads and nobody declared; None
    where that was not looked at.
    """

    rendered: list[str] | dict[str, str | None]
    live: list[str] | dict[str, str | None]
    undeclared: list[Text] | None = None


Kind = TypeVar("Kind", bound=Stored)


@dataclass(frozen=True)
class Window:
    """A finished window: raw arrays, and what the server counted during it (None: not readable).

    `series` is the course of the counters, `record` all of counters.json; None where a run has none.
    """

    boot: int
    number: int
    arrays: dict[str, np.ndarray]
    counted: Counters | None
    series: Series | None = None
    record: CounterRecord | None = None
    telemetry: Telemetry | None = None


@dataclass(frozen=True)
class Boot:
    """One life of the server: what was rendered, what was live, and its log."""

    number: int
    argv: LiveRecord | None
    env: LiveRecord | None
    log: str | None


class Settings(Stored):
    """A recipe as its engine takes it: `resolved` is what the configuration says by name, or None and `why`."""

    id: str
    argv: list[str]
    env: dict[str, str]
    resolved: dict[str, str | int | float | bool | None] | None = None
    why: str | None = None


class Resolved(Stored):
    """resolved.json: what the engine made of this recipe, and of the one whose `changes` it is to show."""

    changes: list[str]
    before: Settings | None
    after: Settings


@dataclass(frozen=True)
class Evidence:
    """A run, read. `quality`: the answers by suite that the recipe asks for.

    `answered_in`: the names in the run of all files of answers, by suite; of a suite that isn't asked for none is read.
    `resolved`: None where nobody asked the engine what it makes of the settings.
    """

    recipe: Recipe
    manifest: Manifest
    machine: Machine
    windows: list[Window]
    boots: list[Boot]
    quality: dict[str, list[dict]]
    seal_faults: list[str]
    resolved: Resolved | None = None
    answered_in: dict[str, str] = field(default_factory=dict)


def read_evidence(run: Path) -> Evidence:
    """Read a run folder, anybody's.

    Raises RunProblem when it is no run folder or a file in it can't be read.
    """
    try:
        return _read(run)
    except Problem:
        raise
    except Exception as error:  # whatever a stranger's folder holds is one clear error
        raise RunProblem(f"{run}: can't be read as a run: {type(error).__name__}: {error}"[:500]) from error


@contextmanager
def judging(what: str) -> Iterator[None]:
    """Whatever a stranger's run makes our arithmetic do is one clear error: raises RunProblem for any exception."""
    try:
        yield
    except Problem:
        raise
    except Exception as error:
        raise RunProblem(f"{what}: can't be judged: {type(error).__name__}: {error}"[:500]) from error


def _read(run: Path) -> Evidence:
    recipe = read_recipe(run)
    boots = [folder for folder in run.glob("boots/*") if is_number(folder.name)]
    answers = answer_files(run)
    return Evidence(
        recipe=recipe,
        manifest=_stored(Manifest, run / "manifest.json"),
        machine=_stored(Machine, run / "machine.json"),
        windows=[_read_window(boot, number, folder) for boot, number, folder in windows_of(run)],
        boots=[_read_boot(folder) for folder in sorted(boots, key=lambda folder: int(folder.name))],
        quality=read_suites(answers, recipe.quality.suites if recipe.quality else ()),
        seal_faults=[*seal_faults(run), *_claims_faults(run, recipe)],
        resolved=_stored(Resolved, resolved) if (resolved := run / "resolved.json").is_file() else None,
        answered_in={suite: file.relative_to(run).as_posix() for suite, file in answers.items()},
    )


def _claims_faults(run: Path, recipe: Recipe) -> list[str]:
    """Claims are judged as recipe.yaml has them: claims.json says the same, or one of them is not the run's."""
    file = run / "claims.json"
    same = not file.is_file() or read_json(file) == json.loads(json.dumps(as_data(recipe)["claims"]))
    return [] if same else ["claims.json has other claims than recipe.yaml"]


def _read_window(boot: int, number: int, folder: Path) -> Window:
    arrays = read_arrays(folder / FILE)
    record = _stored(CounterRecord, folder / "counters.json") if (folder / "counters.json").is_file() else None
    counted = difference(record.before, record.after) if record and record.after is not None else None
    telemetry = folder / "telemetry.npz"
    seen = read_telemetry(telemetry) if telemetry.is_file() else None
    return Window(boot, number, arrays, counted, _series(record, folder), record, seen)


def _series(record: CounterRecord | None, folder: Path) -> Series | None:
    if record is None or record.series is None:
        return None
    try:
        return as_series(record.series)
    except (ValueError, KeyError) as error:
        raise RunProblem(f"{folder / 'counters.json'}: series: {error}") from error


def _read_boot(folder: Path) -> Boot:
    argv, env = folder / "argv.json", folder / "env.json"
    return Boot(
        number=int(folder.name),
        argv=_stored(LiveRecord, argv) if argv.is_file() else None,
        env=_stored(LiveRecord, env) if env.is_file() else None,
        log=_read_log(folder / "server.log.gz"),
    )


def _read_log(file: Path) -> str | None:
    """A server's log; None for one that isn't there or is damaged, as a full disk leaves it: nothing is known of it."""
    try:
        return read_packed(file, MAX_LOG_BYTES, "a server's log").decode(errors="replace") if file.is_file() else None
    except RunProblem:
        return None


def _stored(kind: type[Kind], file: Path) -> Kind:
    try:
        return kind.model_validate(read_json(file))
    except ValidationError as errors:
        first = errors.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"]) or "the whole file"
        raise RunProblem(f"{file}: {key}: {first['msg']}") from None
