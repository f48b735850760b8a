"""The main job on the real engine, from the front door to the verdict."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from bench.runfolder import seal_faults
from recipes.load import load_recipe
from recipes.run.supervisor import descendants_of
from tests.disturbed import failed
from tests.ports import free_port

ROOT = Path(__file__).resolve().parent.parent.parent
PROMISED = {
    "manifest.json",
    "recipe.yaml",
    "claims.json",
    "machine.json",
    "prompts.sha256",
    "SHA256SUMS",
    "verdict.json",
}
BOOT_FILES = {"argv.json", "env.json", "server.log.gz"}


def test_the_default_recipe_ends_in_its_verdict_without_a_compiler(reproduced):
    verdict = json.loads((reproduced.run / "verdict.json").read_text())
    assert reproduced.code == 0, reproduced.stderr
    assert verdict["state"] in {"REPRODUCED", "MEASURED"}
    blind = {guard["id"] for guard in verdict["guards"] if guard["ok"] is None}
    # What was timed depends on what else this machine does; what was counted does not.
    assert (failed(verdict, "run"), blind) == (set(), set())
    rates = verdict["output_tok_s"]
    if failed(verdict, "timing"):
        assert set(rates.values()) == {None}
    else:
        assert rates["steady"] > rates["whole"] * 0.98 > 0
    assert verdict["acceptance_length"] > 1
    assert "no recipe is made for it" in reproduced.stderr, "it says which recipe it picked, and why"


def test_the_run_folder_is_complete_sealed_small_and_names_nobody_s_disk(reproduced):
    assert {path.name for path in reproduced.run.iterdir()} == PROMISED | {"boots", "quality"}
    assert {path.name for path in (reproduced.run / "boots/1").iterdir()} == BOOT_FILES | {"w1"}
    assert {path.name for path in (reproduced.run / "boots/1/w1").iterdir()} == {
        "client.npz",
        "counters.json",
        "telemetry.npz",
    }
    assert seal_faults(reproduced.run) == []
    assert sum(file.stat().st_size for file in (reproduced.run / "boots/1/w1").iterdir()) < 3e6
    argv = json.loads((reproduced.run / "boots/1/argv.json").read_text())
    assert argv["live"] == argv["rendered"] and "--no-async-scheduling" in argv["live"]
    for file in reproduced.run.rglob("*.json"):
        assert str(Path.home()) + "/" not in file.read_text() and str(ROOT) not in file.read_text()


def test_judging_the_run_again_gives_the_same_bytes(reproduced, inv):
    before = (reproduced.run / "verdict.json").read_bytes()
    assert inv("verdict", str(reproduced.run)).returncode == reproduced.code
    assert (reproduced.run / "verdict.json").read_bytes() == before


def test_each_process_stays_under_a_third_of_eight_gigabytes(reproduced):
    assert 0.3 < reproduced.peak_gb < 8 / 3


class Reproduction:
    """`./inv reproduce` in the background, to be disturbed."""

    def __init__(self, out: Path) -> None:
        self.err = out / "stderr"
        self.out = out
        with self.err.open("w") as err, (out / "stdout").open("w") as stdout:
            self.port = free_port()
            argv = [str(ROOT / "inv"), "reproduce", "--out", str(out / "runs"), "--port", str(self.port)]
            self.process = subprocess.Popen(argv, stdout=stdout, stderr=err)
        self.seen: set[int] = set()

    def wait_for(self, text: str, limit_s: float = 180) -> None:
        deadline = time.monotonic() + limit_s
        while text not in self.err.read_text():
            assert self.process.poll() is None, self.err.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)

    def wait_running(self) -> None:
        """Until the window's requests are in flight, as the server counts them."""
        self.wait_for("window 1, ")
        deadline = time.monotonic() + 180
        while self.in_flight() < 8:
            assert time.monotonic() < deadline, self.err.read_text()
            time.sleep(0.2)
        time.sleep(1)
        self.seen = set(self.descendants())

    def in_flight(self) -> float:
        with suppress(httpx.HTTPError):
            text = httpx.get(f"http://127.0.0.1:{self.port}/metrics", timeout=5).text
            found = re.search(r"^vllm:num_requests_running\S* (\S+)$", text, re.M)
            return float(found[1]) if found else 0
        return 0

    def descendants(self) -> list[int]:
        return descendants_of(self.process.pid)

    def finish(self, limit_s: float) -> dict:
        self.process.wait(timeout=limit_s)
        run = Path((self.out / "stdout").read_text().strip().splitlines()[-1])
        return json.loads((run / "verdict.json").read_text())

    def orphans(self) -> list[int]:
        return [pid for pid in self.seen if Path(f"/proc/{pid}/cmdline").exists() and command(pid)]


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


@pytest.fixture
def reproduction(tmp_path: Path):
    started = Reproduction(tmp_path)
    yield started
    started.process.kill()
    started.process.wait()


def test_an_engine_killed_in_a_window_leaves_an_invalid_run_and_no_orphan(reproduction):
    reproduction.wait_running()
    victim = next(pid for pid in reproduction.descendants() if command(pid).startswith("VLLM::EngineCore"))
    os.kill(victim, signal.SIGKILL)
    verdict = reproduction.finish(limit_s=60)
    assert reproduction.process.returncode == 7
    assert verdict["state"] == "INVALID"
    finished = next(guard for guard in verdict["guards"] if guard["id"] == "finished")
    assert "boot 1 window 1: the engine ended during the window" in finished["observed"]
    assert set(verdict["output_tok_s"].values()) == {None}
    assert reproduction.orphans() == []


@pytest.mark.parametrize("moment", ["boot 1: starting the engine", "boot 1: warming up", "running"])
def test_ctrl_c_at_any_stage_keeps_the_run_and_ends_everything_within_ten_seconds(reproduction, moment):
    if moment == "running":
        reproduction.wait_running()
    else:
        reproduction.wait_for(moment)
        time.sleep(4 if "boot" in moment else 1)
    reproduction.seen = set(reproduction.descendants())
    assert reproduction.seen
    started = time.monotonic()
    reproduction.process.send_signal(signal.SIGINT)
    verdict = reproduction.finish(limit_s=30)
    assert time.monotonic() - started < 10
    assert reproduction.process.returncode == 7
    assert verdict["state"] == "INVALID"
    assert "interrupted" in next(guard for guard in verdict["guards"] if guard["id"] == "finished")["observed"]
    assert reproduction.orphans() == []


SERVER = """
import http.server, json, sys
class Answers(http.server.BaseHTTPRequestHandler):
    posts = 0
    def do_GET(self):
        text = {"/v1/models": '{"data": [{"id": "micro"}]}', "/version": '{"version": "0.32.0"}'}.get(self.path, "")
        if self.path == "/metrics":
            text = "# TYPE vllm:request_success_total counter\\nvllm:request_success_total{finished_reason=\\"length\\"} 0\\n"
        self.send(200, text)
    def do_POST(self):
        Answers.posts += 1
        self.rfile.read(int(self.headers["content-length"]))
        self.send(200 if Answers.posts <= int(sys.argv[2]) else 500, "{}")
    def send(self, status, text):
        self.send_response(status); self.send_header("content-length", str(len(text))); self.end_headers()
        self.wfile.write(text.encode())
    def log_message(self, *a): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""


@pytest.mark.parametrize(("accepted", "stage"), [(0, "warm-up"), (32, "window")])
def test_when_every_request_fails_there_is_no_number_and_no_exit_0(inv, tmp_path, accepted, stage):
    assert 2 * load_recipe("micro").recipe.benchmark.concurrency == 32
    port = free_port()
    server = subprocess.Popen([sys.executable, "-c", SERVER, str(port), str(accepted)])
    try:
        time.sleep(1)
        answer = inv(
            "bench", "--recipe", "micro", "--url", f"http://127.0.0.1:{port}", "--out", str(tmp_path), "--json"
        )
    finally:
        server.kill()
        server.wait()
    verdict = json.loads(answer.stdout)
    assert answer.returncode == 7
    assert verdict["state"] == "INVALID"
    assert set(verdict["output_tok_s"].values()) == {None}
    observed = {guard["id"]: guard["observed"] for guard in verdict["guards"] if guard["ok"] is False}
    assert ("finished" in observed) if stage == "warm-up" else observed["completed"] == 0
