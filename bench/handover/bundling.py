"""Room bench: `./inv bundle`: gathers what a bundle carries, writes it, says what was written."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.handover.runs import chosen_runs, items_of, published_ladders
from bench.plan import ensure_image
from images.console import emit_json, out, stage, table
from images.errors import UsageProblem
from recipes.bundle.carry import carried_engine
from recipes.bundle.layout import VERSION, BundleInfo
from recipes.bundle.sign import public_text, secret_key
from recipes.bundle.write import Written, bundle_entries, write_bundle
from recipes.load import load_recipe
from recipes.lock import parse_images


@dataclass(frozen=True)
class Wanted:
    """What a person asked of `./inv bundle`."""

    recipe: str
    out: str
    version: str = "1"
    with_results: bool = False
    runs: tuple[str, ...] = ()
    with_engine: bool = False
    archive: str | bool | None = None  # an image's name, or True for the recipe's own
    caches: str | None = None
    platform: str | None = None
    images: tuple[str, ...] = ()
    revision: str | None = None
    key: Path | None = None


def make_bundle(wanted: Wanted, as_json: bool) -> None:
    """Write the bundle and print what it is.

    Raises UsageProblem for a recipe, a run, a key or a name that is wrong, BundleProblem for what can't be carried.
    """
    written = write(wanted)
    if as_json:
        emit_json({**asdict(written), "info": written.info.model_dump(by_alias=True)})
        return
    rows = [
        ("file", f"{written.file} ({written.size / 1e6:,.1f} MB, {written.files} files)"),
        ("content", f"sha256:{written.content}"),
        ("signed by", written.signer or "nobody; --key signs it"),
        ("chain", " → ".join(written.info.chain)),
        ("carries", ", ".join(_carries(written.info))),
    ]
    out().print(table(f"{written.recipe}, version {written.version}", ("", ""), rows))
    out().print(f"\nTo adopt it: ./inv adopt {written.file}", markup=False)


def write(wanted: Wanted) -> Written:
    """Gather and write a bundle; `make_bundle` without the words."""
    if not VERSION.fullmatch(wanted.version):
        raise UsageProblem(f"--version {wanted.version!r}: wanted letters, digits, dots, dashes and _, 64 at most")
    loaded = load_recipe(wanted.recipe)
    if loaded.origin:  # as it came, without what this site says of it
        loaded = load_recipe(loaded.recipe.id, loaded.folder.parent)
    recipe = loaded.recipe
    images = parse_images(list(wanted.images))
    key = secret_key(wanted.key) if wanted.key else None
    runs = chosen_runs(recipe, list(wanted.runs), wanted.with_results)
    ladders = published_ladders(recipe) if wanted.with_results else []
    if wanted.with_results and not runs and not ladders:
        raise UsageProblem(f"results/ has no run of {recipe.id} as it is now, and no ladder: name a run with --run RUN")
    as_folder = wanted.out.endswith("/")
    if not as_folder and Path(wanted.out).is_dir():
        raise UsageProblem(f"{wanted.out} is a folder: name a file in it, or {wanted.out}/NAME/ for a folder")
    archive = ensure_image(loaded).reference if wanted.archive is True else wanted.archive
    with carried_engine(loaded, wanted.with_engine, archive, wanted.caches, wanted.platform) as engine:
        carried = replace(engine, runs=tuple(runs), ladders=tuple(ladders), quality=items_of(recipe))
        signer = public_text(key) if key else None
        entries, info = bundle_entries(loaded, wanted.version, images, wanted.revision, carried, signer)
        total = sum(entry.size for entry in entries)
        with stage(f"Writing {recipe.id} as a bundle, {total / 1e6:,.0f} MB") as update:
            done = 0

            def progress(count: int) -> None:
                nonlocal done
                done += count
                update(f"{done / 1e6:,.0f} MB", done, total)

            return write_bundle(entries, info, key, Path(wanted.out), as_folder, progress)


def _carries(info: BundleInfo) -> list[str]:
    found = ["the model's files"] if info.model == "carried" else ["the model's name, not its files"]
    found.append("a lock" if info.lock else f"no lock ({info.why_no_lock})")
    found += [f"{len(info.runs)} run(s)"] if info.runs else []
    found += [f"{len(info.ladders)} ladder(s)"] if info.ladders else []
    found += [f"wheels for {info.wheels.platform}, Python {info.wheels.python}"] if info.wheels else []
    found += [f"the image for {info.archive.platform}"] if info.archive else []
    found += [f"compiled kernels for {each.device}" for each in info.caches]
    return found
