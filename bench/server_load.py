"""Room bench: how busy the server's own processes were, and whether they, not the GPU, set the rate. Pure."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

from bench.analyse import WindowResult
from bench.attribution import GPU_IDLE_PCT
from bench.evidence import Window
from bench.telemetry.store import Telemetry
from bench.telemetry.window import Bounds, idle_share, process_shares, rate_within, window_figures

# How the processes of a vLLM server are named: those that serve HTTP; those that schedule steps and drive the device.
API_SERVERS = ("VLLM::API", "python", "vllm")
CORES = ("VLLM::Engine", "VLLM::Worker")
API_LIMIT = 0.8
STANDS_STILL = 0.1


@dataclass(frozen=True)
class ServerLoad:
    """A server's load in a window; None where it isn't known.

    `api_server`: share of a core of the busiest process that takes requests, turns text into tokens and back, and
    streams answers. `engine_core`: of the busiest of those that schedule steps and drive the device; `engine_idle`: the
    share of the time in which that one did nothing. `gpu_busy_pct`: mean utilisation of the GPUs, as NVML tells it.
    `others`: cores of the machine at work for anything but this server, its load clients and the sampler.
    """

    api_server: float | None = None
    engine_core: float | None = None
    engine_idle: float | None = None
    gpu_busy_pct: float | None = None
    others: float | None = None

    @property
    def limits(self) -> str | None:
        """Why the host set the rate and not the GPU, in words; None where nothing shows that.

        With every stream in flight an engine has work; one that stands still beside a busy API server waits for it. An
        engine core that is always at work says something only beside a GPU that is often idle: it is how a CPU engine
        computes, and how one polls a busy GPU.
        """
        if self.engine_idle is None or (self.gpu_busy_pct is not None and self.gpu_busy_pct >= GPU_IDLE_PCT):
            return None
        if self.engine_idle >= STANDS_STILL:
            if self.api_server is None or self.api_server < API_LIMIT:
                return None
            return (
                f"the API server was at its limit ({self.api_server:.2f} of a core), and the engine waited for it "
                f"{self.engine_idle:.0%} of the time. --api-server-count starts more of them"
            )
        if self.gpu_busy_pct is None:
            return None
        return (
            f"the engine always had a step in hand ({self.engine_core:.2f} of a core) and the GPU was busy "
            f"{self.gpu_busy_pct:.0f}% of the time, less than {GPU_IDLE_PCT:.0f}%: between steps it waits for the host"
        )


def server_loads(pairs: Sequence[tuple[Window, WindowResult]]) -> list[ServerLoad]:
    """The server's load in the steady part of each window that has one, and telemetry of the server."""
    watched = [(window.telemetry, result.bounds) for window, result in pairs if window.telemetry and result.bounds]
    found = [_load(telemetry, bounds) for telemetry, bounds in watched]
    return [load for load in found if load.engine_core is not None or load.api_server is not None]


def limits_of(loads: Sequence[ServerLoad]) -> str | None:
    """Why the host set the rate in windows, in words, and in how many of them; None where it did in none."""
    bound = [load for load in loads if load.limits]
    if not bound:
        return None
    said = mean_load(bound).limits or bound[0].limits
    return said if len(bound) == len(loads) else f"in {len(bound)} of {len(loads)} windows {said}"


def mean_load(loads: Sequence[ServerLoad]) -> ServerLoad:
    """The mean over windows; what isn't known in one is unknown."""
    columns = zip(*map(astuple, loads), strict=True)
    return ServerLoad(*(None if None in column else float(np.mean(column)) for column in columns))


def _load(telemetry: Telemetry, bounds: Bounds) -> ServerLoad:
    shares = process_shares(telemetry, bounds)
    named = [
        (str(process.get("name")), share, column)
        for column, (process, share) in enumerate(zip(telemetry.meta["processes"], shares, strict=True))
        if process["role"] == "server" and share is not None
    ]
    api = [share for name, share, _ in named if name.startswith(API_SERVERS)]
    cores = [(share, column) for name, share, column in named if name.startswith(CORES)]
    core, column = max(cores, default=(None, None))
    figures = window_figures(telemetry, bounds)
    busy = [gpu.utilisation_pct for gpu in figures.gpus]
    sampler = rate_within(telemetry.arrays["time_s"], telemetry.arrays["sampler_cpu_s"], bounds)
    ours = [share for share in (*shares, sampler) if share is not None]
    whole = figures.host_busy_cores
    return ServerLoad(
        api_server=max(api, default=None),
        engine_core=core,
        engine_idle=None if column is None else idle_share(telemetry, bounds, column),
        gpu_busy_pct=None if not busy or None in busy else float(np.mean(busy)),
        others=None if whole is None else max(0.0, whole - sum(ours)),
    )
