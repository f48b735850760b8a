"""Tests: what this host allows is run; what is left out is said, with its reason, or fails with --require."""

import os
import platform
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from tests import stood_still

settings.register_profile("shared machine", deadline=None)  # how long an example takes there says nothing of it
settings.load_profile("shared machine")

ROOT = Path(__file__).resolve().parent.parent
HOST_PROGRAMS = ("systemd-nspawn", "mmdebstrap", "setpriv", "nsenter", "gpg", "dpkg-deb", "ssh")


def _no_engine() -> str | None:
    if platform.system() != "Linux" or platform.machine() not in {"x86_64", "aarch64"}:
        return f"the CPU engine has wheels for Linux on x86-64 and aarch64, this is {platform.platform()}"
    return None


def no_docker() -> str | None:
    """Why no Docker engine can be used here, or None."""
    if shutil.which("docker") is None:
        return "there is no docker program"
    answer = subprocess.run(["docker", "info"], capture_output=True, text=True, check=False)
    return None if answer.returncode == 0 else "no Docker engine answers"


def _no_host() -> str | None:
    if os.geteuid() != 0:
        return "a test machine is booted as root only"
    missing = [name for name in HOST_PROGRAMS if shutil.which(name) is None]
    return f"there is no {', '.join(missing)} (tests/apt.txt names the packages)" if missing else None


def _no_browser() -> str | None:
    return None if shutil.which("chromium") else "there is no Chromium"


def _no_gpu() -> str | None:
    return None if shutil.which("nvidia-smi") else "there is no NVIDIA GPU"


LEFT_OUT = pytest.StashKey[dict[str, list]]()
LACKS = {"engine": _no_engine, "docker": no_docker, "host": _no_host, "browser": _no_browser, "gpu": _no_gpu}


def pytest_configure(config: pytest.Config) -> None:
    """Tests send their tasks a hangup: what they start must not inherit from a `nohup` around pytest to ignore it."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    config.pluginmanager.register(stood_still)
    required = {name for name in config.getoption("--require").split(",") if name}
    unknown = required - LACKS.keys() - {"unit"}
    if unknown:
        raise pytest.UsageError(f"--require {', '.join(sorted(unknown))}: wanted some of {', '.join(LACKS)}")
    for name in sorted(required & LACKS.keys()):
        reason = LACKS[name]()
        if reason:
            raise pytest.UsageError(f"--require {name}: {reason}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --require."""
    parser.addoption("--require", default="", help="markers that must not be skipped, separated by commas")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by its folder, and skip what the host lacks."""
    reasons = {name: lacks() for name, lacks in LACKS.items()}
    for item in items:
        kind = item.path.relative_to(ROOT / "tests").parts[0]
        item.add_marker(kind)
        if kind in {"docker", "host"}:  # the first one builds the image, or the machine, with nothing cached
            item.add_marker(pytest.mark.timeout(2400))
        if reasons.get(kind):
            item.add_marker(pytest.mark.skip(reason=f"{kind}: {reasons[kind]}"))
    items.sort(key=lambda item: ["unit", *LACKS].index(item.path.relative_to(ROOT / "tests").parts[0]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    """A test of a required kind that skips itself has failed: its reason becomes the failure."""
    report = yield
    kind = item.path.relative_to(ROOT / "tests").parts[0]
    if report.skipped and kind in item.config.getoption("--require").split(","):
        report.outcome, report.longrepr = "failed", f"skipped, although {kind} is required: {report.longrepr}"
    return report


class AKindAWorker(LoadScopeScheduling):
    """Tests side by side, those of a kind in one process: they share an image, or a machine."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.split("/")[1]


def pytest_xdist_make_scheduler(config: pytest.Config, log) -> AKindAWorker | None:
    """Take a kind for xdist's scope."""
    return AKindAWorker(config, log) if config.getoption("dist") == "loadscope" else None


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Count what a selection leaves out, by kind."""
    for item in items:
        kind = item.path.relative_to(ROOT / "tests").parts[0]
        item.config.stash.setdefault(LEFT_OUT, {}).setdefault(kind, []).append(item)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was left out, and why."""
    chosen = config.getoption("markexpr") or config.getoption("keyword")
    for kind, items in config.stash.get(LEFT_OUT, {}).items():
        terminalreporter.write_line(f"left out: {len(items)} {kind} tests, not chosen by {chosen!r}")


@pytest.fixture
def inv(tmp_path: Path):
    """Run the front door: inv("check", "--all") → CompletedProcess."""

    def run(*arguments: str, timeout: float = 300, **environ: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [str(ROOT / "inv"), *arguments],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env={**os.environ, **environ},
            stdin=subprocess.DEVNULL,
        )

    return run
