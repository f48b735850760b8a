"""Room recipes: checking and listing the library for people and for scripts."""

import json
from pathlib import Path

from images.console import emit_json, note, out, table
from images.engine import find_engine
from images.errors import UsageProblem
from images.index import cache_root
from images.probe import probe, resolved_config, unknown_names
from images.written import write_whole
from images.yaml_source import shown
from recipes.compare import beside_rows, difference, ladder_rows, overridden
from recipes.graphs import graph_fit
from recipes.load import Loaded, load_ladder, load_recipe, recipe_ids, resolve_id
from recipes.lock import Images, as_text, lock_here, make_lock, parse_images, with_revision
from recipes.machine import gpu_device, load_machines, machine_facts, machine_profile, why_not
from recipes.render import render
from recipes.rules import RULES, broken_rules, require_rules
from recipes.schema import Recipe
from recipes.serving import platform_of
from recipes.site import OwnSite, site_for_a_look
from recipes.spec import HOST_CACHE, container, serving_spec

SCHEMA_FILE = Path(__file__).with_name("recipe.schema.json")


def findings(recipe_id: str, own: OwnSite | None = None) -> list[str]:
    """Everything wrong with a recipe, one line each; empty when it is good. `own` as `load_recipe` has it."""
    try:
        return broken_rules(load_recipe(recipe_id, own=own))
    except UsageProblem as problem:
        return str(problem).splitlines()


def engine_findings(recipe_id: str, own: OwnSite | None = None) -> list[str]:
    """What the recipe's engine doesn't accept, or doesn't do: unknown flags and variables, overridden settings.

    Where the engine isn't installed nothing is asked, and a note says so.
    """
    loaded = load_recipe(recipe_id, own=own)
    engine = find_engine(loaded.recipe.engine.image)
    if engine is None:
        note(f"The {loaded.recipe.engine.image} engine isn't installed: whether it knows these flags was not asked.")
        return []
    declared = loaded.recipe.engine
    unknown = unknown_names(probe(engine, cache_root()), declared.flags, declared.env)
    if unknown or why_not(loaded.recipe, machine_facts()):
        return unknown
    spec = serving_spec(loaded)
    resolved = resolved_config(engine, spec.argv, spec.env)
    fit = graph_fit(loaded.recipe, resolved.get("max_cudagraph_capture_size"))
    if fit and fit.said:
        note(f"→ {fit.said}.")
    return overridden(declared.flags, resolved)


def check_recipes(name: str | None, as_json: bool) -> int:
    """Check one recipe, or all of them with None; print, and return the exit code (0, or 2).

    One recipe is also held against its engine, where that is installed.
    """
    ids = recipe_ids() if name is None else [resolve_id(name)]
    own = site_for_a_look()
    found = {recipe_id: findings(recipe_id, own) for recipe_id in ids}
    if name is not None and not found[ids[0]]:
        found[ids[0]] = engine_findings(ids[0], own)
    if as_json:
        emit_json(found)
    else:
        console = out()
        for recipe_id, lines in found.items():
            console.print(f"{'✘' if lines else '✔'} {recipe_id}", markup=False)
            for line in lines:
                console.print(f"    {line}", markup=False, soft_wrap=True)
        console.print(f"{len(ids)} recipe(s) checked against the schema and {len(RULES)} known traps", markup=False)
    return 2 if any(found.values()) else 0


def print_difference(first: str, second: str, as_json: bool) -> None:
    """Print how two recipes differ, in argv/env terms."""
    found = difference(first, second)
    if as_json:
        emit_json(found)
        return
    console = out()
    console.print(f"{found['before']} → {found['after']}", markup=False)
    for was, now in found["argv_env"]:
        for sign, line in (("-", was), ("+", now)):
            if line is not None:
                console.print(f"  {sign} {line}", markup=False, soft_wrap=True)
    for key, was, now in found["other"]:
        console.print(f"  {key}: {json.dumps(was)} → {json.dumps(now)}", markup=False, soft_wrap=True)
    if not found["argv_env"] and not found["other"]:
        console.print("  nothing that is run or measured differs")


def print_ladder(name: str, as_json: bool) -> None:
    """Print a family's ladder: what each rung changes, what was published, what could make it a no-op."""
    family = name.split("/", maxsplit=1)[0]
    own = site_for_a_look()
    rows, beside = ladder_rows(family, machine_facts(), own), beside_rows(family, own)
    if as_json:
        emit_json({"family": family, "rungs": rows, "beside": beside})
        return
    lines = [
        (
            row["rung"],
            "\n".join(row["delta"]) or "–",
            "–" if row["published_tok_s"] is None else f"{row['published_tok_s']:,.0f} (claimed)",
            "–" if row["published_step"] is None else f"{row['published_step']:+.1%} on {row['published_step_on']}",
            row["applies"] or "runs here",
            "\n".join(row["no_op_if"]) or "–",
        )
        for row in rows
    ]
    columns = ("rung", "change", "output tok/s", "step", "on this machine", "a no-op if")
    out().print(table(load_ladder(family).title, columns, lines, below=("change", "a no-op if")))
    if beside:
        out().print("\nBeside the ladder, measured where --rungs names it:", markup=False)
    for row in beside:
        change = f": {', '.join(row['delta'])}, on {row['on']}" if row["delta"] else ""
        out().print(f"  {row['rung']} – {row['title']}{change}", markup=False)


def write_schema() -> None:
    """Write the JSON Schema of a recipe beside the code that defines it."""
    schema = Recipe.model_json_schema(by_alias=True)
    SCHEMA_FILE.write_text(json.dumps(schema, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
    note(f"wrote {shown(SCHEMA_FILE)}")


def write_lock(name: str, images: list[str], revision: str | None, out_file: Path | None) -> None:
    """Lock a recipe, write the file, and print its name."""
    out().print(shown(save_lock(name, parse_images(images), revision, out_file)), markup=False)


def save_lock(name: str, images: Images, revision: str | None, out_file: Path | None) -> Path:
    """Lock a recipe and write the file; returns which.

    Raises UsageProblem when something that must be fixed isn't, or the file can't be written.
    """
    loaded = with_revision(load_recipe(name), revision)
    require_rules(loaded)
    text = as_text(make_lock(loaded, machine_facts(), images))
    file = out_file or Path(f"{loaded.recipe.id.replace('/', '-')}.lock.json")
    try:
        write_whole(file, text.encode())
    except OSError as error:
        raise UsageProblem(f"{shown(file)}: can't be written: {error.strerror}") from error
    return file


def check_lock(file: Path) -> int:
    """Compare a lock with the same recipe on this machine; print, and return 0 or 5 (not comparable)."""
    loaded, _, lines = lock_here(file, machine_facts())
    said = "differs from the lock" if lines else "the same argv, env, model and engine"
    console = out()
    console.print(f"{loaded.recipe.id}: {said}", markup=False)
    for line in lines:
        console.print(f"  {line}", markup=False, soft_wrap=True)
    return 5 if lines else 0


def render_lock(
    file: Path, target: str, image: str | None, device: str | None, cache: Path, out_file: Path | None
) -> None:
    """Render what a lock fixes: the same bytes everywhere, or a refusal that says what differs.

    The image is the lock's for this machine's architecture, unless the lock has none.
    """
    facts = machine_facts()
    loaded, lock, lines = lock_here(file, facts)
    if lines:
        raise UsageProblem(f"{shown(file)} can't be rendered here, it would differ:\n  " + "\n  ".join(lines))
    platform = platform_of(facts)
    locked = lock["engine"]["images"].get(platform)
    if image and locked and image != locked:
        raise UsageProblem(f"{shown(file)} fixes its image, {locked}, and --image names another: leave it out")
    chosen = locked or image
    if not chosen:
        has = ", ".join(lock["engine"]["images"]) or "no image"
        raise UsageProblem(f"{shown(file)} has {has} and none for {platform}; name one: --image NAME@sha256:…")
    _render(loaded, target, chosen, device, cache, out_file)


def render_recipe(
    name: str, target: str, image: str | None, device: str | None, cache: Path | None, out_file: Path | None
) -> None:
    """Render a recipe for a target; print it, or write it to a file. Of an adopted one the site's overlay fills in.

    Raises UsageProblem where no image is named.
    """
    loaded = load_recipe(name)
    require_rules(loaded)
    chosen = image or loaded.site.image
    if not chosen:
        raise UsageProblem(f"render --recipe {name} needs --image NAME@sha256:…: the engine's image")
    _render(loaded, target, chosen, device, cache or Path(loaded.site.cache or HOST_CACHE), out_file)


def _render(loaded: Loaded, target: str, image: str, device: str | None, cache: Path, out_file: Path | None) -> None:
    facts = machine_facts()
    profile = machine_profile(facts, load_machines())
    spec = serving_spec(loaded, profile)
    chosen = device or gpu_device(loaded.recipe, facts, profile, loaded.site.gpu)
    text = render(target, spec, container(loaded, image, chosen, cache))
    if out_file is None:
        print(text, end="")  # noqa: T201 (the result itself, for a pipe)
        return
    try:
        write_whole(out_file, text.encode(), 0o755 if target == "docker" else 0o644)
    except OSError as error:
        raise UsageProblem(f"{shown(out_file)}: can't be written: {error.strerror}") from error
    out().print(shown(out_file), markup=False)
