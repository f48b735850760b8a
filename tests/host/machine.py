"""Tests: a Debian machine of its own, booted in systemd-nspawn with a network of its own.

Built once with mmdebstrap and kept under the cache by the hash of its recipe; each boot is an overlay over it, so
that no test spoils another. The overlay is mounted in a mount namespace of the machine's own and every process dies
with ours, so a test run that is killed leaves folders behind, never mounts; the next run removes them.
"""

import fcntl
import hashlib
import inspect
import json
import os
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from images.index import cache_root
from tests.host.debs import index_packages

SUITE = "trixie"
# What a freshly installed server has, plus what Ansible's modules ask of a host.
PACKAGES = (
    *("systemd", "systemd-sysv", "dbus", "iproute2", "procps", "ca-certificates", "openssh-server", "sudo"),
    *("python3", "python3-apt", "busybox-static"),
)
# What apt finds inside, without a network: a package archive at /srv/debian. Their dependencies come along.
ARCHIVE = ("docker.io", "docker-cli", "prometheus", "python3-debian", "python3-requests")
KEEP_DAYS = 14
BOOT_S = 120


def recipe() -> dict:
    """Everything that decides what a machine is built from."""
    return {"suite": SUITE, "packages": PACKAGES, "archive": ARCHIVE, "built_by": inspect.getsource(build)}


def machines_folder() -> Path:
    """Where machines live, out of the way of any test's own cache."""
    folder = cache_root() / "test-machines"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def base_machine() -> Path:
    """The root of the machine as built; building takes a minute or two, once."""
    name = hashlib.sha256(json.dumps(recipe(), sort_keys=True).encode()).hexdigest()[:12]
    folder = machines_folder()
    with locked(folder / "build.lock"):
        remove_leftovers(folder)
        root = folder / f"base-{name}"
        if not root.exists():
            build(folder / f"unfinished-{name}", root)
        os.utime(root)
    return root


@contextmanager
def locked(file: Path, wait: bool = True) -> Iterator[None]:
    """Hold a lock file; raises BlockingIOError instead of waiting where `wait` is false."""
    with file.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield


def remove_leftovers(folder: Path) -> None:
    """Remove machines whose test run is dead, and bases nobody has used for KEEP_DAYS."""
    for machine in folder.glob("run-*"):
        try:
            with locked(machine / "lock", wait=False):
                shutil.rmtree(machine, ignore_errors=True)
        except OSError:
            continue  # alive, or just being made
    for base in folder.glob("base-*"):
        if time.time() - base.stat().st_mtime > KEEP_DAYS * 86400:
            shutil.rmtree(base, ignore_errors=True)


def build(unfinished: Path, root: Path) -> None:
    """Bootstrap Debian, keep the archive's packages inside, leave no other source for apt."""
    shutil.rmtree(unfinished, ignore_errors=True)
    download = " ".join(("apt-get", "-y", "--download-only", "--no-install-recommends", "install", *ARCHIVE))
    commands = [
        f'APT_CONFIG="$MMDEBSTRAP_APT_CONFIG" {download}',
        'mkdir -p "$1/srv/debian" && mv "$1"/var/cache/apt/archives/*.deb "$1/srv/debian/"',
        # Timers would take apt's lock at times of their own choosing; a container loads no kernel modules.
        'chroot "$1" systemctl mask apt-daily.timer apt-daily-upgrade.timer ssh.service systemd-modules-load.service',
        # First boots rebuild caches unless these are newer than /usr.
        'touch "$1/etc/.updated" "$1/var/.updated"',
        # Nobody needs a test machine after a power cut of this host.
        'echo force-unsafe-io >"$1/etc/dpkg/dpkg.cfg.d/test-machine"',
    ]
    argv = ["mmdebstrap", "--quiet", "--variant=minbase", "--mode=root", f"--include={','.join(PACKAGES)}"]
    argv += [f"--customize-hook={command}" for command in commands]
    done = subprocess.run([*argv, SUITE, str(unfinished)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise RuntimeError(f"the test machine could not be built: {done.stderr[-2000:]}")
    index_packages(unfinished / "srv/debian")
    shutil.rmtree(unfinished / "var/lib/apt/lists", ignore_errors=True)
    for listed in (unfinished / "etc/apt/sources.list", *(unfinished / "etc/apt/sources.list.d").glob("*")):
        listed.unlink(missing_ok=True)
    source = "Types: deb\nURIs: file:/srv/debian\nSuites: ./\nTrusted: yes\n"
    (unfinished / "etc/apt/sources.list.d/debian.sources").write_text(source)
    (unfinished / "etc/hostname").write_text("fresh\n")
    subprocess.run(["chroot", str(unfinished), "apt-get", "update", "-q"], check=True, capture_output=True)
    unfinished.rename(root)


def child(pid: int) -> int:
    """A process's first child, or 0."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0
    return int(children[0]) if children else 0


class Machine:
    """One boot of a machine over `layers`, the uppermost first. A context manager: it is gone afterwards.

    `pid` is its init's, for nsenter; `upper` holds every file that differs from the layers; `root` reaches its files.
    """

    def __init__(self, name: str, layers: Sequence[Path]) -> None:
        self.name, self.layers = name, list(layers)
        self.folder = machines_folder() / f"run-{os.getpid()}-{name}-{time.monotonic_ns():x}"
        self.upper, self.console = self.folder / "upper", self.folder / "console.log"
        self._process: subprocess.Popen | None = None
        self.pid = self._nspawn = 0

    def __enter__(self) -> "Machine":
        for part in ("upper", "work", "merged", "docker"):
            (self.folder / part).mkdir(parents=True)
        self._lock = locked(self.folder / "lock")
        self._lock.__enter__()
        try:
            self.boot()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._lock.__exit__(None, None, None)
        shutil.rmtree(self.folder, ignore_errors=True)

    def boot(self) -> None:
        """Start the machine and wait until systemd says that it runs."""
        self.pid = self._nspawn = 0
        layers = ":".join(map(str, self.layers))
        parts = {name: self.folder / name for name in ("upper", "work", "merged", "docker")}
        options = f"lowerdir={layers},upperdir={parts['upper']},workdir={parts['work']}"
        nspawn = ["systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--capability=all", "--private-network"]
        # Docker's overlay can't lie on an overlay: its folder is a plain one of the host.
        nspawn += [f"--bind={parts['docker']}:/var/lib/docker", "--system-call-filter=keyctl add_key request_key bpf"]
        nspawn += [f"--machine={self.name}", f"--directory={parts['merged']}", "--boot"]
        script = 'mount -t overlay overlay -o "$0" "$1" && shift && exec "$@"'
        # In a PID namespace of its own, since the machine's init outlives a nspawn that is killed.
        argv = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--propagation", "private"]
        argv += ["--pid", "--fork", "--kill-child", "--mount-proc"]
        argv += ["sh", "-c", script, options, str(parts["merged"]), *nspawn]
        with self.console.open("ab") as sink:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
            )
        self._wait_until_running()

    def _wait_until_running(self) -> None:
        deadline = time.monotonic() + BOOT_S
        state = "not started"
        while time.monotonic() < deadline and self._process.poll() is None:
            self._nspawn = child(self._process.pid)
            self.pid = child(self._nspawn)
            if self.pid:
                state = self.run("systemctl", "is-system-running", check=False).stdout.strip()
            if state == "running":
                return
            if state == "degraded":
                state += ": " + self.run("systemctl", "--failed", "--plain", check=False).stdout
                break
            time.sleep(0.2)
        said = self.console.read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{self.name} did not boot ({state}); its console ends:\n{said}")

    @property
    def root(self) -> Path:
        """The machine's / as this host reaches it, while it runs."""
        return Path(f"/proc/{self.pid}/root")

    def run(
        self, *argv: str, check: bool = True, stdin: str | bytes | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess:
        """Run a program inside; with `check` its failure is an AssertionError that shows what it said."""
        entered = ["nsenter", f"--target={self.pid}", "--all", "--wd=/", "env", "-i", "PATH=/usr/sbin:/usr/bin"]
        entered += ["HOME=/root", "LC_ALL=C.UTF-8", *(f"{key}={value}" for key, value in (env or {}).items())]
        data = stdin.encode() if isinstance(stdin, str) else stdin
        done = subprocess.run([*entered, *argv], input=data or b"", capture_output=True, check=False)
        answer = subprocess.CompletedProcess(
            argv, done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
        )
        assert not check or answer.returncode == 0, f"{' '.join(argv)}: {answer.stdout}{answer.stderr}"
        return answer

    def write(self, path: str, text: str | bytes, mode: int = 0o644) -> None:
        """Write a file inside, as root; missing folders are made."""
        script = 'mkdir -p "$(dirname "$0")" && cat > "$0" && chmod "$1" "$0"'
        self.run("sh", "-c", script, path, f"{mode:o}", stdin=text)

    def read(self, path: str) -> str:
        """A file's text."""
        return self.run("cat", path).stdout

    def state(self) -> dict[str, str]:
        """Every file that differs from the layers below: path → a hash of its kind, owner, mode and content."""
        found = {}
        for folder, folders, files in os.walk(self.upper):
            for name in (*folders, *files):
                path = Path(folder, name)
                about = path.lstat()
                content = path.readlink().as_posix().encode() if path.is_symlink() else b""
                content = path.read_bytes() if stat.S_ISREG(about.st_mode) else content
                kind = f"{about.st_mode:o} {about.st_uid} {about.st_gid} {hashlib.sha256(content).hexdigest()}"
                found[f"/{path.relative_to(self.upper)}"] = kind
        return found

    def inventory(self) -> dict:
        """This machine's variables for Ansible."""
        return {
            "ansible_connection": "community.docker.nsenter",
            "ansible_nsenter_pid": self.pid,
            "ansible_python_interpreter": "/usr/bin/python3",
        }

    def shut_down(self) -> None:
        """Shut down in order, so that `upper` can be a layer of other machines."""
        if self._process and self._process.poll() is None:
            os.kill(self._nspawn, signal.SIGTERM)
            try:
                self._process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.kill()
                raise

    def kill(self) -> None:
        """Pull the plug. All its processes and mounts die with nspawn, the first of their PID namespace."""
        if self._process is None:
            return
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self._nspawn or self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=30)
