"""Preflight: what a machine is judged as, what is wanted of it, and its one GPU. Pure, standard library only.

Runs where Ansible is called; filter_plugins/findings.py makes machine_facts findable.
"""

import re

from machine_facts import GB300_PCI_IDS

STATION_WORDS = {"GB300", "STATION"}  # in any order, between spaces or underscores; display names never decide
STATION_PLATFORM = "GALAXY-GB300"  # in /etc/dgx-release; corroborates only

ANY = {
    "architecture": ["aarch64", "x86_64"],
    "docker_min": "20.10",
    "image_gb": 10,
    "weights_gb": 5,
    "idle_memory_mib": 2048,
    "driver_min": None,
    "toolkit_min": None,
    "page_size": None,
    "power_limit_min_w": None,
}
CUDA = {**ANY, "docker_min": "25.0", "driver_min": "580", "toolkit_min": "1.19", "image_gb": 40, "weights_gb": 80}
# What a Station needs was read in public field reports; nobody here could check it on one.
STATION = {**CUDA, "architecture": ["aarch64"], "driver_min": "590.48.01"}
STATION |= {"page_size": 65536, "power_limit_min_w": 1100}
PROFILES = {"dgx-station": STATION, "cuda": CUDA, "cpu": ANY}


def profile_of(facts: dict, asked: str = "auto") -> str:
    """dgx-station, cuda or cpu: by PCI id and DMI words, then by any NVIDIA GPU.

    Raises ValueError for a profile that doesn't exist.
    """
    if asked in PROFILES:
        return asked
    if asked != "auto":
        raise ValueError(f"no profile is called {asked!r}; wanted auto or one of {', '.join(PROFILES)}")
    if gb300s(facts["pci_gpus"]) or gb300s(facts["gpus"]) or dmi_words(facts) >= STATION_WORDS:
        return "dgx-station"
    return "cuda" if facts["gpus"] or any(gpu["pci_id"].startswith("10de:") for gpu in facts["pci_gpus"]) else "cpu"


def dmi_words(facts: dict) -> set[str]:
    """Words of the DMI product name, upper-case."""
    return {word.upper() for word in re.split(r"[\W_]+", facts["dmi_product"] or "") if word}


def gb300s(gpus: list[dict]) -> list[dict]:
    """Those of a list of GPUs that are a GB300, by PCI id."""
    return [gpu for gpu in gpus if gpu["pci_id"] in GB300_PCI_IDS]


def fitting_gpus(facts: dict, profile: str = "auto", uuid: str = "") -> list[dict]:
    """The driver's GPUs that this machine would serve on: exactly one is wanted, an index is no contract."""
    kind = profile_of(facts, profile)
    listed = gb300s(facts["gpus"]) if kind == "dgx-station" else facts["gpus"] if kind == "cuda" else []
    return [gpu for gpu in listed if uuid in {"", gpu["uuid"]}]


def one_gpu(facts: dict, profile: str = "auto", uuid: str = "") -> str:
    """UUID of the one GPU to serve on, or an empty text."""
    fitting = fitting_gpus(facts, profile, uuid)
    return fitting[0]["uuid"] if len(fitting) == 1 else ""


def at_least(found: str | None, wanted: str) -> bool:
    """Whether a dotted version is the wanted one or newer."""
    numbers = [[int(part) for part in re.findall(r"\d+", version or "")] for version in (found, wanted)]
    return bool(numbers[0]) and numbers[0] >= numbers[1]
