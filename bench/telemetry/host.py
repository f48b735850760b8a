"""Room bench: the host's side of telemetry, read from /proc: processes, machine load, memory."""

import math
import os
from dataclasses import dataclass

TICKS = os.sysconf("SC_CLK_TCK")
PAGE_B = os.sysconf("SC_PAGE_SIZE")
# /proc/stat of a machine with many cores is long: it is read once a second, not at every sample.
STAT_FIELDS = slice(1, 9)
IDLE, IOWAIT = 3, 4


@dataclass(frozen=True)
class ProcessState:
    """What /proc says of a process: `birth` in ticks since the machine's boot tells a pid from its next owner.

    `wait_s` is how long its main thread was ready to run and no core was free; NaN where the kernel doesn't tell.
    """

    birth: int
    name: str
    cpu_s: float
    rss_b: int
    wait_s: float


def read_process(pid: int) -> ProcessState | None:
    """CPU seconds (user and system, all threads) and memory of a process; None when it is gone."""
    text = _read(f"/proc/{pid}/stat")
    if text is None:
        return None
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    if not fields or fields[0] == "Z":
        return None
    cpu_s = (int(fields[11]) + int(fields[12])) / TICKS
    waited = (_read(f"/proc/{pid}/schedstat") or "").split()
    wait_s = int(waited[1]) / 1e9 if len(waited) > 1 else math.nan
    return ProcessState(int(fields[19]), head.partition("(")[2], cpu_s, int(fields[21]) * PAGE_B, wait_s)


def busy_cpu_s() -> float | None:
    """CPU seconds that all cores together have worked since the machine's boot."""
    text = _read("/proc/stat")
    if text is None:
        return None
    ticks = [int(value) for value in text.partition("\n")[0].split()[STAT_FIELDS]]
    return (sum(ticks) - ticks[IDLE] - ticks[IOWAIT]) / TICKS


def load1() -> float | None:
    """The load average over one minute."""
    text = _read("/proc/loadavg")
    return float(text.split()[0]) if text else None


def memory_used_b() -> float | None:
    """Memory that is not available to a new process, in bytes."""
    found = {}
    for line in (_read("/proc/meminfo") or "").splitlines()[:5]:
        name, _, value = line.partition(":")
        found[name] = int(value.split()[0]) * 1024
    if "MemTotal" not in found or "MemAvailable" not in found:
        return None
    return float(found["MemTotal"] - found["MemAvailable"])


def _read(path: str) -> str | None:
    # Not Path.read_text: at five samples a second its cost would show.
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        return os.read(handle, 65536).decode(errors="replace")
    except OSError:  # the process ended in between
        return None
    finally:
        os.close(handle)
