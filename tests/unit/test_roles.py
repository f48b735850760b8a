"""The roles' defaults are what they document, and what they'd do to Docker's settings is right for any settings."""

import json
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from images.errors import UsageProblem
from images.yaml_source import read_yaml
from recipes.hosts import Host, _setting, read_events, read_hosts, report, run_playbook, secrets
from tests.ansible_module import load

ROOT = Path(__file__).resolve().parent.parent.parent
ROLES = sorted((ROOT / "ansible/roles").iterdir())
DOCKER = {"version": "29.1.2", "daemon_json": None, "unit_flags": [], "daemon_json_newer": None}
INFO = {"CDISpecDirs": None, "LiveRestoreEnabled": False, "DefaultRuntime": "runc", "LoggingDriver": "json-file"}
INFO |= {"Driver": "overlay2", "DockerRootDir": "/var/lib/docker", "Debug": False}
CDI = {"features": {"cdi": True}}


hosts = load("filter_plugins/hosts.py")


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_a_role_s_defaults_are_those_of_its_documentation_by_name_and_value(role: Path):
    options = read_yaml(role / "meta/argument_specs.yml").data["argument_specs"]["main"]["options"]
    documented = {name: option["default"] for name, option in options.items() if "default" in option}
    assert read_yaml(role / "defaults/main.yml").data == documented
    assert all(name.startswith(f"{role.name}_") for name in options)
    assert all(option["description"] for option in options.values())


def test_every_secret_variable_of_a_role_can_come_from_the_environment():
    assert secrets() == {"model_cache_token": "HF_TOKEN", "serving_api_key": "VLLM_API_KEY"}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("serving_api_key", "VLLM_API_KEY"),
        ("model_cache_token", "HF_TOKEN"),
        ("ansible_become_password", "ANSIBLE_BECOME_PASSWORD_FILE"),
        ("ansible_ssh_pass", "ANSIBLE_CONNECTION_PASSWORD_FILE"),
    ],
)
def test_a_secret_on_the_command_line_is_refused_unshown_with_a_better_way(name: str, way: str):
    with pytest.raises(UsageProblem) as refused:
        run_playbook("preflight.yml", "", None, ["preflight_gpu=x", f"{name}=hunter2"], "")
    assert way in str(refused.value)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("container_toolkit_min=1.20", "1.20"),  # as a number it is 1.2, which 1.19 is newer than
        ("container_toolkit_min=2", "2"),
        ("preflight_profile=null", "null"),
        ("preflight_cache=/data", "/data"),
        ("preflight_ports=[8001, 8002]", [8001, 8002]),
        ('preflight_wanted={"driver_min": "590"}', {"driver_min": "590"}),
        ("monitoring_enabled=true", True),
        ("model_cache_owner=1001", 1001),
        ("engine_image_keep_free_gb=2.5", 2.5),  # a number in its role, which adds to it
        ("monitoring_limit_acceptance_drop=0.2", 0.2),
        ("ansible_port=2222", 2222),
        ("somebody_s_version=1.20", "1.20"),
        ("somebody_s_template={{ a }}", "{{ a }}"),
        ("somebody_s_text=a=b", "a=b"),
    ],
)
def test_a_setting_s_text_stays_text_unless_it_can_only_be_a_value(text: str, value: object):
    found = dict([_setting(text)])
    assert found == {text.partition("=")[0]: value}
    assert type(*found.values()) is type(value)


def test_a_fresh_docker_gets_the_settings_and_one_restart():
    plan = hosts.docker_plan({**DOCKER, "info": INFO}, CDI)
    assert plan["settings"] == CDI
    assert plan["write"]
    assert plan["restart"]


def test_a_docker_that_does_it_by_default_is_left_alone():
    plan = hosts.docker_plan({**DOCKER, "info": {**INFO, "CDISpecDirs": ["/etc/cdi"]}}, CDI)
    assert not plan["write"]
    assert not plan["restart"]


def test_a_file_that_was_written_before_a_failed_restart_still_needs_it():
    plan = hosts.docker_plan({**DOCKER, "info": INFO, "daemon_json": CDI, "daemon_json_newer": True}, CDI)
    assert not plan["write"]
    assert plan["restart"]
    assert plan["unmet"] == ["features.cdi is False, wanted True"]


def test_a_setting_that_docker_does_not_show_is_judged_by_the_file_s_age():
    owned = {"log-opts": {"max-size": "10m"}}
    docker = {**DOCKER, "info": INFO, "daemon_json": owned}
    assert hosts.docker_plan({**docker, "daemon_json_newer": True}, owned)["restart"]
    assert not hosts.docker_plan({**docker, "daemon_json_newer": False}, owned)["restart"]


def test_a_setting_that_the_unit_sets_by_a_flag_is_reported_before_it_is_written():
    docker = {**DOCKER, "info": INFO, "unit_flags": ["data-root", "host"]}
    assert hosts.docker_plan(docker, {"data-root": "/data"})["conflicts"] == ["data-root"]


def test_an_engine_too_old_for_cdi_is_never_restarted_for_it():
    plan = hosts.docker_plan({**DOCKER, "version": "20.10.24", "info": INFO}, CDI)
    assert not plan["write"]
    assert not plan["restart"]
    assert "20.10.24" in plan["note"]


keys = st.sampled_from("abc")  # few, so that they meet
values = st.recursive(
    st.booleans() | st.integers(0, 3), lambda inner: st.dictionaries(keys, inner, max_size=3), max_leaves=6
)
objects = st.dictionaries(keys, values, max_size=3)


@given(objects, objects)
def test_merging_keeps_every_foreign_setting_and_sets_every_owned_one(present: dict, owned: dict):
    result = hosts.merged(present, owned)
    before, after, ours = hosts.leaves(present), hosts.leaves(result), hosts.leaves(owned)
    for path, value in ours.items():
        if value != {}:
            assert after[path] == value
    foreign = {path for path in before if not any(related(path, mine) for mine in ours)}
    assert {path: after[path] for path in foreign} == {path: before[path] for path in foreign}


def related(one: str, other: str) -> bool:
    """Whether one dotted path is the other, or lies above or below it."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


@given(objects, objects)
def test_after_writing_and_restarting_nothing_is_left_to_do(present: dict, owned: dict):
    docker = {**DOCKER, "info": INFO, "daemon_json": present, "daemon_json_newer": False}
    owned = {key: value for key, value in owned.items() if key not in hosts.SHOWN}
    assume({} not in hosts.leaves(owned).values())  # an empty mapping owns nothing, and no setting of ours is one
    once = hosts.docker_plan(docker, owned)
    again = hosts.docker_plan({**docker, "daemon_json": once["settings"]}, owned)
    assert not again["write"]
    assert not again["restart"]


@pytest.mark.parametrize(
    "uri",
    [
        "https://nvidia.github.io/libnvidia-container/stable/deb/$(ARCH)",
        "https://nvidia.github.io/libnvidia-container/stable/deb/amd64/",
        "http://nvidia.github.io/libnvidia-container/stable/deb/arm64",
        "https://nvidia.github.io/libnvidia-container/stable/deb",
    ],
)
def test_one_archive_is_known_under_all_its_spellings(uri: str):
    known = [{"file": "/etc/apt/sources.list.d/a.list", "uri": uri, "signed_by": "/k"}]
    wanted = "https://nvidia.github.io/libnvidia-container/stable/deb/$(ARCH)"
    assert hosts.apt_archive(known, wanted) == {"files": ["/etc/apt/sources.list.d/a.list"], "keys": ["/k"]}
    assert (
        hosts.apt_archive(known, "https://nvidia.github.io/libnvidia-container/experimental/deb/$(ARCH)")["files"] == []
    )


def test_a_rescued_failure_is_no_failure_and_an_unreachable_host_is_told_from_a_failed_one():
    lines = [
        json.dumps({"_event": event, "task": {"name": "t"}, "hosts": {host: result}})
        for event, host, result in [
            ("v2_runner_on_failed", "good", {"msg": "first try"}),
            ("v2_runner_on_ok", "good", {"changed": True}),
            ("v2_runner_on_failed", "bad", {"msg": "no space"}),
            ("v2_runner_on_unreachable", "gone", {"msg": "timed out"}),
        ]
    ]
    counts = {"good": (0, 0), "bad": (1, 0), "gone": (0, 1)}
    stats = {name: {"failures": failed, "unreachable": lost} for name, (failed, lost) in counts.items()}
    lines += ["[WARNING]: not ours", json.dumps({"_event": "v2_playbook_on_stats", "stats": stats}), '{"cut o']
    found = {host.name: host for host in read_hosts(read_events(lines))}
    assert (found["good"].problem, found["good"].changed) == (None, ["t"])
    assert (found["bad"].problem, found["bad"].reached) == ("t: no space", True)
    assert (found["gone"].problem, found["gone"].reached) == ("t: timed out", False)


def test_one_host_that_fails_among_many_is_a_row_with_its_reason_and_the_exit_code_is_one(capsys):
    good = Host("good", changed=["docker_host: Merge"], diffs=["+\tone\x1b[2J"], kind="cuda")
    made = [good, Host("bad", problem="engine_image: no space"), Host("gone", reached=False, problem="timed out")]
    assert report(made, check=False, as_json=False) == 1
    said = capsys.readouterr().out
    rows = {
        line.split()[0]: " ".join(line.split()) for line in said.splitlines() if line[:4] in {"good", "bad ", "gone"}
    }
    assert "\x1b" not in said, "a host's file moves no cursor here"
    assert rows["good"] == "good cuda done 1 not looked at"
    assert rows["bad"] == "bad failed 0 not looked at engine_image: no space"
    assert rows["gone"] == "gone could not be reached 0 not looked at timed out"
    assert report(made[:1], check=False, as_json=False) == 0
    assert report(made, check=False, as_json=True) == 1
