"""Room recipes: hosts brought to where they serve a recipe, and back to what they served before."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from images.errors import Problem, UsageProblem
from recipes.hosts import Host, changing, report, run_playbook
from recipes.load import Loaded, load_recipe
from recipes.lock import with_revision
from recipes.serving import HostImage, host_image, platform_of, service, variables, weights_variables


@dataclass(frozen=True)
class Wanted:
    """What hosts are to serve. `image` as --image has it; without `serve` only the model's weights are brought."""

    recipe: str
    image: str | None
    serve: bool


def provision_recipe(
    wanted: Wanted,
    hosts: str,
    inventory: str | None,
    settings: Sequence[str],
    check: bool,
    as_json: bool,
) -> int:
    """Provision hosts and serve a recipe on each, rendered by the host's own facts; a host that fails stops no other.

    On this machine alone, the image that its site names goes before the declared one.
    Returns 0 where every host serves it (with `check`: would), 1 where one doesn't.
    """
    loaded = load_recipe(wanted.recipe)
    here = hosts in {"", "localhost"} and not inventory
    image = wanted.image or (loaded.site.image if here else None)
    doing = f"{'Checking what it takes to serve' if check else 'Serving'} {loaded.recipe.id}"
    if not wanted.serve:
        _require_weights_to_bring(loaded)
        doing = f"{'Checking what it takes to bring' if check else 'Bringing'} {loaded.recipe.model.repo}"
    looked = run_playbook("facts.yml", hosts, inventory, settings, "Asking the hosts what they are")
    with TemporaryDirectory(prefix="station-recipes-serving-") as folder:
        told = _tell(loaded, looked, Path(folder), image) if wanted.serve else _tell_weights(loaded, looked)
        able = [host for host in looked if not host.problem]
        made = [host for host in looked if host.problem]
        if able:
            more = Path(folder) / "hosts.json"
            more.write_text(json.dumps({"all": {"hosts": told}}))
            names = ",".join(host.name for host in able)
            made += run_playbook("site.yml", names, inventory, settings, doing, changing(check), more)
    return report(sorted(made, key=lambda host: host.name), check, as_json)


def _require_weights_to_bring(loaded: Loaded) -> None:
    """Raise UsageProblem where a recipe's model is no repository's, or at no confirmed commit."""
    if not loaded.recipe.model.repo:
        raise UsageProblem(f"{loaded.recipe.id} serves a folder of this repository: it has no weights to bring")
    with_revision(loaded, None)


def _tell_weights(loaded: Loaded, looked: Sequence[Host]) -> dict[str, dict]:
    """The roles' variables for hosts that only get a model's weights."""
    return {host.name: weights_variables(loaded) for host in looked if not host.problem}


def _tell(loaded: Loaded, looked: Sequence[Host], folder: Path, image: str | None) -> dict[str, dict]:
    """The roles' variables for each host; a host that can't serve the recipe is marked with the reason instead."""
    told: dict[str, dict] = {}
    images: dict[str, HostImage] = {}
    for host in looked:
        if host.problem or host.facts is None or host.wanted is None:
            host.problem = host.problem or "it told nothing of itself"
            continue
        try:
            platform = platform_of(host.facts)
            if platform not in images:
                images[platform] = host_image(image, loaded, platform)
            served = service(loaded, images[platform], host.facts, host.wanted)
        except Problem as problem:
            host.problem = str(problem)
            continue
        told[host.name] = variables(loaded, images[platform], served, host.facts, folder / f"{len(told)}.json")
    return told


def roll_back(hosts: str, inventory: str | None, settings: Sequence[str], check: bool, as_json: bool) -> int:
    """Bring back on each host the service before: its unit and its lock. A second time returns.

    Returns 0 where every host serves it again, 1 where one doesn't.
    """
    settings = [*(settings or ()), "serving_rollback=true"]
    doing = f"{'Checking what it takes to bring' if check else 'Bringing'} back what was served before"
    return report(run_playbook("serve.yml", hosts, inventory, settings, doing, changing(check)), check, as_json)
