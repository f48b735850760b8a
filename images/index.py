"""Room images: where packages come from. uv doesn't read pip's configuration, so this hands it over."""

import configparser
import os
import sys
from collections.abc import Mapping
from pathlib import Path


def pip_settings(environ: Mapping[str, str], files: list[Path]) -> dict[str, str]:
    """Read pip's [global] and [install] settings; later files win, PIP_* variables win over files."""
    settings: dict[str, str] = {}
    for file in files:
        parser = configparser.RawConfigParser()
        try:
            parser.read(file)
        except (configparser.Error, OSError, UnicodeDecodeError):
            continue  # pip itself would complain; it is not ours to judge
        for section in ("global", "install"):
            if parser.has_section(section):
                settings.update(parser.items(section))
    for name, value in environ.items():
        if name.startswith("PIP_"):
            settings[name[4:].lower().replace("_", "-")] = value
    return settings


def pip_files(environ: Mapping[str, str]) -> list[Path]:
    """The configuration files pip reads on Linux, lowest precedence first."""
    home = Path(environ.get("HOME", "/"))
    config = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    shared = [Path(folder) / "pip/pip.conf" for folder in environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":")]
    files = [*shared, Path("/etc/pip.conf"), home / ".pip/pip.conf", config / "pip/pip.conf"]
    if "PIP_CONFIG_FILE" in environ:
        files.append(Path(environ["PIP_CONFIG_FILE"]))
    return files


def uv_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with pip's index settings said in uv's words, where uv has none of its own.

    Hashes are pinned, so taking a file from any of the indexes is safe: uv may look in all of them.
    """
    settings = pip_settings(environ, pip_files(environ))
    translated = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_NO_CONFIG": "1", "UV_LINK_MODE": "copy"}
    if "index-url" in settings:
        translated["UV_DEFAULT_INDEX"] = settings["index-url"]
    if "extra-index-url" in settings:
        translated["UV_INDEX"] = " ".join(settings["extra-index-url"].split())
    if "find-links" in settings:
        translated["UV_FIND_LINKS"] = ",".join(settings["find-links"].split())
    if "cert" in settings:
        translated["SSL_CERT_FILE"] = settings["cert"]
    if "no-index" in settings and settings["no-index"].lower() in {"1", "true", "yes", "on"}:
        translated["UV_NO_INDEX"] = "1"
    return {**translated, **environ}


def uv_command() -> list[str]:
    """uv as the control plane pins it: beside the interpreter that runs us."""
    return [str(Path(sys.executable).with_name("uv"))]


def cache_root(environ: Mapping[str, str] = os.environ) -> Path:
    """Where engines, models and JIT caches live: STATION_RECIPES_CACHE, else the user's cache folder."""
    if environ.get("STATION_RECIPES_CACHE"):
        return Path(environ["STATION_RECIPES_CACHE"]).expanduser().absolute()
    base = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "/")) / ".cache"
    return Path(base) / "station-recipes"


def state_root(environ: Mapping[str, str] = os.environ) -> Path:
    """Where running servers, noise floors and adopted recipes are kept: STATION_RECIPES_STATE, else the user's own."""
    if environ.get("STATION_RECIPES_STATE"):
        return Path(environ["STATION_RECIPES_STATE"]).expanduser().absolute()
    base = environ.get("XDG_STATE_HOME") or Path(environ.get("HOME", "/")) / ".local" / "state"
    return Path(base) / "station-recipes"
