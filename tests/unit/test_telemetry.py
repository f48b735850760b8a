"""Telemetry: nothing is made up, everything missing has a reason, and the sampler costs next to nothing."""

import math
import os
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bench.conditions import GpuMeans, gpu_means
from bench.energy import energy, gpu_memory_gb
from bench.telemetry.devices import DeviceError, Probe, open_devices
from bench.telemetry.sampler import Sampler, Watched
from bench.telemetry.store import MAX_BYTES, Telemetry, read_telemetry, save_telemetry
from bench.telemetry.window import window_figures
from images.errors import RunProblem

LOST, UNSUPPORTED = "NVMLError_GpuIsLost", "NVMLError_NotSupported"


class ScriptedGpu:
    """A GPU whose every answer is written down in advance: a value, or the name of the driver's error."""

    def __init__(self, pids=(), **scripts) -> None:
        self.uuid, self.facts, self._pids = "GPU-scripted", {"memory_total_b": 80e9}, pids
        self.probes = tuple(Probe(name, self._teller(script)) for name, script in scripts.items())

    @staticmethod
    def _teller(script):
        number = count()

        def tell() -> float:
            said = script(next(number)) if callable(script) else script
            if isinstance(said, str):
                raise DeviceError(said)
            return said

        return tell

    def processes(self) -> list[int]:
        return list(self._pids)


def sampled(gpus, seconds: float, watched=list, rate_hz: float = 50) -> Telemetry:
    sampler = Sampler(gpus, watched, None, rate_hz)
    sampler.start()
    time.sleep(seconds)
    return sampler.stop()


def whole(telemetry: Telemetry) -> tuple[float, float]:
    return telemetry.arrays["time_s"][0], telemetry.arrays["time_s"][-1]


def test_what_a_gpu_lacks_is_nan_with_the_driver_s_reason_and_is_asked_once():
    gpu = ScriptedGpu(gpu_power_w=UNSUPPORTED, gpu_sm_clock_mhz="NVMLError_NoPermission", gpu_memory_used_b=67e9)
    telemetry = sampled([gpu], 0.3)
    assert np.isnan(telemetry.arrays["gpu_power_w"]).all()
    record = telemetry.meta["gpus"][0]
    assert record["lacks"] == {"gpu_power_w": UNSUPPORTED, "gpu_sm_clock_mhz": "NVMLError_NoPermission"}
    assert record["errors"]["gpu_power_w"] == {UNSUPPORTED: 1}
    figures = window_figures(telemetry, whole(telemetry)).gpus[0]
    assert figures.power_w is None and figures.throttle is None and figures.memory_gb == pytest.approx(67)


def test_a_gpu_lost_in_mid_run_is_noted_with_its_moment_and_gives_no_value_after_it():
    gpu = ScriptedGpu(gpu_power_w=lambda n: 500.0 if n < 5 else LOST, gpu_memory_used_b=1e9)
    before = time.monotonic()
    telemetry = sampled([gpu], 0.4)
    assert before < telemetry.meta["gpus"][0]["lost_s"] < time.monotonic()
    assert (
        np.isfinite(telemetry.arrays["gpu_power_w"][:5]).all() and np.isnan(telemetry.arrays["gpu_power_w"][5:]).all()
    )
    assert np.isnan(telemetry.arrays["gpu_memory_used_b"][6:]).all()
    assert window_figures(telemetry, whole(telemetry)).gpus[0].lost_s


def test_an_error_that_passes_costs_its_samples_only():
    gpu = ScriptedGpu(gpu_power_w=lambda n: "NVMLError_Timeout" if n in {3, 4} else 500.0)
    telemetry = sampled([gpu], 0.4)
    assert np.flatnonzero(np.isnan(telemetry.arrays["gpu_power_w"][:, 0])).tolist() == [3, 4]
    assert telemetry.meta["gpus"][0]["errors"] == {"gpu_power_w": {"NVMLError_Timeout": 2}}
    assert telemetry.meta["gpus"][0]["lacks"] == {}


def test_a_driver_that_answers_late_leaves_a_gap_that_is_reported_and_no_sample_is_made_up():
    gpu = ScriptedGpu(gpu_power_w=lambda n: time.sleep(0.3 if n == 10 else 0) or 500.0)
    telemetry = sampled([gpu], 1.0)
    missed = sum(to - since for since, to in telemetry.meta["gaps"])
    assert 0.2 < missed < 0.9
    assert window_figures(telemetry, whole(telemetry)).gap_share == pytest.approx(missed, rel=0.2)
    assert len(telemetry.arrays["time_s"]) <= 1 + 50 * (1.1 - missed)


def test_a_window_that_telemetry_covers_by_half_has_a_gap_of_half():
    telemetry = made(30, lambda _: 500.0, lambda t: 500 * t)
    assert window_figures(telemetry, (0, 30)).gap_share == 0
    assert window_figures(telemetry, (15, 45)).gap_share == pytest.approx(0.5)
    assert window_figures(telemetry, (31, 32)).gap_share == 1


def test_a_driver_that_never_answers_again_costs_the_samples_and_not_the_run(monkeypatch):
    monkeypatch.setattr("bench.telemetry.sampler.STOP_LIMIT_S", 0.2)
    gpu = ScriptedGpu(gpu_power_w=lambda n: time.sleep(3 if n == 5 else 0) or 500.0)
    began = time.monotonic()
    telemetry = sampled([gpu], 0.3)
    assert time.monotonic() - began < 1.5
    assert telemetry.meta["stuck"] and len(telemetry.arrays["time_s"]) == 5
    assert telemetry.meta["gaps"], "what was not sampled to the end is a gap"


def test_processes_on_the_gpu_that_are_not_our_server_s_are_counted_and_named():
    ours, other = os.getpid(), os.getppid()
    server = lambda: [Watched("server", 0, lambda: [ours])]  # noqa: E731
    gpu = ScriptedGpu(pids=(ours, other), gpu_power_w=1.0)
    telemetry = sampled([gpu], 0.2, server)
    assert window_figures(telemetry, whole(telemetry)).gpus[0].foreign == 1
    assert [each["pid"] for each in telemetry.meta["foreign"]] == [other]
    assert window_figures(sampled([gpu], 0.2), whole(telemetry)).gpus[0].foreign is None, "whose server is unknown"
    alone = sampled([ScriptedGpu(pids=(ours,), gpu_power_w=1.0)], 0.2, server)
    assert window_figures(alone, whole(alone)).gpus[0].foreign == 0
    hidden = sampled([ScriptedGpu(pids=(other,), gpu_power_w=1.0)], 0.2, server)
    assert window_figures(hidden, whole(hidden)).gpus[0].foreign is None, "our server isn't there: other pids than ours"


def test_a_fault_of_whoever_names_the_processes_costs_samples_and_is_told():
    asked = count()

    def watched():
        if next(asked) == 1:
            raise ConnectionError("the container engine is away")
        return []

    telemetry = sampled([ScriptedGpu(gpu_power_w=1.0)], 0.5, watched)
    assert telemetry.meta["fault"] == "ConnectionError: the container engine is away"
    assert len(telemetry.arrays["time_s"]) > 10 and telemetry.arrays["gpu_power_w"].shape[0] > 10


def test_cpu_is_told_process_by_process_and_of_a_whole_tree():
    busy = "import time\nend = time.monotonic() + 30\nwhile time.monotonic() < end: pass"
    spinner = subprocess.Popen([sys.executable, "-c", busy])
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    try:
        trees = [Watched("client", 0, lambda: [spinner.pid]), Watched("client", 1, lambda: [sleeper.pid])]
        began_s = time.monotonic()
        before = time.clock_gettime(time.CLOCK_MONOTONIC)
        telemetry = sampled([], 2.0, lambda: trees, rate_hz=5)
        truth = _cpu_s(spinner.pid) / (time.monotonic() - began_s)
    finally:
        for process in (spinner, sleeper):
            process.kill()
            process.wait()
    figures = window_figures(telemetry, whole(telemetry))
    assert before <= telemetry.arrays["time_s"][0], "the clock is CLOCK_MONOTONIC"
    assert figures.client_share == pytest.approx(truth, abs=0.2) and figures.client_share > 0.1
    assert min(figures.client_shares) < 0.1 and figures.server_cores is None
    assert 0 < figures.host_busy_cores <= os.cpu_count() + 0.5 and figures.host_memory_gb > 0.1


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_what_is_asked_rarely_is_asked_at_the_end_too_so_that_energy_reaches_over_the_whole_window():
    """Seen on an H200: the last look at the counter was 0.3 s before the window's end, and the run had no energy."""
    gpu = ScriptedGpu(gpu_power_w=400.0)
    gpu.probes += (Probe("gpu_energy_j", lambda: 400.0 * time.monotonic(), every=1000),)
    telemetry = sampled([gpu], 0.3)
    told = np.isfinite(telemetry.arrays["gpu_energy_j"][:, 0])
    assert told[[0, -1]].all() and told.sum() == 2
    assert energy(telemetry, whole(telemetry), 100.0).j_per_token == pytest.approx(1.2, rel=0.2)


def test_without_a_driver_there_is_host_telemetry_and_the_driver_s_own_reason():
    with open_devices(["GPU-none"]) as (devices, reason):
        if devices or not reason.startswith("NVMLError_LibraryNotFound"):
            pytest.skip(f"this machine has a driver: {reason}")
        sampler = Sampler(devices, list, reason, 50)
        sampler.start()
        time.sleep(0.2)
        telemetry = sampler.stop()
    figures = window_figures(telemetry, whole(telemetry))
    assert figures.no_gpu == "NVMLError_LibraryNotFound" and figures.gpus == []
    assert telemetry.arrays["gpu_power_w"].shape == (len(telemetry.arrays["time_s"]), 0)
    assert figures.host_load1 is not None
    found = energy(telemetry, whole(telemetry), 100)
    assert found.j_per_token is None and "NVMLError_LibraryNotFound" in found.reason


def test_the_sampler_uses_less_than_one_percent_of_a_core():
    """At 5 Hz over 20 s, watching eight processes; the host's side alone, since a driver's cost needs a driver."""
    processes = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(8)]
    try:
        trees = [Watched("client", n, lambda pid=each.pid: [pid]) for n, each in enumerate(processes)]
        gpu = ScriptedGpu(gpu_power_w=500.0, gpu_energy_j=1.0, gpu_memory_used_b=1e9)
        telemetry = sampled([gpu], 20, lambda: trees, rate_hz=5)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert 98 <= len(telemetry.arrays["time_s"]) <= 102
    assert telemetry.meta["overhead"]["share"] < 0.01, telemetry.meta["overhead"]
    assert telemetry.meta["overhead"]["cpu_s"] > 0


def made(seconds: float, power_w, energy_j, module_w=None, rate_hz: float = 5) -> Telemetry:
    """Telemetry of one GPU from functions of time."""
    telemetry = sampled([ScriptedGpu(gpu_power_w=1.0)], 0.05)
    times = np.arange(0, seconds, 1 / rate_hz)
    fresh = {name: np.full((len(times), *array.shape[1:]), math.nan) for name, array in telemetry.arrays.items()}
    fresh["time_s"] = times
    for name, told in (("gpu_power_w", power_w), ("gpu_energy_j", energy_j), ("gpu_module_power_w", module_w)):
        if told is not None:
            fresh[name][:, 0] = [told(moment) for moment in times]
    meta = {**telemetry.meta, "started_s": 0.0, "ended_s": seconds, "gaps": []}
    return Telemetry(meta, fresh)


def test_energy_per_token_counts_what_was_drawn_inside_the_window_and_nothing_else():
    power = lambda t: 100.0 if t < 10 or t > 40 else 600.0  # noqa: E731
    counted = lambda t: 1e6 + 100 * min(t, 10) + 600 * max(0, min(t, 40) - 10) + 100 * max(0, t - 40)  # noqa: E731
    found = energy(made(50, power, counted), (12.3, 37.7), tokens=10_000)
    assert found.counter_j == pytest.approx(600 * 25.4, rel=1e-3) and found.agree
    assert found.j_per_token == pytest.approx(600 * 25.4 / 10_000, rel=1e-3) and found.scope == "gpu"


def test_a_counter_and_an_integral_that_differ_by_more_than_five_percent_are_both_shown_and_not_used():
    good = energy(made(30, lambda _: 500.0, lambda t: 520 * t), (5, 25), 1000)
    bad = energy(made(30, lambda _: 500.0, lambda t: 530 * t), (5, 25), 1000)
    assert good.agree and good.j_per_token
    assert bad.agree is False and bad.j_per_token is None
    assert "10600" in bad.reason and "10000" in bad.reason and bad.counter_j == pytest.approx(10600)


def test_a_counter_that_counts_the_whole_module_is_labelled_so():
    found = energy(made(30, lambda _: 500.0, lambda t: 700 * t, module_w=lambda _: 705.0), (5, 25), 1000)
    assert found.scope == "module" and found.agree and found.j_per_token == pytest.approx(14)


def test_counters_of_different_scopes_give_no_energy_and_say_so():
    card = made(30, lambda _: 500.0, lambda t: 500 * t)
    module = made(30, lambda _: 500.0, lambda t: 700 * t, module_w=lambda _: 705.0)
    result = SimpleNamespace(bounds=(5, 25), steady_tokens=1000.0)

    def means(*seen: Telemetry) -> GpuMeans:
        return gpu_means([(SimpleNamespace(boot=1, telemetry=each), result) for each in seen])

    assert means(card, card).energy_scope == "gpu" and "energy_j_per_token" not in means(card, card).reasons
    both = means(card, module)
    assert both.energy_j_per_token is None and both.energy_scope is None
    assert "gpu and module" in both.reasons["energy_j_per_token"]


@pytest.mark.parametrize(
    ("power_w", "energy_j", "said"),
    [
        (lambda _: 500.0, None, "counter gives no value"),
        (None, lambda t: 500 * t, "power gives no value"),
        (lambda _: 500.0, lambda t: 500 * t if t < 15 else 500 * (t - 15), "reset"),
        (lambda _: 500.0, lambda t: 500 * t if t < 20 else math.nan, "counter gives no value"),
    ],
)
def test_energy_that_can_t_be_checked_is_null_with_a_reason(power_w, energy_j, said):
    found = energy(made(30, power_w, energy_j), (5, 25), 1000)
    assert found.j_per_token is None and said in found.reason


def test_gpu_memory_is_the_most_in_the_window_in_decimal_gigabytes():
    telemetry = made(30, lambda _: 1.0, lambda t: t)
    telemetry.arrays["gpu_memory_used_b"][:, 0] = np.where(telemetry.arrays["time_s"] < 20, 67e9, 90e9)
    assert gpu_memory_gb(telemetry, (5, 15)) == (pytest.approx(67), None)
    assert gpu_memory_gb(made(30, lambda _: 1.0, lambda t: t), (5, 15))[0] is None


def test_a_stored_window_reads_back_the_same_and_a_long_one_stays_under_a_megabyte(tmp_path):
    telemetry = sampled([ScriptedGpu(gpu_power_w=lambda n: 500.0 + n, gpu_energy_j=UNSUPPORTED)], 0.3)
    save_telemetry(tmp_path / "telemetry.npz", telemetry)
    again = read_telemetry(tmp_path / "telemetry.npz")
    assert again.meta == telemetry.meta
    for name, array in telemetry.arrays.items():
        assert np.allclose(again.arrays[name], array, atol=1e-4, equal_nan=True), name
    noise = np.random.default_rng(1)
    long = made(7200, lambda _: noise.normal(500, 30), lambda t: 500 * t + noise.random())
    for name in ("gpu_utilisation_pct", "gpu_sm_clock_mhz", "gpu_memory_used_b", "host_cpu_s", "host_load1"):
        long.arrays[name][...] = noise.random(long.arrays[name].shape)
    save_telemetry(tmp_path / "long.npz", long)
    again = read_telemetry(tmp_path / "long.npz")
    assert (tmp_path / "long.npz").stat().st_size <= MAX_BYTES and again.meta["kept_every"] > 1
    assert window_figures(again, (100, 7000)).gap_share == 0, "samples left out to save space are no gap"
    assert energy(again, (100, 7000), 1).agree


@pytest.mark.parametrize("spoil", ["shape", "meta", "falling", "infinite", "text", "none"])
def test_a_file_that_is_no_telemetry_is_one_clear_error(tmp_path, spoil):
    telemetry = sampled([ScriptedGpu(gpu_power_w=1.0)], 0.2)
    file = tmp_path / "telemetry.npz"
    if spoil == "shape":
        telemetry.arrays["gpu_power_w"] = np.zeros((3, 1))
    if spoil == "meta":
        telemetry.meta["gpus"] = "many"
    if spoil == "falling":
        telemetry.arrays["time_s"] = telemetry.arrays["time_s"][::-1]
    if spoil == "infinite":
        telemetry.arrays["host_load1"][0] = math.inf
    save_telemetry(file, telemetry)
    if spoil == "text":
        file.write_text("not a zip")
    if spoil == "none":
        file.unlink()
    with pytest.raises(RunProblem, match="telemetry"):
        read_telemetry(file)
