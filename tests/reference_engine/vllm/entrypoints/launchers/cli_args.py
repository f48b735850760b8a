"""The flags of `serve` that the tests' recipes use."""

import argparse
import json


def make_arg_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add them to a parser."""
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--model")
    for name in ("host", "served-model-name", "dtype", "mamba-backend", "mamba-ssm-cache-dtype"):
        parser.add_argument(f"--{name}", default="auto" if name.startswith("mamba") else None)
    for name in ("port", "max-num-seqs", "max-model-len"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("async-scheduling", "enable-prefix-caching", "enforce-eager"):
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--speculative-config", type=json.loads, default=None)
    return parser
