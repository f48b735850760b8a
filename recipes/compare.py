"""Room recipes: what differs between two recipes or two rungs, in the engine's own terms."""

import json
from collections.abc import Collection, Iterator
from pathlib import Path

from images.errors import UsageProblem
from images.validate import validate
from images.yaml_source import read_yaml
from recipes.load import Loaded, changes, families, leaves, load_ladder, load_recipe, recipe_ids
from recipes.load import as_data as recipe_data
from recipes.lock import locked_recipe
from recipes.machine import why_not
from recipes.schema import Recipe
from recipes.site import OwnSite, site_for_a_look
from recipes.spec import flag_arguments, serving_spec

# What can make a rung measure nothing, by the key it changes.
NO_OPS = {
    "engine.env.OMP_NUM_THREADS": "serving sets torch's threads to 1 itself when the variable is unset",
    "engine.flags.async-scheduling": "it is on unless refused; no log line proves it, only the resolved configuration",
    "engine.flags.mamba-backend": "FlashInfer is switched off with a warning where the image has no cubins and no nvcc",
    "engine.flags.mamba-ssm-cache-dtype": "`auto`, or a CPU with AVX512-BF16, leaves the state as it was",
    "engine.flags.enable-mamba-cache-stochastic-rounding": "ignored on a CPU, and without an explicit float16 state",
    "engine.flags.speculative-config": "drafts that are never accepted: see the acceptance length",
}


# A flag's name, and the engine's name for what it resolves it to.
RESOLVED = {
    "async-scheduling": "async_scheduling",
    "enable-mamba-cache-stochastic-rounding": "stochastic_rounding",
    "enable-prefix-caching": "enable_prefix_caching",
    "enforce-eager": "enforce_eager",
    "mamba-backend": "mamba_backend",
    "mamba-cache-dtype": "mamba_cache_dtype",
    "mamba-cache-philox-rounds": "philox_rounds",
    "mamba-ssm-cache-dtype": "mamba_ssm_cache_dtype",
    "max-cudagraph-capture-size": "max_cudagraph_capture_size",
    "max-num-seqs": "max_num_seqs",
}


def overridden(flags: dict, resolved: dict) -> list[str]:
    """One sentence a declared flag that the engine resolves to something else: such a setting has no effect."""
    drafts = flags.get("speculative-config") or {}
    wanted = {RESOLVED[name]: (name, value) for name, value in flags.items() if name in RESOLVED}
    if isinstance(drafts, dict) and "num_speculative_tokens" in drafts:
        wanted["num_speculative_tokens"] = ("speculative-config", drafts["num_speculative_tokens"])
    return [
        f"{name}: declared {json.dumps(value)}, the engine makes it {json.dumps(resolved[key])}"
        for key, (name, value) in sorted(wanted.items())
        if resolved.get(key) is not None and resolved[key] != value and value != "auto"
    ]


def argument_lines(loaded: Loaded) -> dict[str, str]:
    """A recipe's argv and environment as named lines: '--flag' or 'NAME=' to its text."""
    recipe = loaded.recipe
    spec = serving_spec(loaded)
    flags = {f"--{name}": " ".join(flag_arguments(name, value)) for name, value in recipe.engine.flags.items()}
    model = {"model": spec.argv[1], "--dtype": f"--dtype {recipe.model.dtype}"}
    return {**model, **flags, **{f"{name}=": f"{name}={value}" for name, value in spec.env.items()}}


def argument_changes(before: Loaded, after: Loaded) -> Iterator[tuple[str, str | None, str | None]]:
    """Yield (name, before, after) for every argument or variable that differs; None where it isn't there."""
    old, new = argument_lines(before), argument_lines(after)
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            yield name, old.get(name), new.get(name)


def subject(text: str, own: OwnSite | None = None) -> Loaded:
    """What a person names: a run's folder, a lock file, or a recipe. `own` as `load_recipe` has it.

    Raises UsageProblem for a file or folder that is neither, or an unknown recipe.
    """
    path = Path(text)
    if (path / "recipe.yaml").is_file():
        document = read_yaml(path / "recipe.yaml")
        return Loaded(validate(Recipe, document.data, document.marks), path, document.marks)
    if path.is_file():
        return locked_recipe(path)
    a_path = text.count("/") > 1 or text.startswith((".", "/"))
    if a_path or (path.is_dir() and text.split("/", maxsplit=1)[0] not in families()):
        raise UsageProblem(f"{text} is no run's folder (it has no recipe.yaml), no lock file and no recipe's name")
    return load_recipe(text, own=own)


def difference(first: str, second: str) -> dict:
    """Two recipes, locks or runs: {argv_env: [[before, after]], other: [[key, before, after]]}."""
    own = site_for_a_look()
    before, after = subject(first, own), subject(second, own)
    old, new = (dict(leaves(recipe_data(each.recipe))) for each in (before, after))
    others = [
        key
        for key in changes(before.recipe, after.recipe)
        if not key.startswith(("engine.flags.", "engine.env.")) and key not in {"model.path", "model.dtype"}
    ]
    paths = {".".join(path): path for path in old.keys() | new.keys()}
    return {
        "before": first,
        "after": second,
        "argv_env": [[was, now] for _, was, now in argument_changes(before, after)],
        "other": [[key, old.get(paths[key]), new.get(paths[key])] for key in others],
    }


def ladder_rows(family: str, facts: dict, own: OwnSite | None = None) -> list[dict]:
    """A family's ladder, rung by rung: delta in argv/env terms, published figure and step, applies, no-op risks.

    The delta is against the rung that it extends, the step against the last rung that has a published figure. `own`:
    what was said once of this machine, if somebody has read it already.
    """
    rows = []
    last_published: float | None = None
    last_rung: str | None = None
    rungs, own = load_ladder(family).rungs, own or site_for_a_look()
    for rung in rungs:
        loaded = load_recipe(f"{family}/{rung}", own=own)
        previous = _extended(loaded, {f"{family}/{each}" for each in rungs}, own)
        claimed = next((claim for claim in loaded.recipe.claims if claim.metric == "output_tok_s"), None)
        published = claimed.published if claimed else None
        delta = [now or f"without {was}" for _, was, now in argument_changes(previous, loaded)] if previous else []
        step = published / last_published - 1 if published and last_published else None
        keys = loaded.recipe.delta.changes if loaded.recipe.delta else []
        rows.append(
            {
                "rung": rung,
                "delta": delta,
                "published_tok_s": published,
                "published_step": step,
                "published_step_on": last_rung if step is not None else None,
                "applies": why_not(loaded.recipe, facts),
                "no_op_if": [NO_OPS[key] for key in keys if key in NO_OPS],
            }
        )
        if published:
            last_published, last_rung = published, rung
    return rows


def beside_rows(family: str, own: OwnSite) -> list[dict]:
    """A family's recipes that are no rung of its ladder: {rung, title, on, delta}, the delta against `on`."""
    rungs = load_ladder(family).rungs
    ids = [recipe_id for recipe_id in recipe_ids() if recipe_id.startswith(f"{family}/")]
    rows = []
    for recipe_id in ids:
        name = recipe_id.split("/", maxsplit=1)[1]
        if name in rungs:
            continue
        loaded = load_recipe(recipe_id, own=own)
        parent = _extended(loaded, ids, own)
        delta = [now or f"without {was}" for _, was, now in argument_changes(parent, loaded)] if parent else []
        on = parent.recipe.id.split("/", maxsplit=1)[1] if parent else None
        rows.append({"rung": name, "title": loaded.recipe.title, "on": on, "delta": delta})
    return rows


def _extended(loaded: Loaded, among: Collection[str], own: OwnSite) -> Loaded | None:
    """The nearest of the recipes `among` those given that a recipe extends."""
    while loaded.recipe.extends:
        loaded = load_recipe(loaded.recipe.extends, own=own)
        if loaded.recipe.id in among:
            return loaded
    return None
