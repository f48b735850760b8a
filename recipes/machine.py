"""Room recipes: what the machine is, as ansible/library/machine_facts.py tells it."""

import json
import sys
from pathlib import Path

from images.command import run
from images.declaration import declaration
from images.errors import Problem, UsageProblem
from images.validate import validate
from images.yaml_source import read_yaml
from recipes.schema import Machine, Match, Model, Recipe

MACHINES = Path(__file__).parent / "machines"
NAME_GPU = "Name it, once for this machine: ./inv site --gpu UUID"
FACTS_SCRIPT = Path(__file__).parent.parent / "ansible" / "library" / "machine_facts.py"


def machine_facts(root: Path = Path("/")) -> dict:
    """Ask the one owner of machine facts; the mapping is documented there.

    Raises Problem if it can't answer.
    """
    answer = run([sys.executable, str(FACTS_SCRIPT), "--root", str(root)])
    if answer.returncode != 0:
        raise Problem(f"machine facts could not be read: {answer.stderr.strip()}")
    return json.loads(answer.stdout)


def load_machines(folder: Path = MACHINES) -> dict[str, Machine]:
    """Every machine profile by name, the most particular first."""
    found = []
    for file in sorted(folder.glob("*.yaml")):
        document = read_yaml(file)
        found.append(validate(Machine, document.data, document.marks))
    return {machine.name: machine for machine in sorted(found, key=_breadth)}


def _breadth(machine: Machine) -> tuple[bool, bool, str]:
    particular = machine.match.pci_ids or machine.match.gpu_names
    return machine.device == "cpu", not particular, machine.name


def machine_profile(facts: dict, machines: dict[str, Machine]) -> Machine:
    """The profile a machine's facts fit: by PCI id, by the GPU's name, by memory, else the CPU."""
    gpus = [*facts["gpus"], *facts["pci_gpus"]]
    return next(
        each for each in machines.values() if each.device == "cpu" or any(_fits(each.match, gpu) for gpu in gpus)
    )


def _fits(match: Match, gpu: dict) -> bool:
    return (
        (not match.pci_ids or gpu.get("pci_id") in match.pci_ids)
        and (not match.gpu_names or gpu.get("name") in match.gpu_names)
        and (match.memory_mib_min is None or (gpu.get("memory_mib") or 0) >= match.memory_mib_min)
    )


def why_not(recipe: Recipe, facts: dict) -> str | None:
    """Why a recipe can't exist on this machine, in words; None where it can."""
    has_gpu = bool(facts["gpus"])
    on_gpu = declaration(recipe.engine.image).device == "cuda"
    applies = recipe.applies
    if applies and not on_gpu:
        return f"does not apply to the {recipe.engine.image} engine: {applies.reason}"
    if on_gpu and not has_gpu:
        return "needs an NVIDIA GPU"
    return _unconfirmed(recipe.model)


def _unconfirmed(model: Model) -> str | None:
    if model.repo and not model.revision:
        return f"needs a confirmed commit of {model.repo} (./inv site --model-revision)"
    return None


def how_to_confirm(model: Model) -> str:
    """What a person does to confirm the commit of a repository's model, once for this machine."""
    return (
        f"Read it where you trust it: git ls-remote https://huggingface.co/{model.repo} HEAD. "
        f"Then: ./inv site --model-revision {model.repo}=COMMIT"
    )


def require_applies(recipe: Recipe, facts: dict) -> None:
    """Raise UsageProblem where a recipe can't exist on this machine."""
    reason = why_not(recipe, facts)
    if reason is None:
        return
    unconfirmed = reason == _unconfirmed(recipe.model)
    remedy = how_to_confirm(recipe.model) if unconfirmed else "`./inv list` shows what can"
    raise UsageProblem(f"{recipe.id} can't run here: it {reason}. {remedy}.")


def gpu_device(
    recipe: Recipe, facts: dict, profile: Machine, uuid: str | None = None, remedy: str = NAME_GPU
) -> str | None:
    """The CDI name of the one GPU a recipe runs on, `uuid`'s where a site names one; None for a CPU engine.

    Raises UsageProblem unless exactly one GPU fits the machine's profile: an index is no contract. `remedy` says how
    to name it.
    """
    if declaration(recipe.engine.image).device != "cuda":
        return None
    fitting = [gpu["uuid"] for gpu in facts["gpus"] if gpu.get("uuid") and _fits(profile.match, gpu)]
    fitting = [each for each in fitting if uuid in {None, each}]
    if profile.device != "cuda" or len(fitting) != 1:
        seen = ", ".join(f"{gpu['name']} {gpu['uuid']}" for gpu in facts["gpus"]) or "no NVIDIA GPU"
        raise UsageProblem(f"wanted exactly one GPU that {recipe.id} is made for, found: {seen}. {remedy}")
    return f"nvidia.com/gpu={fitting[0]}"
