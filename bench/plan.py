"""Room bench: gathers everything a run needs before anything is started."""

from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from bench.record import Plan
from images.build import Built, Order, build_image, held_image
from images.console import note
from images.declaration import declaration
from images.docker_engine import DockerProblem, docker_engine, is_remote
from images.engine import Engine, ensure_engine
from images.errors import EngineProblem, Problem, UsageProblem
from images.given import given_engine
from images.index import cache_root
from images.verify import verify_image
from recipes.hosts import run_playbook
from recipes.load import Loaded, first_choice, load_recipe, with_options
from recipes.machine import gpu_device, load_machines, machine_facts, machine_profile, require_applies
from recipes.rules import require_rules
from recipes.run.docker import connect
from recipes.run.managed import cache_of, device_of, find_service
from recipes.run.process import refuse_taken_port
from recipes.schema import Machine
from recipes.spec import HOST_CACHE, Container, ServingSpec, container, serving_spec
from recipes.weights import HUB, require_weights, snapshot

RUNTIMES = ("process", "docker")


@dataclass(frozen=True)
class Options:
    """What a command line may say about a run; 0 and None leave it to the recipe.

    `url`: a server of somebody's; `gpu`: the UUID of the one GPU; `engine_python`: an interpreter that has vLLM.
    """

    recipe: str | None = None
    port: int = 0
    boots: int = 0
    windows: int = 0
    runtime: str | None = None
    url: str | None = None
    load: bool = True
    gpu: str | None = None
    engine_python: str | None = None
    engine_paths: tuple[str, ...] = ()


def gather(options: Options) -> Plan:
    """Choose and check the recipe, bring its engine, and say what will be run.

    Raises UsageProblem for a recipe that is wrong or can't run here, EngineProblem when its engine can't be had.
    """
    machine = machine_facts()
    name, why = (options.recipe, "asked for") if options.recipe else first_choice(machine["slug"])
    loaded = load_recipe(name)
    note(f"Recipe {loaded.recipe.id}: {loaded.recipe.title} ({why})")
    return plan_for(loaded, options, machine)


def plan_for(chosen: Loaded, options: Options, machine: dict) -> Plan:
    """A plan for a recipe that was chosen: checked, with the options applied and its engine at hand.

    Raises as `gather` does.
    """
    on_gpu = declaration(chosen.recipe.engine.image).device == "cuda"
    gpu = options.gpu or (chosen.site.gpu if on_gpu else None)
    said_by = "--gpu" if options.gpu else "./inv site, or the adopted recipe's site.yaml, names the GPU"
    machine = with_gpu(machine, gpu, said_by)
    loaded = with_options(chosen, options.port, options.boots, options.windows)
    require_rules(loaded)
    require_applies(loaded.recipe, machine)
    profile = machine_profile(machine, load_machines())
    spec = serving_spec(loaded, profile)
    if gpu:
        spec = replace(spec, env={**spec.env, "CUDA_VISIBLE_DEVICES": gpu})
    if options.url is None:
        refuse_taken_port(spec.host, spec.port)
    if options.engine_python:
        if options.runtime == "docker":
            raise UsageProblem("--engine-python is for engines that run as a process, not with --runtime docker")
        engine = given_engine(loaded.recipe.engine.image, options.engine_python, options.engine_paths)
        return _process_plan(loaded, engine, spec, machine, options)
    if choose_runtime(loaded, options.runtime) == "process":
        engine = ensure_engine(loaded.recipe.engine.image, loaded.wheels)
        return _process_plan(loaded, engine, spec, machine, options)
    built = ensure_image(loaded)
    box = engine_container(loaded, built, machine, profile)
    return Plan(loaded, built, spec, machine, options.url, options.load, box, weights=_weights(loaded, box))


def with_gpu(machine: dict, uuid: str | None, said_by: str = "--gpu") -> dict:
    """The machine's facts with one of its GPUs only, by UUID; as they are where none is named. `said_by`: who named it.

    Raises UsageProblem where the machine has no such GPU.
    """
    if uuid is None:
        return machine
    found = [gpu for gpu in machine["gpus"] if gpu.get("uuid") == uuid]
    if not found:
        seen = ", ".join(f"{gpu.get('name')} {gpu.get('uuid')}" for gpu in machine["gpus"]) or "no NVIDIA GPU"
        raise UsageProblem(f"{said_by} {uuid}: this machine has {seen}")
    return {**machine, "gpus": found}


def choose_runtime(loaded: Loaded, asked: str | None) -> str:
    """How the engine is started: as asked, else as the recipe says, else as the engine allows.

    Raises UsageProblem for an unknown way, or one that the engine doesn't have.
    """
    if asked and asked not in RUNTIMES:
        raise UsageProblem(f"--runtime {asked}: wanted one of {', '.join(RUNTIMES)}")
    only_image = declaration(loaded.recipe.engine.image).disk_gb is None
    if asked == "process" and only_image:
        raise UsageProblem(
            f"{loaded.recipe.id}: the {loaded.recipe.engine.image} engine runs in a container only, unless you name an "
            "interpreter that has it: --engine-python PYTHON"
        )
    return asked or ("docker" if only_image else loaded.recipe.runtime.kind)


def ensure_image(loaded: Loaded) -> Built:
    """The engine's image: the one this machine's site names, else built or pulled where it isn't there yet; proved."""
    name, site = loaded.recipe.engine.image, loaded.site
    if site.image:
        try:
            built = held_image(name, site.image)
        except EngineProblem as problem:
            way = f"./inv site --forget images.{name}, and ./inv build --recipe {loaded.recipe.id} makes one"
            way = "adopt its bundle again" if loaded.origin else way
            raise EngineProblem(f"{problem}. It is the one that the site names: {way}") from None
        note(f"Image: {built.id}, the {name} {built.version} that the site names")
    else:
        built = build_image(Order(name, mirrors=tuple(site.mirrors)))
    verify_image(built)
    return built


def engine_container(loaded: Loaded, built: Built, machine: dict, profile: Machine) -> Container:
    """The container part of a plan: the image, the one GPU by CDI, and the cache.

    The cache is the site's; of a repository's model the hosts' own, which has its weights; else a volume of this image
    alone. Raises UsageProblem where the weights aren't there, DockerProblem for an engine that knows no CDI.
    """
    device = gpu_device(loaded.recipe, machine, profile)
    if device and not docker_engine().devices_by_cdi:
        raise DockerProblem(
            "the Docker engine is older than 25, which is the first that gives a container a GPU by CDI"
        )
    volume = f"station-recipes-{built.name}-{built.identity}"
    cache = loaded.site.cache or (HOST_CACHE if loaded.recipe.model.repo else None)
    if cache and not is_remote():
        require_weights(loaded.recipe, Path(cache))
    return container(loaded, built.reference, device, Path(cache) if cache else volume)


def _process_plan(loaded: Loaded, engine: Engine, spec: ServingSpec, machine: dict, options: Options) -> Plan:
    """A plan for an engine that runs as a process: a repository's model lies in the site's cache, else in ours."""
    plan = Plan(loaded, engine, spec, machine, options.url, options.load)
    model = loaded.recipe.model
    if not model.repo:
        return plan
    cache = Path(loaded.site.cache) if loaded.site.cache else cache_root()
    require_weights(loaded.recipe, cache)
    spec = replace(spec, env={**spec.env, "HF_HOME": str(cache / HUB)})
    return replace(plan, spec=spec, weights=snapshot(cache, model))


def _weights(loaded: Loaded, box: Container) -> Path | None:
    """The folder of a repository's model where the engine's cache is a folder of this machine, and it is in it."""
    if not loaded.recipe.model.repo or not isinstance(box.cache, Path):
        return None
    folder = snapshot(box.cache, loaded.recipe.model)
    return folder if folder.is_dir() else None


def gather_service(recipe: str, host: str, windows: int) -> Plan:
    """A plan for the service that `./inv provision` made on a host: one boot, the one it is in.

    `host` is a name that ssh knows, or localhost; DOCKER_HOST names its Docker engine. What runs is asked of that:
    the image by its labels, the device. Raises UsageProblem for a wrong recipe, Problem where none of it runs there.
    """
    loaded = with_options(load_recipe(recipe), 0, 1, windows)
    require_rules(loaded)
    machine = host_facts(host)
    require_applies(loaded.recipe, machine)
    spec = serving_spec(loaded, machine_profile(machine, load_machines()))
    with closing(connect()) as client:
        running = find_service(client, loaded.recipe.id)
        built = held_image(loaded.recipe.engine.image, running.attrs["Image"])
        box = container(loaded, built.id, device_of(running), cache_of(running))
    verify_image(built)
    if is_remote():
        refuse_taken_port(spec.host, spec.port)  # the tunnel's end here
    note(f"Recipe {loaded.recipe.id}: the service on {host}, as it runs")
    return Plan(loaded, built, spec, machine, box=box, service=True, weights=_weights(loaded, box))


def host_facts(host: str) -> dict:
    """Machine facts of a host that ssh knows, or of this machine. Raises Problem where it can't be asked."""
    if host == "localhost":
        return machine_facts()
    (looked,) = run_playbook("facts.yml", host, None, (), f"Asking {host} what it is")
    if looked.facts is None:
        raise Problem(f"{host}: {looked.problem or 'it told nothing of itself'}")
    return looked.facts
