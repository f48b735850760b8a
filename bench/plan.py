"""Room bench: gathers everything a run needs before anything is started."""

import json
import shlex
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from bench.record import Plan
from images.build import Built, Order, build_image, held_image
from images.command import run
from images.console import note, stage
from images.declaration import declaration
from images.docker_engine import DockerProblem, docker_engine, engine_host, is_remote
from images.engine import Engine, ensure_engine
from images.errors import EngineProblem, Problem, UsageProblem
from images.given import given_engine
from images.index import cache_root
from images.verify import verify_image
from recipes.hosts import run_playbook
from recipes.load import Loaded, first_choice, load_recipe, with_options
from recipes.machine import FACTS_SCRIPT, gpu_device, load_machines, machine_facts, machine_profile, require_applies
from recipes.rules import require_rules
from recipes.run.docker import connect
from recipes.run.managed import cache_of, device_of, find_service
from recipes.run.process import refuse_taken_port
from recipes.run.tunnel import ssh_target
from recipes.schema import Machine
from recipes.spec import HOST_CACHE, Container, ServingSpec, container, serving_spec
from recipes.weights import HUB, require_weights, snapshot

RUNTIMES = ("process", "docker")
CONNECT_S = 20


@dataclass(frozen=True)
class Options:
    """What a command line may say about a run; 0 and None leave it to the recipe.

    `url`: a server of somebody's; `gpu`: the UUID of the one GPU; `engine_python`: an interpreter that has vLLM;
    `here`: what is asked makes sense on this machine alone.
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
    here: bool = False


def gather(options: Options) -> Plan:
    """Choose and check the recipe, bring its engine, and say what will be run.

    The machine is the one the engine will run on: of a Docker engine reached by ssh, its own. Raises UsageProblem for a
    recipe that is wrong or can't run there, EngineProblem when its engine can't be had.
    """
    asked = load_recipe(options.recipe) if options.recipe else None
    away = runs_away(asked, options)
    if away and options.here:
        raise UsageProblem(elsewhere())
    machine = engine_machine() if away else machine_facts()
    name, why = (options.recipe, "asked for") if asked else first_choice(machine["slug"])
    loaded = asked or load_recipe(name)
    if not (asked or away or options.here) and runs_away(loaded, options):
        raise UsageProblem(
            f"the Docker engine is at {engine_host()}, and this machine's recipe, {loaded.recipe.id}, runs in a "
            "container: name the one that is to run there, --recipe NAME"
        )
    note(f"Recipe {loaded.recipe.id}: {loaded.recipe.title} ({why})")
    return plan_for(loaded, options, machine, away)


def elsewhere() -> str:
    """Why a task that runs an engine here can't, where the Docker engine is another machine's, and what can."""
    return (
        f"the Docker engine is at {engine_host()}, and only reproduce and quality measure another machine's: run this "
        "task there. To leave a server there: ./inv provision --host HOST --recipe NAME"
    )


def runs_away(loaded: Loaded | None, options: Options) -> bool:
    """Whether the engine will run on the machine of a Docker engine elsewhere; without a recipe as far as asked for.

    Raises UsageProblem for a way to start it that it doesn't have, DockerProblem for an engine that can't serve here.
    """
    if options.url is not None or options.engine_python:
        return False
    return (choose_runtime(loaded, options.runtime) if loaded else options.runtime) == "docker" and is_remote()


def engine_machine() -> dict:
    """Facts of the machine whose Docker engine ssh reaches, asked over the same ssh.

    Raises UsageProblem where its address names no host, EngineProblem where it can't be asked.
    """
    host = engine_host()
    target = ssh_target(host)
    if target is None:
        raise UsageProblem(f"{host} names no host of a Docker engine: wanted ssh://USER@HOST")
    command = f"python3 -c {shlex.quote(FACTS_SCRIPT.read_text())} --root /"
    argv = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}", *target, command]
    with stage(f"asking {host} what it is"):
        answer = run(argv)
    try:
        return json.loads(answer.stdout)
    except ValueError:
        said = (answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"])[-1]
        raise EngineProblem(
            f"{host}, the Docker engine's machine, can't be asked what it is: {said}. Wanted: ssh without a password, "
            "and python3 there"
        ) from None


def plan_for(chosen: Loaded, options: Options, machine: dict, away: bool = False) -> Plan:
    """A plan for a recipe that was chosen: checked, with the options applied and its engine at hand.

    `away`: `machine` is the Docker engine's, not this one. Raises as `gather` does.
    """
    if not away and runs_away(chosen, options):
        raise UsageProblem(elsewhere())
    on_gpu = declaration(chosen.recipe.engine.image).device == "cuda"
    gpu = options.gpu or (chosen.site.gpu if on_gpu else None)
    said_by = "--gpu" if options.gpu else "./inv site, or the adopted recipe's site.yaml, names the GPU"
    machine = with_gpu(machine, gpu, said_by)
    loaded = with_options(chosen, options.port, options.boots, options.windows)
    require_rules(loaded)
    require_applies(loaded.recipe, machine)
    profile = machine_profile(machine, load_machines())
    spec = serving_spec(loaded, profile)
    if options.url is None:
        _refuse_key(spec)
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
    device = engine_device(loaded, machine, profile)
    built = ensure_image(loaded, device)
    box = engine_container(loaded, built, device)
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


def _refuse_key(spec: ServingSpec) -> None:
    """Raise UsageProblem for a server that asks for an API key: whatever we ask of one, we ask without."""
    if spec.api_key_env:
        raise UsageProblem(
            f"{spec.recipe_id} wants an API key (runtime.api_key_env: {spec.api_key_env}), and a server is measured "
            "here without one. ./inv provision serves it with its key; to measure it, take runtime.api_key_env out"
        )


def ensure_image(loaded: Loaded, device: str | None = None) -> Built:
    """The engine's image: the one this machine's site names, else built or pulled where it isn't there yet; proved.

    `device` is the CDI name of the GPU that the engine is to decode on for the proof; without one that stays unproved.
    """
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
    verify_image(built, device=device)
    return built


def engine_device(loaded: Loaded, machine: dict, profile: Machine) -> str | None:
    """The CDI name of the one GPU that a recipe's container gets; None for a CPU engine.

    Raises UsageProblem unless exactly one fits, DockerProblem for an engine that knows no CDI.
    """
    device = gpu_device(loaded.recipe, machine, profile)
    if device and not docker_engine().devices_by_cdi:
        raise DockerProblem(
            "the Docker engine is older than 25, which is the first that gives a container a GPU by CDI"
        )
    return device


def engine_container(loaded: Loaded, built: Built, device: str | None) -> Container:
    """The container part of a plan: the image, the one GPU by CDI, and the cache.

    The cache is the site's; of a repository's model the hosts' own, which has its weights; else a volume of this image
    alone. Raises UsageProblem where the weights aren't there.
    """
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
    if host == "localhost" and is_remote():
        raise UsageProblem(
            f"--host localhost, and the Docker engine is at {engine_host()}: name that host, or unset it"
        )
    loaded = with_options(load_recipe(recipe), 0, 1, windows)
    require_rules(loaded)
    machine = host_facts(host)
    require_applies(loaded.recipe, machine)
    spec = serving_spec(loaded, machine_profile(machine, load_machines()))
    _refuse_key(spec)
    with closing(connect()) as client:
        running = find_service(client, loaded.recipe.id)
        built = held_image(loaded.recipe.engine.image, running.attrs["Image"])
        box = container(loaded, built.id, device_of(running), cache_of(running))
    verify_image(built)  # without the GPU: the service has it, and its memory
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
