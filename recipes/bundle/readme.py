"""Room recipes: a bundle's README, made from the recipe alone: what it is, what it claims, how it is adopted."""

from recipes.bundle.layout import BundleInfo
from recipes.load import Loaded

ENGINE_STEPS = """\
## Without a network

The wheels of the engine and of the front door itself are inside, for {platform} and Python {python}. The front door
comes first; then the rest installs from the bundle:

    tar -xf BUNDLE.tar engine
    export PIP_NO_INDEX=1 PIP_FIND_LINKS=$PWD/engine/control UV_NO_INDEX=1 UV_FIND_LINKS=$PWD/engine/control
    ./inv adopt BUNDLE.tar

A wheel is installed only if its hash stands in the pins of your own copy of the repository.
"""


def readme(loaded: Loaded, info: BundleInfo) -> str:
    """The README's text; the same for the same recipe."""
    recipe = loaded.recipe
    load = recipe.benchmark
    parts = [
        f"# {_plain(recipe.id)}, version {info.version}\n\n{_plain(recipe.title)}.\n",
        "A bundle of station-recipes: a recipe as data, with what is needed to prove its figures on your machine. "
        "Nothing in it is run when it is adopted.\n",
        "    ./inv adopt BUNDLE.tar          # in a clone of station-recipes: checks it, shows it, keeps it\n"
        "    ./inv reproduce --recipe …      # as adopt says\n"
        "    ./inv compare MINE THEIRS       # your run and one of results/\n",
        "## What it claims\n",
        _claims(loaded),
        "## What is measured\n",
        f"{load.prompts} requests of {load.input_len} tokens in and {load.output_len} out, {load.concurrency} streams, "
        f"{load.prompt_source} prompts, temperature {load.temperature:g}, seed {load.seed}; boots {load.boots}, "
        f"windows {load.windows}. Engine: {info.engine.image} {info.engine.version}, on {_machines(info)}.\n",
        "## How it came to be\n",
        _chain(loaded, info),
        "## What is inside\n",
        _inside(loaded, info),
    ]
    if info.wheels:
        parts.append(ENGINE_STEPS.format(platform=info.wheels.platform, python=info.wheels.python))
    return "\n".join(parts)


def _claims(loaded: Loaded) -> str:
    claims = loaded.recipe.claims
    if not claims:
        return "Nothing: a run of it is MEASURED.\n"
    rows = ["| claim | published | status | machine | source |", "| --- | --- | --- | --- | --- |"]
    rows += [
        f"| {_cell(claim.id)} | {claim.published:g} ± {claim.tolerance:g} | {claim.status} | {_cell(claim.machine)} "
        f"| {_cell(claim.source)} |"
        for claim in claims
    ]
    return "\n".join(rows) + "\n"


def _machines(info: BundleInfo) -> str:
    return "any machine" if info.machines == ["any"] else ", ".join(info.machines)


def _chain(loaded: Loaded, info: BundleInfo) -> str:
    delta = loaded.recipe.delta
    text = " → ".join(info.chain)
    if delta is None:
        return f"{text}\n"
    return f"{text}\n\nIts own step: {', '.join(map(_plain, delta.changes))}: {_plain(delta.reason)}.\n"


def _inside(loaded: Loaded, info: BundleInfo) -> str:
    model = loaded.recipe.model
    where = ", with the model's files" if info.model == "carried" else f"; the model is {_plain(model.repo)} on the hub"
    lines = [
        f"- `recipes/`: the recipe and everything it extends{where}",
        "- `lock.json`: what decides what is run, for any machine of its kind"
        if info.lock
        else f"- no lock: {_plain(info.why_no_lock or '')}",
        "- `rendered/`: a docker script, a compose file, a systemd unit"
        + ("" if info.image else ". The image's digest in them is a placeholder: `./inv render` writes yours"),
        "- `rules.json`, `claims.json`: the engine traps the recipe is checked against, and the claims, as data",
    ]
    lines += ["- `quality/`: the items of the quality suites, with their answers"] if loaded.recipe.quality else []
    lines += [f"- `results/{run.name}`: a run on {run.machine}, {run.state}" for run in info.runs]
    lines += [f"- `results/{name}`: a ladder" for name in info.ladders]
    if info.wheels:
        lines.append(f"- `engine/`: wheels for {info.wheels.platform}, Python {info.wheels.python}")
    if info.archive:
        lines.append(f"- `engine/image.oci.tar`: the engine's image for {info.archive.platform}")
    lines += [f"- `engine/caches/{each.device}`: compiled kernels for {each.platform}" for each in info.caches]
    lines.append("- `SHA256SUMS`" + (", signed: `SHA256SUMS.minisig`" if info.signer else "; not signed"))
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """A recipe's text on one line of Markdown, with nothing that would be markup."""
    line = " ".join(text.split())
    return "".join(f"\\{char}" if char in "\\`*_[]<>#|" else char for char in line if char.isprintable())


def _cell(text: str) -> str:
    return _plain(text)
