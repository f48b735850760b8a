"""The Docker engine seen from another machine: a network namespace of our own, whose only way here is ssh."""

import os
import shlex
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE, THERE, PORT = "10.231.77.1", "10.231.77.2", 5250


@contextmanager
def another_machine(folder: Path) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yield what goes before a command that runs on the other machine, and its environment. Root only."""
    name = f"sr-{os.getpid()}"
    ssh = folder / "ssh"
    ssh.mkdir()
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(ssh / "host"))
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(ssh / "user"))
    (ssh / "authorized").write_text((ssh / "user.pub").read_text())
    (ssh / "sshd_config").write_text(
        f"ListenAddress {HERE}\nPort {PORT}\nHostKey {ssh}/host\nAuthorizedKeysFile {ssh}/authorized\nStrictModes no\n"
        f"PermitRootLogin yes\nPidFile none\nUsePAM no\nPasswordAuthentication no\nMaxStartups 100\n"
    )
    key = f"-i {shlex.quote(str(ssh / 'user'))} -o UserKnownHostsFile=/dev/null -o StrictHostKeyChecking=no"
    (ssh / "bin").mkdir()
    (ssh / "bin" / "ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F none {key} -o LogLevel=ERROR "$@"\n')
    (ssh / "bin" / "ssh").chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    server = None
    try:
        run("ip", "netns", "add", name)
        run("ip", "link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b", "netns", name)
        run("ip", "addr", "add", f"{HERE}/30", "dev", f"{name}a")
        run("ip", "link", "set", f"{name}a", "up")
        for command in (f"addr add {THERE}/30 dev {name}b", f"link set {name}b up", "link set lo up"):
            run("ip", "-n", name, *command.split())
        server = subprocess.Popen(
            ["/usr/sbin/sshd", "-D", "-e", "-f", str(ssh / "sshd_config")], stderr=subprocess.DEVNULL
        )
        time.sleep(1)
        assert server.poll() is None, "sshd did not start"
        environ = {"PATH": f"{ssh}/bin:{os.environ['PATH']}", "DOCKER_HOST": f"ssh://root@{HERE}:{PORT}"}
        yield ["ip", "netns", "exec", name], environ
    finally:
        if server is not None:
            server.terminate()
            server.wait()
        subprocess.run(["ip", "link", "del", f"{name}a"], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def run(*argv: str) -> None:
    """Run a short command that must succeed."""
    subprocess.run(argv, check=True, capture_output=True)
