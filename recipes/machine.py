"""Room recipes: what the machine is, as ansible/library/machine_facts.py tells it."""

import json
import sys
from pathlib import Path

from images.command import run
from images.errors import Problem

FACTS_SCRIPT = Path(__file__).parent.parent / "ansible" / "library" / "machine_facts.py"


def machine_facts(root: Path = Path("/")) -> dict:
    """Ask the one owner of machine facts; the mapping is documented there.

    Raises Problem if it can't answer.
    """
    answer = run([sys.executable, str(FACTS_SCRIPT), "--root", str(root)])
    if answer.returncode != 0:
        raise Problem(f"machine facts could not be read: {answer.stderr.strip()}")
    return json.loads(answer.stdout)
