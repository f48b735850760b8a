"""A machine that stands still for a moment makes a test of clocks fail that has nothing wrong: only then it runs again.

A thread that wakes every few milliseconds knows for how long it did not. A test that failed is run once more if the
machine stood still meanwhile; pytest prints it as RERUN. A test that fails without a pause, or twice, has failed.
"""

import threading
import time

import pytest

BEAT_S = 0.02
PAUSE_S = 0.25  # a busy machine wakes a sleeping thread within some 10 ms


class Heartbeat(threading.Thread):
    """Notes the longest time (s) that this machine did not run a thread that only sleeps."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="heartbeat")
        self.longest_s = 0.0

    def run(self) -> None:
        """Beat until the process ends."""
        last = time.monotonic()
        while True:
            time.sleep(BEAT_S)
            now = time.monotonic()
            self.longest_s, last = max(self.longest_s, now - last - BEAT_S), now


HEART = Heartbeat()
PAUSE = "machine stood still, s"
AGAIN: list[str] = []


def stood_still() -> bool:
    """Whether the machine stood still during the test that runs; asked of a failed one."""
    time.sleep(5 * BEAT_S)  # after a pause any thread may be the first to run again
    return HEART.longest_s > PAUSE_S


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test may run once more, on this condition."""
    HEART.start()
    for item in items:
        item.add_marker(pytest.mark.flaky(reruns=1, condition=stood_still))


def pytest_runtest_logstart() -> None:
    """A pause counts for the test in which it was seen."""
    HEART.longest_s = 0.0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note which test runs again, and why. Where tests run side by side, only the worker's heart has beaten."""
    if report.outcome == "rerun":
        if PAUSE not in dict(report.user_properties):
            report.user_properties = [*report.user_properties, (PAUSE, HEART.longest_s)]
        paused_s = dict(report.user_properties)[PAUSE]
        AGAIN.append(f"run again: {report.nodeid} (the machine stood still for {paused_s:.2f} s)")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which tests ran again, and why."""
    for line in AGAIN:
        terminalreporter.write_line(line)
