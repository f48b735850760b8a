"""Hosts: what a host's facts mean for what roles do to it. Pure, standard library only; Ansible calls it as filters."""

import re

# Findings that make a host the wrong one to provision, and that provisioning doesn't mend.
BARS = ("architecture", "init", "identity", "gpu", "driver_library", "daemon_json", "apt_sources")
# Findings that a reboot mends, for sure.
REBOOTS = ("reboot", "driver_library")
CDI_SINCE = (25, 0)
# Settings of daemon.json that `docker info` shows, by their path; the others can be judged by the file's age only.
SHOWN = {
    "features.cdi": lambda info: bool(info["CDISpecDirs"]),
    "live-restore": lambda info: info["LiveRestoreEnabled"],
    "default-runtime": lambda info: info["DefaultRuntime"],
    "log-driver": lambda info: info["LoggingDriver"],
    "storage-driver": lambda info: info["Driver"],
    "data-root": lambda info: info["DockerRootDir"],
    "debug": lambda info: info["Debug"],
}


def bars(findings: list[dict], accepted: list[str]) -> list[str]:
    """Lines about the findings that stop provisioning, unless they are accepted."""
    stop = [each for each in findings if each["ok"] is False and each["id"] in BARS and each["id"] not in accepted]
    return [f"{each['id']}: found {each['found']}; wanted {each['wanted']}; {each['remedy']}" for each in stop]


def reboot_reasons(findings: list[dict]) -> list[str]:
    """Why the host needs a reboot, a line each; empty where it needs none."""
    return [f"{each['id']}: {each['found']}" for each in findings if each["ok"] is False and each["id"] in REBOOTS]


def version_of(text: str | None) -> tuple[int, ...]:
    """A dotted version as numbers; empty where there is none."""
    return tuple(int(part) for part in re.findall(r"\d+", text or ""))


def merged(present: dict, owned: dict) -> dict:
    """`present` with the values of `owned` put in, however deep; everything else stays."""
    result = dict(present)
    for key, value in owned.items():
        before = result.get(key)
        result[key] = merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return result


def leaves(settings: dict, above: str = "") -> dict[str, object]:
    """Nested settings as dotted path → value."""
    found = {}
    for key, value in settings.items():
        nested = isinstance(value, dict) and value
        found |= leaves(value, f"{above}{key}.") if nested else {f"{above}{key}": value}
    return found


def without(settings: dict, path: str) -> dict:
    """Nested settings without one dotted path."""
    key, _, rest = path.partition(".")
    if key not in settings:
        return settings
    inner = without(settings[key], rest) if rest and isinstance(settings[key], dict) else {}
    return {**{name: value for name, value in settings.items() if name != key}, **({key: inner} if inner else {})}


def docker_plan(docker: dict, owned: dict) -> dict:
    """What has to happen so that Docker runs with the settings we own.

    `docker` is machine_facts' host.docker. Returns {settings, write, restart, conflicts, unmet, note}: the whole
    daemon.json as it should be, whether to write it, whether a restart is needed, owned settings that the unit's
    command line sets too (dockerd wouldn't start), and what isn't in effect. Judged by what is in effect: a file
    that was written while the restart failed still needs its restart.
    """
    info, present = docker["info"], docker["daemon_json"] or {}
    note = ""
    version = version_of(docker["version"])[:2]
    if version and version < CDI_SINCE and "features.cdi" in leaves(owned):
        owned = without(owned, "features.cdi")
        note = f"Docker {docker['version']} knows no CDI devices (25.0 was the first): left out"
    in_file, unmet, missing = leaves(present), [], {}
    for path, value in leaves(owned).items():
        shown = SHOWN[path](info) if info and path in SHOWN else None
        effective = shown == value if shown is not None else in_file.get(path) == value
        if not effective or in_file.get(path, value) != value:
            missing[path] = value
        if info and shown is not None and shown != value:
            unmet.append(f"{path} is {shown}, wanted {value}")
        elif info and shown is None and (in_file.get(path) != value or docker["daemon_json_newer"]):
            unmet.append(f"{path} is not in effect, wanted {value}")
    needed = {path: value for path, value in missing.items() if in_file.get(path) != value}
    return {
        "settings": merged(present, owned) if needed else present,
        "write": bool(needed),
        "restart": bool(unmet) or (info is None and bool(docker["version"])),
        "conflicts": sorted({path.partition(".")[0] for path in needed} & set(docker["unit_flags"])),
        "unmet": unmet,
        "note": note,
    }


def apt_candidate(policy: str) -> str:
    """The version that `apt-cache policy` would install, without epoch and revision; 0 where there is none."""
    found = re.search(r"^ *Candidate: (?:\d+:)?([\d.]+)", policy, re.M)
    return found[1] if found else "0"


def archive_name(uri: str) -> str:
    """An archive's URI without what may differ for the same archive: scheme, architecture, last slash."""
    return re.sub(r"/(\$\(ARCH\)|amd64|arm64)?/*$", "", re.sub(r"^\w+:/*", "", uri.rstrip("/") + "/"))


def apt_archive(sources: list[dict], uri: str) -> dict:
    """Which files already name an archive, and with which keys: {files, keys}. One key at most is sound."""
    same = [each for each in sources if archive_name(each["uri"]) == archive_name(uri)]
    return {"files": sorted({each["file"] for each in same}), "keys": sorted({str(each["signed_by"]) for each in same})}


def fresh_specs(facts: dict) -> list[str]:
    """CDI specs that name a GPU of this machine and no other driver version than the loaded one."""
    driver = facts["driver"]["kernel"] or next((gpu["driver"] for gpu in facts["gpus"] if gpu["driver"]), None)
    here = {gpu["uuid"] for gpu in facts["gpus"]}
    return [
        spec["file"]
        for spec in facts["host"]["cdi"]
        if here & set(spec["devices"]) and not (driver and set(spec["driver_versions"]) - {driver})
    ]


class FilterModule:
    """Ansible's way to find the filters."""

    def filters(self) -> dict:
        """Filter names."""
        return {
            "bars": bars,
            "reboot_reasons": reboot_reasons,
            "docker_plan": docker_plan,
            "apt_candidate": apt_candidate,
            "apt_archive": apt_archive,
            "fresh_specs": fresh_specs,
        }
