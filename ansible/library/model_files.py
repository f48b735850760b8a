#!/usr/bin/python3
"""A model's files on a host: from a hub, a mirror or a folder, checked, never there in part. Standard library only.

As a script: `python3 model_files.py --cache FOLDER --repo OWNER/NAME --revision COMMIT` prints JSON; a token is
taken from HF_TOKEN. As an Ansible module it takes the same names as parameters.

    CACHE/models/OWNER--NAME/REVISION/           the finished files, read-only; the folder appears by one rename
    CACHE/models/OWNER--NAME/REVISION.json       sha256, size and mtime of each; beside it, not in it
    CACHE/models/OWNER--NAME/.REVISION.partial/  what has arrived; a file is NAME.partial until its hash is right
    CACHE/huggingface/hub/…/snapshots/REVISION   a link to the first, for engines that are given a repository's name
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from dataclasses import fields
from pathlib import Path

try:
    from ansible.module_utils.model_disk import (
        Progress,
        as_ourselves,
        inside,
        is_held,
        locked,
        read_json,
        sha256_of,
        shown,
    )
    from ansible.module_utils.model_hub import ModelProblem, Told
    from ansible.module_utils.model_request import Request, require_name
    from ansible.module_utils.model_transfer import arrived, bring_all, finish, take_back
except ImportError:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "module_utils"))
    from model_disk import Progress, as_ourselves, inside, is_held, locked, read_json, sha256_of, shown
    from model_hub import ModelProblem, Told
    from model_request import Request, require_name
    from model_transfer import arrived, bring_all, finish, take_back

WATCH_POLL_S = 0.5
SETTLED = 6  # polls with a free lock after which nobody is at work


def faults(request: Request) -> dict[str, str]:
    """What is wrong with the finished files, by name; "" is the folder. By size and time, or by hash (verify=full).

    Raises ModelProblem for a file in the folder that nobody fetched.
    """
    folder, known = request.place("finished"), read_json(request.place("manifest")).get("files", {})
    if not folder.is_dir():
        return {"": "it isn't there"}
    present = {str(file.relative_to(folder)): file for file in folder.rglob("*") if not file.is_dir()}
    added = sorted(present.keys() - known.keys() - request.files.keys())
    if known and added:
        raise ModelProblem(f"{request.path} holds {', '.join(added)}, which nobody fetched: remove it")
    found = {} if known else {"": "it has no manifest"}
    for name in sorted(known.keys() | request.files.keys()):
        entry, file = known.get(name), present.get(name)
        if file is None or entry is None:
            found[name] = "is missing"
            continue
        seen, wanted = file.lstat(), request.files.get(name, entry["sha256"])
        unchanged = [seen.st_size, seen.st_mtime_ns] == [entry["size"], entry["mtime_ns"]] and entry["sha256"] == wanted
        if not (unchanged and request.verify == "quick") and sha256_of(file) != wanted:
            found[name] = "has another content"
    return found


def listing(request: Request) -> dict[str, Told]:
    """The files to fetch as the source tells them; a recipe's hash beats the hub's.

    Raises ModelProblem where the source lacks a file, or says it has another content than the one wanted.
    """
    told = (
        folder_listing(request)
        if request.hub is None
        else request.hub.listing(request.repo, request.revision, [*request.files])
    )
    names = sorted(request.files or told)
    missing = [name for name in names if name not in told]
    if missing or not names:
        raise ModelProblem(
            f"{request.source} has no {', '.join(missing) or 'files'} of {request.repo} at {request.revision}"
        )
    for name in names:
        require_name(name)
        found, wanted = told[name].sha256, request.files.get(name)
        if found and wanted and found != wanted:
            raise ModelProblem(f"{name} at {request.source}: sha256 {found}, wanted {wanted}; nothing was fetched")
    return {name: Told(told[name].size, request.files.get(name, told[name].sha256), told[name].blob) for name in names}


def folder_listing(request: Request) -> dict[str, Told]:
    """A folder's files; links are followed, hidden files are not the model's."""
    root = Path(request.source)
    with as_ourselves():
        if not root.is_dir():
            raise ModelProblem(f"source: {root} is not a folder of this host; mount it, or name another")
        found = {str(file.relative_to(root)): Told(file.stat().st_size) for file in root.rglob("*") if file.is_file()}
    return {name: told for name, told in found.items() if "/." not in f"/{name}"}


def alias(request: Request, make: bool) -> bool:
    """Whether an engine finds the folder by the repository's name; makes the link. True where it had to be made.

    A folder of that name that somebody else's download made is left alone.
    """
    name = "models--" + request.repo.replace("/", "--")
    link = Path("huggingface/hub") / name / "snapshots" / request.revision
    if link.is_dir() and not link.is_symlink():
        return False
    target = Path("../../../..") / request.place("finished")
    if link.is_symlink() and link.readlink() == target:
        return False
    if make:
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(target)
    return True


def ensure(request: Request, check: bool, say=None) -> dict:
    """Bring the model there, or with `check` tell what that would do. The mapping is the module's answer.

    Raises ModelProblem; what has arrived is kept.
    """
    with contextlib.ExitStack() as held:
        there = held.enter_context(inside(Path(request.cache), request.owner, request.group, make=not check))
        if not check:
            held.enter_context(locked(request.place("lock"), request.lock_wait_s))
        wrong = faults(request) if there else {"": "it isn't there"}
        answer = {"folder": request.path, "repo": request.repo, "revision": request.revision, "faults": wrong}
        if not wrong:
            changed = alias(request, make=not check)
            return {
                **answer,
                "changed": changed,
                "needed": changed,
                "complete": True,
                "bytes_to_fetch": 0,
                "message": f"{request.path} is whole",
            }
        files = listing(request)
        total = sum(told.size for told in files.values())
        to_come = total - sum(arrived(request, name, told, wrong) for name, told in files.items() if there)
        require_space(request, to_come)
        answer |= {
            "changed": True,
            "needed": True,
            "files": len(files),
            "bytes_total": total,
            "bytes_to_fetch": to_come,
        }
        summary = f"{shown(to_come)} of {shown(total)} in {len(files)} files from {request.source} to {request.path}"
        if check:
            return {**answer, "complete": False, "message": f"would bring {summary}"}
        take_back(request, wrong)
        progress = Progress(request.place("progress"), total, say)
        finish(request, bring_all(request, files, progress))
        alias(request, make=True)
        return {**answer, "complete": True, "bytes_fetched": progress.fetched, "message": f"brought {summary}"}


def require_space(request: Request, to_come: int) -> None:
    """Raise ModelProblem unless the bytes fit and `keep_free_gb` stay free."""
    folder = Path(request.cache)
    with as_ourselves():
        while not folder.exists():
            folder = folder.parent
        disk = os.statvfs(folder)
    free, wanted = disk.f_bavail * disk.f_frsize, (0 if request.link else to_come) + request.keep_free_gb * 1e9
    if free < wanted:
        raise ModelProblem(
            f"{folder} has {shown(free)} free, wanted {shown(wanted)}: {shown(to_come)} to come and "
            f"{request.keep_free_gb:g} GB to stay free; nothing was fetched"
        )


def watch(request: Request, every_s: float) -> dict:
    """Wait up to `every_s` seconds for a run to end; say how far it is.

    A lock that is free for a moment only may be that of a run that hasn't begun yet, unless the files are there.
    """
    deadline, free = time.monotonic() + max(every_s, WATCH_POLL_S * (SETTLED + 2)), 0
    with inside(Path(request.cache), request.owner, request.group, make=False) as there:
        while there and time.monotonic() < deadline:
            free = 0 if is_held(request.place("lock")) else free + 1
            if free >= SETTLED or (free and request.place("manifest").exists()):
                return {"changed": False, "ended": True, "progress": "ended"}
            time.sleep(WATCH_POLL_S)
        text = read_json(request.place("progress")).get("text") if there else None
    return {"changed": False, "ended": False, "progress": text or "no byte yet"}


# ---- as a script, as a module ------------------------------------------------------------------------------------


def main() -> int:
    """Run as a script: progress to stderr, the answer as JSON to stdout."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("cache", "repo", "revision"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--source", default=Request.source, help="a hub's or mirror's address, or a folder")
    parser.add_argument("--file", action="append", default=[], metavar="NAME=SHA256", help="once a file; default: all")
    for name in ("owner", "group", "streams", "retries", "lock-wait-s"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Request, name.replace("-", "_")))
    for name in ("keep-free-gb", "backoff-s"):
        parser.add_argument(f"--{name}", type=float, default=getattr(Request, name.replace("-", "_")))
    parser.add_argument("--verify", choices=("quick", "full"), default=Request.verify)
    parser.add_argument("--link", action="store_true", help="a second name for a folder's files instead of a copy")
    parser.add_argument("--check", action="store_true", help="only tell what would be brought")
    given = vars(parser.parse_args())
    check, files = given.pop("check"), dict(pair.rsplit("=", 1) for pair in given.pop("file") if "=" in pair)
    try:
        request = Request(**given, files=files, token=os.environ.get("HF_TOKEN") or None)
        print(json.dumps(ensure(request, check, lambda text: print(text, file=sys.stderr, flush=True)), sort_keys=True))
    except ModelProblem as problem:
        print(f"✘ {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; what has arrived is kept", file=sys.stderr)
        return 1
    return 0


def run_module() -> None:
    """Run as an Ansible module: `state: present` brings the files, `watched` waits a while for a run that does."""
    from ansible.module_utils.basic import AnsibleModule

    kinds = {"str": "str", "str | None": "str", "int": "int", "float": "float", "bool": "bool", "dict": "dict"}
    spec = {each.name: {"type": kinds[each.type]} for each in fields(Request)}
    for name in ("cache", "repo", "revision"):
        spec[name]["required"] = True
    spec["token"]["no_log"] = True
    spec["verify"]["choices"] = ["quick", "full"]
    own = {
        "state": {"choices": ["present", "watched"], "default": "present"},
        "every_s": {"type": "int", "default": 30},
    }
    module = AnsibleModule(argument_spec={**spec, **own}, supports_check_mode=True)
    given = {name: value for name, value in module.params.items() if name in spec and value not in (None, "")}
    try:
        request = Request(**given)
        watched = module.params["state"] == "watched"
        answer = watch(request, module.params["every_s"]) if watched else ensure(request, module.check_mode)
    except ModelProblem as problem:
        module.fail_json(msg=str(problem))
    module.exit_json(**answer)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(main())
    run_module()
