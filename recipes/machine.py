"""Room recipes: what the machine is, as ansible/library/machine_facts.py tells it."""

import json
import sys
from pathlib import Path

from images.command import run
from images.engine import image_facts
from images.errors import Problem, UsageProblem
from recipes.schema import Recipe

FACTS_SCRIPT = Path(__file__).parent.parent / "ansible" / "library" / "machine_facts.py"


def machine_facts(root: Path = Path("/")) -> dict:
    """Ask the one owner of machine facts; the mapping is documented there.

    Raises Problem if it can't answer.
    """
    answer = run([sys.executable, str(FACTS_SCRIPT), "--root", str(root)])
    if answer.returncode != 0:
        raise Problem(f"machine facts could not be read: {answer.stderr.strip()}")
    return json.loads(answer.stdout)


def why_not(recipe: Recipe, facts: dict) -> str | None:
    """Why a recipe can't exist on this machine, in words; None where it can."""
    has_gpu = bool(facts["gpus"])
    on_gpu = image_facts(recipe.engine.image)["device"] == "cuda"
    applies = recipe.applies
    if applies and applies.device == "cuda" and not on_gpu:
        return f"does not apply to the {recipe.engine.image} engine: {applies.reason}"
    if applies and applies.without_cpu_flag and not on_gpu and applies.without_cpu_flag in facts["cpu"]["flags"]:
        return f"does not apply to this CPU: {applies.reason}"
    return "needs an NVIDIA GPU" if on_gpu and not has_gpu else None


def require_applies(recipe: Recipe, facts: dict) -> None:
    """Raise UsageProblem where a recipe can't exist on this machine."""
    reason = why_not(recipe, facts)
    if reason:
        raise UsageProblem(f"{recipe.id} can't run here: it {reason}. `./inv list` shows what can.")
