"""Two teams, two clean folders, no shared cache or state, the second without a network: from a recipe to one verdict.

Everything that team two has came out of the bundle: its front door's environment, its engine, the recipe.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.bundles import test_key
from tests.docker.registry import CONFIG
from tests.ports import free_port

ROOT = Path(__file__).resolve().parent.parent.parent
NOT_CARRIED = {".git", ".venv", ".venv.lock", ".venv.log", ".runs", "results", "tests", "__pycache__", ".hypothesis"}
REACH = "import socket; socket.create_connection(('192.0.2.1', 443), timeout=3)"
NAMESPACE = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--map-root-user"])]


@dataclass(frozen=True)
class Team:
    """A team: its clone, its own home, cache and state, and what its commands are started through."""

    folder: Path
    clone: Path
    before: tuple[str, ...] = ()
    environ: tuple[tuple[str, str], ...] = ()

    def inv(self, *arguments: str, timeout: float = 1200) -> subprocess.CompletedProcess:
        home = {"HOME": str(self.folder), "PATH": os.environ["PATH"], "LANG": "C.UTF-8", "PIP_CONFIG_FILE": "/dev/null"}
        own = {"STATION_RECIPES_CACHE": str(self.folder / "cache"), "STATION_RECIPES_STATE": str(self.folder / "state")}
        answer = subprocess.run(
            [*self.before, str(self.clone / "inv"), *arguments],
            cwd=self.folder,
            env={**home, **own, **dict(self.environ)},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        sys.stderr.write(answer.stderr[-6000:] + answer.stdout[-3000:])
        return answer


@contextmanager
def offline() -> Iterator[tuple[str, ...]]:
    """A network namespace with nothing in it but its own loopback; yields how a command enters it."""
    holder = subprocess.Popen([*NAMESPACE, "sh", "-c", "ip link set lo up && echo up && exec sleep 3600"], stdout=-1)
    try:
        if holder.stdout.readline() != b"up\n":
            pytest.skip("no network namespace can be made here (unshare --net, ip)")
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        yield ("nsenter", f"--target={holder.pid}", "--net", *user)
    finally:
        holder.kill()
        holder.wait()


@pytest.fixture(scope="module")
def bundles(reproduced, tmp_path_factory, inv_here) -> dict[str, Path]:
    """Team one's two bundles, signed, with its own run: one with the engine, one without."""
    folder = tmp_path_factory.mktemp("one")
    (folder / "key").write_bytes(bytes(test_key()) + b"\n")
    (folder / "key.pub").write_bytes(bytes(test_key().get_public_key()) + b"\n")
    base = ["bundle", "--recipe", "micro", "--run", str(reproduced.run), "--key", str(folder / "key")]
    for name, more in (("whole", ["--with-engine"]), ("lean", ["--version", "lean"])):
        answer = inv_here(*base, *more, "--out", str(folder / f"{name}.tar"))
        assert answer.returncode == 0, answer.stderr
    yield {name: folder / name for name in ("whole.tar", "lean.tar", "key.pub")}
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def inv_here():
    """Team one's front door: this checkout's."""

    def run(*arguments: str) -> subprocess.CompletedProcess:
        argv = [str(ROOT / "inv"), *arguments]
        return subprocess.run(argv, capture_output=True, text=True, timeout=1200, check=False)

    return run


@pytest.fixture(scope="module")
def team_two(bundles, tmp_path_factory) -> Iterator[Team]:
    """A clean folder without a network: a clone of the repository, and the bundle that was carried there."""
    folder = tmp_path_factory.mktemp("two")
    clone = folder / "clone"
    shutil.copytree(ROOT, clone, ignore=lambda _, names: NOT_CARRIED & set(names))
    (clone / "results").mkdir()
    shutil.copyfile(bundles["whole.tar"], folder / "whole.tar")
    # As the bundle's README says: the front door's own environment comes out of it first.
    subprocess.run(["tar", "-xf", "whole.tar", "engine/control"], cwd=folder, check=True)
    links = str(folder / "engine" / "control")
    environ = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": links, "UV_NO_INDEX": "1", "UV_FIND_LINKS": links}
    with offline() as before:
        assert subprocess.run([*before, sys.executable, "-c", REACH], capture_output=True, check=False).returncode != 0
        yield Team(folder, clone, before, tuple(environ.items()))
    shutil.rmtree(folder)


@pytest.mark.timeout(2400)
def test_a_team_without_a_network_adopts_a_bundle_reproduces_it_and_agrees(reproduced, bundles, team_two):
    adopted = team_two.inv("adopt", "whole.tar", "--pubkey", str(bundles["key.pub"]), "--as", "one", "--json")
    assert adopted.returncode == 0, adopted.stderr
    told = json.loads(adopted.stdout.splitlines()[-1])
    assert told["reference"] == "micro/mtp1@one"
    assert [each for each in told["findings"] if each["ok"] is False and each["id"] != "preflight"] == []
    engine = next(each["found"] for each in told["findings"] if each["id"] == "engine")
    assert "its wheels come with the bundle, no network is needed" in engine

    proved = team_two.inv("reproduce", "--recipe", "micro/mtp1@one", "--port", str(free_port()), "--out", "runs")
    run = team_two.folder / proved.stdout.strip().splitlines()[-1]
    verdict, manifest = (json.loads((run / f"{name}.json").read_text()) for name in ("verdict", "manifest"))
    assert proved.returncode == 0 and verdict["state"] == "REPRODUCED"
    assert manifest["origin"]["content"] == told["content"] and manifest["origin"]["label"] == "one"
    (home,) = (team_two.folder / "cache/engines").glob("cpu-*/engine.json")
    assert manifest["engine"]["identity"] == json.loads(home.read_text())["identity"]

    compared = team_two.inv("compare", str(run), "micro/mtp1@one", "--json")
    found = json.loads(compared.stdout.splitlines()[-1])
    assert compared.returncode == 0 and found["agree"], compared.stderr
    assert {row["theirs"]["state"] for row in found["claims"]} == {"REPRODUCED"}
    assert [
        row for row in found["fingerprint"] if row["kind"] in {"model", "settings", "load", "engine", "prompts"}
    ] == []
    assert (team_two.folder / "state/adopted/one/bundle/results" / reproduced.run.name).is_dir()

    listed = json.loads(team_two.inv("list", "--json").stdout.splitlines()[-1])["recipes"]
    mine = next(row for row in listed if row["id"] == "micro/mtp1@one")
    assert mine["verdict"]["state"] == "REPRODUCED"


@pytest.mark.timeout(1200)
def test_the_same_bundle_through_a_registry_and_through_git_is_the_same_recipe(bundles, team_two, inv_here):
    program = shutil.which("docker-registry") or shutil.which("registry")
    if not program or not shutil.which("skopeo"):
        pytest.skip("there is no docker-registry and skopeo (Debian: apt install docker-registry skopeo)")
    port = free_port()
    config = team_two.folder / "registry.yml"
    config.write_text(CONFIG.format(folder=team_two.folder / "registry", port=port))
    registry = subprocess.Popen([*team_two.before, program, "serve", str(config)], stdout=-3, stderr=-3)
    try:
        name = f"127.0.0.1:{port}/team/micro-mtp1"
        ready = "import socket,sys,time\nfor _ in range(100):\n try: socket.create_connection(('127.0.0.1', int(sys.argv[1]))); break\n except OSError: time.sleep(0.1)"
        subprocess.run([*team_two.before, sys.executable, "-c", ready, str(port)], check=True)
        pushing = [*team_two.before, str(ROOT / "inv"), "push", str(bundles["lean.tar"]), "--to", name, "--plain-http"]
        pushed = subprocess.run(pushing, capture_output=True, text=True, check=False)
        assert pushed.returncode == 0, pushed.stderr
        taken = team_two.inv(
            "adopt", f"docker://{name}:lean", "--plain-http", "--as", "registry", "--no-doctor", "--json"
        )
        assert taken.returncode == 0, taken.stderr
    finally:
        registry.kill()
        registry.wait()
    recipes = team_two.folder / "recipes"
    subprocess.run(["git", "init", "-q", str(recipes)], check=True)
    assert inv_here("push", str(bundles["lean.tar"]), "--to", str(recipes)).returncode == 0
    who = ["-c", "user.name=one", "-c", "user.email=one@example.org"]
    subprocess.run(["git", "-C", str(recipes), "add", "-A"], check=True)
    subprocess.run(["git", "-C", str(recipes), *who, "commit", "-q", "-m", "add micro"], check=True)
    cloned = team_two.inv("adopt", f"git+file://{recipes}", "--as", "git", "--no-doctor", "--json")
    assert cloned.returncode == 0, cloned.stderr
    contents = {json.loads(each.stdout.splitlines()[-1])["content"] for each in (taken, cloned)}
    assert len(contents) == 1
    for label in ("registry", "git"):
        same = team_two.inv("diff", "micro/mtp1", f"micro/mtp1@{label}", "--json")
        difference = json.loads(same.stdout.splitlines()[-1])
        assert difference["other"] == [] and [row for row in difference["argv_env"] if "model" not in str(row)] == []
