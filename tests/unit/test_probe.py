"""Asking an engine: once only, unless the kept answer is broken; wrong names are said with the nearest right ones."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from images.engine import Engine
from images.errors import EngineProblem
from images.probe import EngineFacts, Flag, probe, resolved_config, unknown_names

FACTS = {
    "version": "0.32.0",
    "commit": None,
    "torch": "2.13.0",
    "cuda": None,
    "python": "3.11.7",
    "platform": "cpu",
    "arch_list": [],
    "nvcc": False,
    "ninja": False,
    "flashinfer": None,
    "flags": {
        "--async-scheduling": {"choices": None, "negatable": True},
        "--mamba-backend": {"choices": ["triton", "flashinfer"], "negatable": False},
        "--speculative-config": {"choices": None, "negatable": False},
        "-tp": {"choices": None, "negatable": False},
    },
    "env": ["VLLM_CPU_KVCACHE_SPACE", "VLLM_LOGGING_LEVEL"],
}


class Scripted:
    """An engine whose interpreter is a script: it notes each question and its environment, and says what it's told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engine = Engine("cpu", "0.32.0", folder / "python", "0123456789abcdef")
        self.kept = folder / "cache" / "probes" / "cpu-0123456789abcdef.json"
        self.says(json.dumps(FACTS))

    def says(self, stdout: str, stderr: str = "", status: int = 0) -> None:
        script = (
            "#!/bin/sh\n"
            f'for last; do :; done\nprintf "%s\\n" "$last" >>{shlex.quote(str(self.folder))}/questions\n'
            f"env >{shlex.quote(str(self.folder))}/environment\n"
            f"printf %s {shlex.quote(stdout)}\nprintf %s {shlex.quote(stderr)} >&2\nexit {status}\n"
        )
        self.engine.python.write_text(script)
        self.engine.python.chmod(0o755)

    def probe(self) -> EngineFacts:
        return probe(self.engine, self.folder / "cache")

    def questions(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "questions").read_text().splitlines()]


@pytest.fixture
def scripted(tmp_path: Path) -> Scripted:
    return Scripted(tmp_path)


def test_an_engine_is_asked_once(scripted: Scripted):
    first = scripted.probe()
    scripted.says("", status=1)
    second = scripted.probe()
    assert first == second
    assert first.flags["--mamba-backend"] == Flag(("triton", "flashinfer"), False)
    assert scripted.questions() == [{"ask": "facts"}]
    assert [file.name for file in scripted.kept.parent.iterdir()] == [scripted.kept.name], "nothing half-written stays"


def test_another_build_of_the_engine_is_asked_anew(scripted: Scripted):
    scripted.probe()
    probe(Engine("cpu", "0.32.0", scripted.engine.python, "another"), scripted.folder / "cache")
    assert len(scripted.questions()) == 2


@pytest.mark.parametrize(
    "broken",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: json.dumps({**json.loads(text), "schema": 0}),
        lambda text: json.dumps({"schema": 1, "facts": {"version": "0.32.0"}}),
        lambda text: json.dumps({"schema": 1, "facts": {**FACTS, "colour": "red"}}),
        lambda text: json.dumps({"schema": 1, "facts": {**FACTS, "flags": {"--x": None}}}),
    ],
    ids=["empty", "cut short", "a list", "another schema", "keys missing", "keys unknown", "a flag of another shape"],
)
def test_a_broken_answer_is_asked_anew_and_replaced(scripted: Scripted, broken):
    asked = scripted.probe()
    whole = scripted.kept.read_text()
    scripted.kept.write_text(broken(whole))
    assert scripted.probe() == asked
    assert len(scripted.questions()) == 2
    assert scripted.kept.read_text() == whole


def test_a_cache_that_cannot_be_written_costs_only_time(scripted: Scripted, capsys):
    (scripted.folder / "cache").write_text("a file where a folder should be")
    assert scripted.probe().version == "0.32.0"
    assert "can't be kept" in capsys.readouterr().err


def test_a_compiler_installed_later_is_seen(scripted: Scripted, monkeypatch):
    monkeypatch.setattr("images.probe.shutil.which", lambda _: None)
    assert not scripted.probe().nvcc
    monkeypatch.setattr("images.probe.shutil.which", lambda name: "/here" if name == "nvcc" else None)
    assert scripted.probe().nvcc and not scripted.probe().ninja


def test_the_user_s_own_vllm_variables_do_not_reach_the_engine(scripted: Scripted, monkeypatch):
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "tpu")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    scripted.probe()
    seen = (scripted.folder / "environment").read_text()
    assert "VLLM_TARGET_DEVICE" not in seen and "PYTHONPATH" not in seen
    assert "HF_HUB_OFFLINE=1" in seen and "HOME=" in seen


def test_a_command_line_is_asked_with_its_declared_variables(scripted: Scripted):
    scripted.says('{"async_scheduling": false}')
    answer = resolved_config(scripted.engine, ["serve", "m", "--dtype", "half"], {"VLLM_CPU_KVCACHE_SPACE": "1"})
    assert answer == {"async_scheduling": False}
    assert scripted.questions() == [{"ask": "config", "argv": ["serve", "m", "--dtype", "half"]}]
    assert "VLLM_CPU_KVCACHE_SPACE=1" in (scripted.folder / "environment").read_text()


def test_an_interpreter_without_vllm_is_said_with_its_own_words(tmp_path: Path):
    with pytest.raises(EngineProblem, match=r"No module named 'vllm'[\s\S]*ended with status 1"):
        probe(Engine("bare", "0", Path(sys.executable), "none"), tmp_path)
    assert not list(tmp_path.rglob("*.json"))


def test_an_interpreter_that_is_not_there_is_said(tmp_path: Path):
    with pytest.raises(EngineProblem, match="can't be started: .*/gone: No such file"):
        probe(Engine("gone", "0", tmp_path / "gone", "none"), tmp_path)


@pytest.mark.parametrize("said", ["", "Segmentation fault", '["not", "an", "object"]'])
def test_an_answer_that_is_no_object_is_a_fault_of_the_engine(scripted: Scripted, said):
    scripted.says(said, stderr="last words")
    with pytest.raises(EngineProblem, match="last words"):
        scripted.probe()
    assert not scripted.kept.exists()


def test_an_answer_given_before_a_failure_does_not_count(scripted: Scripted):
    scripted.says(json.dumps(FACTS), stderr="killed", status=137)
    with pytest.raises(EngineProblem, match="killed[\\s\\S]*ended with status 137"):
        scripted.probe()


def test_of_a_long_failure_only_the_last_lines_are_shown(scripted: Scripted):
    scripted.says("", stderr="\n".join(f"line {n}" for n in range(100)), status=2)
    with pytest.raises(EngineProblem) as caught:
        scripted.probe()
    assert "line 99" in str(caught.value) and "line 80" not in str(caught.value)


@pytest.mark.parametrize(
    "flag",
    [
        "mamba-backend",
        "--mamba-backend",
        "--mamba_backend",
        "--mamba-backend=triton",
        "--async-scheduling",
        "--no-async-scheduling",
        "no-async-scheduling",
        "--speculative-config.method",
        "-tp",
    ],
)
def test_a_flag_is_known_in_every_spelling_the_engine_accepts(scripted: Scripted, flag):
    assert unknown_names(scripted.probe(), [flag], []) == []


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--mamba-bakend", "vLLM 0.32.0 has no flag --mamba-bakend; nearest: --mamba-backend"),
        ("no-async-schedulin", "vLLM 0.32.0 has no flag --no-async-schedulin; nearest: --no-async-scheduling, "),
        (
            "--no-mamba-backend",
            "vLLM 0.32.0 has no flag --no-mamba-backend: --mamba-backend exists, but can't be negated",
        ),
        ("--zzz", "vLLM 0.32.0 has no flag --zzz"),
        ("-pp", "vLLM 0.32.0 has no flag -pp"),
    ],
)
def test_an_unknown_flag_is_said_with_the_nearest_ones(scripted: Scripted, flag, sentence):
    (said,) = unknown_names(scripted.probe(), ["--async-scheduling", flag, flag], [])
    assert said.startswith(sentence)


def test_an_unknown_variable_of_vllm_is_said_and_another_program_s_is_not(scripted: Scripted):
    env = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_KV_CACHE_SPACE": "1"}
    (said,) = unknown_names(scripted.probe(), [], env)
    wanted = "vLLM 0.32.0 does not know VLLM_CPU_KV_CACHE_SPACE and would ignore it; nearest: VLLM_CPU_KVCACHE_SPACE"
    assert said == wanted
