"""How a host's service stands is told by what systemd says, an old one too; what nobody provisioned is never touched."""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ansible_module import load

ROOT = Path(__file__).resolve().parent.parent.parent
NAME, THEIRS = "station-recipes-micro_base", "station-recipes-theirs_base"
UNIT = "ExecStart=/usr/bin/docker run image \\\n    --port 8000\n"
URL = "http://127.0.0.1:8000"
# As systemd 249 (Ubuntu 22.04) answers: it refuses a style of timestamps that it doesn't know, and says nothing else.
SYSTEMCTL = """#!/bin/sh
for argument; do
    case "$argument" in --timestamp=*) echo "Failed to parse timestamp style: ${{argument#*=}}" >&2; exit 1 ;; esac
done
test ! -e {folder}/dead || {{ echo "Failed to connect to bus: Host is down" >&2; exit 1; }}
for unit; do :; done
cat {folder}/$unit 2>/dev/null || printf 'LoadState=not-found\\nActiveState=inactive\\nNeedDaemonReload=no\\n'
case "$unit" in {name}.service) TZ=${{TZ:-Europe/Berlin}} date -d @$(cat {folder}/since) '+ExecMainStartTimestamp=%a %F %T %Z' ;; esac
"""
DOCKER = "#!/bin/sh\ntest ! -e {folder}/dead-docker || {{ echo 'no daemon' >&2; exit 1; }}\necho theirs\n"


engine_service = load("library/engine_service.py")
Host = Callable[..., dict]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a host's units are; `since`, seconds since 1970, is when NAME started."""
    (tmp_path / "bin").mkdir()
    for program, script in (("systemctl", SYSTEMCTL), ("docker", DOCKER)):
        (tmp_path / "bin" / program).write_text(script.format(folder=tmp_path, name=NAME))
        (tmp_path / "bin" / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.delenv("TZ", raising=False)
    (tmp_path / "units/wants").mkdir(parents=True)
    monkeypatch.setattr(engine_service, "UNITS", tmp_path / "units")
    monkeypatch.setattr(engine_service, "WANTS", tmp_path / "units/wants")
    monkeypatch.setattr(engine_service, "TCP", ())
    (tmp_path / "since").write_text("0")
    return tmp_path


def serve(folder: Path, name: str = NAME, unit: str = UNIT, state: str = "active") -> None:
    """Install a unit, start it with the machine, and let it run since now."""
    (folder / f"units/{name}.service").write_text(unit)
    (folder / f"units/wants/{name}.service").symlink_to(folder / f"units/{name}.service")
    (folder / f"{name}.service").write_text(f"LoadState=loaded\nActiveState={state}\nNeedDaemonReload=no\n")
    (folder / "since").write_text(str(int(time.time())))


def look(unit: str = UNIT, kept: tuple[str, ...] = (NAME,)) -> dict:
    return engine_service.looked(NAME, unit, URL, list(kept))


def test_a_service_that_runs_as_wanted_is_left_alone_under_an_old_systemd_too(folder: Path):
    serve(folder)
    seen = look()
    assert (seen["why"], seen["reread"], seen["theirs"]) == ([], False, [])
    assert abs(seen["started"] - time.time()) < 60, "in seconds since 1970, whatever the host's time zone"


def test_a_changed_unit_is_read_anew_under_an_old_systemd_too(folder: Path):
    serve(folder)
    seen = look(UNIT + "# another\n")
    assert seen["why"] == ["its unit is another one"]
    assert (seen["reread"], seen["containers"]) == (True, ["theirs"])


def test_a_service_older_than_its_files_is_started_anew(folder: Path):
    serve(folder)
    (folder / "since").write_text(str(int(time.time()) - 10))
    assert look()["why"] == ["it started before its files were written"]


@pytest.mark.parametrize("state", ["looked", "stopped", "ready"])
def test_a_systemd_that_does_not_answer_is_an_error_and_never_a_service_as_wanted(folder: Path, state: str):
    serve(folder)
    (folder / "dead").touch()
    ask = {
        "looked": look,
        "stopped": lambda: engine_service.stopped(NAME, URL, 0, True, False),
        "ready": lambda: engine_service.ready(NAME, URL, "micro", "", 0),
    }
    with pytest.raises(engine_service.ServiceProblem, match=f"{NAME} stands: Failed to connect to bus"):
        ask[state]()


def test_a_docker_that_does_not_say_what_runs_is_asked_where_systemd_must_read_anew_and_there_it_is_an_error(
    folder: Path,
):
    serve(folder)
    (folder / "dead-docker").touch()
    assert look()["why"] == []
    with pytest.raises(engine_service.ServiceProblem, match="Docker does not say which containers run: no daemon"):
        look(UNIT + "# another\n")


def test_what_was_provisioned_before_is_to_go_and_what_somebody_installed_on_another_port_is_nobody_s_business(
    folder: Path,
):
    before = "station-recipes-micro_mtp1"
    serve(folder, before)
    serve(folder, THEIRS, UNIT.replace("8000", "18000"))
    serve(folder)
    seen = look(kept=(before, NAME))
    assert (seen["others"], seen["theirs"]) == ([before], [])
    assert seen["why"] == [f"{before} serves instead"]


@pytest.mark.parametrize("state", ["active", "inactive"])
def test_a_unit_that_somebody_installed_on_the_same_port_is_named_and_not_taken_away(folder: Path, state: str):
    serve(folder, THEIRS, state=state)
    seen = look(kept=())
    assert (seen["others"], seen["theirs"]) == ([], [f"{THEIRS}.service"])


def test_whoever_else_listens_on_the_port_is_told_and_the_service_itself_is_not(folder: Path, monkeypatch):
    monkeypatch.setattr(engine_service, "TCP", (Path("/proc/net/tcp"), Path("/proc/net/tcp6")))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        url, told = f"http://127.0.0.1:{port}", [f"a process that listens on port {port} (ss -ltnp names it)"]
        assert engine_service.looked(NAME, UNIT, url, [])["theirs"] == told
        serve(folder)
        assert engine_service.looked(NAME, UNIT, url, [])["theirs"] == []
        before = "station-recipes-micro_mtp1"  # provisioned, and still starting
        serve(folder, before, state="activating")
        (folder / f"{NAME}.service").write_text("LoadState=loaded\nActiveState=inactive\nNeedDaemonReload=no\n")
        assert engine_service.looked(NAME, UNIT, url, [before])["theirs"] == []
    assert engine_service.looked(NAME, UNIT, url, [])["theirs"] == []
