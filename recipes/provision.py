"""Room recipes: hosts brought to where they serve a recipe, and back to what they served before."""

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from images.errors import Problem
from recipes.hosts import Host, changing, report, run_playbook
from recipes.load import Loaded, load_recipe
from recipes.serving import HostImage, host_image, platform_of, service, variables


def provision_recipe(
    recipe: str,
    image: str | None,
    hosts: str,
    inventory: str | None,
    settings: Sequence[str],
    check: bool,
    as_json: bool,
) -> int:
    """Provision hosts and serve a recipe on each, rendered by the host's own facts; a host that fails stops no other.

    Returns 0 where every host serves it (with `check`: would), 1 where one doesn't.
    """
    loaded = load_recipe(recipe)
    looked = run_playbook("facts.yml", hosts, inventory, settings, "Asking the hosts what they are")
    with TemporaryDirectory(prefix="station-recipes-serving-") as folder:
        told = _tell(loaded, image, looked, Path(folder))
        able = [host for host in looked if not host.problem]
        made = [host for host in looked if host.problem]
        if able:
            more = Path(folder) / "hosts.json"
            more.write_text(json.dumps({"all": {"hosts": told}}))
            names = ",".join(host.name for host in able)
            doing = f"{'Checking what it takes to serve' if check else 'Serving'} {loaded.recipe.id}"
            made += run_playbook("site.yml", names, inventory, settings, doing, changing(check), more)
    return report(sorted(made, key=lambda host: host.name), check, as_json)


def _tell(loaded: Loaded, image: str | None, looked: Sequence[Host], folder: Path) -> dict[str, dict]:
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
