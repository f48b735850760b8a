"""Room bench: measures one window inside a container next to the server: `python3 -m bench.inside FOLDER`.

FOLDER/order.json says what, FOLDER/out receives the window's files and their SHA256SUMS; what happens is told in JSON
lines on standard output. It runs in the engine's own image, with what that has: no package of the control plane.
"""

import json
import sys
from pathlib import Path

from bench.runfolder import seal
from bench.window import Order, Target, answers, measure_window
from images.engine import Engine
from images.errors import Problem
from recipes.run.supervised import birth_of
from recipes.run.supervisor import descendants_of
from recipes.schema import Benchmark


def main(folder: Path) -> int:
    """Measure the window that FOLDER/order.json describes; 0 when it is complete."""
    asked = json.loads((folder / "order.json").read_text())
    pid, url = asked["server_pid"], asked["url"]
    birth = birth_of(pid)

    def alive() -> bool:
        return birth_of(pid) == birth if birth is not None else answers(url)

    def processes() -> list[int]:
        return [pid, *descendants_of(pid)] if birth is not None else []

    order = Order(
        tokenizer=Path(asked["tokenizer"]),
        load=Benchmark.model_validate(asked["load"]),
        prompts=asked["prompts"],
        clients=asked["clients"],
        gpus=asked["gpus"],
        no_gpu=asked["no_gpu"],
    )
    target = Target(url, asked["model"], alive, None, processes)
    engine = Engine("inside", asked["version"], Path(sys.executable), asked["identity"])
    out = folder / "out"
    try:
        sent = measure_window(order, target, engine, out, lambda done, total: tell(done=done, total=total))
    except Problem as problem:
        tell(problem=str(problem))
        return 1
    seal(out)
    tell(streams=sent.streams, prompts=sent.prompts, start_skew_s=sent.start_skew_s)
    return 0


def tell(**event: object) -> None:
    """Print one event."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
