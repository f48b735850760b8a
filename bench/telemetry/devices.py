"""Room bench: GPUs as things to ask questions: NVML behind an interface that a scripted device can take too."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

with suppress(ModuleNotFoundError):  # the CPU engine's image has no GPU to ask, and no module for it
    import pynvml

LOST = "NVMLError_GpuIsLost"
FINAL = frozenset(
    {"NVMLError_NotSupported", "NVMLError_NoPermission", "NVMLError_FunctionNotFound", "NVMLError_InvalidArgument"}
)
# What each array of telemetry.npz holds; the arrays are (samples, GPUs).
GPU_ARRAYS = (
    "gpu_utilisation_pct",
    "gpu_power_w",
    "gpu_module_power_w",
    "gpu_sm_clock_mhz",
    "gpu_memory_clock_mhz",
    "gpu_temperature_c",
    "gpu_power_limit_w",
    "gpu_memory_used_b",
    "gpu_energy_j",
    "gpu_throttle_bits",
    "gpu_process_count",
    "gpu_foreign_count",
)
SLOW = 5  # every fifth sample: once a second at 5 Hz
RARE = 15  # every 3 s: the energy counter alone costs 4 ms of CPU a question (H200, driver 580)


class DeviceError(Exception):
    """A question that the driver refused. Its text is NVML's name of the error, such as NVMLError_NotSupported."""


@dataclass(frozen=True)
class Probe:
    """One question to a GPU, asked at every `every`-th sample. `ask` raises DeviceError."""

    array: str
    ask: Callable[[], float]
    every: int = 1


class Device(Protocol):
    """A GPU that can be sampled. `facts` is what doesn't change: memory_total_b, driver, power_limit_default_w."""

    uuid: str
    facts: dict
    probes: tuple[Probe, ...]

    def processes(self) -> list[int]:
        """The pids that hold the GPU. Raises DeviceError."""


@dataclass(frozen=True)
class NvmlDevice:
    """One GPU by its UUID, asked through NVML."""

    uuid: str
    facts: dict
    probes: tuple[Probe, ...]
    processes: Callable[[], list[int]] = field(repr=False)


@contextmanager
def open_devices(uuids: list[str]) -> Iterator[tuple[list[NvmlDevice], str | None]]:
    """Open NVML for the length of a `with` block; yields the GPUs, or none and the reason why.

    The reason is NVML's own name of the error: no driver (NVMLError_LibraryNotFound), no such GPU
    (NVMLError_NotFound), no permission. It never raises: a run without a GPU is a run. Wanting none asks nothing.
    """
    if not uuids:
        yield [], None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        yield [], type(error).__name__
        return
    try:
        yield _devices(pynvml, uuids)
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def all_uuids() -> list[str]:
    """The UUIDs of every GPU that the driver shows.

    Raises pynvml.NVMLError, such as NVMLError_LibraryNotFound without a driver.
    """
    pynvml.nvmlInit()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [_text(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    finally:
        pynvml.nvmlShutdown()


def _devices(nvml, uuids: list[str]) -> tuple[list[NvmlDevice], str | None]:
    found = []
    for uuid in uuids:
        try:
            found.append(_device(nvml, uuid, nvml.nvmlDeviceGetHandleByUUID(uuid)))
        except nvml.NVMLError as error:
            return [], f"{uuid}: {type(error).__name__}"
    return found, None


def _device(nvml, uuid: str, handle) -> NvmlDevice:
    asked = _asker(nvml)

    def value(field_id: int, scope: int) -> float:
        found = nvml.nvmlDeviceGetFieldValues(handle, [(field_id, scope)])[0]
        if found.nvmlReturn != nvml.NVML_SUCCESS:
            raise nvml.NVMLError(found.nvmlReturn)
        return float(found.value.uiVal)

    def power(scope: int) -> float:
        return value(nvml.NVML_FI_DEV_POWER_INSTANT, scope) / 1e3

    def gpu_power() -> float:
        # Older cards don't know the instant; what they tell is a mean over up to a second.
        try:
            return power(nvml.NVML_POWER_SCOPE_GPU)
        except nvml.NVMLError_NotSupported:
            return nvml.nvmlDeviceGetPowerUsage(handle) / 1e3

    def memory():
        # The second version tells the driver's own reserve apart, as nvidia-smi does.
        try:
            return nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        except (nvml.NVMLError_FunctionNotFound, nvml.NVMLError_InvalidArgument):
            return nvml.nvmlDeviceGetMemoryInfo(handle)

    def pids() -> list[int]:
        holders = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return sorted({int(holder.pid) for holder in holders})

    probes = (
        # Power first and its counter next to it: their moments should be one.
        Probe("gpu_power_w", asked(gpu_power)),
        Probe("gpu_energy_j", asked(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3), RARE),
        Probe("gpu_module_power_w", asked(lambda: power(nvml.NVML_POWER_SCOPE_MODULE))),
        Probe("gpu_utilisation_pct", asked(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
        Probe("gpu_memory_used_b", asked(lambda: memory().used)),
        Probe("gpu_sm_clock_mhz", asked(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))),
        Probe("gpu_throttle_bits", asked(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))),
        Probe("gpu_memory_clock_mhz", asked(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)), SLOW),
        Probe(
            "gpu_temperature_c",
            asked(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            SLOW,
        ),
        Probe("gpu_power_limit_w", asked(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3), SLOW),
    )
    facts = {
        "memory_total_b": _or_none(asked(lambda: memory().total)),
        "power_limit_default_w": _or_none(asked(lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1e3)),
        "name": _text_or_none(nvml, lambda: nvml.nvmlDeviceGetName(handle)),
        "driver": _text_or_none(nvml, nvml.nvmlSystemGetDriverVersion),
    }
    return NvmlDevice(uuid, facts, probes, asked(pids))


def _asker(nvml) -> Callable:
    """Turn a function that raises NVML's errors into one that raises ours."""

    def asked(function: Callable) -> Callable:
        def ask():
            try:
                return function()
            except nvml.NVMLError as error:
                raise DeviceError(type(error).__name__) from error

        return ask

    return asked


def _or_none(ask: Callable) -> float | None:
    try:
        return float(ask())
    except DeviceError:
        return None


def _text_or_none(nvml, ask: Callable) -> str | None:
    try:
        return _text(ask())
    except nvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
