"""Room recipes: hosts, looked at and provisioned. Runs ansible-playbook on ansible/ and reads what it says."""

import difflib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from images.command import run_shown, tail
from images.console import emit_json, note, out, printable, table
from images.errors import Problem, UsageProblem, nearest
from images.index import cache_root
from images.yaml_source import read_yaml

PLAYBOOKS = Path(__file__).parent.parent / "ansible"
THIS_MACHINE = PLAYBOOKS / "inventory" / "this-machine.yml"
PROBLEMS_FOUND = 8
# A host's name or address, for ssh; with an inventory, a pattern of Ansible's. Neither is an option, nor a file (@).
NAME = re.compile(r"[\w.:\[][\w.:@%\[\]-]*")
NAME_WITHIN = re.compile(r"[^@\s-][^\s]*")
PASSWORD = re.compile(r"ansible_\w*pass(?:word|phrase)?")  # of Ansible's own, such as ansible_become_password
UNREAD = "Completely failed to parse inventory source"
NOBODY = "leaves us with no hosts to target"
MARKS = {True: "✔", False: "✘", None: "–"}


@dataclass
class Host:
    """What a playbook said of one host. `problem` is why it ended early; `changed` names what it changed.

    `facts` are machine_facts', `wanted` how the inventory wants it to serve (facts.yml).
    """

    name: str
    reached: bool = True
    problem: str | None = None
    changed: list[str] = field(default_factory=list)
    diffs: list[str] = field(default_factory=list)
    kind: str | None = None
    findings: list[dict] = field(default_factory=list)
    reboot_required: list[str] = field(default_factory=list)
    facts: dict | None = None
    wanted: dict | None = None

    @property
    def wrong(self) -> list[dict]:
        """Findings that are not as wanted."""
        return [finding for finding in self.findings if finding["ok"] is False]

    def as_json(self) -> dict:
        """For scripts."""
        told = {"reached": self.reached, "problem": self.problem, "changed": self.changed, "diffs": self.diffs}
        return {**told, "kind": self.kind, "findings": self.findings, "reboot_required": self.reboot_required}


def doctor(hosts: str, inventory: str | None, settings: Sequence[str], as_json: bool) -> int:
    """Run preflight on hosts and print every finding; nothing on them is changed.

    Returns 0 where all is as wanted, 8 where something isn't, 1 where a host could not be looked at.
    """
    looked = run_playbook("preflight.yml", hosts, inventory, settings, "Looking at the hosts")
    code = 1 if any(host.problem for host in looked) else PROBLEMS_FOUND if any(host.wrong for host in looked) else 0
    if as_json:
        emit_json({"exit": code, "hosts": {host.name: host.as_json() for host in looked}})
        return code
    for host in looked:
        if host.findings:
            _print_findings(host, host.findings, f"judged as {host.kind}")
    _print_hosts(looked, changes=False)
    return code


def provision(hosts: str, inventory: str | None, settings: Sequence[str], check: bool, as_json: bool) -> int:
    """Bring hosts to where they can serve; with `check` say what would change, and change nothing.

    Returns 0 where every host was provisioned, 1 where one was not. What provisioning can't mend is listed.
    """
    doing = "Checking what would change" if check else "Provisioning the hosts"
    return report(run_playbook("site.yml", hosts, inventory, settings, doing, changing(check)), check, as_json)


def changing(check: bool) -> list[str]:
    """Ansible's options where something is changed, or with `check` would be."""
    return ["--diff", *(["--check"] if check else [])]


def report(made: Sequence[Host], check: bool, as_json: bool) -> int:
    """Print what was changed on each host, or with `check` would be; returns 1 where one failed, else 0."""
    code = 1 if any(host.problem for host in made) else 0
    if as_json:
        emit_json({"exit": code, "check": check, "hosts": {host.name: host.as_json() for host in made}})
        return code
    for host in made:
        for text in host.diffs:
            out().print(printable(text.expandtabs()), markup=False)
        if host.changed:
            title = f"{host.name}: {'would change' if check else 'changed'}"
            out().print(table(title, ("",), [(task,) for task in host.changed]))
        if host.wrong:
            what = "wrong as it is now" if check else "what provisioning can't mend"
            _print_findings(host, host.wrong, what)
    _print_hosts(made, changes=True)
    return code


def run_playbook(
    playbook: str,
    hosts: str,
    inventory: str | None,
    settings: Sequence[str],
    description: str,
    options: Sequence[str] = (),
    more: Path | None = None,
) -> list[Host]:
    """Run a playbook of ansible/ and return what it said of every host.

    `hosts` are names or groups of the inventory, separated by commas, or without one names that ssh knows; empty
    means all of the inventory, and without one this machine. `more` is an inventory of ours with variables for the
    same hosts. Raises UsageProblem where no host is named so, and
    Problem where Ansible itself failed.
    """
    argv = [sys.executable, "-m", "ansible", "playbook", playbook, *_where(hosts, inventory), *options]
    argv += ["--inventory", str(more)] if more else []
    values = dict(map(_setting, settings or ()))
    _say_unknown(values)
    with tempfile.TemporaryDirectory(prefix="station-recipes-ansible-") as folder:  # nobody else may look into it
        log = Path(folder) / "events.jsonl"
        if values:
            given = Path(folder) / "settings.json"
            given.touch(0o600)
            given.write_text(json.dumps(values))
            argv += ["--extra-vars", f"@{given}"]  # a command line is shown, by us and by ps
        status = run_shown(
            argv,
            description,
            log,
            env=_environment(os.environ),
            cwd=PLAYBOOKS,
            watch=lambda: {"status": _now(log)[:60]},
        )
        text = log.read_text(errors="replace")
        found = read_hosts(read_events(text.splitlines()))
        if not found and UNREAD in text:
            why = re.search(r"(?:YAML parsing failed|Failed to parse inventory): (.+)", text)
            reason = printable(why[1]) if why else "it is no inventory"
            raise UsageProblem(f"the inventory {inventory} can't be read: {reason} Examples: ansible/inventory/")
        if not found and (status == 0 or NOBODY in text):
            called = f"of {inventory or THIS_MACHINE} is called {hosts!r}" if hosts else f"is named in {inventory}"
            raise UsageProblem(f"no host {called}")
        if not found:
            raise Problem(f"Ansible ended with status {status} before it reached a host:\n{tail(log)}")
        if status != 0 and not any(host.problem for host in found):
            raise Problem(f"Ansible ended with status {status}, and blames no host:\n{tail(log)}")
    return found


def _where(hosts: str, inventory: str | None) -> list[str]:
    names = [name.strip() for name in hosts.split(",") if name.strip()]
    strange = [name for name in names if not (NAME_WITHIN if inventory else NAME).fullmatch(name)]
    if strange or (hosts and not names):  # an empty list would mean all
        raise UsageProblem(f"--host {', '.join(strange) or hosts!r}: wanted names of hosts, separated by commas")
    if inventory:
        if not Path(inventory).exists():
            raise UsageProblem(f"there is no inventory {inventory}; examples are in ansible/inventory/")
        return ["--inventory", str(Path(inventory).absolute()), *(["--limit", ",".join(names)] if names else [])]
    if names in ([], ["localhost"]):
        return ["--inventory", str(THIS_MACHINE)]
    return ["--inventory", ",".join(names) + ","]


def _setting(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise UsageProblem(f"--set {text!r}: wanted NAME=VALUE, a role's variable (ansible/roles/*/meta)")
    secret, ask = secrets(), f"ANSIBLE_{'BECOME' if 'become' in name else 'CONNECTION'}_PASSWORD_FILE"
    if name in secret or PASSWORD.fullmatch(name):
        raise UsageProblem(
            f"--set {name}=…: a secret on a command line is seen by every user of this machine, and kept by the shell. "
            f"Give it by {secret.get(name) or ask} in the environment, or by a vault"
        )
    return name, _value(value, declared().get(name, {}).get("type"))


def _say_unknown(names: Iterable[str]) -> None:
    """Say which variables no role has: an inventory of somebody's may use them, and a misspelt one does nothing."""
    known = declared()
    for name in (name for name in names if name not in known and not name.startswith("ansible_")):
        close = nearest(name, list(known), count=1)
        note(f"--set {name}: no role of ours has this variable{f'; did you mean {close[0]}?' if close else ''}")


def _value(text: str, kind: str | None) -> object:
    """A variable's value as its role declares it. Of unknown ones a list, a mapping, true, false or a whole number.

    Anything else is text: as a number the version 1.20 would be 1.2.
    """
    number = r"-?\d+(\.\d+)?" if kind == "float" else r"-?\d+"
    if kind in {"str", "path"} or not re.fullmatch(rf"[\[{{].*|true|false|{number}", text, re.DOTALL):
        return text
    try:
        return json.loads(text)
    except ValueError:  # such as {{ a template }}
        return text


def declared() -> dict[str, dict]:
    """The roles' variables as their argument_specs have them, by name."""
    files = sorted(PLAYBOOKS.glob("roles/*/meta/argument_specs.yml"))
    options = [read_yaml(file).data["argument_specs"]["main"]["options"] for file in files]
    return {name: option for each in options for name, option in each.items()}


def secrets() -> dict[str, str]:
    """The roles' variables that are secret, each with the variable of the environment that it is taken from."""
    found = {}
    for name, option in declared().items():
        if option.get("no_log"):
            taken = re.search(r"env', '(\w+)'", option["default"])
            found[name] = taken[1] if taken else ""
    return found


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    ours = {
        "ANSIBLE_CONFIG": str(PLAYBOOKS / "ansible.cfg"),
        "ANSIBLE_HOME": str(cache_root(environ) / "ansible"),
        "ANSIBLE_STDOUT_CALLBACK": "ansible.posix.jsonl",
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "1",
        "ANSIBLE_DEPRECATION_WARNINGS": "0",
        "LC_ALL": "C.UTF-8",
    }
    return {**environ, **ours}


def read_events(lines: Iterable[str]) -> Iterable[dict]:
    """What the jsonl callback wrote, without the warnings between."""
    for line in lines:
        if line.startswith("{"):
            try:
                yield json.loads(line)
            except ValueError:
                continue  # cut off: Ansible was ended


def _now(log: Path) -> str:
    starts = [line for line in tail(log, lines=40).splitlines() if "_on_task_start" in line]
    events = list(read_events(starts[-1:]))
    return events[0]["task"]["name"] if events else ""


def read_hosts(events: Iterable[dict]) -> list[Host]:
    """Every host that a playbook named, with what was changed, found, and why it ended early."""
    hosts: dict[str, Host] = {}
    for event in events:
        task = event.get("task", {}).get("name", "")
        for name, result in event.get("hosts", {}).items():
            _note_result(hosts.setdefault(name, Host(name)), event["_event"], task, result)
        for name, counts in event.get("stats", {}).items():
            host = hosts.setdefault(name, Host(name))
            if not counts["failures"] and not counts["unreachable"]:
                host.problem, host.reached = None, True
    return [hosts[name] for name in sorted(hosts)]


def _note_result(host: Host, event: str, task: str, result: dict) -> None:
    facts = result.get("ansible_facts") or {}
    host.kind = facts.get("preflight_kind", host.kind)
    host.findings = facts.get("preflight_findings", host.findings)
    host.reboot_required = facts.get("preflight_reboot_required", host.reboot_required)
    host.facts = facts.get("station", host.facts)
    host.wanted = facts.get("station_wanted", host.wanted)
    if event == "v2_runner_on_ok" and result.get("changed"):
        host.changed.append(task.replace(" : ", ": "))
        host.diffs += _diffs(result.get("diff"))
    if event in {"v2_runner_on_failed", "v2_runner_on_unreachable"} and not result.get("ignore_errors"):
        items = [str(each.get("msg")) for each in result.get("results") or [] if each.get("failed") and each.get("msg")]
        said = "; ".join(items) or str(result.get("msg") or result.get("stderr") or "failed without a word").strip()
        more = str(result.get("module_stderr") or "").strip()
        # Ansible wraps what a filter says in where it was called from.
        said = re.sub(r"^(?:Task failed: )?(?:.*The filter plugin '\w+' failed: )?", "", said, flags=re.DOTALL)
        where = task.partition(" against arg spec")[0].replace(" : ", ": ")
        host.problem = f"{where}: {said}{chr(10) + more if more and more not in said else ''}"
        host.reached = event == "v2_runner_on_failed"


def _diffs(diff: object) -> list[str]:
    """Unified diffs of the files a task changed; apt's own words where it has some."""
    found = []
    for one in diff if isinstance(diff, list) else [diff] if diff else []:
        before, after = one.get("before"), one.get("after")
        name = one.get("after_header") or one.get("before_header") or ""
        if isinstance(before, str) and isinstance(after, str) and name:
            label = name.replace(" (content)", "")
            lines = difflib.unified_diff(before.splitlines(), after.splitlines(), label, label, lineterm="", n=2)
            found.append("\n".join(lines))
    return [text for text in found if text]


def _print_findings(host: Host, told: Sequence[dict], what: str) -> None:
    judged = [each for each in told if each["ok"] is not None or not each["found"].startswith("not applicable")]
    rows = [(MARKS[each["ok"]], each["id"], each["found"], each["wanted"], each["remedy"]) for each in judged]
    left_out = len(told) - len(judged)
    out().print(table(f"{host.name}: {what}", ("", "finding", "found", "wanted", "what to do"), rows))
    if left_out:
        note(f"{left_out} more lines do not apply to a {host.kind} host")
    out().print()


def _print_hosts(hosts: Sequence[Host], changes: bool) -> None:
    rows = []
    for host in hosts:
        state = "could not be reached" if not host.reached else "failed" if host.problem else "done"
        count = f"{len(host.wrong)} of {len(host.findings)}" if host.findings else "not looked at"
        changed = [str(len(host.changed))] if changes else []
        rows.append((host.name, host.kind or "", state, *changed, count, host.problem or ""))
    columns = ("host", "judged as", "state", *(["changes"] if changes else []), "problems", "why")
    out().print(table("", columns, rows))
