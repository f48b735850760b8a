"""`vllm serve` and `vllm bench serve`."""

import argparse
import asyncio
import os
import sys
from pathlib import Path

from bench import reference_server
from vllm.benchmarks import serve as client
from vllm.entrypoints.launchers.cli_args import make_arg_parser

STEP_MS = 4.0
ACCEPTED = (0.8, 0.5, 0.3)


def serve(argv: list[str]) -> int:
    """Serve with the truth that the flags imply: drafts take longer steps, a float16 state shorter ones."""
    if "REFERENCE_DIES" in os.environ:
        sys.exit(f"RuntimeError: {os.environ['REFERENCE_DIES']}")
    args = make_arg_parser(argparse.ArgumentParser()).parse_args(argv)
    drafts = (args.speculative_config or {}).get("num_speculative_tokens", 0)
    step_ms = STEP_MS * (1 + 0.1 * drafts) * (0.8 if args.mamba_ssm_cache_dtype == "float16" else 1)
    sys.stderr.write(f"INFO Using {args.mamba_backend} Mamba SSU backend.\n")
    if "REFERENCE_RESETS_STATE" in os.environ:
        sys.stderr.write("WARNING Reset SSM cache type to float32\n")
    options = ["--port", str(args.port), "--model", args.served_model_name, "--engine-version", "0.32.0"]
    options += ["--tokenizer", str(Path(args.model_tag) / "tokenizer.json"), "--step-ms", str(step_ms)]
    options += ["--acceptance", ",".join(map(str, ACCEPTED[:drafts]))] if drafts else []
    return reference_server.main([*options, "--prefill-ms", "4"])


def bench(argv: list[str]) -> None:
    """Apply a load: the client's flags that are used, the others are taken and not looked at."""
    parser = argparse.ArgumentParser()
    for name in ("base-url", "model", "dataset-path", "result-dir", "result-filename"):
        parser.add_argument(f"--{name}")
    for name in ("custom-output-len", "max-concurrency", "num-prompts"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--temperature", type=float)
    args, _ = parser.parse_known_args(argv)
    asyncio.run(client.benchmark(args))


def main() -> None:
    """The command line."""
    if sys.argv[1] == "serve":
        sys.exit(serve(sys.argv[2:]))
    bench(sys.argv[3:])


if __name__ == "__main__":
    main()
