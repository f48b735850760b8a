"""Every Station variant is judged as it is: right machines pass, each fault is named, and none hides another.

tests/fixtures/machines/station.json is a sound Station as field reports describe it; each test changes one thing.
"""

import copy
import json
from pathlib import Path

import pytest

from images.yaml_source import read_yaml
from recipes.machine import load_machines
from tests.ansible_module import load

ROOT = Path(__file__).resolve().parent.parent.parent
SOUND = json.loads((ROOT / "tests/fixtures/machines/station.json").read_text())
WHERE = {"cache": "/var/lib/cache", "cache_uid": 1000, "ports": [8000]}
SMALL = {"image_gb": 0, "weights_gb": 0}
PRODUCT = "sys/class/dmi/id/product_name"
DISPLAY, GB300 = 0, 1


machine_facts, judge = load("library/machine_facts.py"), load("filter_plugins/findings.py")
hosts = load("filter_plugins/hosts.py")


class Recorded:
    """Answers of programs, recorded: by the longest beginning of the command line that is known."""

    def __init__(self, machine: dict) -> None:
        self.gpus, self.answers = machine["gpus"], machine["answers"]

    def ask(self, *argv: str) -> tuple[int, str, str] | None:
        if argv[0] == "nvidia-smi":
            return self.smi(argv[1].removeprefix("--query-gpu=").split(","))
        line = " ".join(argv)
        known = [start for start in self.answers if line.startswith(start)]
        answer = self.answers[max(known, key=len)] if known else None
        return tuple(answer) if isinstance(answer, list) else None if answer is None else (0, answer, "")

    def smi(self, fields: list[str]) -> tuple[int, str, str] | None:
        if self.gpus is None:
            return None
        for field in fields:
            if any(field not in gpu for gpu in self.gpus):
                return 2, f'Field "{field}" is not a valid field to query.', ""
        return 0, "\n".join(", ".join(gpu[field] for field in fields) for gpu in self.gpus), ""


@pytest.fixture
def station() -> dict:
    """A sound Station, to be spoilt."""
    return copy.deepcopy(SOUND)


@pytest.fixture
def facts(tmp_path: Path):
    """facts(machine) → what machine_facts says of it."""

    def collect(machine: dict) -> dict:
        for name, text in machine["files"].items():
            if text is not None:
                file = tmp_path / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(b"\6\0\0\0\0" if "SecureBoot" in name else text.encode())
        return machine_facts.collect(tmp_path, Recorded(machine), folders=["/var/lib/cache"])

    return collect


@pytest.fixture
def wrong(facts):
    """wrong(machine) → ids of the findings that are not as wanted."""

    def judged(machine: dict, **options) -> list[str]:
        found = judge.findings(facts(machine), WHERE, wanted=SMALL, **options)
        for each in found:
            assert each.keys() == {"id", "ok", "found", "wanted", "remedy"}
            assert bool(each["remedy"]) == (each["ok"] is False), each
            assert each["found"], each
        assert len({each["id"] for each in found}) == len(found) == 35
        return [each["id"] for each in found if each["ok"] is False]

    return judged


@pytest.mark.parametrize(
    "name", ["DGX_Station_GB300", "DGX Station GB300", "NVIDIA DGX Station GB300", "GB300 DGX Station"]
)
def test_a_station_is_known_by_the_words_of_its_product_name_in_any_order(station, facts, wrong, name):
    station["files"][PRODUCT] = name
    assert wrong(station) == []
    assert judge.profile_of(facts(station)) == "dgx-station"


@pytest.mark.parametrize("device", ["31c2", "31c3"])
def test_both_pci_ids_are_a_gb300(station, facts, wrong, device):
    station["files"]["sys/bus/pci/devices/0009:01:00.0/device"] = f"0x{device}"
    station["gpus"][GB300]["pci.device_id"] = f"0x{device.upper()}10DE"
    assert wrong(station) == []
    assert judge.one_gpu(facts(station)) == "GPU-gb300"


def test_a_recipe_and_preflight_know_the_same_gb300s():
    """machine_facts.py runs alone on hosts, and a profile is data: neither can take the list from the other."""
    profile = load_machines()["dgx-station-gb300"]
    assert profile.match.pci_ids == list(machine_facts.GB300_PCI_IDS)


def test_the_gb300_is_chosen_wherever_the_driver_lists_it(station, facts, wrong):
    station["gpus"].reverse()
    assert wrong(station) == []
    assert judge.one_gpu(facts(station)) == "GPU-gb300"


def test_a_name_that_repeats_after_an_update_decides_nothing(station, wrong):
    station["files"]["etc/dgx-release"] += 'DGX_PRETTY_NAME="NVIDIA DGX Spark"\nDGX_NAME="DGX Spark"\n'
    assert wrong(station) == []


def test_no_gb300_is_a_finding_that_shows_what_was_seen(station, facts, wrong):
    station["gpus"].pop(GB300)
    assert wrong(station) == ["gpu"]
    (gpu,) = [each for each in judge.findings(facts(station), WHERE) if each["id"] == "gpu"]
    assert "NVIDIA RTX PRO 2000 GPU-display (10de:2bb4)" in gpu["found"]
    assert "exactly one GB300" in gpu["wanted"]


def test_two_gb300s_are_a_finding_until_one_is_named(station, wrong):
    station["gpus"].append({**station["gpus"][GB300], "uuid": "GPU-second"})
    assert wrong(station) == ["gpu"]
    assert wrong(station, uuid="GPU-gb300") == []
    assert wrong(station, uuid="GPU-nobody") == ["gpu"]


def test_a_station_without_a_driver_is_still_a_station(station, facts, wrong):
    station["gpus"] = None
    station["files"]["proc/driver/nvidia/version"] = None
    assert wrong(station) == ["gpu", "driver"]
    assert judge.profile_of(facts(station)) == "dgx-station"


@pytest.mark.parametrize(
    ("id_", "change"),
    [
        ("architecture", {"architecture": "x86_64"}),
        ("identity", {PRODUCT: "Precision 7960"}),
        ("platform_file", {"etc/dgx-release": 'DGX_PLATFORM="DGX Server for DGX B200"\n'}),
        ("page_size", {"page_size": "4096"}),
        ("init", {"proc/1/comm": "tini\n"}),
        ("reboot", {"run/reboot-required": "", "run/reboot-required.pkgs": "linux-image-6.17\n"}),
        ("driver", {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Kernel Module  580.95.05  x\n"}),
        ("driver_library", {"usr/lib/aarch64-linux-gnu/libnvidia-ml.so.595.10.01": ""}),
        ("daemon_json", {"etc/docker/daemon.json": '{"features": '}),
        ("daemon_flags", {"etc/docker/daemon.json": '{"containerd": "/run/containerd/other.sock"}'}),
        ("cdi_shadowed", {"etc/cdi/mine.yaml": SOUND["files"]["run/cdi/nvidia.yaml"]}),
        ("cdi_spec", {"run/cdi/nvidia.yaml": None}),
        ("ports", {"proc/net/tcp6": "  sl  local_address rem_address st\n   0: 00000000:1F40 00000000:0000 0A\n"}),
        (
            "apt_sources",
            {
                "etc/apt/sources.list.d/second.sources": "Types: deb\nURIs: https://nvidia.github.io/libnvidia-container"
                "/stable/deb/arm64\nSuites: /\nSigned-By: /etc/apt/keyrings/other.asc\n"
            },
        ),
    ],
)
def test_one_wrong_file_is_one_finding(station, wrong, id_, change):
    station["files"] |= change
    found = wrong(station)
    # An older driver is also not the one that the specs and the library were made for.
    also = {"driver": ["driver_library", "cdi_fresh"]}.get(id_, [])
    assert found == [id_, *also]


@pytest.mark.parametrize(
    ("id_", "field", "value"),
    [
        ("mig", "mig.mode.current", "Enabled"),
        ("persistence", "persistence_mode", "Disabled"),
        ("ecc", "ecc.errors.uncorrected.volatile.total", "3"),
        ("power_limit", "power.limit", "800.00"),
        ("throttle", "clocks_event_reasons.active", "0x0000000000000048"),
        ("idle_memory", "memory.used", "90000"),
    ],
)
def test_one_wrong_state_of_the_gpu_is_one_finding(station, wrong, id_, field, value):
    station["gpus"][GB300][field] = value
    assert wrong(station) == [id_]


def test_a_masked_persistence_daemon_is_told_with_the_way_to_unmask_it(station, facts):
    station["gpus"][GB300]["persistence_mode"] = "Disabled"
    station["answers"]["systemctl is-enabled nvidia-persistenced"] = [1, "masked", ""]
    (told,) = [each for each in judge.findings(facts(station), WHERE) if each["id"] == "persistence"]
    assert told["ok"] is False
    assert "it is masked; systemctl unmask it first" in told["remedy"]


def test_the_reasons_for_a_reboot_are_left_for_whoever_decides_on_it(station, facts):
    assert hosts.reboot_reasons(judge.findings(facts(station), WHERE)) == []
    station["files"] |= {"run/reboot-required": "", "run/reboot-required.pkgs": "linux-image-6.17\n"}
    station["files"]["usr/lib/aarch64-linux-gnu/libnvidia-ml.so.595.10.01"] = ""
    assert hosts.reboot_reasons(judge.findings(facts(station), WHERE)) == [
        "reboot: pending, for linux-image-6.17",
        "driver_library: kernel 590.48.01, library 595.10.01",
    ]


def test_the_display_card_s_state_is_nobody_s_business(station, wrong):
    station["gpus"][DISPLAY] |= {"persistence_mode": "Disabled", "memory.used": "9000", "power.limit": "10"}
    assert wrong(station) == []


def test_a_stale_cdi_spec_is_named_with_both_versions(station, facts, wrong):
    spec = station["files"]["run/cdi/nvidia.yaml"]
    station["files"]["run/cdi/nvidia.yaml"] = spec.replace("590.48.01", "580.95.05")
    assert wrong(station) == ["cdi_fresh"]
    (stale,) = [each for each in judge.findings(facts(station), WHERE) if each["id"] == "cdi_fresh"]
    assert "580.95.05" in stale["found"]
    assert "590.48.01" in stale["wanted"]


@pytest.mark.parametrize(
    ("id_", "answers"),
    [
        ("toolkit", {"nvidia-ctk --version": "NVIDIA Container Toolkit CLI version 1.17.8"}),
        ("clock", {"timedatectl show": "no"}),
        (
            "packages",
            {"dpkg --audit": "The following packages are only half configured:\n docker.io  Linux container\n"},
        ),
        ("fabric", {"systemctl is-active nvidia-fabricmanager": "active"}),
        (
            "docker_cdi",
            {"docker info": SOUND["answers"]["docker info"].replace('["/etc/cdi", "/var/run/cdi"]', "null")},
        ),
        (
            "docker_api",
            {"docker info": [1, "", "permission denied while trying to connect to the Docker daemon socket"]},
        ),
    ],
)
def test_one_wrong_answer_is_one_finding(station, wrong, id_, answers):
    station["answers"] |= answers
    assert wrong(station) == [id_]


def test_a_host_without_systemd_is_none_to_provision(station, facts):
    station["files"]["proc/1/comm"] = "tini\n"
    (bar,) = hosts.bars(judge.findings(facts(station), WHERE, wanted=SMALL), [])
    assert bar.startswith("init: found tini; wanted systemd")


def test_doctor_and_provision_want_the_same_container_toolkit(station, facts):
    role = read_yaml(ROOT / "ansible/roles/container_toolkit/defaults/main.yml").data
    for profile in ("cuda", "dgx-station"):
        told = {each["id"]: each for each in judge.findings(facts(station), WHERE, profile)}
        assert told["toolkit"]["wanted"] == f"nvidia-container-toolkit {role['container_toolkit_min']} or newer"


def test_containers_that_a_needed_restart_would_kill_are_named(station, facts):
    station["answers"]["docker ps"] = "their-database\tpostgres:17"
    station["answers"]["docker info"] = SOUND["answers"]["docker info"].replace('["/etc/cdi", "/var/run/cdi"]', "null")
    found = {each["id"]: each for each in judge.findings(facts(station), WHERE)}
    assert found["containers"]["ok"] is False
    assert "their-database" in found["containers"]["found"]


@pytest.mark.parametrize(
    ("info", "settings"),
    [
        ('{"ServerVersion": "29.1.2", "DockerRootDir": "/data/docker"}', None),
        ("", '{"data-root": "/data/docker"}'),  # where it doesn't run
    ],
)
def test_the_disk_that_is_judged_for_images_is_the_one_that_docker_keeps_them_on(station, facts, info, settings):
    station["answers"]["docker info"] = info
    station["files"]["etc/docker/daemon.json"] = settings
    found = {each["id"]: each["found"] for each in judge.findings(facts(station), WHERE)}
    assert found["disk_image"].endswith(" GB free for /data/docker")
    assert found["disk_weights"].endswith(" GB free for /var/lib/cache")


def test_our_own_server_is_no_finding(station, wrong):
    station["files"]["proc/net/tcp"] = "  sl  local_address rem_address st\n   0: 0100007F:1F40 00000000:0000 0A\n"
    station["gpus"][GB300]["memory.used"] = "240000"
    assert wrong(station) == ["idle_memory", "ports"]
    station["answers"]["docker ps"] = "station-recipes-nemotron_base\tvllm"
    assert wrong(station) == []


def test_every_fault_is_found_at_once(station, wrong):
    station["files"] |= {"page_size": "4096", PRODUCT: "X", "run/reboot-required": "", "etc/docker/daemon.json": "["}
    station["gpus"][GB300] |= {"mig.mode.current": "Enabled", "power.limit": "800"}
    station["answers"] |= {"timedatectl show": "no"}
    assert set(wrong(station)) >= {"identity", "page_size", "reboot", "clock", "mig", "power_limit", "daemon_json"}


@pytest.mark.parametrize(
    ("out", "ok"), [("GPU 0: NVIDIA GB300 (UUID: GPU-gb300)", True), ("GPU 0: x (UUID: GPU-display)", False)]
)
def test_only_a_container_that_names_the_gpu_proves_the_device(station, facts, out, ok):
    found = judge.findings(facts(station), WHERE, probe={"rc": 0, "out": out, "err": ""})
    assert next(each for each in found if each["id"] == "container")["ok"] is ok


def test_a_driver_with_other_field_names_is_read_all_the_same(station, facts, wrong):
    for gpu in station["gpus"]:
        gpu["clocks_throttle_reasons.active"] = gpu.pop("clocks_event_reasons.active")
        gpu.pop("ecc.errors.uncorrected.volatile.total")
    assert wrong(station) == []
    assert facts(station)["gpus"][GB300]["throttle"] == []
    assert facts(station)["gpus"][GB300]["ecc_uncorrected"] is None


def test_a_host_without_a_gpu_is_not_asked_for_one(station, wrong, facts):
    station["gpus"] = None
    station["files"] |= {PRODUCT: "Virtual Machine", "architecture": "x86_64", "etc/dgx-release": None}
    for name in list(station["files"]):
        if "pci/devices" in name or "nvidia" in name:
            station["files"][name] = None
    assert judge.profile_of(facts(station)) == "cpu"
    assert wrong(station) == []


def test_a_plain_gpu_host_may_have_any_page_size_and_name(station, wrong):
    station["files"] |= {PRODUCT: "HGX H200", "architecture": "x86_64", "page_size": "4096", "etc/dgx-release": None}
    station["files"]["sys/bus/pci/devices/0009:01:00.0/device"] = "0x2335"
    station["gpus"] = [{**station["gpus"][GB300], "pci.device_id": "0x233510DE", "power.default_limit": "700"}]
    assert wrong(station) == []


def test_an_unknown_profile_or_value_is_refused_with_the_choices(station, facts):
    with pytest.raises(ValueError, match="dgx-station, cuda, cpu"):
        judge.findings(facts(station), WHERE, profile="spark")
    with pytest.raises(ValueError, match='toolkit_min is 1.2; wanted text, "1.20"'):
        judge.findings(facts(station), WHERE, wanted={"toolkit_min": 1.20})
    with pytest.raises(ValueError, match="weights_gb"):
        judge.findings(facts(station), WHERE, wanted={"weights": 3})
