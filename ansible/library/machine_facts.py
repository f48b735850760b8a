#!/usr/bin/python
"""What machine this is: the one owner of machine facts. Standard library only.

As a script: `python3 machine_facts.py --root / [--host]` prints JSON. As an Ansible module it returns the same
mapping as `ansible_facts.station`. With another root than / only files are read, no program is asked. It only
reads. What the machine doesn't tell is null, never a guess.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

SCHEMA = 1
GB300_PCI_IDS = ("10de:31c2", "10de:31c3")
# Name here → nvidia-smi's name. Drivers differ in what they know: a field that one doesn't is left out.
GPU_TEXT = {
    "uuid": "uuid",
    "name": "name",
    "driver": "driver_version",
    "compute_capability": "compute_cap",
    "device": "pci.device_id",
    "address": "pci.bus_id",
    "mig": "mig.mode.current",
    "persistence": "persistence_mode",
    "throttle": "clocks_event_reasons.active",
    "throttle_old_name": "clocks_throttle_reasons.active",
}
GPU_NUMBERS = {
    "memory_mib": "memory.total",
    "memory_used_mib": "memory.used",
    "power_limit_w": "power.limit",
    "power_default_w": "power.default_limit",
    "ecc_uncorrected": "ecc.errors.uncorrected.volatile.total",
}
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "sve")
# Bits of nvidia-smi's throttle reasons that mean something is wrong (nvml.h, nvmlClocksEventReason*).
THROTTLE = {0x08: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}
DOCKER_INFO = (
    *("ServerVersion", "DockerRootDir", "CDISpecDirs", "LiveRestoreEnabled", "DefaultRuntime", "LoggingDriver"),
    *("Driver", "Debug", "CgroupDriver", "SecurityOptions", "Containers", "ContainersRunning"),
)
SERVICES = ("nvidia-persistenced", "nvidia-fabricmanager", "nvidia-imex", "nvidia-cdi-refresh")
VERSION = re.compile(r"\d+\.\d+(?:\.\d+)*")


class Programs:
    """Asks the machine's programs. Tests give another object with the same `ask`."""

    def ask(self, *argv: str) -> tuple[int, str, str] | None:
        """(status, output, errors), or None where the program is absent or hangs."""
        program = shutil.which(argv[0], path=os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin")
        if program is None:
            return None
        try:
            answer = subprocess.run([program, *argv[1:]], capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return answer.returncode, answer.stdout.strip(), answer.stderr.strip()


class NoPrograms:
    """Asks nobody: another root's files are all there is."""

    def ask(self, *argv: str) -> tuple[int, str, str] | None:
        """Return None."""


def said(answer: tuple[int, str, str] | None) -> str | None:
    """A program's output if it succeeded, else None."""
    return answer[1] if answer and answer[0] == 0 else None


def read(path: Path) -> str | None:
    """The stripped text of a file, or None."""
    try:
        return path.read_text(errors="replace").strip().strip("\0")
    except OSError:
        return None


def lines_of(path: Path) -> list[str]:
    """The lines of a file; none where it can't be read."""
    return (read(path) or "").splitlines()


def version_in(text: str | None) -> str | None:
    """The first dotted version in a text, or None."""
    found = VERSION.search(text or "")
    return found[0] if found else None


def os_release(root: Path) -> dict[str, str | None]:
    """Distribution id and version from /etc/os-release."""
    pairs = dict(line.split("=", 1) for line in lines_of(root / "etc/os-release") if "=" in line)
    return {key: pairs.get(name, "").strip('"') or None for key, name in (("id", "ID"), ("version", "VERSION_ID"))}


def cpu(root: Path) -> dict:
    """CPU model, logical cores and the instruction sets that change what the CPU engine does."""
    lines = [line for line in lines_of(root / "proc/cpuinfo") if ":" in line]
    pairs = [tuple(part.strip() for part in line.split(":", 1)) for line in lines]
    first = dict(reversed(pairs))
    flags = (first.get("flags") or first.get("Features") or "").split()
    return {
        "model": first.get("model name"),
        "cores": sum(1 for name, _ in pairs if name == "processor") or None,
        "flags": [flag for flag in CPU_FLAGS if flag in flags],
    }


def memory_gb(root: Path) -> float | None:
    """Physical memory in GB (1e9 bytes)."""
    total = re.search(r"^MemTotal:\s+(\d+)", read(root / "proc/meminfo") or "", re.M)
    return round(int(total[1]) * 1024 / 1e9, 1) if total else None


def pci_gpus(root: Path) -> list[dict]:
    """Display controllers and 3D accelerators on the PCI bus, by vendor and device id."""
    found = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        kind = read(device / "class") or ""
        if kind.startswith("0x03"):
            ids = [(read(device / part) or "").removeprefix("0x") for part in ("vendor", "device")]
            found.append({"address": device.name, "pci_id": ":".join(ids)})
    return found


def driver_gpus(programs: Programs) -> list[dict]:
    """GPUs as the NVIDIA driver names them; empty without a driver."""
    fields = {**GPU_TEXT, **GPU_NUMBERS}
    while fields:
        query = f"--query-gpu={','.join(fields.values())}"
        answer = programs.ask("nvidia-smi", query, "--format=csv,noheader,nounits")
        unknown = re.search(r'Field "([^"]+)" is not a valid field', f"{answer[1]}{answer[2]}" if answer else "")
        if not unknown:
            break
        fields = {name: asked for name, asked in fields.items() if asked != unknown[1]}
    lines = (said(answer) or "").splitlines()
    return [driver_gpu(dict(zip(fields, line.split(", "), strict=False))) for line in lines if line.strip()]


def driver_gpu(said_of_it: dict[str, str]) -> dict:
    """One line of nvidia-smi's answer as a mapping; fields it can't tell are None."""
    known = {name: value.strip() for name, value in said_of_it.items()}
    text = {name: None if "N/A" in known.get(name, "N/A") else known[name] for name in GPU_TEXT}
    device = (text.pop("device") or "").lower().removeprefix("0x")
    older = text.pop("throttle_old_name")
    reasons = text.pop("throttle") or older
    bits = int(reasons, 16) if reasons and reasons.startswith("0x") else None
    return {
        **text,
        **{name: number(known.get(name)) for name in GPU_NUMBERS},
        "throttle": None if bits is None else [name for bit, name in THROTTLE.items() if bits & bit],
        "pci_id": f"{device[4:8]}:{device[0:4]}" if len(device) == 8 else None,
    }


def number(text: str | None) -> float | None:
    """A number out of nvidia-smi's text, or None for '[N/A]'."""
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None


def driver(root: Path) -> dict[str, str | None]:
    """The version of the loaded kernel driver, and of the library that programs load: they must be equal."""
    loaded = re.search(r"Module.*?\s(\d{3,}\.[\d.]*\d)", read(root / "proc/driver/nvidia/version") or "")
    folders = [*(root / "usr/lib").glob("*-linux-gnu"), root / "usr/lib64", root / "usr/lib/wsl/lib"]
    names = [file.name for folder in folders for file in folder.glob("libnvidia-ml.so.*.*")]
    versions = [name.partition(".so.")[2] for name in names]
    newest = max(versions, key=lambda version: [int(part) for part in re.findall(r"\d+", version)], default=None)
    return {"kernel": loaded[1] if loaded else None, "library": newest}


def slug(facts: dict) -> str:
    """The machine's name in results: the GPU where there is one, else the CPU architecture."""
    if any(gpu["pci_id"] in GB300_PCI_IDS for gpu in (*facts["pci_gpus"], *facts["gpus"])):
        return "dgx-station-gb300"
    names = [gpu["name"] for gpu in facts["gpus"] if gpu["name"]]
    if names:
        return "-".join(names[0].lower().removeprefix("nvidia").replace("/", " ").split())
    return "cpu-" + facts["architecture"].replace("_", "-")


def docker(root: Path, programs: Programs) -> dict:
    """Docker: what is installed, what its daemon says is in effect, what its files and its unit want."""
    asked = programs.ask("docker", "info", "--format", "{{json .}}")
    info = as_json(said(asked)) or {}
    if info.get("ServerErrors"):
        info, asked = {}, (1, "", "; ".join(info["ServerErrors"]))
    rows = (said(programs.ask("docker", "ps", "--format", "{{.Names}}\t{{.Image}}")) or "").splitlines()
    settings = root / "etc/docker/daemon.json"
    wanted, broken = daemon_settings(settings)
    return {
        "version": version_in(said(programs.ask("dockerd", "--version"))) or info.get("ServerVersion"),
        "client": said(programs.ask("docker", "--version")),
        "error": None if info else (asked[2] or "no answer") if asked else "there is no docker program",
        "info": {key: info.get(key) for key in DOCKER_INFO} if info else None,
        "root": str(info.get("DockerRootDir") or (wanted or {}).get("data-root") or "/var/lib/docker"),
        "containers": [dict(zip(("name", "image"), row.split("\t"), strict=False)) for row in rows],
        "unit_flags": unit_flags(said(programs.ask("systemctl", "cat", "docker.service")) or ""),
        "daemon_json": wanted,
        "daemon_json_error": broken,
        "daemon_json_newer": newer(settings, root / "run/docker.pid"),
        "cdi_devices": sorted({one["ID"] for one in info.get("DiscoveredDevices") or [] if one.get("Source") == "cdi"}),
    }


def daemon_settings(file: Path) -> tuple[dict | None, str | None]:
    """daemon.json as a mapping, None where there is no file; and what is wrong with it, or None."""
    text = read(file)
    if text is None:
        return None, f"{file} can't be read" if file.exists() else None
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        return {}, f"not JSON: {error}"
    return (found, None) if isinstance(found, dict) else ({}, f"a {type(found).__name__}, not an object")


def as_json(text: str | None) -> object:
    """Parse what a program said; None where it isn't JSON."""
    try:
        return json.loads(text or "")
    except ValueError:
        return None


def newer(one: Path, other: Path) -> bool | None:
    """Whether a file was changed after another; None where either is missing."""
    try:
        return one.stat().st_mtime_ns > other.stat().st_mtime_ns
    except OSError:
        return None


def unit_flags(unit: str) -> list[str]:
    """Long flags of dockerd's effective command line: the last ExecStart that isn't cleared."""
    commands = re.findall(r"^ExecStart=(.*)$", re.sub(r"\\\n", " ", unit), re.M)
    last = next((command for command in reversed(commands) if command.strip()), "")
    short = {"-H": "--host", "-g": "--data-root", "-s": "--storage-driver", "-l": "--log-level", "-D": "--debug"}
    words = [short.get(word, word) for word in last.split()[1:]]
    return sorted({word.removeprefix("--").split("=")[0] for word in words if word.startswith("--")})


def cdi_specs(root: Path) -> list[dict]:
    """CDI specs for NVIDIA GPUs: file, device names, and the driver versions that their paths name."""
    found = []
    for folder in ("etc/cdi", "var/run/cdi", "run/cdi"):
        for file in sorted((root / folder).glob("*")):
            text = read(file) or ""
            if file.suffix not in {".yaml", ".json"} or not re.search(r"""kind["']?:\s*["']?nvidia\.com/gpu""", text):
                continue
            if any(os.path.samefile(file, root / one["file"].lstrip("/")) for one in found):
                continue  # /var/run is /run
            names = re.findall(r"""^[\s{,-]*["']?name["']?:\s*["']?([\w.:-]+)""", text, re.M)
            versions = sorted(set(re.findall(r"lib(?:cuda|nvidia-[\w-]+)\.so\.(\d{3,}\.[\d.]*\d)", text)))
            found.append({"file": f"/{folder}/{file.name}", "devices": sorted(set(names)), "driver_versions": versions})
    return found


def folder_facts(root: Path, name: str) -> dict:
    """Owner of a folder, and the free space where it lies or would lie."""
    path = root / name.lstrip("/")
    free = os.statvfs(next(each for each in (path, *path.parents) if os.path.exists(each)))
    there = path.stat() if os.path.isdir(path) else None
    return {
        "exists": there is not None,
        "owner_uid": there and there.st_uid,
        "mode": there and f"{there.st_mode & 0o7777:04o}",
        "foreign": there and foreign_entry(path, there.st_uid),
        "free_gb": round(free.f_bavail * free.f_frsize / 1e9, 1),
    }


def foreign_entry(folder: Path, owner: int) -> str | None:
    """The first entry of a folder that belongs to another user than its owner."""
    try:
        strange = (entry.name for entry in os.scandir(folder) if entry.stat(follow_symlinks=False).st_uid != owner)
        return next(strange, None)
    except OSError:
        return None


def listening_ports(root: Path) -> list[int]:
    """TCP ports that something listens on."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in lines_of(root / "proc/net" / name)]
    return sorted({int(row[1].rpartition(":")[2], 16) for row in rows if len(row) > 3 and row[3] == "0A"})


def apt_sources(root: Path) -> list[dict]:
    """Every URI that apt is told of: file, URI, and the key that is said to sign it."""
    found = []
    for file in [root / "etc/apt/sources.list", *sorted((root / "etc/apt/sources.list.d").glob("*"))]:
        text = re.sub(r"^\s*#.*$", "", read(file) or "", flags=re.M)
        where = "/" + str(file.relative_to(root))
        if file.suffix == ".list":
            for options, uri in re.findall(r"^\s*deb\s+(?:\[([^\]]*)\]\s+)?(\S+)", text, re.M):
                signed = re.search(r"signed-by=(\S+)", options, re.I)
                found.append({"file": where, "uri": uri, "signed_by": signed[1] if signed else None})
        elif file.suffix == ".sources":
            for stanza in re.split(r"\n\s*\n", text):
                fields = {key.lower(): value for key, value in re.findall(r"^([\w-]+):[ \t]*(.*)$", stanza, re.M)}
                signed = fields.get("signed-by") or ("inline" if "signed-by" in fields else None)
                if fields.get("enabled", "yes").lower() not in {"no", "false", "0"}:
                    uris = fields.get("uris", "").split()
                    found += [{"file": where, "uri": uri, "signed_by": signed} for uri in uris]
    return found


def services(programs: Programs, verb: str) -> dict[str, str]:
    """What systemctl says of the services that matter, by its verb; those that it doesn't know are left out."""
    told = {name: programs.ask("systemctl", verb, name) for name in SERVICES}
    return {name: answer[1] for name, answer in told.items() if answer and answer[1] not in {"", "not-found"}}


def host(root: Path, programs: Programs, folders: list[str]) -> dict:
    """What decides whether this host can serve: Docker, the container toolkit, CDI, disks, ports, clock, reboot."""
    clock = said(programs.ask("timedatectl", "show", "--property=NTPSynchronized", "--value"))
    secure_boot = sorted((root / "sys/firmware/efi/efivars").glob("SecureBoot-*"))
    return {
        "docker": (engine := docker(root, programs)),
        "toolkit": version_in(said(programs.ask("nvidia-ctk", "--version"))),
        "cdi": cdi_specs(root),
        "folders": {name: folder_facts(root, name) for name in dict.fromkeys([engine["root"], *folders])},
        "listening": listening_ports(root),
        "clock_synchronised": {"yes": True, "no": False}.get(clock),
        "reboot": lines_of(root / "run/reboot-required.pkgs") if (root / "run/reboot-required").exists() else None,
        "init": "systemd" if (root / "run/systemd/system").is_dir() else read(root / "proc/1/comm"),
        "services": services(programs, "is-enabled"),
        "active": [name for name, state in services(programs, "is-active").items() if state == "active"],
        "apt_sources": apt_sources(root),
        "half_installed": re.findall(r"^ (\S+)", said(programs.ask("dpkg", "--audit")) or "", re.M),
        "secure_boot": secure_boot[0].read_bytes()[-1:] == b"\1" if secure_boot else None,
    }


def collect(root: Path, programs: Programs | None = None, folders: list[str] | None = None) -> dict:
    """Everything this file knows about the machine below `root`; with `folders` (may be empty), its host state too."""
    real = root == Path("/")
    programs = programs or (Programs() if real else NoPrograms())
    facts = {
        "schema": SCHEMA,
        "architecture": platform.machine() if real else read(root / "architecture") or platform.machine(),
        "kernel": platform.release() if real else read(root / "proc/sys/kernel/osrelease"),
        "page_size": os.sysconf("SC_PAGE_SIZE") if real else number(read(root / "page_size")),
        "os": os_release(root),
        "dmi_product": read(root / "sys/class/dmi/id/product_name"),
        "dgx_release": read(root / "etc/dgx-release"),
        "cpu": cpu(root),
        "memory_gb": memory_gb(root),
        "pci_gpus": pci_gpus(root),
        "gpus": driver_gpus(programs),
        "driver": driver(root),
    }
    if folders is not None:
        facts["host"] = host(root, programs, folders)
    return {**facts, "slug": slug(facts)}


def main() -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path("/"), help="read the files below this folder")
    parser.add_argument("--host", action="store_true", help="also what preflight asks: Docker, disks, ports, …")
    parser.add_argument("--folder", action="append", default=[], help="with --host: say who owns it and what is free")
    options = parser.parse_args()
    facts = collect(options.root, folders=options.folder if options.host else None)
    print(json.dumps(facts, indent=2, sort_keys=True))


def run_module() -> None:
    """Run as an Ansible module."""
    from ansible.module_utils.basic import AnsibleModule

    arguments = {
        "root": {"type": "path", "default": "/"},
        "host": {"type": "bool", "default": False},
        "folders": {"type": "list", "elements": "str", "default": []},
    }
    module = AnsibleModule(argument_spec=arguments, supports_check_mode=True)
    asked = module.params
    facts = collect(Path(asked["root"]), folders=asked["folders"] if asked["host"] else None)
    module.exit_json(changed=False, ansible_facts={"station": facts})


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main()
    else:
        run_module()
