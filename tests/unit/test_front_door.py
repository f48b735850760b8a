"""The front door: exit codes, nearest names, speed, and one clear sentence when the host lacks something."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.runs import recipe, write_run

ROOT = Path(__file__).resolve().parent.parent.parent


def processor_time(action: Callable[[], object]) -> float:
    """Seconds of processor time that a command took: what it costs, whatever else the machine does."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    action()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_the_task_list_comes_at_once(inv):
    inv("--list")
    assert min(processor_time(lambda: inv("--list")) for _ in range(3)) < 0.7
    answer = inv("--list")
    assert {"reproduce", "bench", "quality", "verdict", "check", "list", "test", "lint"} <= set(answer.stdout.split())


@pytest.mark.parametrize(
    "task",
    [
        "reproduce",
        "bench",
        "quality",
        "serve",
        "status",
        "stop",
        "diff",
        "ladder",
        "lock",
        "verdict",
        "check",
        "list",
        "test",
        "lint",
    ],
)
def test_every_task_explains_itself(inv, task):
    answer = inv(task, "--help")
    assert answer.returncode == 0
    assert len(answer.stdout.split("Docstring:")[1].split("Options:")[0].split()) > 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["chekc"], "Did you mean: check?"),
        (
            ["reproduce", "--recpie", "micro"],
            "reproduce has no option --recpie. Did you mean: --recipe? `./inv reproduce --help`",
        ),
        (["reproduce", "--port=8000", "micro"], "reproduce takes no 'micro', and there is no task of that name"),
        (["--everything"], "./inv has no option --everything. `./inv --help`"),
        (["list", "everything"], "list takes no 'everything', and there is no task of that name"),
        (["reproduce", "--boots", "many"], "--boots wants a whole number, not 'many'"),
        (["reproduce", "--json", "--boots=1.5"], "--boots wants a whole number, not '1.5'"),
        (["verdict"], "run"),
        (["check"], "check needs either --recipe NAME"),
        (["check", "--recipe", "micro/bsae"], "did you mean micro/base"),
        (["reproduce", "--recipe", "micro/mtp11"], "did you mean micro/mtp1"),
        (["bench", "--recipe", "micro"], "--url"),
        (["reproduce", "--boots", "-3"], "boots"),
        (["reproduce", "--port", "80"], "port"),
        (["reproduce", "--boots", "0"], "--boots wants 1 or more"),
        (["serve", "--port=0"], "--port wants 1 or more"),
        (["reproduce", "--recipe="], "--recipe is empty"),
        (["provision", "--check", "--host", ""], "--host is empty"),
        (["provision", "--check", "--inventory", "several-hosts.yml", "--host="], "--host is empty"),
        (["doctor", "--set", "", "--json"], "--set is empty"),
        (["bundle", "--with-image="], "--with-image is empty"),
        (["verdict", ""], "RUN is empty"),
        (["--dry", "provision", "--check"], "./inv has no option --dry"),
        (["provision", "--check", "--dry"], "provision has no option --dry"),
        (["pull", "-o", "micro.tar"], "pull has no option -o. Did you mean: --out?"),
        (["verdict", "-j"], "verdict has no option -j. Did you mean: --json?"),
    ],
)
def test_wrong_usage_ends_with_2_and_says_what_to_do(inv, arguments, said):
    answer = inv(*arguments)
    assert answer.returncode == 2, answer.stderr
    assert said in answer.stderr
    assert "Traceback" not in answer.stderr


def test_no_letter_means_an_option_but_those_that_are_its_whole_name():
    import tasks
    from images.front_door import FrontDoor

    door = FrontDoor(namespace=tasks.ns)
    letters = {name: [word for word in door._options([name]) if len(word) == 2] for name in tasks.ns.task_names}
    whole = {"test": ["-k"], "diff": ["-a", "-b"], "image.diff": ["-a", "-b"]}  # of the last two by place
    assert letters == {name: whole.get(name, []) for name in tasks.ns.task_names}


def test_without_a_task_the_tasks_are_listed(inv):
    answer = inv()
    assert answer.returncode == 0 and "reproduce" in answer.stdout and answer.stderr == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["doctor", "-h", "web1"],
        ["doctor", "--json", "-h", "web1"],
        ["doctor", "-h=web1"],
        ["doctor", "-hweb1", "--json"],
        ["provision", "-h", "web1", "--recipe", "micro"],
        ["bench", "--recipe", "micro", "-h", "web1"],
    ],
    ids=" ".join,
)
def test_h_where_host_was_meant_names_host_and_does_nothing(inv, arguments):
    answer = inv(*arguments)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.count("\n") == 1 and f"./inv {arguments[0]} --host web1" in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "explained"),
    [
        (["-h"], "<subcommand>"),
        (["-h", "doctor"], "doctor"),
        (["doctor", "-h"], "doctor"),
        (["doctor", "-h", "--json"], "doctor"),
        (["doctor", "--host", "web1", "-h"], "doctor"),
        (["provision", "--help"], "provision"),
        (["bench", "-h"], "bench"),
        (["check", "-h", "micro"], "check"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_h_alone_goes_on_explaining_and_no_help_shows_it_as_another_option(inv, arguments, explained):
    answer = inv(*arguments)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.startswith(f"Usage: ./inv [--core-opts] {explained} ")
    assert "-h STRING, --host" not in answer.stdout
    if explained in {"doctor", "provision"}:
        assert "--host=STRING hosts or groups, separated by commas" in " ".join(answer.stdout.split())


def test_all_recipes_are_checked_in_under_three_seconds_without_the_engine(inv, tmp_path):
    checking = ("check", "--all", "--json")
    assert processor_time(lambda: inv(*checking, STATION_RECIPES_CACHE=str(tmp_path))) < 3
    answer = inv(*checking, STATION_RECIPES_CACHE=str(tmp_path))
    assert answer.returncode == 0
    assert not any(json.loads(answer.stdout).values())
    assert list(tmp_path.iterdir()) == []


def test_the_list_names_the_recipe_for_this_machine(inv):
    answer = json.loads(inv("list", "--json").stdout)
    assert answer["first_choice"] in {row["id"] for row in answer["recipes"]}


def test_a_verdict_through_the_front_door_prints_the_folder_last_and_exits_with_the_state(inv, tmp_path):
    run = write_run(tmp_path / "run", recipe(), boots=[])
    answer = inv("verdict", str(run))
    assert answer.returncode == 7
    assert "INVALID" in answer.stdout
    assert answer.stdout.strip().splitlines()[-1] == str(run)
    assert json.loads(inv("verdict", str(run), "--json").stdout)["state"] == "INVALID"


@pytest.mark.parametrize("words", [["--forget", "--json"], ["--forget"], ["--forget", "--gpu", "GPU-1"]])
def test_an_option_that_may_be_repeated_and_has_no_value_is_refused_in_whichever_form(inv, tmp_path, words):
    answer = inv("site", *words, STATION_RECIPES_STATE=str(tmp_path))
    assert answer.returncode == 2 and f"{words[0]} needs a value" in answer.stderr
    assert list(tmp_path.iterdir()) == [], "nothing is said or forgotten"


def test_a_folder_that_is_no_run_is_a_fault(inv, tmp_path):
    answer = inv("verdict", str(tmp_path))
    assert answer.returncode == 1
    assert "is no run folder" in answer.stderr


def test_a_server_that_does_not_answer_is_a_fault_before_any_load(inv, engine_marker):
    answer = inv("bench", "--recipe", "micro", "--url", "http://127.0.0.1:9", STATION_RECIPES_CACHE=engine_marker)
    assert answer.returncode == 1
    assert "no vLLM server answers at http://127.0.0.1:9" in answer.stderr


@pytest.fixture
def engine_marker(tmp_path, monkeypatch) -> str:
    """A cache in which the engine looks installed: these tests never start it."""
    from images.engine import MARKER, engine_home

    monkeypatch.setenv("STATION_RECIPES_CACHE", str(tmp_path))
    home = engine_home("cpu")
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "python").symlink_to(sys.executable)
    (home / MARKER).write_text("{}")
    return str(tmp_path)


ECHO = """
import sys
from invoke import Collection, task
from images.front_door import open_door
from recipes.run.supervised import interrupts_held

@task
def echo(_):
    try:
        for line in sys.stdin:
            print(line.strip(), flush=True)
    finally:
        with interrupts_held():
            print("cleaning up", flush=True)
            print(sys.stdin.readline().strip(), flush=True)

open_door(Collection(echo))
"""


@contextmanager
def front_door(ignoring: str) -> Iterator[subprocess.Popen]:
    """A task that gives back each line, and one more while it cleans up; started with these signals ignored."""
    argv = ["sh", "-c", f'trap "" {ignoring}; exec "$0" -c "$1" echo' if ignoring else 'exec "$0" -c "$1" echo']
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*argv, sys.executable, ECHO], cwd=ROOT, text=True, bufsize=1, **pipes) as door:
        try:
            door.stdin.write("ready\n")
            assert door.stdout.readline() == "ready\n"
            yield door
        finally:
            door.kill()


@pytest.mark.parametrize("asked", [["--list"], ["verdict", "--help"], ["list"]])
def test_a_list_that_nobody_reads_to_its_end_is_no_error(asked):
    reading, writing = os.pipe()
    os.close(reading)
    argv = [sys.executable, "tasks.py", *asked]
    answer = subprocess.run(argv, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (answer.returncode, answer.stderr) == (141, b"")


def test_a_closed_output_is_no_traceback():
    argv = ["sh", "-c", 'exec "$0" tasks.py --list >&-', sys.executable]
    answer = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")


@pytest.mark.parametrize("after_s", [0.05, 0.1, 0.15, 0.2, 0.3])
def test_ctrl_c_while_it_starts_is_no_traceback(after_s):
    argv = [
        sys.executable,
        "-c",
        "print(flush=True); import sys; sys.argv = ['tasks.py', 'list']; import runpy; runpy.run_path('tasks.py', run_name='__main__')",
    ]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as door:
        door.stdout.readline()  # Python itself has started
        time.sleep(after_s)
        door.send_signal(signal.SIGINT)
        told = door.communicate(timeout=30)[1]
    assert "Traceback" not in told and door.returncode in {0, 1, -signal.SIGINT}


def test_who_imports_the_tasks_keeps_ctrl_c_as_it_was():
    code = "import signal, tasks; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout == "True\n"


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_what_nohup_started_outlives_its_terminal_and_still_ends_in_order_when_asked(ending):
    with front_door(ignoring="HUP INT") as door:
        door.send_signal(signal.SIGHUP)
        door.stdin.write("alive\n")
        assert door.stdout.readline() == "alive\n"
        door.send_signal(ending)
        assert door.stdout.readline() == "cleaning up\n"
        door.send_signal(signal.SIGHUP)
        door.stdin.write("cleaned\n")
        assert door.stdout.readline() == "cleaned\n"
        door.stdin.close()
        assert (door.wait(20), door.stderr.read()) == (1, "interrupted\n")


def test_without_nohup_a_lost_terminal_ends_a_task_in_order():
    with front_door(ignoring="") as door:
        door.send_signal(signal.SIGHUP)
        assert door.stdout.readline() == "cleaning up\n"
        door.stdin.close()
        assert (door.wait(20), door.stderr.read()) == (1, "interrupted\n")


class TestFirstContact:
    """`inv` on hosts that lack something: one sentence, the remedy, no traceback, nothing half-made."""

    @pytest.fixture
    def clone(self, tmp_path: Path) -> Path:
        folder = tmp_path / "clone"
        folder.mkdir()
        for name in ("inv", "pins.txt", "tasks.py"):
            shutil.copy(ROOT / name, folder)
        return folder

    @pytest.fixture
    def programs(self, tmp_path: Path) -> Path:
        """A PATH with the shell's tools and nothing else."""
        folder = tmp_path / "bin"
        folder.mkdir()
        for name in ("sh", "dirname", "readlink", "cmp", "rm", "grep", "tail", "cp", "flock", "env", "mkdir"):
            (folder / name).symlink_to(shutil.which(name))
        return folder

    def run(self, clone: Path, programs: Path, **environ: str) -> subprocess.CompletedProcess:
        keep = {name: os.environ[name] for name in ("HOME", "PIP_CERT") if name in os.environ}
        return subprocess.run(
            [str(clone / "inv"), "--list"],
            capture_output=True,
            text=True,
            check=False,
            env={**keep, "PATH": str(programs), **environ},
            timeout=120,
        )

    def fake(self, programs: Path, name: str, script: str) -> None:
        file = programs / name
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    def test_no_python(self, clone, programs):
        answer = self.run(clone, programs)
        assert answer.returncode == 1
        assert "Python 3.11 to 3.14 is needed; found: no python3 on PATH" in answer.stderr

    def test_an_old_python(self, clone, programs):
        self.fake(programs, "python3", 'case "$2" in *platform*) echo 3.9.2;; *) exit 1;; esac')
        answer = self.run(clone, programs)
        assert answer.returncode == 1
        assert "python3 is 3.9.2" in answer.stderr and "apt install python3" in answer.stderr

    def test_no_venv_module(self, clone, programs):
        self.fake(programs, "python3", f'case "$2" in *ensurepip*) exit 1;; *) exec {sys.executable} "$@";; esac')
        answer = self.run(clone, programs)
        assert answer.returncode == 1
        assert "apt install python3-venv" in answer.stderr
        assert not (clone / ".venv").exists()

    def test_no_network(self, clone, programs):
        (programs / "python3").symlink_to(sys.executable)
        offline = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": os.devnull}
        answer = self.run(clone, programs, **offline)
        assert answer.returncode == 1
        assert "package index could not be reached" in answer.stderr
        assert not (clone / ".venv" / "pins.txt").exists(), "an interrupted environment is never taken for a whole one"

    def test_a_full_disk(self, clone, programs):
        self.fake(programs, "uv", "echo 'error: No space left on device (os error 28)' >&2; exit 2")
        (programs / "python3").symlink_to(sys.executable)
        answer = self.run(clone, programs)
        assert answer.returncode == 1
        assert "The disk is full" in answer.stderr

    @pytest.fixture
    def stale(self, clone: Path, programs: Path) -> Path:
        """The .venv of older pins, a `uv` that makes a new one of the Python it is given, and a Python on PATH."""
        (clone / "tasks.py").write_text("print('ran')\n")
        (clone / ".venv" / "bin").mkdir(parents=True)
        (clone / ".venv" / "pins.txt").write_text("older\n")
        for name in ("python", "python3", "python3.11", "python3.12", "python3.13", "python3.14"):
            (clone / ".venv" / "bin" / name).symlink_to(sys.executable)
        (programs / "ln").symlink_to(shutil.which("ln"))
        making = '"$4" -c "" && mkdir -p "$5/bin" && ln -s "$4" "$5/bin/python"'
        self.fake(programs, "uv", f'case "$1" in venv) {making};; esac')
        return clone / ".venv"

    @pytest.mark.parametrize("spelled", ["clone/.venv/bin", "clone/../clone/.venv/bin/", "link/.venv/bin"])
    def test_an_activated_environment_is_made_anew_with_the_python_behind_it(self, stale, clone, programs, spelled):
        (clone.parent / "link").symlink_to(clone)
        (programs / "python3").symlink_to(sys.executable)
        answer = self.run(clone, programs, PATH=f"{clone.parent}/{spelled}:{programs}")
        assert (answer.returncode, answer.stdout) == (0, "ran\n"), answer.stderr
        assert os.readlink(stale / "bin" / "python") == str(programs / "python3")

    def test_the_environment_s_own_python_is_never_the_one_to_make_it_anew(self, stale, clone, programs):
        own = str(stale / "bin" / "python3")
        answer = self.run(clone, programs, PATH=f"{stale / 'bin'}:{programs}", STATION_RECIPES_PYTHON=own)
        assert answer.returncode == 1
        assert f"{own} is in {stale}, which is to be made anew" in answer.stderr
        assert Path(own).exists(), "nothing was deleted"

    def test_a_python_that_was_upgraded_under_the_environment_has_it_made_anew(self, stale, clone, programs):
        shutil.copy(clone / "pins.txt", stale / "pins.txt")
        (stale / "bin" / "python").unlink()
        bare = Path(sys.base_prefix) / "bin" / "python3"
        self.fake(stale / "bin", "python", f'exec {bare} -S "$@"')  # it starts, and finds no package
        (programs / "python3").symlink_to(sys.executable)
        answer = self.run(clone, programs)
        assert (answer.returncode, answer.stdout) == (0, "ran\n"), answer.stderr
        assert os.readlink(stale / "bin" / "python") == str(programs / "python3")
