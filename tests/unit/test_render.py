"""Rendering: whatever a recipe says reaches the engine unchanged, by each target, and nothing else does."""

import configparser
import csv
import gzip
import http.server
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from images.errors import UsageProblem
from recipes.render import TEMPLATES, container_name, environment, render
from recipes.spec import CACHE_ENV, Container, ServingSpec, flag_arguments

ROOT = Path(__file__).resolve().parent.parent.parent
SCHEMA = ROOT / "tests" / "fixtures" / "compose-spec.json.gz"
IMAGE = "registry.example/vllm@sha256:" + "a" * 64
DEVICE = "nvidia.com/gpu=GPU-0b7c9a52-1111-2222-3333-444455556666"
BOX = Container(IMAGE, DEVICE, Path("/srv/cache"), "private", 8, {"memlock": -1, "stack": 67108864}, 1000)
SPEC = ServingSpec(
    recipe_id="micro/mtp1",
    argv=("serve", "/srv/model", "--served-model-name", "m", "--host", "127.0.0.1", "--port", "8000"),
    env={"OMP_NUM_THREADS": "1"},
    host="127.0.0.1",
    port=8000,
    served_name="m",
    model_path=Path("/srv/model"),
    ready_timeout_s=300,
    stop_timeout_s=90,
)
EVERY_TARGET = pytest.mark.parametrize("target", TEMPLATES)

HOSTILE = (
    "'", '"', "\\", "\n", "\r", "\t", "$(touch x)", "`id`", "%n", "%%", "$$", "${HOME}", "$HOME", "\\n", "\\x24", "; ",
    " #", "# ", ": ", "- ", "&", "|", "*", "~", "\u00e9", "\U0001f600", "\u0085", "\u2028", "\ufeff", "\uffff", "\x7f",
    "\x01", '{"a": "b"}', "--rm", "=", ",", "{{ x }}", "{% x %}", "\\\n", "null", " ", "EOF",
)  # fmt: skip
ANY = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
TEXTS = st.text(ANY, max_size=12) | st.lists(st.sampled_from(HOSTILE), max_size=6).map("".join)
PATHS = TEXTS.map(lambda text: "/srv/" + text.replace("\r", ""))
FLAGS = st.booleans() | st.integers() | TEXTS | st.lists(TEXTS, max_size=3) | st.dictionaries(TEXTS, TEXTS, max_size=3)
NAMES = st.from_regex(r"[A-Z][A-Z0-9_]{0,8}", fullmatch=True) | st.sampled_from([*CACHE_ENV])


@st.composite
def specs(draw: st.DrawFn) -> ServingSpec:
    path, served_name = draw(PATHS), draw(TEXTS)
    flags = draw(st.dictionaries(st.from_regex(r"[a-z]{1,5}(-[a-z0-9]{1,5})?", fullmatch=True), FLAGS, max_size=4))
    words = [word for name, value in flags.items() for word in flag_arguments(name, value)]
    env = draw(st.dictionaries(NAMES, TEXTS, max_size=4))
    return replace(
        SPEC,
        argv=("serve", path, "--served-model-name", served_name, *words),
        env=env,
        served_name=served_name,
        model_path=Path(path),
        api_key_env=draw(st.none() | NAMES.filter(lambda name: name not in {*env, *CACHE_ENV})),
    )


@pytest.fixture(scope="module", autouse=True)
def fake_docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A `docker` that prints its arguments, each ended by a NUL, first on the PATH."""
    folder = tmp_path_factory.mktemp("bin")
    program = folder / "docker"
    program.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    program.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(folder), prepend=":")
        yield program


def run_script(text: str, **environ: str) -> subprocess.CompletedProcess:
    env = {"PATH": os.environ["PATH"], **environ}
    return subprocess.run(["bash", "-c", text], env=env, capture_output=True, check=False)


def unit_commands(text: str, key: str) -> list[list[str]]:
    """The words of each `key=` command of a unit, by the rules of systemd.syntax(7) and systemd.service(5)."""
    logical, joined = [], ""
    for line in re.split("[\n\r]", text):
        if line.lstrip().startswith(("#", ";")):
            continue
        joined += line
        if joined.endswith("\\"):
            joined = joined[:-1] + " "
        else:
            logical.append(joined)
            joined = ""
    commands = [line.removeprefix(f"{key}=") for line in logical if line.startswith(f"{key}=")]
    return [[expanded(word) for word in unit_words(command)] for command in commands]


def unit_words(line: str) -> list[bytes]:
    escapes = {"n": b"\n", "t": b"\t", "r": b"\r", "\\": b"\\", '"': b'"', "'": b"'"}
    words, word, quote, at = [], None, "", 0
    while at < len(line):
        char = line[at]
        at += 1
        if char == "\\":
            kind = line[at]
            at += 1
            if kind == "x":
                piece = bytes.fromhex(line[at : at + 2])
                at += 2
            else:
                piece = escapes[kind]
            word = (word or b"") + piece
        elif quote and char == quote:
            quote = ""
        elif not quote and char in "\"'":
            quote, word = char, word or b""
        elif not quote and char in " \t\r":
            words += [] if word is None else [word]
            word = None
        else:
            word = (word or b"") + char.encode()
    assert not quote
    return words + ([] if word is None else [word])


def expanded(word: bytes) -> str:
    """Specifiers, then variables: we write neither, so that each % and $ must be doubled."""
    text = word.decode()
    for sign in "%$":
        assert sign not in text.replace(sign * 2, ""), word
        text = text.replace(sign * 2, sign)
    return text


def docker_words(target: str, text: str) -> list[str]:
    """What the docker program is called with by a target that calls it."""
    if target == "systemd":
        (command,) = unit_commands(text, "ExecStart")
        assert command[0] == "/usr/bin/docker"
        return command[1:]
    found = run_script(text, **dict.fromkeys(re.findall(r'^: "\$\{(\w+):', text, re.M), "a-secret"))
    assert found.returncode == 0, found.stderr
    return found.stdout.decode().split("\0")[:-1]


def docker_run(target: str, text: str) -> tuple[list[tuple[str, str]], str, list[str]]:
    """Options, image and arguments of the `docker run` of a target."""
    run, *words = docker_words(target, text)
    assert run == "run"
    options = []
    while words[0].startswith("--"):
        name = words.pop(0)
        options.append((name, "" if name in {"--rm", "--read-only"} else words.pop(0)))
    return options, words[0], words[1:]


def compose_service(text: str) -> dict:
    def bare(value: object) -> object:
        if isinstance(value, dict):
            return {key: bare(item) for key, item in value.items()}
        if isinstance(value, list):
            return [bare(item) for item in value]
        if not isinstance(value, str):
            return value
        assert "$" not in value.replace("$$", ""), value
        return value.replace("$$", "$")

    return bare(yaml.safe_load(text)["services"]["vllm"])


def recover(target: str, text: str) -> tuple[list[str], dict[str, str]]:
    """argv and env of the engine, read from a rendered file as its target would read it."""
    if target == "compose":
        service = compose_service(text)
        assert service["entrypoint"] == ["vllm"]
        return service["command"], {name: value for name, value in service["environment"].items() if value is not None}
    options, image, argv = docker_run(target, text)
    assert image == IMAGE
    assert [value for name, value in options if name == "--entrypoint"] == ["vllm"]
    pairs = [value.split("=", 1) for name, value in options if name == "--env"]
    return argv, dict(pair for pair in pairs if len(pair) == 2)


def bind_mounts(target: str, text: str) -> list[tuple[str, str, bool]]:
    if target == "compose":
        mounts = compose_service(text)["volumes"]
        return [(mount["source"], mount["target"], mount.get("read_only", False)) for mount in mounts]
    lines = [value for name, value in docker_run(target, text)[0] if name == "--mount"]
    fields = [next(csv.reader([line], strict=True)) for line in lines]
    pairs = [dict(field.partition("=")[::2] for field in line) for line in fields]
    return [(pair["source"], pair["target"], "readonly" in pair) for pair in pairs]


@given(specs())
@settings(max_examples=100, deadline=None)
def test_each_target_starts_the_engine_with_the_spec_s_argv_and_environment_whatever_their_text(spec: ServingSpec):
    wanted = (list(spec.argv), {**CACHE_ENV, **spec.env})
    path = str(spec.model_path)
    for target in TEMPLATES:
        text = render(target, spec, BOX)
        assert recover(target, text) == wanted, target
        assert bind_mounts(target, text) == [("/srv/cache", "/cache", False), (path, path, True)], target


@given(specs())
@settings(max_examples=25, deadline=None)
def test_systemd_itself_finds_nothing_to_say_about_a_unit(tmp_path_factory: pytest.TempPathFactory, spec: ServingSpec):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze to verify a unit with")
    folder = tmp_path_factory.mktemp("units")
    unit = folder / f"{container_name(spec.recipe_id)}.service"
    unit.write_bytes(render("systemd", spec, BOX).replace("/usr/bin/docker", shutil.which("true")).encode())
    (folder / "docker.service").write_text(f"[Service]\nExecStart={shutil.which('true')}\n")
    found = subprocess.run(
        ["systemd-analyze", "verify", "--recursive-errors=no", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.returncode, found.stderr) == (0, "")


@given(specs())
@settings(max_examples=25, deadline=None)
def test_a_compose_file_is_valid_by_the_compose_specification_s_own_schema(spec: ServingSpec):
    import jsonschema

    for box in (BOX, replace(BOX, device=None, ulimits={})):
        document = yaml.safe_load(render("compose", spec, box))
        jsonschema.Draft202012Validator(json.loads(gzip.decompress(SCHEMA.read_bytes()))).validate(document)


@given(specs())
@settings(max_examples=25, deadline=None)
def test_both_bash_and_the_plain_shell_parse_a_script(spec: ServingSpec):
    script = render("docker", spec, BOX).encode()
    assert script.startswith(b"#!/bin/sh\n")
    for shell in ("bash", "sh"):
        found = subprocess.run([shell, "-n"], input=script, capture_output=True, check=False)
        assert (found.returncode, found.stderr) == (0, b"")


@pytest.mark.parametrize("target", ["docker", "systemd"])
def test_the_container_has_one_named_device_no_privilege_and_nowhere_to_write_but_its_cache(target: str):
    options, _, _ = docker_run(target, render(target, SPEC, BOX))
    about = [(name, value) for name, value in options if name not in {"--env", "--mount"} and "health" not in name]
    assert sorted(about) == sorted(
        {
            "--rm": "",
            "--name": "station-recipes-micro_mtp1",
            "--label": "station-recipes.recipe=micro/mtp1",
            "--pull": "never",
            "--network": "host",
            "--read-only": "",
            "--tmpfs": "/tmp:exec,mode=1777",
            "--cap-drop": "ALL",
            "--security-opt": "no-new-privileges",
            "--user": "1000:1000",
            "--ipc": "private",
            "--shm-size": "8g",
            "--device": DEVICE,
            "--stop-timeout": "90",
            "--entrypoint": "vllm",
        }.items()
        | {("--ulimit", "memlock=-1"), ("--ulimit", "stack=67108864")}
    )


def test_a_compose_service_has_the_same_limits():
    service = compose_service(render("compose", SPEC, BOX))
    for key in ("command", "environment", "volumes", "healthcheck"):
        service.pop(key)
    assert service == {
        "container_name": "station-recipes-micro_mtp1",
        "labels": {"station-recipes.recipe": "micro/mtp1"},
        "image": IMAGE,
        "pull_policy": "never",
        "network_mode": "host",
        "read_only": True,
        "tmpfs": ["/tmp:exec,mode=1777"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "user": "1000:1000",
        "ipc": "private",
        "shm_size": "8g",
        "devices": [DEVICE],
        "ulimits": {"memlock": -1, "stack": 67108864},
        "stop_grace_period": "90s",
        "entrypoint": ["vllm"],
    }


@EVERY_TARGET
def test_without_a_device_none_is_named(target: str):
    text = render(target, SPEC, replace(BOX, device=None))
    assert "device" not in text
    assert "gpu" not in text


def test_systemd_waits_longer_than_the_engine_may_take_to_stop():
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.read_string(render("systemd", SPEC, BOX))
    service = unit["Service"]
    assert int(service["TimeoutStopSec"]) > SPEC.stop_timeout_s
    assert service["ExecStop"] == "-/usr/bin/docker stop station-recipes-micro_mtp1"
    assert service["Restart"] == "on-failure"


@EVERY_TARGET
def test_the_api_key_is_named_and_its_value_stands_nowhere(target: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_API_KEY", "a-secret")
    text = render(target, replace(SPEC, api_key_env="VLLM_API_KEY"), BOX)
    assert "a-secret" not in text
    if target == "compose":
        assert compose_service(text)["environment"]["VLLM_API_KEY"] is None
    else:
        assert ("--env", "VLLM_API_KEY") in docker_run(target, text)[0]
    assert "VLLM_API_KEY" not in render(target, SPEC, BOX)


def test_without_its_api_key_nothing_starts():
    spec = replace(SPEC, api_key_env="VLLM_API_KEY")
    found = run_script(render("docker", spec, BOX))
    assert (found.returncode != 0, found.stdout) == (True, b"")
    text = render("systemd", spec, BOX)
    assert "\nEnvironmentFile=/etc/station-recipes/station-recipes-micro_mtp1.env\n" in text
    (check,) = unit_commands(text, "ExecStartPre")
    assert subprocess.run(check, env={}, capture_output=True, check=False).returncode == 1
    assert subprocess.run(check, env={"VLLM_API_KEY": "k"}, check=False).returncode == 0


class Answers(http.server.BaseHTTPRequestHandler):
    """Answers each request with the server's status, and keeps its path."""

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@EVERY_TARGET
def test_the_health_check_asks_for_health_alone_and_believes_a_200_alone(target: str):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        text = render(target, replace(SPEC, port=server.server_port), BOX)
        if target == "compose":
            kind, command = compose_service(text)["healthcheck"]["test"]
            assert kind == "CMD-SHELL"
        else:
            command = dict(docker_run(target, text)[0])["--health-cmd"]
        server.asked = []
        codes = []
        for server.status in (200, 503):
            codes.append(subprocess.run(["sh", "-c", command], check=False).returncode)
        server.shutdown()
    assert (codes, server.asked) == ([0, 1], ["/health", "/health"])


@EVERY_TARGET
def test_a_file_begins_with_what_it_is_and_how_to_start_and_stop_it(target: str):
    text = render(target, SPEC, BOX)
    comment = text[: re.search("^(?!#)", text, re.M).start()]
    assert "Recipe micro/mtp1: vLLM in a Docker container that answers on http://127.0.0.1:8000." in comment
    assert re.search("^# Start: ", comment, re.M)
    assert re.search("^# Stop: ", comment, re.M)


@EVERY_TARGET
def test_a_value_that_no_filter_quoted_stops_the_rendering(target: str):
    with pytest.raises(TypeError, match="without a filter"):
        environment(target).from_string("a{{ value }}").render(value="b; c")


WRONG = {
    "unknown target": ("composer", SPEC, "did you mean compose"),
    "a NUL in a flag": ("docker", replace(SPEC, argv=("serve", "a\0b")), "NUL"),
    "a NUL in a variable": ("systemd", replace(SPEC, env={"A": "\0"}), "NUL"),
    "not UTF-8": ("compose", replace(SPEC, argv=("serve", "\udcff")), "not valid UTF-8"),
    "a name that is none": ("compose", replace(SPEC, env={"A B": "1"}), "can't name a variable"),
    "a key that is none": ("docker", replace(SPEC, api_key_env="K:-$(id)"), "can't name a variable"),
    "a secret": ("docker", replace(SPEC, env={"K": "v"}, api_key_env="K"), "a recipe holds no secret"),
    "a relative folder": ("docker", replace(SPEC, model_path=Path("model")), "wanted an absolute path"),
    "an id of two lines": ("docker", replace(SPEC, recipe_id="a/b\nrm x"), "can't stand in a rendered file"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_can_t_be_written_down_is_refused(case: str):
    target, spec, message = WRONG[case]
    with pytest.raises(UsageProblem, match=re.escape(message)):
        render(target, spec, BOX)
