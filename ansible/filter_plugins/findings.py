"""Preflight: machine facts in, findings out. Pure, standard library only; Ansible calls it as a filter.

Every line is judged; none hides another. What a finding is: module_utils/host_findings.py.
"""

import sys
from pathlib import Path

# Ansible loads this file by its path, and has no way of its own for what filters share.
sys.path.extend(str(Path(__file__).resolve().parent.parent / folder) for folder in ("module_utils", "library"))

from host_findings import Findings, docker, machine, own_containers, storage
from host_profiles import ANY, GB300_PCI_IDS, PROFILES, at_least, fitting_gpus, one_gpu, profile_of

NVIDIA_ARCHIVE = "nvidia.github.io/libnvidia-container"
STATES = ("mig", "persistence", "ecc", "power_limit", "throttle", "idle_memory")


def gpu_text(gpu: dict) -> str:
    """A GPU in one line."""
    return f"{gpu.get('name') or 'GPU'} {gpu.get('uuid') or gpu.get('address')} ({gpu['pci_id']})"


def gpu(add: Findings, facts: dict, kind: str, want: dict, uuid: str) -> None:
    """The one GPU, its driver, and the state it is in."""
    if kind == "cpu":
        add.leave(("gpu", "driver", "driver_library", *STATES), "not applicable: a cpu host")
        return
    fitting = fitting_gpus(facts, kind, uuid)
    on_bus = [each for each in facts["pci_gpus"] if each["pci_id"].startswith("10de:")]
    seen = "; ".join(map(gpu_text, facts["gpus"])) or (
        f"the driver lists none; on the PCI bus: {', '.join(map(gpu_text, on_bus)) or 'none'}"
    )
    named = f" with the UUID {uuid}" if uuid else ""
    wanted = f"exactly one GB300 ({' or '.join(GB300_PCI_IDS)})" if kind == "dgx-station" else "exactly one NVIDIA GPU"
    if len(fitting) > 1:
        remedy = "name one by its UUID in preflight_gpu"
    elif uuid or facts["gpus"]:
        remedy = "look for it with nvidia-smi -L and lspci -nn; correct preflight_gpu if it names another GPU"
    else:
        remedy = "install the NVIDIA driver, or look in dmesg why it found no GPU"
    add.add("gpu", len(fitting) == 1, seen, wanted + named, remedy)
    driver(add, facts, want)
    if len(fitting) == 1:
        state(add, facts, fitting[0], want)
    else:
        add.leave(STATES, "not checked: no single GPU to look at")


def driver_version(facts: dict) -> str | None:
    """The driver's version: the loaded kernel module's, else what nvidia-smi says."""
    return facts["driver"]["kernel"] or next((each["driver"] for each in facts["gpus"] if each["driver"]), None)


def driver(add: Findings, facts: dict, want: dict) -> None:
    """The driver's version, and whether its two halves are the same."""
    version, library = driver_version(facts), facts["driver"]["library"]
    add.add(
        "driver",
        at_least(version, want["driver_min"]),
        version or "no driver",
        f"{want['driver_min']} or newer",
        "upgrade the driver as the machine's vendor says (DGX OS: its own update), then reboot",
    )
    both = facts["driver"]["kernel"] and library
    add.add(
        "driver_library",
        facts["driver"]["kernel"] == library if both else None,
        f"kernel {facts['driver']['kernel'] or 'not told'}, library {library or 'not found'}",
        "the same version twice",
        "reboot needed: packages were upgraded under a loaded driver",
    )


def state(add: Findings, facts: dict, one: dict, want: dict) -> None:
    """The state that the one GPU is in: STATES, line by line."""

    def judge(name: str, value: object, good: bool, wanted: str, remedy: str, unit: str = "") -> None:
        found = "not told" if value is None else f"{value:g}{unit}" if isinstance(value, (int, float)) else value
        add.add(name, None if value is None else good, found, wanted, remedy)

    index = f"-i {one['uuid']}"
    judge("mig", one["mig"], one["mig"] == "Disabled", "Disabled", f"nvidia-smi {index} -mig 0, when nothing uses it")
    unit = facts["host"]["services"].get("nvidia-persistenced") or "unknown"
    judge(
        "persistence",
        one["persistence"],
        one["persistence"] == "Enabled",
        "Enabled",
        f"systemctl enable --now nvidia-persistenced (it is {unit}"
        f"{'; systemctl unmask it first' if unit == 'masked' else ''})",
    )
    errors = one["ecc_uncorrected"]
    judge("ecc", errors, errors == 0, "0 uncorrected errors", "reboot; if they return, have the GPU checked")
    limit = one["power_limit_w"]
    least = want["power_limit_min_w"] or one["power_default_w"] or 0
    judge(
        "power_limit", limit, (limit or 0) >= least, f"{least:g} W or more", f"nvidia-smi {index} -pl {least:g}", " W"
    )
    slow = one["throttle"]
    judge(
        "throttle",
        None if slow is None else ", ".join(slow) or "nothing slows it",
        not slow,
        "no thermal, power-brake or hardware slowdown",
        "see to cooling and power supply; nvidia-smi -q -d PERFORMANCE tells more",
    )
    used, serving = one["memory_used_mib"], own_containers(facts)
    if serving:
        add.leave(("idle_memory",), f"not checked: {serving} is serving")
        return
    judge(
        "idle_memory",
        used,
        (used or 0) <= want["idle_memory_mib"],
        f"at most {want['idle_memory_mib']} MiB in use before a model loads",
        "stop what uses it (nvidia-smi lists it); if nothing does, memory was left behind and a reboot frees it",
        " MiB",
    )


def device(add: Findings, facts: dict, kind: str, want: dict, uuid: str, probe: dict | None) -> None:
    """The way of the GPU into a container: toolkit, CDI specs, and a real container."""
    names = ("toolkit", "cdi_spec", "cdi_fresh", "cdi_shadowed", "apt_sources", "container")
    if kind == "cpu":
        add.leave(names, "not applicable: a cpu host")
        return
    here = facts["host"]
    add.add(
        "toolkit",
        at_least(here["toolkit"], want["toolkit_min"]),
        here["toolkit"] or "not installed",
        f"nvidia-container-toolkit {want['toolkit_min']} or newer",
        "DGX OS: update it as NVIDIA says" if facts["dgx_release"] else "run ./inv provision",
    )
    chosen = one_gpu(facts, kind, uuid)
    cdi(add, facts, chosen)
    keys = sorted({str(each["signed_by"]) for each in here["apt_sources"] if NVIDIA_ARCHIVE in each["uri"]})
    add.add(
        "apt_sources",
        len(keys) <= 1,
        ", ".join(keys) or "NVIDIA's archive is not set up",
        "NVIDIA's archive signed by one key file at most",
        "keep one of the files in /etc/apt/sources.list.d that name it: apt refuses two Signed-By",
    )
    container(add, chosen, probe)


def cdi(add: Findings, facts: dict, chosen: str) -> None:
    """The CDI specs: one for the chosen GPU (a UUID, or nothing), fresh, and not hidden by a second one."""
    here = facts["host"]
    specs = [spec for spec in here["cdi"] if chosen in spec["devices"]] if chosen else here["cdi"]
    listed = "; ".join(f"{spec['file']}: {', '.join(spec['devices'])}" for spec in here["cdi"]) or "no spec"
    again = "systemctl restart nvidia-cdi-refresh (it writes /var/run/cdi/nvidia.yaml)"
    add.add("cdi_spec", bool(specs), listed, f"a CDI spec with nvidia.com/gpu={chosen or 'UUID'}", again)
    version = driver_version(facts)
    stale = [f"{spec['file']} names {', '.join(spec['driver_versions'])}" for spec in specs if version]
    stale = [text for text, spec in zip(stale, specs, strict=False) if set(spec["driver_versions"]) - {version}]
    known = bool(version and any(spec["driver_versions"] for spec in specs))
    add.add(
        "cdi_fresh",
        not stale if known else None,
        "; ".join(stale) or (f"made for {version}" if known else "not told: no driver version in a spec"),
        f"specs made for the loaded driver {version or ''}".strip(),
        f"{again}; delete a stale file in /etc/cdi by hand",
    )
    mine = [spec["file"] for spec in specs]
    shadowed = len(mine) > 1 and any(file.startswith("/etc/cdi/") for file in mine)
    add.add(
        "cdi_shadowed",
        not shadowed,
        ", ".join(mine) or "no spec",
        "one spec a device, and none in /etc/cdi that hides the packaged one",
        "move the file in /etc/cdi away: it hides the one in /var/run/cdi that is kept fresh",
    )


def container(add: Findings, chosen: str, probe: dict | None) -> None:
    """What a real container saw of the chosen GPU, where one was tried."""
    if probe is None:
        why = (
            "no image to try it with is on the host (preflight_probe_image names it)"
            if chosen
            else "no single GPU to look at"
        )
        add.leave(("container",), f"not checked: {why}", "a container sees the GPU")
        return
    seen = chosen in probe["out"]
    add.add(
        "container",
        probe["rc"] == 0 and seen,
        probe["out"] if seen else probe["err"] or probe["out"] or f"status {probe['rc']}, and no word",
        f"nvidia-smi -L in a container with nvidia.com/gpu={chosen} names it",
        "read the message: it is Docker's own. See the lines on CDI above",
    )


def findings(
    facts: dict,
    where: dict,
    profile: str = "auto",
    uuid: str = "",
    wanted: dict | None = None,
    probe: dict | None = None,
) -> list[dict]:
    """Judge a machine.

    `facts` is machine_facts.collect with folders; `where` has cache, cache_uid and ports; `wanted`
    overrides single values of the profile; `probe` is {rc, out, err} of a container that ran `nvidia-smi -L`.
    Raises ValueError for an unknown profile, an unknown value in `wanted`, or a version there that is a number.
    """
    kind = profile_of(facts, profile)
    unknown = set(wanted or {}) - set(ANY)
    if unknown:
        raise ValueError(f"preflight_wanted has {', '.join(sorted(unknown))}; there are: {', '.join(ANY)}")
    for name, value in (wanted or {}).items():
        if name.endswith("_min") and not isinstance(value, str):
            raise ValueError(f'preflight_wanted: {name} is {value!r}; wanted text, "1.20": as a number that is 1.2')
    want = {**PROFILES[kind], **(wanted or {})}
    found = Findings()
    machine(found, facts, kind, want)
    gpu(found, facts, kind, want, uuid)
    docker(found, facts, kind, want)
    device(found, facts, kind, want, uuid, probe)
    storage(found, facts, want, where)
    return list(found)


class FilterModule:
    """Ansible's way to find the filters."""

    def filters(self) -> dict:
        """Filter names."""
        return {"findings": findings, "profile_of": profile_of, "one_gpu": one_gpu}
