"""Room bench: observing a window: which GPUs and processes telemetry watches, and where it is kept."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from bench.clients import Running
from bench.record import Plan
from bench.telemetry.devices import open_devices
from bench.telemetry.sampler import Sampler, Watched
from bench.telemetry.store import save_telemetry
from images.declaration import declaration
from images.errors import UsageProblem
from recipes.machine import gpu_device, load_machines, machine_profile
from recipes.run.supervised import interrupts_held

FILE = "telemetry.npz"
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


def gpus_of(plan: Plan) -> tuple[list[str], str | None]:
    """The UUIDs of the GPUs that a plan's engine runs on; or none, and why."""
    recipe = plan.loaded.recipe
    if declaration(recipe.engine.image).device != "cuda":
        return [], "the engine runs on the CPU"
    if plan.url and urlsplit(plan.url).hostname not in LOOPBACK:
        return [], "the server is not known to run on this machine"
    try:
        device = gpu_device(recipe, plan.machine, machine_profile(plan.machine, load_machines()))
    except UsageProblem as problem:
        return [], str(problem)
    return [device.rpartition("=")[2]], None


@contextmanager
def observed(
    plan: Plan, server_pids: Callable[[], list[int]] | None, folder: Path
) -> Iterator[Callable[[list[Running]], None]]:
    """Sample for the length of a `with` block and keep it in folder/telemetry.npz, also when the block fails.

    Yields the function that takes the client processes to watch. `server_pids`: the server's processes on this
    machine, None where they aren't known.
    """
    trees = [Watched("server", 0, server_pids)] if server_pids else []

    def watch_clients(running: list[Running]) -> None:
        trees.extend(Watched("client", index, client.processes) for index, client in enumerate(running))

    uuids, unwanted = gpus_of(plan)
    with open_devices(uuids) as (devices, refused):
        sampler = Sampler(devices, lambda: list(trees), unwanted or refused)
        sampler.start()
        try:
            yield watch_clients
        finally:
            with interrupts_held(), suppress(OSError):  # on a full disk the window's own file says so
                telemetry = sampler.stop()
                folder.mkdir(parents=True, exist_ok=True)
                save_telemetry(folder / FILE, telemetry)
