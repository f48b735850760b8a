"""Room bench: how busy the server's own processes were, and whether they, not the GPU, set the rate. Pure."""

from dataclasses import dataclass

import numpy as np

from bench.analyse import WindowResult
from bench.attribution import GPU_IDLE_PCT
from bench.evidence import Window
from bench.telemetry.window import window_figures

API_LIMIT = 0.8
CORE_LIMIT = 0.95


@dataclass(frozen=True)
class ServerLoad:
    """Shares of one core, means over windows; None where they aren't known.

    `api_server`: the busiest process that takes requests, turns text into tokens and back, and streams answers.
    `engine_core`: the busiest of those that schedule steps and drive the device.
    """

    api_server: float | None = None
    engine_core: float | None = None

    def limits(self, gpu_busy_pct: float | None) -> str | None:
        """Why the host set the rate and not the GPU, in words; None where nothing shows that.

        `gpu_busy_pct`: the GPU's mean utilisation as NVML tells it, None without a GPU. An engine core that never
        waits is how a CPU engine computes, and how one beside a busy GPU polls: it says something only if the GPU is
        often idle.
        """
        idle = "" if gpu_busy_pct is None else f"; the GPU was busy {gpu_busy_pct:.0f}% of the time"
        if self.api_server is not None and self.api_server >= API_LIMIT:
            return (
                f"the API server had no time left ({self.api_server:.2f} of a core{idle}): it sets this rate. "
                "--api-server-count starts more of them"
            )
        waiting = gpu_busy_pct is not None and gpu_busy_pct < GPU_IDLE_PCT
        if waiting and self.engine_core is not None and self.engine_core >= CORE_LIMIT:
            return f"the engine core had no time left ({self.engine_core:.2f} of a core{idle}): the host sets this rate"
        return None


def server_load(pairs: list[tuple[Window, WindowResult]]) -> ServerLoad:
    """The server's load in the steady part of windows; nothing is known unless every window has one and telemetry."""
    if not pairs or any(window.telemetry is None or result.bounds is None for window, result in pairs):
        return ServerLoad()
    figures = [window_figures(window.telemetry, result.bounds) for window, result in pairs]
    return ServerLoad(
        _mean([each.api_server_share for each in figures]), _mean([each.engine_core_share for each in figures])
    )


def _mean(values: list[float | None]) -> float | None:
    return None if None in values else float(np.mean(values))
