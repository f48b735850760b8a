"""The playbooks are sound, and the front door says what is wrong with a request before it touches a host."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.hosts import PLAYBOOKS
from tests.host.playbook import play

SUMMARY = "could not be reached"


def ansible(*argv: str) -> subprocess.CompletedProcess:
    environ = {**os.environ, "LC_ALL": "C.UTF-8", "NO_COLOR": "1"}
    return subprocess.run(argv, cwd=PLAYBOOKS, capture_output=True, text=True, check=False, env=environ)


def test_every_playbook_s_syntax_is_right():
    playbooks = sorted(file.name for file in PLAYBOOKS.glob("*.yml") if file.name != "changes.yml")
    done = ansible(sys.executable, "-m", "ansible", "playbook", "--syntax-check", *playbooks)
    assert done.returncode == 0, done.stderr
    assert [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("playbook")] == playbooks


def test_the_playbooks_pass_ansible_lint_in_its_strictest_profile():
    done = ansible(str(Path(sys.executable).with_name("ansible-lint")), "--profile=production", "--offline")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failure(s), 0 warning(s)" in done.stderr


@pytest.mark.parametrize("inventory", sorted(PLAYBOOKS.glob("inventory/*.yml")), ids=lambda file: file.name)
def test_every_inventory_example_is_read(inventory: Path):
    done = ansible(str(Path(sys.executable).with_name("ansible-inventory")), "--inventory", str(inventory), "--list")
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr


def test_a_host_that_can_t_be_reached_is_told_in_the_table_and_ends_with_one(inv):
    done = inv("doctor", "--host", "127.0.0.1:5400")
    assert done.returncode == 1
    assert SUMMARY in done.stdout
    assert "Connection refused" in done.stdout
    assert "$ " in done.stderr  # the command, so that anyone can run it without us


def test_this_machine_is_looked_at_where_no_host_is_named(inv):
    done = inv("doctor")
    assert done.returncode in {0, 8}
    assert "localhost: judged as" in done.stdout
    assert "what to do" in done.stdout


def test_a_version_that_an_inventory_gives_as_a_number_is_refused(tmp_path: Path):
    done = play(tmp_path, "container_toolkit", "--check", container_toolkit_min=1.20)
    assert done.code != 0
    assert 'found the number 1.2, wanted text, \\"1.20\\"' in " ".join(done.text.split())


def test_what_is_set_is_in_effect_and_on_no_command_line_that_is_shown(inv):
    done = inv("doctor", "--set", "preflight_cache=/srv/nobody-s-business", "--set", "preflight_ports=[1, 5409]")
    assert "for /srv/nobody-s-business" in " ".join(done.stdout.split())
    assert "free: 1, 5409" in " ".join(done.stdout.split())
    assert "$ " in done.stderr
    assert "nobody-s-business" not in done.stderr
    assert "5409" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--inventory", "nosuch.yml"), "there is no inventory nosuch.yml; examples are in ansible/inventory/"),
        (("--inventory", "ansible/inventory/this-machine.yml", "--host", "mars"), "is called 'mars'"),
        (("--host", "--version"), "--host '--version': wanted names of hosts"),
        (("--host", "@hosts"), "--host '@hosts': wanted names of hosts"),
        (("--host", ","), "--host ',': wanted names of hosts"),
        (("--set", "docker_host_wait_s"), "wanted NAME=VALUE"),
        (("--set", "serving_api_key=hunter2"), "Give it by VLLM_API_KEY in the environment, or by a vault"),
        (("--set", "preflight_profile=spark"), "value of preflight_profile must be one of"),
        (("--set", 'preflight_wanted={"weights": 3}'), "weights; there are: architecture, docker_min"),
    ],
)
def test_a_wrong_request_is_one_message_that_says_what_was_wanted(inv, arguments, message):
    done = inv("doctor", *arguments)
    assert done.returncode in {1, 2}
    assert message in " ".join((done.stdout + done.stderr).split())
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("all:\n  hosts: [a, b\n", "can't be read: While parsing a flow sequence did not find expected ',' or ']'"),
        ("", "no host is named in"),
        ("all: {hosts: {x: {ansible_connection: nosuch}}}", "the connection plugin 'nosuch' was not found"),
        ("all: {hosts: {x: {ansible_connection: local, preflight_ports: '{{ nosuch }}'}}}", "'nosuch' is undefined"),
        (
            "all: {hosts: {x: {ansible_connection: local, ansible_python_interpreter: /no/python}}}",
            "The module interpreter '/no/python' was not found",
        ),
    ],
)
def test_a_wrong_inventory_is_one_message_that_says_what_is_wrong(inv, tmp_path: Path, text: str, message: str):
    (tmp_path / "hosts.yml").write_text(text)
    done = inv("doctor", "--inventory", str(tmp_path / "hosts.yml"))
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode in {1, 2}
    assert message in said
    assert "Traceback" not in said
    assert "WARNING" not in said
