"""Room bench: observing a window: which GPUs and processes telemetry watches, and where it is kept."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from bench.clients import Running
from bench.telemetry.devices import open_devices
from bench.telemetry.sampler import Sampler, Watched
from bench.telemetry.store import save_telemetry
from recipes.run.supervised import interrupts_held

FILE = "telemetry.npz"


@contextmanager
def observed(
    gpus: Sequence[str], no_gpu: str | None, server_pids: Callable[[], list[int]] | None, folder: Path
) -> Iterator[Callable[[list[Running]], None]]:
    """Sample for the length of a `with` block and keep it in folder/telemetry.npz, also when the block fails.

    Yields the function that takes the client processes to watch. `gpus` are UUIDs, or none, and `no_gpu` says why;
    `server_pids`: the server's processes on this machine, None where they aren't known.
    """
    trees = [Watched("server", 0, server_pids)] if server_pids else []

    def watch_clients(running: list[Running]) -> None:
        trees.extend(Watched("client", index, client.processes) for index, client in enumerate(running))

    with open_devices(gpus) as (devices, refused):
        sampler = Sampler(devices, lambda: list(trees), no_gpu or refused)
        sampler.start()
        try:
            yield watch_clients
        finally:
            with interrupts_held(), suppress(OSError):  # on a full disk the window's own file says so
                telemetry = sampler.stop()
                folder.mkdir(parents=True, exist_ok=True)
                save_telemetry(folder / FILE, telemetry)
