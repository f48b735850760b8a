"""Room recipes: the tasks about recipes, locks, engine images and hosts: each parses, calls, prints, exits."""

from pathlib import Path

from invoke import Exit, task

from images.errors import UsageProblem
from recipes.spec import HOST_CACHE

RECIPE = "recipe id or family, such as micro/mtp1; `./inv list` shows them"


@task(
    help={
        "recipe": f"{RECIPE}: its engine's image, and its lock",
        "image": "an image by name instead: a folder below images/",
        "source": "pull (upstream's, by digest) or build (from pinned wheels); default: as image.yaml declares",
        "base": "what it is built on, NAME@sha256:…; default: as image.yaml declares",
        "platform": "linux/amd64 or linux/arm64: refused unless the Docker engine runs it",
        "archs": "GPU architectures instead of the declared ones, separated by commas",
        "again": "build although the same image is there",
        "verify": "prove the image again although it was proved",
        "proof": "prove the image before it is used (--no-proof: not now)",
        "lock": "write the recipe's lock (--no-lock: don't)",
        "out": "file of the lock (default <family>-<rung>.lock.json)",
        "json": "print JSON",
    }
)
def build(
    _c,
    recipe=None,
    image=None,
    source=None,
    base=None,
    platform=None,
    archs=None,
    again=False,
    verify=False,
    proof=True,
    lock=True,
    out=None,
    json=False,
):
    """Bring a recipe's engine image into the Docker engine, prove it, and lock the recipe to it."""
    from recipes.engine_image import build_engine, order_for, parse_archs, refuse_unwritten

    refuse_unwritten(recipe, out, lock, proof, verify)
    options = {"source": source, "base": base, "platform": platform, "cuda_archs": parse_archs(archs), "again": again}
    order = order_for(recipe, image, **options)
    prove = "not" if not proof else "again" if verify else "once"
    build_engine(order, recipe, Path(out) if out else None, prove, lock, json)


@task(
    iterable=["image"],
    help={
        "recipe": f"{RECIPE}",
        "image": "PLATFORM=NAME@sha256:…, once a platform; recipes that run in a container need one",
        "model-revision": "the full commit of the model's repository, confirmed by you",
        "out": "file to write (default <family>-<rung>.lock.json)",
        "check": "a lock file: say what would differ here, and end with 5 if anything does",
    },
)
def lock(_c, recipe=None, image=None, model_revision=None, out=None, check=None):
    """Write down everything that decides what a recipe runs, or check such a file against this machine."""
    from recipes.check import check_lock, write_lock

    if bool(recipe) == bool(check):
        raise UsageProblem("lock needs either --recipe NAME or --check FILE")
    if check:
        raise Exit(code=check_lock(Path(check)))
    write_lock(recipe, image, model_revision, Path(out) if out else None)


@task(
    help={
        "recipe": RECIPE,
        "lock-file": "a lock instead of a recipe: the same bytes everywhere, or what differs",
        "target": "docker, compose or systemd",
        "image": "the engine's image, NAME@sha256:…",
        "device": "CDI name of the one GPU; default: the GPU of this machine that the recipe is made for",
        "cache": f"host folder for downloads and compiled kernels; default: as the site says, else {HOST_CACHE}",
        "out": "file to write (default: print)",
    }
)
def render(_c, recipe=None, lock_file=None, target="docker", image=None, device=None, cache=None, out=None):
    """Write a recipe as a file another tool runs: a docker script, a compose file, a systemd unit."""
    from recipes.check import render_lock, render_recipe

    file = Path(out) if out else None
    if lock_file and not recipe:
        render_lock(Path(lock_file), target, image, device, Path(cache or HOST_CACHE), file)
    elif recipe and not lock_file:
        render_recipe(recipe, target, image, device, Path(cache) if cache else None, file)
    else:
        raise UsageProblem("render needs --recipe NAME and --image NAME@sha256:…, or --lock-file FILE")


@task(positional=["a", "b"], help={"a": "a recipe, a lock file or a run", "b": "another", "json": "print JSON"})
def diff(_c, a, b, json=False):
    """Say how two recipes, locks or runs differ, in terms of the engine's arguments and environment."""
    from recipes.check import print_difference

    print_difference(a, b, json)


HOSTS = {
    "host": "hosts or groups, separated by commas; default: all of --inventory, else this machine",
    "inventory": "an Ansible inventory; ansible/inventory/ has examples",
    "set": "NAME=VALUE, a variable of a role; may be repeated",
    "json": "print JSON",
}


@task(help=HOSTS, iterable=["set"])
def doctor(_c, host="", inventory=None, set=None, json=False):  # noqa: A002
    """Look at hosts: every finding with found, wanted and remedy; changes nothing. 8 if something is wrong."""
    from recipes.hosts import doctor

    raise Exit(code=doctor(host, inventory, set, json))


@task(
    help={
        **HOSTS,
        "recipe": "recipe id or family, such as micro/mtp1: serve it there as a service of systemd",
        "image": "NAME@sha256:…, an archive of image.save, or sha256:… of one the hosts have; default: as declared",
        "serve": "serve the recipe (--no-serve: bring its model's weights, and start nothing)",
        "rollback": "bring back the service before, unit and lock, and do nothing else",
        "check": "say what would change, and change nothing",
    },
    iterable=["set"],
)
def provision(
    _c,
    host="",
    inventory=None,
    recipe=None,
    image=None,
    serve=True,
    rollback=False,
    check=False,
    set=None,  # noqa: A002
    json=False,
):
    """Bring hosts to where they can serve, and serve a recipe there. On DGX OS it installs no packages."""
    from recipes.hosts import provision
    from recipes.provision import Wanted, provision_recipe, roll_back

    if (rollback and recipe) or ((image or not serve) and not recipe):
        raise UsageProblem("provision takes --recipe NAME (with it --image or --no-serve), or --rollback, or neither")
    if rollback:
        raise Exit(code=roll_back(host, inventory, set, check, json))
    if recipe:
        raise Exit(code=provision_recipe(Wanted(recipe, image, serve), host, inventory, set, check, json))
    raise Exit(code=provision(host, inventory, set, check, json))


@task(
    iterable=["mirror", "image", "model_revision", "forget"],
    help={
        "gpu": "the UUID of the one GPU to use, where several fit a recipe",
        "cache": f"host folder of weights and compiled kernels; default: {HOST_CACHE} where the weights are there",
        "mirror": "a registry's repository to ask for an engine's image first; may be repeated",
        "image": "ENGINE=sha256:… of the image to use for an engine; `build` says so of what it built itself",
        "model-revision": "OWNER/NAME=COMMIT: the commit of a model's repository that you confirm",
        "forget": "take back gpu, cache, mirrors (one: mirrors.HOST/NAME), images.ENGINE, revisions.OWNER/NAME; or all",
        "json": "print JSON",
    },
)
def site(_c, gpu=None, cache=None, mirror=None, image=None, model_revision=None, forget=None, json=False):
    """Say once what holds for this machine, and every task uses it; bare, what is said so far."""
    from recipes.saying import change_site

    change_site(gpu, cache, mirror, image, model_revision, forget, json)
