#!/usr/bin/python3
"""The engine as a service of a host: how it stands, stopped when nothing is in flight, waited for until it answers.

An Ansible module, standard library only.

    state=looked   how the unit stands against what is wanted, as sentences; changes nothing
    state=stopped  wait until no request runs or waits, then stop the unit at once
    state=ready    wait until a real completion comes back under the model's name

Zero in flight is told by vLLM's own gauges. Whoever sends a request in the moment between is cut off: only a proxy in
front can close that door.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from datetime import datetime
from pathlib import Path

UNITS = Path("/etc/systemd/system")
TCP = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
WANTS = UNITS / "multi-user.target.wants"
OURS = "station-recipes-"
GAUGE = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.M)
POLL_S = 0.2
ASK_S = 5
COMPLETION_S = 240  # a first completion may wait for kernels to be compiled
PROPERTIES = (
    "LoadState",
    "ActiveState",
    "SubState",
    "NeedDaemonReload",
    "ExecMainStartTimestamp",
    "NRestarts",
    "Result",
)
WHEN = re.compile(r"\w+ (\d+-\d+-\d+ \d+:\d+:\d+) UTC")  # the weekday is told too
LISTENS = "0A"
LOG_LINES = 12


class ServiceProblem(Exception):
    """Why a service can't be stopped or isn't ready, with the way out."""


def run(*argv: str) -> subprocess.CompletedProcess:
    """Run a program, which tells times in UTC."""
    environ = {**os.environ, "TZ": "UTC"}
    return subprocess.run(argv, capture_output=True, text=True, check=False, env=environ)


def properties(name: str) -> dict[str, str]:
    """What systemd says of a unit, of one that it doesn't know too. Raises ServiceProblem where it says nothing.

    Asked by nothing that systemd 245 and newer don't understand: `--timestamp=unix` came with 251.
    """
    asked = run("systemctl", "show", f"--property={','.join(PROPERTIES)}", f"{name}.service")
    told = dict(line.split("=", 1) for line in asked.stdout.splitlines() if "=" in line)
    if asked.returncode != 0 or "ActiveState" not in told:
        raise ServiceProblem(f"systemd does not say how {name} stands: {asked.stderr.strip() or asked.stdout.strip()}")
    return told


def started_at(told: dict[str, str]) -> int:
    """When a unit's process started, in seconds since 1970, by the clock of files' times; 0 where it didn't."""
    found = WHEN.fullmatch(told.get("ExecMainStartTimestamp", ""))
    return int(datetime.strptime(f"{found[1]} +0000", "%Y-%m-%d %H:%M:%S %z").timestamp()) if found else 0


def read(path: Path) -> str | None:
    """A file's text, or None where there is none."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return None


def looked(name: str, unit: str, url: str, kept: list[str]) -> dict:
    """How a host stands against a wanted unit that answers on `url`; `kept` are services that were provisioned here.

    Returns {why, reread, others, theirs, containers, started}: sentences why it must be started anew (none: it serves
    as wanted), whether systemd knows another text of it, names of those kept that are still installed, what of somebody
    else has its port, names of containers that are not this service's (asked where systemd must read anew), and when
    it started (seconds since 1970). Raises ServiceProblem where systemd or Docker doesn't say.
    """
    file = UNITS / f"{name}.service"
    before, now = read(file), properties(name)
    started = started_at(now)
    why = []
    if before is None:
        why.append("it is not installed")
    elif before != unit:
        why.append("its unit is another one")
    if now.get("ActiveState") != "active":
        why.append(f"it is {now.get('ActiveState', 'unknown')}")
    elif now.get("NeedDaemonReload") == "yes":
        why.append("it runs with an older unit")
    elif [each for each in (file, environment_file(name)) if each.exists() and int(each.stat().st_mtime) > started]:
        why.append("it started before its files were written")
    others = sorted({each for each in kept if each != name and installed(each)})
    if others:
        why.append(f"{', '.join(others)} serves instead")
    reread = now.get("LoadState") == "loaded" and (before != unit or now.get("NeedDaemonReload") == "yes")
    ours = {name, *kept}
    return {
        "why": why,
        "reread": reread,
        "others": others,
        "theirs": rivals(url, ours),
        "containers": [each for each in containers() if each not in ours] if reread else [],
        "started": started,
    }


def installed(name: str) -> bool:
    """Whether a unit is here, or starts with the machine."""
    return any(os.path.lexists(folder / f"{name}.service") for folder in (UNITS, WANTS))


def rivals(url: str, ours: set[str]) -> list[str]:
    """What has a service's port and isn't `ours`, in words: units that somebody else installed, or whoever listens."""
    port = urllib.parse.urlsplit(url).port
    word = re.compile(rf"--port[ =]['\"]?{port}\b")
    units = sorted({link.stem for link in WANTS.glob(f"{OURS}*_*.service")} - ours)
    named = [f"{each}.service" for each in units if word.search(read(UNITS / f"{each}.service") or "")]
    if named or any(properties(each)["ActiveState"] not in {"inactive", "failed"} for each in sorted(ours)):
        return named
    rows = [line.split() for file in TCP for line in (read(file) or "").splitlines()]
    taken = any(row[3] == LISTENS and int(row[1].rpartition(":")[2], 16) == port for row in rows[1:] if ":" in row[1])
    return [f"a process that listens on port {port} (ss -ltnp names it)"] if taken else []


def containers() -> list[str]:
    """Names of the running containers. Raises ServiceProblem where Docker doesn't say."""
    asked = run("docker", "ps", "--format", "{{.Names}}")
    if asked.returncode != 0:
        raise ServiceProblem(f"Docker does not say which containers run: {asked.stderr.strip()}")
    return sorted(asked.stdout.split())


def environment_file(name: str) -> Path:
    """Where the unit reads its API key from."""
    return Path(f"/etc/station-recipes/{name}.env")


def ask(url: str, path: str, data: dict | None = None, key: str | None = None, timeout_s: float = ASK_S) -> bytes:
    """Ask a server on loopback, past any proxy. Raises OSError, which HTTP errors are too."""
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    body = None if data is None else json.dumps(data).encode()
    request = urllib.request.Request(f"{url}{path}", data=body, headers=headers)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout_s) as answer:
        return answer.read()


def in_flight(url: str) -> int | None:
    """Requests that run or wait. 0 where nothing listens: there is nothing to lose; None where nobody says."""
    try:
        found = GAUGE.findall(ask(url, "/metrics").decode(errors="replace"))
    except urllib.error.HTTPError:
        return None
    except OSError as error:
        refused = isinstance(getattr(error, "reason", error), ConnectionRefusedError)
        return 0 if refused else None
    return int(sum(map(float, found))) if found else None


def stopped(name: str, url: str, drain_s: float, cut_off: bool, check: bool) -> dict:
    """Stop a unit as soon as nothing is in flight.

    Returns {changed, waited_s, most, cut}: the most requests seen in flight, and those cut off. Raises
    ServiceProblem when there are still some after `drain_s` seconds and they may not be cut off; it serves on.
    """
    if properties(name).get("ActiveState") not in {"active", "activating", "reloading"}:
        return {"changed": False, "waited_s": 0, "most": 0, "cut": 0}
    if check:
        return {"changed": True, "waited_s": None, "most": in_flight(url), "cut": None}
    began, most = time.monotonic(), 0
    while (left := in_flight(url)) != 0:
        most = max(most, left or 0)
        if time.monotonic() - began > drain_s:
            if cut_off:
                break
            what = f"{left} requests are in flight" if left else f"{url}/metrics does not say how many are in flight"
            raise ServiceProblem(
                f"{name}: after {drain_s:g} s {what}. It serves on, untouched. Send requests elsewhere and "
                "run again, wait longer (serving_drain_s), or cut them off (serving_cut_off=true)"
            )
        time.sleep(POLL_S)
    answer = run("systemctl", "stop", f"{name}.service")
    if answer.returncode != 0:
        raise ServiceProblem(f"{name} can't be stopped: {answer.stderr.strip()}")
    return {"changed": True, "waited_s": round(time.monotonic() - began, 1), "most": most, "cut": left or 0}


def api_key(name: str, variable: str) -> str | None:
    """The API key that the unit gives the engine."""
    text = read(environment_file(name)) or ""
    found = re.search(rf"^{re.escape(variable)}=(.*)$", text, re.M) if variable else None
    return found[1].strip().strip("\"'") if found else None


def ready(name: str, url: str, model: str, variable: str, timeout_s: float) -> dict:
    """Wait for a real completion under the model's name.

    Raises ServiceProblem with the log's end when the unit fails, another model answers, or the time is over.
    """
    began, restarts = time.monotonic(), properties(name).get("NRestarts")
    key, last = api_key(name, variable), "it did not answer"
    asked = {"model": model, "prompt": "1", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    while True:
        now = properties(name)
        gone = now.get("ActiveState") in {"failed", "inactive"} or now.get("SubState") == "auto-restart"
        if gone or now.get("NRestarts") != restarts:
            raise ServiceProblem(f"{name} ended ({now.get('ActiveState')}, {now.get('Result')}). {log_end(name)}")
        try:
            ask(url, "/health")
            answer = json.loads(ask(url, "/v1/completions", asked, key, COMPLETION_S))
            if answer["model"] == model and answer["usage"]["completion_tokens"] == 2:
                return {"changed": False, "waited_s": round(time.monotonic() - began, 1)}
            last = f"a completion of {answer['model']!r} came back"
        except urllib.error.HTTPError as error:
            last = f"it answers {error.code}: {error.read(300).decode(errors='replace')}"
            if error.code in {401, 404}:
                raise ServiceProblem(f"{url} serves no model {model!r} to us: {last}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            last = str(error)
        if time.monotonic() - began > timeout_s:
            raise ServiceProblem(f"{name} was not ready after {timeout_s:g} s: {last}. {log_end(name)}")
        time.sleep(POLL_S * 5)


def log_end(name: str) -> str:
    """The end of a unit's log."""
    lines = run("journalctl", "--no-pager", "--output=cat", f"--lines={LOG_LINES}", f"--unit={name}").stdout.strip()
    return f"Its log ends:\n{lines}"


def main() -> None:
    """Run as an Ansible module."""
    from ansible.module_utils.basic import AnsibleModule

    module = AnsibleModule(
        argument_spec={
            "state": {"choices": ["looked", "stopped", "ready"], "required": True},
            "name": {"type": "str", "required": True},
            "unit": {"type": "str", "default": ""},
            "url": {"type": "str", "default": ""},
            "kept": {"type": "list", "elements": "str", "default": []},
            "model": {"type": "str", "default": ""},
            "api_key_env": {"type": "str", "default": "", "no_log": False},  # the variable's name
            "drain_s": {"type": "float", "default": 0},
            "cut_off": {"type": "bool", "default": False},
            "timeout_s": {"type": "float", "default": 300},
        },
        supports_check_mode=True,
    )
    asked = module.params
    try:
        if asked["state"] == "looked":
            result = {"changed": False, **looked(asked["name"], asked["unit"], asked["url"], asked["kept"])}
        elif asked["state"] == "stopped":
            result = stopped(asked["name"], asked["url"], asked["drain_s"], asked["cut_off"], module.check_mode)
        elif module.check_mode:
            result = {"changed": False}
        else:
            result = ready(asked["name"], asked["url"], asked["model"], asked["api_key_env"], asked["timeout_s"])
    except ServiceProblem as problem:
        module.fail_json(msg=str(problem))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
