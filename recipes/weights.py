"""Room recipes: whether a repository's model is in a cache, as the hub's own clients lay it out there."""

from pathlib import Path

from images.errors import UsageProblem
from images.yaml_source import shown
from recipes.schema import Model, Recipe
from recipes.spec import HOST_CACHE

HUB = "huggingface"  # below a cache: HF_HOME


def snapshot(cache: Path, model: Model) -> Path:
    """The folder of a repository's model at its commit."""
    return cache / HUB / "hub" / f"models--{model.repo.replace('/', '--')}" / "snapshots" / str(model.revision)


def require_weights(recipe: Recipe, cache: Path) -> None:
    """Raise UsageProblem where a recipe's model is a repository's and isn't in the cache, with the ways to it.

    The engine is offline. A model that role model_cache brought is whole where its folder is there.
    """
    model = recipe.model
    if model.repo is None or snapshot(cache, model).is_dir():
        return
    raise UsageProblem(
        f"{model.repo} at {str(model.revision)[:12]} is not in {shown(cache / HUB)}. Bring it to {HOST_CACHE}: ./inv "
        f"provision --recipe {recipe.id} --no-serve (what was cut off is resumed); ./inv site --cache {HOST_CACHE} "
        f"lets an engine without a container look there too. Or name a folder whose {HUB}/ has it: "
        "./inv site --cache FOLDER"
    )
