"""Room bench: the tasks that hand recipes on and take them in: each parses, calls, prints, exits."""

from pathlib import Path

from invoke import Exit, task

from images.errors import UsageProblem
from images.tasks import PLAIN, PLAIN_HOST
from recipes.tasks import RECIPE

SOURCE = "a bundle's tar or folder, docker://HOST/NAME:VERSION of a registry, or git+URL of a repository of recipes"


@task(
    iterable=["run", "image"],
    optional=["with_image"],
    help={
        "recipe": RECIPE,
        "out": "file to write, such as micro.tar; a name that ends in / is written as a folder",
        "version": "the bundle's version, yours to choose (default 1)",
        "with-results": "carry the newest published run of each machine, and the family's ladders",
        "run": "carry this run; may be repeated",
        "with-engine": "carry the engine's wheels, and those of ./inv, so that nothing needs a network",
        "with-image": "carry the engine's image, brought and proved first; or NAME or id of one, or docker://…",
        "caches": "compiled kernels to carry: DEVICE of what process runs keep, such as sm_103a, or DEVICE=FOLDER",
        "platform": "of the engine that is carried: linux/amd64 or linux/arm64; default: this machine's",
        "image": "PLATFORM=NAME@sha256:…, the image that lock and rendered files name; may be repeated",
        "model-revision": "the full commit of the model's repository, confirmed by you",
        "key": "a minisign secret key to sign with",
        "json": "print JSON",
    },
)
def bundle(
    _c,
    recipe=None,
    out="",
    version="1",
    with_results=False,
    run=None,
    with_engine=False,
    with_image=None,
    caches=None,
    platform=None,
    image=None,
    model_revision=None,
    key=None,
    json=False,
):
    """Write a recipe with all that proves it as one file for another team: the same bytes every time."""
    from bench.handover.bundling import Wanted, make_bundle

    if not recipe or not out:
        raise UsageProblem("bundle needs --recipe NAME and --out FILE, such as --out micro.tar")
    wanted = Wanted(
        recipe=recipe,
        out=out,
        version=version,
        with_results=with_results,
        runs=tuple(run),
        with_engine=with_engine,
        archive=with_image,
        caches=caches,
        platform=platform,
        images=tuple(image),
        revision=model_revision,
        key=Path(key) if key else None,
    )
    make_bundle(wanted, json)


@task(
    positional=["source"],
    iterable=["mirror"],
    help={
        "source": SOURCE,
        "recipe": "of a repository with several bundles, the one to take",
        "version": "of a repository with several versions, the one to take; default: the newest in its index",
        "ref": "of a git repository the branch or tag; default: its own",
        "check": "show and check it, keep nothing; 8 if something is wrong",
        "pubkey": "refuse it unless it is signed by this minisign public key: its file or its base64 line",
        "as": "a name for it instead of the first digits of its content",
        "port": "port on 127.0.0.1 instead of the recipe's",
        "gpu": "UUID of the one GPU to run on, where several fit",
        "cache": "host folder that containers and rendered files mount as the engine's cache; carried kernels go there",
        "mirror": "a repository to ask for the engine's image before the declared ones; may be repeated",
        "without-engine": "leave out the engine that it carries",
        "allow-code": "accept code that the engine would run: plugins, a model's own code, compiled kernels",
        "max-gb": "the most that all its files together may have (default 2)",
        "doctor": "look at this machine as ./inv doctor does (--no-doctor: don't)",
        "plain-http": PLAIN,
        "plain-http-host": PLAIN_HOST,
        "json": "print JSON",
    },
)
def adopt(
    _c,
    source,
    recipe=None,
    version=None,
    ref=None,
    check=False,
    pubkey=None,
    as_=None,
    port=0,
    gpu=None,
    cache=None,
    mirror=None,
    without_engine=False,
    allow_code=False,
    max_gb=2,
    doctor=True,
    plain_http=False,
    plain_http_host=None,
    json=False,
):
    """Take another team's bundle in: verify it, show what it is and would change, check it here, keep it as it came."""
    from bench.handover.adopting import Taken, take
    from images.registry import Wire

    options = Taken(
        source=source,
        recipe=recipe,
        version=version,
        ref=ref,
        check=check,
        pubkey=pubkey,
        label=as_,
        site={"port": port or None, "gpu": gpu, "cache": cache, "mirrors": list(mirror)},
        without_engine=without_engine,
        allow_code=allow_code,
        max_gb=max_gb,
        doctor=doctor,
        wire=Wire(plain_http, plain_http_host),
    )
    raise Exit(code=take(options, json))


@task(
    positional=["mine", "theirs"],
    help={
        "mine": "a run's folder",
        "theirs": "another's, or an adopted recipe: the newest run that came with it",
        "json": "print JSON",
    },
)
def compare(_c, mine, theirs, json=False):
    """Judge the same claims on two runs, say how their fingerprints differ, and the likeliest cause of a gap."""
    from bench.handover.comparing import compare_runs

    raise Exit(code=compare_runs(mine, theirs, json))


@task(
    positional=["source"],
    help={
        "source": "a bundle's tar or folder",
        "to": "HOST/NAME of a registry, where its version becomes the tag; or a working tree of git",
        "move-tag": "let a version name this bundle although it names another one there",
        "max-gb": "the most that all its files together may have (default 2)",
        "plain-http": PLAIN,
        "plain-http-host": PLAIN_HOST,
        "json": "print JSON",
    },
)
def push(_c, source, to="", move_tag=False, max_gb=2, plain_http=False, plain_http_host=None, json=False):
    """Put a bundle into a registry as an artifact NAME:VERSION, or into a git repository of recipes."""
    from bench.handover.moving import push_to
    from images.registry import Wire

    if not to:
        raise UsageProblem("push needs --to HOST/NAME of a registry, or --to FOLDER of a git working tree")
    push_to(Path(source), to, Wire(plain_http, plain_http_host), move_tag, max_gb, json)


@task(
    positional=["source"],
    help={
        "source": "docker://HOST/NAME:VERSION of a registry, or git+URL of a repository of recipes",
        "out": "file to write; of a git repository a folder",
        "recipe": "of a repository with several bundles, the one to take",
        "version": "of a repository with several versions, the one to take; default: the newest in its index",
        "ref": "of a git repository the branch or tag; default: its own",
        "max-gb": "the most that all its files together may have (default 2)",
        "plain-http": PLAIN,
        "plain-http-host": PLAIN_HOST,
        "json": "print JSON",
    },
)
def pull(
    _c,
    source,
    out="",
    recipe=None,
    version=None,
    ref=None,
    max_gb=2,
    plain_http=False,
    plain_http_host=None,
    json=False,
):
    """Fetch a bundle and check it, byte for byte, without adopting it."""
    from bench.handover.moving import pull_from
    from images.registry import Wire
    from recipes.bundle.source import Choice

    if not out:
        raise UsageProblem("pull needs --out FILE, such as --out micro.tar")
    pull_from(source, Path(out), Choice(recipe, version, ref, Wire(plain_http, plain_http_host)), max_gb, json)


@task(
    help={
        "recipe": f"{RECIPE}, or a recipe that was adopted",
        "all": "every recipe in the library",
        "publish": "whether others would accept it: docs/contributing-recipes.md, rule by rule",
        "schema": "write the JSON Schema of a recipe to recipes/recipe.schema.json, for editors",
        "json": "print a list of findings",
    }
)
def check(_c, recipe=None, all=False, publish=False, schema=False, json=False):  # noqa: A002
    """Validate recipes: schema, extends, declared deltas, engine traps; one recipe also against its engine."""
    from recipes.check import check_recipes, write_schema

    if schema:
        write_schema()
        return
    if bool(recipe) == all or (publish and all):
        raise UsageProblem("check needs either --recipe NAME or --all; --publish goes with --recipe")
    if publish:
        from bench.handover.publish import check_publish

        raise Exit(code=check_publish(recipe, json))
    raise Exit(code=check_recipes(None if all else recipe, json))


@task(
    name="list",
    iterable=["source"],
    help={
        "source": "also what docker://HOST/NAME of a registry, or git+URL of a repository, has; may be repeated",
        "plain-http": PLAIN,
        "plain-http-host": PLAIN_HOST,
        "json": "print JSON",
    },
)
def list_(_c, source=None, plain_http=False, plain_http_host=None, json=False):
    """List recipes, the library's and adopted ones: what they change, whether they run here, the newest verdict."""
    from bench.handover.verdicts import newest_verdicts
    from images.registry import Wire
    from recipes.catalogue import list_recipes

    raise Exit(code=list_recipes(newest_verdicts(), source, Wire(plain_http, plain_http_host), json))
