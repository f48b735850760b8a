"""Room bench: energy per output token and GPU memory, from a window's telemetry. Pure."""

from dataclasses import dataclass

import numpy as np

from bench.telemetry.store import Telemetry
from bench.telemetry.window import Bounds

AGREEMENT = 0.05
SCOPES = {"gpu": "gpu_power_w", "module": "gpu_module_power_w"}


@dataclass(frozen=True)
class Energy:
    """Energy of all sampled GPUs over the window, J, by the driver's counter and by integrating its power.

    `scope` says what drew it: the GPU, or the whole module with its CPU. `agree` is whether counter and
    integral lie within 5% of each other (None: one of them is missing). `j_per_token` is the counter's, and
    None with a `reason` wherever it can't be believed.
    """

    scope: str | None
    counter_j: float | None
    integral_j: float | None
    agree: bool | None
    j_per_token: float | None
    reason: str | None


def energy(telemetry: Telemetry, bounds: Bounds, tokens: float) -> Energy:
    """Energy over `bounds` (s, CLOCK_MONOTONIC) in which `tokens` output tokens arrived."""
    if not telemetry.meta["gpus"]:
        return Energy(None, None, None, None, None, f"no GPU telemetry: {telemetry.meta['no_gpu'] or 'no GPU'}")
    counter = _sum_over_gpus(telemetry, "gpu_energy_j", bounds, _risen)
    integrals = {scope: _sum_over_gpus(telemetry, name, bounds, _integral) for scope, name in SCOPES.items()}
    integral = integrals["gpu"]
    if counter is None:
        why = f"the energy counter gives no value{_lacks(telemetry, 'gpu_energy_j')}"
        return Energy(None, None, integral, None, None, why)
    if counter <= 0:
        return Energy(None, None, integral, None, None, f"the energy counter moved by {counter:.6g} J: it was reset")
    scope = next((name for name, value in integrals.items() if _close(counter, value)), None)
    if scope is None:
        return _unconfirmed(telemetry, counter, integral)
    per_token = counter / tokens if tokens > 0 else None
    return Energy(scope, counter, integrals[scope], True, per_token, None if per_token else "no output token")


def _unconfirmed(telemetry: Telemetry, counter: float, integral: float | None) -> Energy:
    if integral is None:
        why = f"power gives no value to check the energy counter by{_lacks(telemetry, 'gpu_power_w')}"
        return Energy(None, counter, None, None, None, why)
    off = abs(counter - integral) / counter
    why = f"the energy counter says {counter:.6g} J, the power's integral {integral:.6g} J: {off:.1%} apart"
    return Energy(None, counter, integral, False, None, why)


def gpu_memory_gb(telemetry: Telemetry, bounds: Bounds) -> tuple[float | None, str | None]:
    """Most memory in use within `bounds`, summed over the GPUs, in 1e9 bytes; or None and the reason."""
    if not telemetry.meta["gpus"]:
        return None, f"no GPU telemetry: {telemetry.meta['no_gpu'] or 'no GPU'}"
    times = telemetry.arrays["time_s"]
    used = telemetry.arrays["gpu_memory_used_b"][(times >= bounds[0]) & (times <= bounds[1])].sum(axis=1)
    used = used[np.isfinite(used)]
    if len(used) == 0:
        return None, f"memory in use was not told{_lacks(telemetry, 'gpu_memory_used_b')}"
    return float(used.max()) * 1e-9, None


def _sum_over_gpus(telemetry: Telemetry, name: str, bounds: Bounds, figure) -> float | None:
    """Sum a figure over the GPUs; None if one of them lacks it."""
    times, table = telemetry.arrays["time_s"], telemetry.arrays[name]
    found = [_told(times, table[:, column], bounds, figure) for column in range(table.shape[1])]
    return None if any(value is None for value in found) else float(sum(found))


def _told(times: np.ndarray, values: np.ndarray, bounds: Bounds, figure) -> float | None:
    """Apply a figure if samples reach over the whole window: no edge is guessed."""
    told = np.isfinite(values)
    times, values = times[told], values[told].astype(np.float64)
    if len(times) < 2 or times[0] > bounds[0] or times[-1] < bounds[1]:
        return None
    return figure(times, values, bounds)


def _risen(times: np.ndarray, counter: np.ndarray, bounds: Bounds) -> float:
    """How far a counter rose between the bounds; less than nothing where it fell in between: it was reset."""
    within = counter[(times >= bounds[0]) & (times <= bounds[1])]
    if (np.diff(within) < 0).any():
        return float(np.diff(within).min())
    start, end = np.interp(bounds, times, counter)
    return float(end - start)


def _integral(times: np.ndarray, power_w: np.ndarray, bounds: Bounds) -> float:
    """Trapezoids between samples, cut at the bounds."""
    inside = (times > bounds[0]) & (times < bounds[1])
    at = np.concatenate([[bounds[0]], times[inside], [bounds[1]]])
    power = np.interp(at, times, power_w)
    return float(((power[1:] + power[:-1]) / 2 * np.diff(at)).sum())


def _close(counter: float, integral: float | None) -> bool:
    return integral is not None and abs(counter - integral) <= AGREEMENT * counter


def _lacks(telemetry: Telemetry, name: str) -> str:
    errors = sorted({gpu["lacks"][name] for gpu in telemetry.meta["gpus"] if name in gpu["lacks"]})
    return f" ({', '.join(errors)})" if errors else ""
