"""Room bench: the sampler: a thread that asks GPUs and host five times a second, on the load's clock."""

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from bench.telemetry import host
from bench.telemetry.devices import FINAL, GPU_ARRAYS, LOST, SLOW, Device, DeviceError, Probe
from bench.telemetry.store import SCHEMA, Telemetry

RATE_HZ = 5.0
STOP_LIMIT_S = 5.0
NAN = math.nan


@dataclass(frozen=True)
class Watched:
    """A tree of processes to watch: `role` is client or server, `index` which one, `pids` asked once a second."""

    role: str
    index: int
    pids: Callable[[], Iterable[int]]


@dataclass
class _Gpu:
    """What was gathered of one GPU."""

    device: Device
    values: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in GPU_ARRAYS})
    errors: dict[str, dict[str, int]] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    lost_s: float | None = None


@dataclass
class _Process:
    """What was gathered of one process; `first` is the sample at which it was seen first."""

    role: str
    index: int
    pid: int
    name: str
    birth: int
    first: int
    cpu_s: list[float] = field(default_factory=list)
    rss_b: list[float] = field(default_factory=list)
    wait_s: list[float] = field(default_factory=list)


class Sampler:
    """Samples from start() to stop(). A driver that hangs costs samples, never the run: `stop` doesn't wait for it."""

    def __init__(
        self,
        devices: Sequence[Device],
        watched: Callable[[], Iterable[Watched]],
        no_gpu: str | None = None,
        rate_hz: float = RATE_HZ,
    ) -> None:
        """Prepare to sample `devices` and the trees that `watched()` names, `rate_hz` times a second."""
        self._gpus = [_Gpu(device) for device in devices]
        self._watched, self._no_gpu, self._rate_hz = watched, no_gpu, rate_hz
        self._times: list[float] = []
        self._host: dict[str, list[float]] = {"host_cpu_s": [], "host_load1": [], "host_memory_used_b": []}
        self._own_cpu_s: list[float] = []
        self._processes: dict[tuple[int, int], _Process] = {}
        self._alive: list[_Process] = []
        self._server_pids: set[int] | None = None
        self._foreign: dict[tuple[str, int], str] = {}
        self._fault: str | None = None
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._started_s = time.monotonic()
        self._thread.start()

    def stop(self) -> Telemetry:
        """End and return what was sampled; after a few seconds also without a driver's last answer."""
        self._ending.set()
        self._thread.join(STOP_LIMIT_S)
        return self._gather(stuck=self._thread.is_alive())

    def _run(self) -> None:
        tick = 0
        while True:
            last = self._ending.is_set()  # then everything is asked, so that what is asked rarely reaches to the end
            try:
                self._sample(last)
            except Exception as error:  # whatever it is, it costs this sample and is told; the load goes on
                self._fault = self._fault or f"{type(error).__name__}: {error}"
            if last:
                return
            # Samples that were missed are left out, not made up for: they show as a gap.
            tick = max(tick + 1, math.ceil((time.monotonic() - self._started_s) * self._rate_hz))
            self._ending.wait(max(0.0, self._started_s + tick / self._rate_hz - time.monotonic()))

    def _sample(self, last: bool) -> None:
        number = len(self._times)
        slow = number % SLOW == 0
        if slow:
            self._look_for_processes(number)
        began = time.monotonic()
        gpus = [self._ask(gpu, number, last) for gpu in self._gpus]
        moment = (began + time.monotonic()) / 2
        states = [(process, host.read_process(process.pid)) for process in self._alive]
        figures = (host.busy_cpu_s(), host.load1(), host.memory_used_b()) if slow else (None, None, None)
        with self._lock:  # a sample is kept whole or not at all
            self._times.append(moment)
            for gpu, values in zip(self._gpus, gpus, strict=True):
                for name in GPU_ARRAYS:
                    gpu.values[name].append(values.get(name, NAN))
            for process, state in states:
                known = state is not None and state.birth == process.birth
                process.cpu_s.append(state.cpu_s if known else NAN)
                process.rss_b.append(float(state.rss_b) if known else NAN)
                process.wait_s.append(state.wait_s if known else NAN)
            for name, value in zip(self._host, figures, strict=True):
                self._host[name].append(NAN if value is None else value)
            self._own_cpu_s.append(time.thread_time())
        self._alive = [process for process in self._alive if not math.isnan(process.cpu_s[-1])]

    def _look_for_processes(self, number: int) -> None:
        servers: set[int] = set()
        watches_server = False
        for tree in self._watched():
            pids = list(tree.pids())
            if tree.role == "server":
                watches_server = True
                servers.update(pids)
            for pid in pids:
                state = host.read_process(pid)
                if state is not None and (pid, state.birth) not in self._processes:
                    found = _Process(tree.role, tree.index, pid, state.name, state.birth, number)
                    with self._lock:
                        self._processes[pid, state.birth] = found
                        self._alive.append(found)
        self._server_pids = servers if watches_server else None

    def _ask(self, gpu: _Gpu, number: int, last: bool) -> dict[str, float]:
        values = {}
        for probe in gpu.device.probes:
            if last or number % probe.every == 0:
                values[probe.array] = self._answer(gpu, probe)
        if number % SLOW == 0:
            values["gpu_process_count"], values["gpu_foreign_count"] = self._holders(gpu)
        return values

    def _answer(self, gpu: _Gpu, probe: Probe) -> float:
        if gpu.lost_s is not None or probe.array in gpu.refused:
            return NAN
        try:
            return float(probe.ask())
        except DeviceError as error:
            self._refused(gpu, probe.array, str(error))
            return NAN

    def _holders(self, gpu: _Gpu) -> tuple[float, float]:
        """How many processes hold the GPU, and how many of them aren't our server's (NaN: can't tell)."""
        name = "gpu_process_count"
        if gpu.lost_s is not None or name in gpu.refused:
            return NAN, NAN
        try:
            pids = gpu.device.processes()
        except DeviceError as error:
            self._refused(gpu, name, str(error))
            return NAN, NAN
        if not set(pids) & (self._server_pids or set()):
            # Our server holds this GPU. If it isn't among the holders, the driver's pids aren't those we see
            # (another namespace), or whose server it is isn't known: then others can't be told from it.
            return float(len(pids)), NAN
        others = set(pids) - self._server_pids
        for pid in others - {known for _, known in self._foreign}:
            state = host.read_process(pid)
            self._foreign[gpu.device.uuid, pid] = state.name if state else "ended"
        return float(len(pids)), float(len(others))

    def _refused(self, gpu: _Gpu, array: str, error: str) -> None:
        counts = gpu.errors.setdefault(array, {})
        counts[error] = counts.get(error, 0) + 1
        if error == LOST:
            gpu.lost_s = time.monotonic()
        if error in FINAL:
            gpu.refused.add(array)

    def _gather(self, stuck: bool) -> Telemetry:
        with self._lock:
            count = len(self._times)
            arrays = {
                "time_s": np.asarray(self._times, np.float64),
                **{name: self._of_gpus(name, count) for name in GPU_ARRAYS},
                **{name: np.asarray(values, np.float64) for name, values in self._host.items()},
                "sampler_cpu_s": np.asarray(self._own_cpu_s, np.float64),
                "process_cpu_s": self._of_processes("cpu_s", count),
                "process_rss_b": self._of_processes("rss_b", count),
                "process_wait_s": self._of_processes("wait_s", count),
            }
            ended_s = time.monotonic()
            cpu_s = self._own_cpu_s[-1] if self._own_cpu_s else 0.0
            meta = {
                "schema": SCHEMA,
                "rate_hz": self._rate_hz,
                "clock": "CLOCK_MONOTONIC",
                "started_s": self._started_s,
                "ended_s": ended_s,
                "gaps": gaps(self._times, self._started_s, ended_s, self._rate_hz),
                "no_gpu": self._no_gpu,
                "gpus": [gpu_record(gpu.device, gpu.values, gpu.errors, gpu.lost_s) for gpu in self._gpus],
                "processes": [
                    {"role": each.role, "index": each.index, "pid": each.pid, "name": each.name}
                    for each in self._processes.values()
                ],
                "foreign": [{"uuid": uuid, "pid": pid, "name": name} for (uuid, pid), name in self._foreign.items()],
                "overhead": {
                    "cpu_s": round(cpu_s, 4),
                    "wall_s": round(ended_s - self._started_s, 3),
                    "share": round(cpu_s / (ended_s - self._started_s), 5),
                },
                "kept_every": 1,
                "stuck": stuck,
                "fault": self._fault,
            }
        return Telemetry(meta, arrays)

    def _of_gpus(self, name: str, count: int) -> np.ndarray:
        columns = [gpu.values[name] for gpu in self._gpus]
        return np.asarray(columns, np.float64).reshape(len(columns), count).T

    def _of_processes(self, what: str, count: int) -> np.ndarray:
        table = np.full((count, len(self._processes)), NAN)
        for column, process in enumerate(self._processes.values()):
            values = getattr(process, what)
            table[process.first : process.first + len(values), column] = values
        return table


def gaps(times: Sequence[float], started_s: float, ended_s: float, rate_hz: float) -> list[list[float]]:
    """The stretches [from, to] without samples: where the next came later than twice the interval."""
    interval = 1 / rate_hz
    edges = [started_s - interval, *times, ended_s + interval]
    return [
        [round(before + interval, 4), round(after, 4)]
        for before, after in pairwise(edges)
        if after - before > 2 * interval
    ]


def gpu_record(
    device: Device, values: dict[str, list[float]], errors: dict[str, dict[str, int]], lost_s: float | None
) -> dict:
    """What `meta` says of a GPU: its UUID and its facts side by side, what it lacks and why, when it was lost (s)."""
    lacks = {}
    for name, counts in errors.items():
        if not any(math.isfinite(value) for value in values[name]):
            lacks[name] = max(counts, key=lambda error: counts[error])
    return {"uuid": device.uuid, **device.facts, "lacks": lacks, "errors": errors, "lost_s": lost_s}
