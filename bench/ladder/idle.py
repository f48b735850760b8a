"""Room bench: between two boots: the GPU's memory is free again, as it was before the first one."""

import time
from collections.abc import Callable, Sequence

from bench.telemetry.devices import DeviceError, open_devices
from images.errors import EngineProblem

LIMIT_S = 120
SLACK_B = 1_000_000_000
POLL_S = 0.5


def memory_in_use(gpus: Sequence[str]) -> float | None:
    """The memory in use on GPUs, by UUID, in bytes; None without a GPU or where the driver doesn't say."""
    with open_devices(list(gpus)) as (devices, _):
        found = []
        for device in devices:
            ask = next((probe.ask for probe in device.probes if probe.array == "gpu_memory_used_b"), None)
            try:
                found.append(ask() if ask else None)
            except DeviceError:
                found.append(None)
    return None if not found or None in found else float(sum(found))


def wait_idle(
    gpus: Sequence[str],
    idle_b: float | None,
    look: Callable[[Sequence[str]], float | None] = memory_in_use,
    limit_s: float = LIMIT_S,
) -> float | None:
    """Wait until no more memory is in use than `idle_b` (bytes), within 1 GB; returns what is in use.

    Raises EngineProblem when it isn't free after `limit_s`: a boot beside a leftover would measure something else.
    """
    deadline = time.monotonic() + limit_s
    while True:
        used = look(gpus)
        if used is None or idle_b is None or used <= idle_b + SLACK_B:
            return used
        if time.monotonic() > deadline:
            raise EngineProblem(
                f"{used / 1e9:.1f} GB of GPU memory are in use {limit_s:.0f} s after the last engine ended; "
                f"{idle_b / 1e9:.1f} GB were, before the first one. Find who holds them: nvidia-smi"
            )
        time.sleep(POLL_S)
