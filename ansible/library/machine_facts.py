#!/usr/bin/env python3
"""What machine this is: the one owner of machine facts. Standard library only.

As a script: `python3 machine_facts.py --root /` prints JSON. As an Ansible module it returns the same
mapping as `ansible_facts.station`. With another root than / only files are read, no program is asked.
What the machine doesn't tell is null, never a guess.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

SCHEMA = 1
GB300_PCI_IDS = ("10de:31c2", "10de:31c3")
GPU_FIELDS = ("index", "uuid", "name", "memory.total", "driver_version", "compute_cap", "power.limit")
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "sve")


def read(path: Path) -> str | None:
    """The stripped text of a file, or None."""
    try:
        return path.read_text(errors="replace").strip().strip("\0")
    except OSError:
        return None


def os_release(root: Path) -> dict[str, str | None]:
    """Distribution id and version from /etc/os-release."""
    lines = (read(root / "etc/os-release") or "").splitlines()
    pairs = dict(line.split("=", 1) for line in lines if "=" in line)
    return {key: pairs.get(name, "").strip('"') or None for key, name in (("id", "ID"), ("version", "VERSION_ID"))}


def cpu(root: Path) -> dict:
    """CPU model, logical cores and the instruction sets that change what the CPU engine does."""
    lines = (read(root / "proc/cpuinfo") or "").splitlines()
    pairs = [tuple(part.strip() for part in line.split(":", 1)) for line in lines if ":" in line]
    first = dict(reversed(pairs))
    flags = (first.get("flags") or first.get("Features") or "").split()
    return {
        "model": first.get("model name"),
        "cores": sum(1 for name, _ in pairs if name == "processor") or None,
        "flags": [flag for flag in CPU_FLAGS if flag in flags],
    }


def memory_gb(root: Path) -> float | None:
    """Physical memory in GB (1e9 bytes)."""
    for line in (read(root / "proc/meminfo") or "").splitlines():
        if line.startswith("MemTotal:"):
            return round(int(line.split()[1]) * 1024 / 1e9, 1)
    return None


def pci_gpus(root: Path) -> list[dict]:
    """Display controllers and 3D accelerators on the PCI bus, by vendor and device id."""
    found = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        kind = read(device / "class") or ""
        if kind.startswith("0x03"):
            ids = [(read(device / part) or "").removeprefix("0x") for part in ("vendor", "device")]
            found.append({"address": device.name, "pci_id": ":".join(ids)})
    return found


def driver_gpus() -> list[dict]:
    """GPUs as the NVIDIA driver names them; empty without a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, f"--query-gpu={','.join(GPU_FIELDS)},pci.device_id", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if answer.returncode != 0:
        return []
    return [driver_gpu(line.split(", ")) for line in answer.stdout.strip().splitlines()]


def driver_gpu(values: list[str]) -> dict:
    """One line of nvidia-smi's answer as a mapping; fields it can't tell are None."""
    known = dict(zip((*GPU_FIELDS, "pci"), (value.strip() for value in values), strict=False))
    device = known.get("pci", "").lower().removeprefix("0x")
    return {
        "uuid": known.get("uuid"),
        "name": known.get("name"),
        "memory_mib": number(known.get("memory.total")),
        "driver": known.get("driver_version"),
        "compute_capability": known.get("compute_cap"),
        "power_limit_w": number(known.get("power.limit")),
        "pci_id": f"{device[4:8]}:{device[0:4]}" if len(device) == 8 else None,
    }


def number(text: str | None) -> float | None:
    """A number out of nvidia-smi's text, or None for '[N/A]'."""
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None


def slug(facts: dict) -> str:
    """The machine's name in results: the GPU where there is one, else the CPU architecture."""
    pci = [gpu["pci_id"] for gpu in facts["pci_gpus"]] + [gpu["pci_id"] for gpu in facts["gpus"]]
    if any(pci_id in GB300_PCI_IDS for pci_id in pci):
        return "dgx-station-gb300"
    names = [gpu["name"] for gpu in facts["gpus"] if gpu["name"]]
    if names:
        return "-".join(names[0].lower().removeprefix("nvidia").replace("/", " ").split())
    return "cpu-" + facts["architecture"].replace("_", "-")


def collect(root: Path) -> dict:
    """Everything this file knows about the machine below `root`."""
    real = root == Path("/")
    facts = {
        "schema": SCHEMA,
        "architecture": platform.machine() if real else read(root / "architecture") or platform.machine(),
        "kernel": platform.release() if real else read(root / "proc/sys/kernel/osrelease"),
        "page_size": os.sysconf("SC_PAGE_SIZE") if real else None,
        "os": os_release(root),
        "dmi_product": read(root / "sys/class/dmi/id/product_name"),
        "dgx_release": read(root / "etc/dgx-release"),
        "cpu": cpu(root),
        "memory_gb": memory_gb(root),
        "pci_gpus": pci_gpus(root),
        "gpus": driver_gpus() if real else [],
    }
    return {**facts, "slug": slug(facts)}


def main() -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path("/"), help="read the files below this folder")
    print(json.dumps(collect(parser.parse_args().root), indent=2, sort_keys=True))


def run_module() -> None:
    """Run as an Ansible module."""
    from ansible.module_utils.basic import AnsibleModule

    module = AnsibleModule(argument_spec={"root": {"type": "path", "default": "/"}}, supports_check_mode=True)
    module.exit_json(changed=False, ansible_facts={"station": collect(Path(module.params["root"]))})


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main()
    else:
        run_module()
