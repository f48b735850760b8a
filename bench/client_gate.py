"""Room bench: runs in the engine's environment: `vllm bench serve`, held until every client process is ready.

    python client_gate.py GATE INDEX bench serve …

Starting a client takes 10 to 40 seconds of imports, and never twice the same. So the engine's own load function
waits here, with everything else done: this file writes GATE/ready-INDEX and waits for GATE/go, which holds the
moment (CLOCK_MONOTONIC, s) at which all of them begin. Nothing else is changed. Standard library and vLLM only.
"""

import sys
import time
from pathlib import Path

POLL_S = 0.005


def main() -> None:
    """Run VLLM's own command line with a gate before the load."""
    gate, index = Path(sys.argv[1]), sys.argv[2]
    sys.argv = ["vllm", *sys.argv[3:]]
    from vllm.benchmarks import serve
    from vllm.entrypoints.cli.main import main as vllm_main

    apply_load = serve.benchmark

    async def held(*args: object, **named: object) -> object:
        wait_at(gate, index)
        return await apply_load(*args, **named)

    serve.benchmark = held
    vllm_main()


def wait_at(gate: Path, index: str) -> None:
    """Say that this client is ready, and return at the moment that is given to all."""
    (gate / f"ready-{index}").touch()
    go = gate / "go"
    while not go.exists():
        time.sleep(POLL_S)
    time.sleep(max(0.0, float(go.read_text()) - time.monotonic()))


if __name__ == "__main__":
    main()
