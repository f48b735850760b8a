"""Preflight: findings about the machine itself, its Docker and its disks. Pure, standard library only.

A finding is {id, ok, found, wanted, remedy}. `ok` is null where the line doesn't apply to this kind of machine, or
could not be looked at; `found` then says why.
"""

from host_profiles import STATION_PLATFORM, STATION_WORDS, at_least, dmi_words

OWN = "station-recipes"  # this project's containers are called so, and then the recipe


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
    """Architecture, identity, page size, init, pending reboot, clock."""
    here = facts["host"]
    add.add(
        "architecture",
        facts["architecture"] in want["architecture"],
        facts["architecture"],
        " or ".join(want["architecture"]),
        "another machine: images and wheels are made for these architectures only",
    )
    if kind == "dgx-station":
        station(add, facts, want)
    else:
        add.leave(("identity", "platform_file", "page_size", "fabric"), f"not applicable: a {kind} host")
    secure = {True: "on", False: "off", None: "not told by this machine"}[here["secure_boot"]]
    add.add("secure_boot", True if here["secure_boot"] is not None else None, secure, "reported only", "")
    init = here["init"]
    add.add(
        "init",
        None if init is None else init == "systemd",
        init or "not told by this machine",
        "systemd: Docker and the recipe are its services",
        "provision a machine that was booted with systemd (a container usually isn't); ./inv serve needs none",
    )
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


def station(add: Findings, facts: dict, want: dict) -> None:
    """What a DGX Station alone has: its name, its system, the page size of its kernel, no fabric."""
    words, platform = dmi_words(facts), (facts["dgx_release"] or "").replace("\n", " ")
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
    strays = [name for name in facts["host"]["active"] if name in {"nvidia-fabricmanager", "nvidia-imex"}]
    add.add(
        "fabric",
        not strays,
        ", ".join(strays) or "neither runs",
        "no fabric manager and no IMEX on a single-GPU Station",
        f"systemctl disable --now {' '.join(strays)}",
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


def storage(add: Findings, facts: dict, want: dict, where: dict) -> None:
    """Disks, the caches' owner, ports."""
    here = facts["host"]
    for name, folder, least in (
        ("disk_image", here["docker"]["root"], want["image_gb"]),
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
