"""Preflight: machine facts in, findings out. Pure, standard library only; Ansible calls it as a filter.

A finding is {id, ok, found, wanted, remedy}. `ok` is null where the line doesn't apply to this kind of machine, or
could not be looked at; `found` then says why. Every line is judged; none hides another.
"""

import re

GB300_PCI_IDS = ("10de:31c2", "10de:31c3")
STATION_WORDS = {"GB300", "STATION"}  # in any order, between spaces or underscores; display names never decide
STATION_PLATFORM = "GALAXY-GB300"  # in /etc/dgx-release; corroborates only
NVIDIA_ARCHIVE = "nvidia.github.io/libnvidia-container"

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
CUDA = {**ANY, "docker_min": "25.0", "driver_min": "580", "toolkit_min": "1.18", "image_gb": 40, "weights_gb": 80}
# What a Station needs was read in public field reports; nobody here could check it on one.
STATION = {**CUDA, "architecture": ["aarch64"], "driver_min": "590.48.01", "toolkit_min": "1.19"}
STATION |= {"page_size": 65536, "power_limit_min_w": 1100}
PROFILES = {"dgx-station": STATION, "cuda": CUDA, "cpu": ANY}
OWN = "station-recipes"  # this project's containers are called so, and then the recipe


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


def gpu_text(gpu: dict) -> str:
    """A GPU in one line."""
    return f"{gpu.get('name') or 'GPU'} {gpu.get('uuid') or gpu.get('address')} ({gpu['pci_id']})"


def own_containers(facts: dict) -> str:
    """Names of this project's running containers, in one text."""
    return ", ".join(each["name"] for each in facts["host"]["docker"]["containers"] if each["name"].startswith(OWN))


class Findings(list):
    """A list of findings that is easy to add to."""

    def add(self, name: str, ok: bool | None, found: object, wanted: str, remedy: str) -> None:
        """Add one finding; the remedy is only told where something is wrong."""
        told = remedy if ok is False else ""
        self.append({"id": name, "ok": ok, "found": str(found), "wanted": wanted, "remedy": told})

    def leave(self, names: tuple[str, ...], why: str, wanted: str = "") -> None:
        """Add lines that could not be judged, with the reason."""
        for name in names:
            self.add(name, None, why, wanted, "")


def machine(add: Findings, facts: dict, kind: str, want: dict) -> None:
    """Architecture, identity, page size, pending reboot, clock."""
    here = facts["host"]
    add.add(
        "architecture",
        facts["architecture"] in want["architecture"],
        facts["architecture"],
        " or ".join(want["architecture"]),
        "another machine: images and wheels are made for these architectures only",
    )
    station = kind == "dgx-station"
    words, platform = dmi_words(facts), (facts["dgx_release"] or "").replace("\n", " ")
    if station:
        add.add(
            "identity",
            words >= STATION_WORDS,
            facts["dmi_product"] or "no DMI product name",
            "a DMI product name with the words GB300 and Station",
            "compare with the machine's label; if it is no Station, set preflight_profile to cuda",
        )
        add.add(
            "platform_file",
            not platform or STATION_PLATFORM in platform,
            platform or "no /etc/dgx-release: not DGX OS, packages may be installed",
            f"DGX_PLATFORM with {STATION_PLATFORM}, or no such file",
            "the image was made for another DGX: report it to NVIDIA; identity goes by hardware and was judged above",
        )
        add.add(
            "page_size",
            facts["page_size"] == want["page_size"],
            facts["page_size"],
            str(want["page_size"]),
            "boot the -64k kernel (linux-image-nvidia-64k) and choose it in GRUB",
        )
        strays = [name for name in here["active"] if name in {"nvidia-fabricmanager", "nvidia-imex"}]
        add.add(
            "fabric",
            not strays,
            ", ".join(strays) or "neither runs",
            "no fabric manager and no IMEX on a single-GPU Station",
            f"systemctl disable --now {' '.join(strays)}",
        )
    else:
        add.leave(("identity", "platform_file", "page_size", "fabric"), f"not applicable: a {kind} host")
    secure = {True: "on", False: "off", None: "not told by this machine"}[here["secure_boot"]]
    add.add("secure_boot", True if here["secure_boot"] is not None else None, secure, "reported only", "")
    reboot = here["reboot"]
    add.add(
        "reboot",
        reboot is None,
        "none pending" if reboot is None else f"pending, for {', '.join(reboot) or 'a reason it does not name'}",
        "no reboot pending",
        "reboot the machine when nobody needs it; nothing here reboots it",
    )
    add.add(
        "packages",
        not here["half_installed"],
        ", ".join(here["half_installed"]) or "none half installed",
        "no package half installed",
        "dpkg --configure -a (./inv provision does it, except on DGX OS)",
    )
    add.add(
        "clock",
        here["clock_synchronised"],
        {True: "synchronised", False: "not synchronised", None: "not told by this machine"}[here["clock_synchronised"]],
        "synchronised by NTP",
        "timedatectl set-ntp true, or install chrony",
    )


def gpu(add: Findings, facts: dict, kind: str, want: dict, uuid: str) -> None:
    """The one GPU, its driver, and the state it is in."""
    states = ("mig", "persistence", "ecc", "power_limit", "throttle", "idle_memory")
    if kind == "cpu":
        add.leave(("gpu", "driver", "driver_library", *states), "not applicable: a cpu host")
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
    version = facts["driver"]["kernel"] or next((each["driver"] for each in facts["gpus"] if each["driver"]), None)
    library = facts["driver"]["library"]
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
    if len(fitting) != 1:
        add.leave(states, "not checked: no single GPU to look at")
        return
    one = fitting[0]

    def state(name: str, value: object, good: bool, wanted: str, remedy: str, unit: str = "") -> None:
        found = "not told" if value is None else f"{value:g}{unit}" if isinstance(value, (int, float)) else value
        add.add(name, None if value is None else good, found, wanted, remedy)

    index = f"-i {one['uuid']}"
    state("mig", one["mig"], one["mig"] == "Disabled", "Disabled", f"nvidia-smi {index} -mig 0, when nothing uses it")
    unit = facts["host"]["services"].get("nvidia-persistenced") or "unknown"
    state(
        "persistence",
        one["persistence"],
        one["persistence"] == "Enabled",
        "Enabled",
        f"systemctl enable --now nvidia-persistenced (it is {unit}"
        f"{'; systemctl unmask it first' if unit == 'masked' else ''})",
    )
    errors = one["ecc_uncorrected"]
    state("ecc", errors, errors == 0, "0 uncorrected errors", "reboot; if they return, have the GPU checked")
    limit = one["power_limit_w"]
    least = want["power_limit_min_w"] or one["power_default_w"] or 0
    state(
        "power_limit", limit, (limit or 0) >= least, f"{least:g} W or more", f"nvidia-smi {index} -pl {least:g}", " W"
    )
    slow = one["throttle"]
    state(
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
    state(
        "idle_memory",
        used,
        (used or 0) <= want["idle_memory_mib"],
        f"at most {want['idle_memory_mib']} MiB in use before a model loads",
        "stop what uses it (nvidia-smi lists it); if nothing does, memory was left behind and a reboot frees it",
        " MiB",
    )


def docker(add: Findings, facts: dict, kind: str, want: dict) -> None:
    """Docker itself: version, daemon, settings, containers that a restart would kill."""
    here = facts["host"]["docker"]
    dgx = " (DGX OS: by its own update)" if facts["dgx_release"] else ", or run ./inv provision"
    add.add(
        "docker",
        at_least(here["version"], want["docker_min"]),
        here["version"] or "not installed",
        f"{want['docker_min']} or newer",
        f"install it{dgx}",
    )
    info = here["info"]
    denied = "permission denied" in (here["error"] or "").lower()
    add.add(
        "docker_api",
        info is not None,
        "answers" if info else here["error"],
        "the engine answers docker info",
        "log in as root or as a member of the group docker (a new session, after joining it)"
        if denied
        else "systemctl status docker tells why"
        if here["version"]
        else f"install Docker{dgx}",
    )
    settings, broken = here["daemon_json"] or {}, here["daemon_json_error"]
    add.add(
        "daemon_json",
        not broken,
        broken or ("no file" if here["daemon_json"] is None else f"keys: {', '.join(settings) or 'none'}"),
        "no file, or a JSON object",
        "mend /etc/docker/daemon.json by hand: nothing here overwrites what it can't read",
    )
    twice = sorted(set(settings) & set(here["unit_flags"]))
    add.add(
        "daemon_flags",
        not twice,
        f"both in daemon.json and in the unit's command line: {', '.join(twice)}" if twice else "no conflict",
        "no setting both in daemon.json and in a flag of dockerd",
        "systemctl cat docker shows the flags: remove one of the two; dockerd won't start with both",
    )
    cdi = bool(info and info["CDISpecDirs"])
    names = ", ".join(container["name"] for container in here["containers"]) or "none"
    if kind == "cpu":
        add.leave(("docker_cdi",), "not applicable: a cpu host")
    elif info is None:
        add.leave(("docker_cdi",), "not checked: the engine does not answer")
    else:
        remedy = 'set {"features": {"cdi": true}} in daemon.json and restart Docker' + dgx
        add.add("docker_cdi", cdi, "on" if cdi else "off", "CDI devices are on", remedy)
    kills = kind != "cpu" and info is not None and not cdi and here["containers"]
    add.add(
        "containers",
        None if info is None else not kills,
        names if info else "not checked: the engine does not answer",
        "none that a needed restart of Docker would kill",
        "stop them first, or allow it with docker_host_restart_with_containers",
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
    specs = [spec for spec in here["cdi"] if chosen in spec["devices"]] if chosen else here["cdi"]
    listed = "; ".join(f"{spec['file']}: {', '.join(spec['devices'])}" for spec in here["cdi"]) or "no spec"
    again = "systemctl restart nvidia-cdi-refresh (it writes /var/run/cdi/nvidia.yaml)"
    add.add("cdi_spec", bool(specs), listed, f"a CDI spec with nvidia.com/gpu={chosen or 'UUID'}", again)
    version = facts["driver"]["kernel"] or next((each["driver"] for each in facts["gpus"] if each["driver"]), None)
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
    keys = sorted({str(each["signed_by"]) for each in here["apt_sources"] if NVIDIA_ARCHIVE in each["uri"]})
    add.add(
        "apt_sources",
        len(keys) <= 1,
        ", ".join(keys) or "NVIDIA's archive is not set up",
        "NVIDIA's archive signed by one key file at most",
        "keep one of the files in /etc/apt/sources.list.d that name it: apt refuses two Signed-By",
    )
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


def storage(add: Findings, facts: dict, want: dict, where: dict) -> None:
    """Disks, the caches' owner, ports."""
    here = facts["host"]
    for name, folder, least in (
        ("disk_image", where["docker_root"], want["image_gb"]),
        ("disk_weights", where["cache"], want["weights_gb"]),
    ):
        free = here["folders"][folder]["free_gb"]
        add.add(name, free >= least, f"{free:g} GB free for {folder}", f"{least:g} GB or more", "free some space")
    cache = here["folders"][where["cache"]]
    strange = f"; in it {cache['foreign']} belongs to another user" if cache["foreign"] else ""
    add.add(
        "cache_owner",
        not cache["exists"] or (cache["owner_uid"] == where["cache_uid"] and not strange),
        f"uid {cache['owner_uid']}, mode {cache['mode']}{strange}" if cache["exists"] else "not made yet",
        f"{where['cache']} missing, or owned with all that is in it by uid {where['cache_uid']}",
        "name a folder of its own in preflight_cache; nobody's cache is ever chowned",
    )
    taken = ", ".join(str(port) for port in where["ports"] if port in here["listening"])
    serving = own_containers(facts)
    add.add(
        "ports",
        not taken or bool(serving),
        f"taken: {taken}{f', while {serving} is serving' if serving else ''}" if taken else "free",
        f"free: {', '.join(map(str, where['ports']))}",
        "ss -ltnp shows who listens; stop it, or serve on another port",
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

    `facts` is machine_facts.collect with folders; `where` has docker_root, cache, cache_uid and ports; `wanted`
    overrides single values of the profile; `probe` is {rc, out, err} of a container that ran `nvidia-smi -L`.
    Raises ValueError for an unknown profile or an unknown value in `wanted`.
    """
    kind = profile_of(facts, profile)
    unknown = set(wanted or {}) - set(ANY)
    if unknown:
        raise ValueError(f"preflight_wanted has {', '.join(sorted(unknown))}; there are: {', '.join(ANY)}")
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
