"""The role monitoring against a real Prometheus: every panel answers, every alert fires when it should and only then."""

import json
import math
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import httpx
import pytest
import yaml

from tests.host.playbook import ANSIBLE, play
from tests.replay import LOADED, Replay, families, recorded

SERVER, PROMETHEUS, EXPORTER, ALONE = 5451, 5452, 5453, 5454
WINDOW = "10s"
# As an H200 said it, driver 580.159.04, and a second GPU that tells little, as display cards do.
GPUS = """GPU-9b35ad4f-7118, NVIDIA H200, 143771, 616, 0, 78.91, 700.00, 35, 52, 345, 0, 0x0000000000000004
GPU-00000000-0001, NVIDIA RTX PRO 2000, 16311, 12, [N/A], 9.50, [N/A], 41, [N/A], 210, [N/A], 0x0000000000000001
"""

pytestmark = pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no prometheus (tests/apt.txt)")


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    """The folder that the role writes, for a Prometheus of the user's own; a second time it changes nothing."""
    folder = tmp_path_factory.mktemp("monitoring")
    variables = {
        "monitoring_enabled": True,
        "monitoring_services": False,
        "monitoring_targets": [f"127.0.0.1:{SERVER}"],
        "monitoring_exporter_listen": f"127.0.0.1:{EXPORTER}",
        "monitoring_listen": f"127.0.0.1:{PROMETHEUS}",
        "monitoring_scrape_interval_s": 1,
        "monitoring_config_folder": str(folder / "config"),
        "monitoring_grafana_provisioning": str(folder / "grafana"),
    }
    for kind in ("datasources", "dashboards"):
        (folder / "grafana" / kind).mkdir(parents=True)
    checked = play(folder, "monitoring", "--check", **variables)
    assert (checked.code, (folder / "config").exists()) == (0, False), checked.text
    assert checked.changed > 0
    applied = play(folder, "monitoring", **variables)
    assert applied.code == 0, applied.text
    again = play(folder, "monitoring", **variables)
    assert (again.code, again.changed) == (0, 0), again.text
    return folder / "config"


def panels(config: Path) -> list[dict]:
    board = json.loads((config / "dashboards" / "station-recipes.json").read_text())
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def fake_driver(folder: Path, said: str = GPUS, code: int = 0, lacks: str = "") -> dict[str, str]:
    """An environment in which nvidia-smi is a stub that answers `said`; it refuses to be asked for the field `lacks`."""
    folder.mkdir(exist_ok=True)
    refusal = (
        f'case "$1" in *{lacks}*) echo \'Field "{lacks}" is not a valid field to query.\'; exit 2;; esac\n'
        if lacks
        else ""
    )
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{refusal}cat <<'EOF'\n{said}EOF\nexit {code}\n")
    (folder / "nvidia-smi").chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:/usr/bin:/bin"}


def start_exporter(environ: dict, cache: Path, port: int = EXPORTER) -> subprocess.Popen:
    script = ANSIBLE / "roles" / "monitoring" / "files" / "station_exporter.py"
    argv = ["/usr/bin/python3", str(script), "--listen", f"127.0.0.1:{port}", "--cache", str(cache)]
    return subprocess.Popen(argv, env=environ)


def get(url: str, timeout_s: float = 20, **query: str) -> httpx.Response:
    """GET, waiting for a server that starts."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            answer = httpx.get(url, params=query, trust_env=False, timeout=10)
            if answer.status_code != 503:
                return answer
        except httpx.TransportError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def wait_for_window(address: str) -> None:
    """Wait until a whole window of samples is there: rates over less are extrapolated by halves."""
    deadline = time.monotonic() + 90
    enough = f'count_over_time(up{{job="vllm"}}[{WINDOW}]) >= 9 and on () count_over_time(up{{job="station"}}[{WINDOW}]) >= 9'
    while not ask(address, enough):
        assert time.monotonic() < deadline, "Prometheus scrapes too slowly"
        time.sleep(0.5)


@pytest.fixture(scope="module")
def prometheus(config, tmp_path_factory) -> str:
    """A real Prometheus with the role's configuration, after it has seen the servers for a while; its address."""
    folder = tmp_path_factory.mktemp("prometheus")
    server = Replay(SERVER)
    address = f"127.0.0.1:{PROMETHEUS}"
    argv = ["prometheus", f"--config.file={config}/prometheus.yml", f"--web.listen-address={address}"]
    with (folder / "log").open("w") as log:
        programs = [start_exporter(fake_driver(folder / "bin"), folder)]
        programs.append(subprocess.Popen([*argv, f"--storage.tsdb.path={folder}/data"], stderr=log))
        try:
            assert get(f"http://{address}/-/ready").status_code == 200, (folder / "log").read_text()
            wait_for_window(f"http://{address}")
            yield f"http://{address}"
        finally:
            for program in programs:
                program.terminate()
            for program in programs:
                program.wait(timeout=20)
            server.close()


def ask(prometheus: str, expr: str) -> list[dict]:
    answer = get(f"{prometheus}/api/v1/query", query=expr).json()
    assert answer["status"] == "success", (expr, answer)
    return answer["data"]["result"]


def test_every_query_of_every_panel_answers_with_figures_and_its_legend_s_labels(config, prometheus):
    asked = 0
    for panel in panels(config):
        for target in panel["targets"]:
            expr = (
                target["expr"].replace("[$__rate_interval]", f"[{WINDOW}]").replace("$host", ".*").replace("$gpu", ".*")
            )
            assert "$" not in expr, "a choice that the dashboard doesn't have"
            result = ask(prometheus, expr)
            assert result, (panel["title"], expr)
            assert all(math.isfinite(float(each["value"][1])) for each in result), (panel["title"], result)
            labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert all(labels <= each["metric"].keys() for each in result), (panel["title"], labels, result)
            asked += 1
    assert asked >= 30


def test_figures_are_the_ones_that_were_recorded(config, prometheus):
    expr = {panel["title"]: panel["targets"][0]["expr"] for panel in panels(config)}

    def value(title: str) -> float:
        query = expr[title].replace("[$__rate_interval]", f"[{WINDOW}]").replace("$host", ".*").replace("$gpu", ".*")
        return float(ask(prometheus, query)[0]["value"][1])

    # Between the recordings: 2,160 tokens, 1,044 of 1,098 drafts accepted; the replay takes 10 s for it.
    wanted = {
        "Output tokens": pytest.approx(216, rel=0.05),
        "Acceptance length": pytest.approx(1 + 1044 / 1098, abs=0.005),
        "Prompt tokens found in the prefix cache": pytest.approx(0.4, abs=0.01),
        "Energy an output token": pytest.approx((78.91 + 9.5) / 216, rel=0.05),
    }
    # A scrape that the machine holds up makes one window's rate too low and the next one's too high.
    deadline = time.monotonic() + 60
    while (found := {title: value(title) for title in wanted}) != wanted and time.monotonic() < deadline:
        time.sleep(1)
    assert found == wanted


def test_the_rules_are_loaded_and_healthy_and_the_targets_are_up(prometheus):
    groups = get(f"{prometheus}/api/v1/rules").json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) >= 12 and {rule["health"] for rule in rules} == {"ok"}
    assert {each["metric"]["job"]: each["value"][1] for each in ask(prometheus, "up")} == {"vllm": "1", "station": "1"}


def test_every_vllm_metric_that_an_alert_reads_is_one_that_vllm_has(config):
    told = families(recorded(LOADED)).keys()
    read = set(re.findall(r"vllm:\w+", (config / "alerts.yml").read_text()))
    assert len(read) >= 5 and read <= told


# What a healthy host says, minute by minute.
HEALTHY = {
    'up{job="vllm"}': "1x{n}",
    'up{job="station"}': "1x{n}",
    "vllm:num_requests_running": "4x{n}",
    "vllm:num_requests_waiting": "2x{n}",
    "vllm:generation_tokens_total": "0+600x{n}",
    'vllm:request_success_total{finished_reason="length"}': "0+6x{n}",
    'vllm:request_success_total{finished_reason="error"}': "0x{n}",
    "vllm:spec_decode_num_drafts_total": "0+100x{n}",
    "vllm:spec_decode_num_accepted_tokens_total": "0+90x{n}",
    "station_gpu_query_ok": "1x{n}",
    'station_gpu_throttled{reason="hw_thermal_slowdown"}': "0x{n}",
    'station_gpu_throttled{reason="sw_power_cap"}': "1x{n}",
    "station_gpu_temperature_celsius": "70x{n}",
    "station_gpu_thermal_margin_celsius": "30x{n}",
    "station_gpu_memory_used_bytes": "90x{n}",
    "station_gpu_memory_total_bytes": "100x{n}",
    "station_cache_free_bytes": "50x{n}",
    "station_cache_size_bytes": "100x{n}",
}
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
# What differs from a healthy host, the minute that is looked at, and what fires then.
CASES = [
    ({}, 30, []),
    ({}, 1600, []),
    ({'up{job="vllm"}': "1x10 0x20"}, 13, ["ServerDown"]),
    ({'up{job="vllm"}': "1x10 0 1x20"}, 11, []),
    ({"vllm:generation_tokens_total": "5000x30"}, 10, ["NoTokens"]),
    ({"vllm:generation_tokens_total": "5000x30", "vllm:num_requests_running": "0x30"}, 10, []),
    ({"vllm:generation_tokens_total": "0+600x5 3000x2 3600+600x30"}, 10, []),
    ({"vllm:generation_tokens_total": "0+600x5 3000x30"}, 11, []),
    ({"vllm:num_requests_waiting": "0+5x30"}, 25, ["QueueGrows"]),
    ({"vllm:num_requests_waiting": "100x30"}, 25, []),
    ({"vllm:num_requests_waiting": "0+1x30"}, 25, []),
    ({"vllm:num_requests_waiting": "2x20 100x30"}, 23, []),
    ({'vllm:request_success_total{finished_reason="error"}': "0x5 1x30"}, 8, ["RequestsFail"]),
    ({ACCEPTED: "0+90x1500 135050+50x100"}, 1560, ["AcceptanceDropped"]),
    ({ACCEPTED: "0+90x1500 135050+50x100"}, 1510, []),
    ({ACCEPTED: "0+90x1500 135085+85x100"}, 1560, []),
    ({"station_gpu_query_ok": "0x30"}, 10, ["GpuUnreadable"]),
    ({'station_gpu_throttled{reason="hw_thermal_slowdown"}': "1x30"}, 10, ["GpuThrottled"]),
    ({'station_gpu_throttled{reason="hw_thermal_slowdown"}': "1 0 1 1 0 1 1 1 0 1 1"}, 10, []),
    ({"station_gpu_temperature_celsius": "90x30"}, 10, ["GpuHot"]),
    ({"station_gpu_thermal_margin_celsius": "3x30"}, 10, ["GpuHot"]),
    ({"station_gpu_memory_used_bytes": "98x30"}, 15, ["HbmNearlyFull"]),
    ({"station_cache_free_bytes": "5x30"}, 20, ["CacheDiskNearlyFull"]),
    ({'up{job="station"}': "0x30"}, 10, ["ExporterDown"]),
]
# A minute after it began, nothing has lasted long enough.
CASES += [(differs, 1, []) for differs, _, fires in CASES if fires]


def test_every_alert_fires_when_it_should_and_nothing_else_does(config):
    tests = []
    for differs, minute, fires in CASES:
        firing = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in fires]
        looked = {"expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": f"{minute}m"}
        healthy = {name: values.format(n=minute + 2) for name, values in HEALTHY.items()}
        series = [{"series": name, "values": values} for name, values in {**healthy, **differs}.items()]
        tests.append(
            {"interval": "1m", "input_series": series, "promql_expr_test": [{**looked, "exp_samples": firing}]}
        )
    (config / "cases.yml").write_text(json.dumps({"rule_files": ["alerts.yml"], "tests": tests}))
    answer = subprocess.run(
        ["promtool", "test", "rules", "cases.yml"], cwd=config, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    (group,) = yaml.safe_load((config / "alerts.yml").read_text())["groups"]
    alerts = {rule["alert"] for rule in group["rules"] if "alert" in rule}
    assert alerts == {name for _, _, fires in CASES for name in fires}


@pytest.fixture
def exported(tmp_path):
    """exported(said, code) → what the exporter answers while nvidia-smi says that."""

    def run(said: str, code: int = 0, cache: Path = tmp_path, lacks: str = "") -> str:
        exporter = start_exporter(fake_driver(tmp_path / "bin", said, code, lacks), cache, ALONE)
        try:
            return get(f"http://127.0.0.1:{ALONE}/metrics").text
        finally:
            exporter.terminate()
            exporter.wait(timeout=10)

    return run


def test_the_exporter_leaves_out_what_the_driver_does_not_tell(exported):
    text = exported(GPUS)
    assert 'station_gpu_power_limit_watts{uuid="GPU-9b35ad4f-7118",name="NVIDIA H200"} 700.0' in text
    assert 'station_gpu_throttled{uuid="GPU-9b35ad4f-7118",name="NVIDIA H200",reason="sw_power_cap"} 1.0' in text
    display = [line for line in text.splitlines() if "GPU-00000000-0001" in line]
    assert any("station_gpu_power_watts" in line for line in display)
    assert not any("power_limit" in line or "utilization" in line for line in display)
    assert "station_cache_free_bytes " in text


def test_a_driver_that_fails_is_said_and_no_cache_is_no_figure(exported, tmp_path):
    text = exported("Unable to determine the device handle for GPU: GPU is lost\n", 15, tmp_path / "none")
    assert "station_gpu_query_ok 0.0" in text and "station_gpu_power" not in text and "station_cache" not in text


def test_a_driver_that_does_not_know_a_field_is_asked_for_the_others(exported):
    older = (
        "\n".join(", ".join([*line.split(", ")[:8], *line.split(", ")[9:]]) for line in GPUS.strip().splitlines())
        + "\n"
    )
    text = exported(older, lacks="temperature.gpu.tlimit")
    assert 'station_gpu_sm_clock_hertz{uuid="GPU-9b35ad4f-7118",name="NVIDIA H200"} 345000000.0' in text
    assert "station_gpu_temperature_celsius" in text and "thermal_margin" not in text
