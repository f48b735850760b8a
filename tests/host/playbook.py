"""Run one role as root on this machine, from the repository's files alone, into folders of a test."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
ANSIBLE = ROOT / "ansible"


@dataclass(frozen=True)
class Played:
    """What a play did."""

    code: int
    text: str

    @property
    def changed(self) -> int:
        """The recap's number of changes."""
        return int(re.search(r"changed=(\d+)", self.text)[1])


def play(folder: Path, role: str, *options: str, environ: dict | None = None, **variables: object) -> Played:
    """Apply a role to this machine, or to one that `variables` reach; `folder` takes the playbook and temporary files."""
    book = folder / "play.yml"
    book.write_text(json.dumps([{"hosts": "all", "gather_facts": False, "roles": [role]}]))
    config = folder / "ansible.cfg"  # nobody else's
    config.write_text("[defaults]\n")
    own = {
        "ANSIBLE_LIBRARY": ANSIBLE / "library",
        "ANSIBLE_MODULE_UTILS": ANSIBLE / "module_utils",
        "ANSIBLE_ROLES_PATH": ANSIBLE / "roles",
        "ANSIBLE_LOCAL_TEMP": folder / "local",
        "ANSIBLE_REMOTE_TEMP": folder / "remote",
        "ANSIBLE_ASYNC_DIR": folder / "async",
        "ANSIBLE_CONFIG": config,
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_PIPELINING": "1",
    }
    plain = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    argv = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", "here,", "-c", "local", str(book), *options]
    argv += ["-e", json.dumps({"ansible_python_interpreter": "/usr/bin/python3", **variables})]
    env = {**plain, **{name: str(value) for name, value in own.items()}, **(environ or {})}
    answer = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=300)
    return Played(answer.returncode, answer.stdout + answer.stderr)
