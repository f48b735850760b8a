"""A recipe served in a container: the same options as the rendered script, and nothing of others is touched."""

import json
import os
import signal
import subprocess
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from bench.plan import Options, gather
from images.errors import EngineProblem
from recipes.render import container_name, render
from recipes.run.docker import connect, create, remove
from tests.docker.conftest import ROOT, docker, inv
from tests.docker.elsewhere import another_machine
from tests.ports import free_port

NAME = container_name("micro/mtp1")
# What two containers of one spec may differ in: names, the moment, and labels that only a started server needs.
OWN = {"Hostname", "Labels", "Id", "Name"}


@pytest.fixture
def plan(cpu_image):
    return gather(Options("micro/mtp1", free_port(), runtime="docker"))


def inspected(container: str) -> dict:
    data = json.loads(docker("container", "inspect", container).stdout)[0]
    config = {key: value for key, value in data["Config"].items() if key not in OWN}
    config["Env"] = sorted(config["Env"])
    host = {
        key: value for key, value in data["HostConfig"].items() if value
    }  # the two clients spell "unset" in two ways
    if host["RestartPolicy"]["Name"] in {"", "no"}:
        del host["RestartPolicy"]
    host["Mounts"] = sorted(host["Mounts"], key=lambda mount: mount["Target"])
    for mount in host["Mounts"]:
        mount.setdefault("ReadOnly", False)
    config = {key: value for key, value in config.items() if value and not key.startswith("Attach")}
    return {"config": config, "host": host, "path": data["Path"], "args": data["Args"]}


def test_the_sdk_starts_what_the_rendered_script_says(plan, tmp_path):
    box = replace(plan.box, cache=tmp_path)  # a rendered file names a folder; a run of ours has a volume
    script = render("docker", plan.spec, box).replace("exec docker run", "exec docker create")
    rendered = subprocess.run(["sh"], input=script, capture_output=True, text=True, check=True).stdout.strip()
    by_script = inspected(rendered)
    docker("rm", rendered)
    with closing(connect()) as client:
        container = create(client, plan.spec, box, "server")
        by_sdk = inspected(container.id)
        remove(container)
    by_script["config"].pop("StopTimeout")  # the SDK can't say it; `./inv stop` and the run name the time themselves
    by_script["host"].pop("AutoRemove", None)  # the script's --rm; the SDK's run reads the exit state first
    assert by_sdk["args"] == by_script["args"] == list(plan.spec.argv) and by_sdk["path"] == "vllm"
    assert by_sdk["config"] == by_script["config"]
    assert by_sdk["host"] == by_script["host"]


def test_a_container_of_others_under_our_name_is_left_alone(plan, cpu_image):
    theirs = docker("create", "--name", NAME, "--entrypoint", "true", cpu_image.id).stdout.strip()
    try:
        answer = inv("quality", "--recipe", "micro/mtp1", "--runtime", "docker", "--port", str(free_port()))
        assert "exists that isn't ours" in answer.stderr + answer.stdout
        assert docker("container", "inspect", theirs).returncode == 0, "it is still there"
    finally:
        docker("rm", theirs)


def test_a_server_in_a_container_is_found_refused_twice_and_stopped(cpu_image, tmp_path):
    port = str(free_port())
    state = {"STATION_RECIPES_STATE": str(tmp_path)}
    started = inv("serve", "--recipe", "micro/mtp1", "--runtime", "docker", "--port", port, "--json", **state)
    assert started.returncode == 0, started.stderr
    record = json.loads(started.stdout)
    try:
        (seen,) = [each for each in json.loads(inv("status", "--json", **state).stdout) if each["port"] == int(port)]
        assert (seen["state"], seen["recipe"], seen["in_flight"]) == ("ready", "micro/mtp1", 0)
        again = inv("serve", "--recipe", "micro/mtp1", "--runtime", "docker", "--port", str(free_port()), **state)
        assert again.returncode == 1 and "is already running in the container" in again.stderr
    finally:
        stopped = inv("stop", "--port", port, "--json", **state)
    assert json.loads(stopped.stdout) == {"port": int(port), "recipe": "micro/mtp1", "was": "ready", "cut": 0}
    assert docker("container", "inspect", record["container"]).returncode != 0


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_no_container_outlives_a_reproduce_that_is_killed_or_interrupted(cpu_image, tmp_path, ending):
    argv = [str(ROOT / "inv"), "reproduce", "--runtime", "docker", "--port", str(free_port()), "--out", str(tmp_path)]
    with (tmp_path / "err").open("w") as err:
        process = subprocess.Popen(argv, stderr=err, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        wait(lambda: docker("ps", "--quiet", "--filter", f"name={NAME}").stdout, 120)
        time.sleep(3)
        os.kill(process.pid, ending)
        process.wait(timeout=60)
        wait(lambda: not docker("ps", "--quiet", "--filter", f"name={NAME}").stdout, 30)
    finally:
        process.kill()
        docker("rm", "--force", NAME)
    (run,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert inv("verdict", str(run)).returncode == 7


def wait(condition, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.3)


def test_an_image_that_is_gone_is_said_with_the_way_to_it(plan):
    box = replace(plan.box, image="sha256:" + "0" * 64)
    with pytest.raises(EngineProblem, match=r"has no image sha256:0+: \./inv build makes or pulls it"):
        create(connect(), plan.spec, box, "server")


def test_a_reproduce_in_containers_ends_as_the_process_run_does(cpu_image, tmp_path):
    port = str(free_port())
    answer = inv("reproduce", "--recipe", "micro", "--runtime", "docker", "--port", port, "--out", str(tmp_path))
    assert answer.returncode == 0, answer.stderr + answer.stdout
    run = Path(answer.stdout.strip().splitlines()[-1])
    verdict = json.loads((run / "verdict.json").read_text())
    assert verdict["state"] == "REPRODUCED"
    # Guards on timing may fail beside other work, and void rates alone: this recipe claims none.
    passed = {guard["id"] for guard in verdict["guards"] if guard["ok"]}
    assert passed >= {"seal", "finished", "completed", "generation_tokens", "live_argv", "live_env", "image_digest"}
    assert {claim["state"] for claim in verdict["claims"]} == {"REPRODUCED"}
    argv = json.loads((run / "boots/1/argv.json").read_text())
    assert argv["live"] == argv["rendered"] and argv["live"][:2] == ["vllm", "serve"]
    # The argv after the program, and the claims that are judged, are those of a process run.
    published = next((ROOT / "results/cpu-x86-64/micro").glob("*-micro-mtp1-1e8267"))
    by_process = json.loads((published / "boots/1/argv.json").read_text())["live"]
    start = by_process.index("serve")
    assert without_port(argv["live"][1:]) == without_port(by_process[start:])
    judged = json.loads((published / "verdict.json").read_text())["claims"]
    assert [claim["id"] for claim in verdict["claims"]] == [claim["id"] for claim in judged]
    assert {file.name for file in (run / "boots/1/w1").iterdir()} == {"client.npz", "counters.json", "telemetry.npz"}
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["engine"]["image"]["id"] == cpu_image.id == manifest["boots"][0]["image"]
    assert docker("ps", "--all", "--quiet", "--filter", "label=station-recipes.recipe=micro/mtp1").stdout == ""


def without_port(argv: list[str]) -> list[str]:
    at = argv.index("--port")
    return [*argv[:at], *argv[at + 2 :]]


@pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace is made as root only")
def test_a_docker_engine_on_another_machine_serves_over_ssh(cpu_image, tmp_path):
    """The other machine sees nothing of this one but ssh: no port, no folder."""
    with another_machine(tmp_path) as (there, environ):
        argv = [*there, str(ROOT / "inv"), "reproduce", "--recipe", "micro", "--runtime", "docker"]
        argv += ["--port", str(free_port()), "--out", str(tmp_path / "runs"), "--json"]
        answer = subprocess.run(argv, capture_output=True, text=True, check=False, env={**os.environ, **environ})
        assert answer.returncode == 0, answer.stderr + answer.stdout
        assert json.loads(answer.stdout)["state"] == "REPRODUCED"
        assert f"asking {environ['DOCKER_HOST']} what it is" in answer.stderr, "the run's facts are that machine's"
