"""Room images: what runs inside an engine's interpreter to say what it is; standard library and vLLM only.

Started as `python -P -c <this text> <question as JSON>`, so that it needs no file in an image. It prints one JSON
object. The questions are {"ask": "facts"} and {"ask": "config", "argv": ["serve", model, …]}.
"""

import argparse
import json
import os
import platform
import shutil
import sys
from enum import Enum
from importlib import import_module, metadata

# Where the parser of `vllm serve` is made: since 0.32, and before.
PARSERS = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
# The names of our answer, and where vLLM keeps each value below its VllmConfig.
RESOLVED = {
    "async_scheduling": "scheduler_config.async_scheduling",
    "dtype": "model_config.dtype",
    "enable_prefix_caching": "cache_config.enable_prefix_caching",
    "enforce_eager": "model_config.enforce_eager",
    "mamba_backend": "mamba_config.backend",
    "mamba_cache_dtype": "cache_config.mamba_cache_dtype",
    "mamba_cache_mode": "cache_config.mamba_cache_mode",
    "mamba_ssm_cache_dtype": "cache_config.mamba_ssm_cache_dtype",
    "max_cudagraph_capture_size": "compilation_config.max_cudagraph_capture_size",
    "max_num_seqs": "scheduler_config.max_num_seqs",
    "num_speculative_tokens": "speculative_config.num_speculative_tokens",
    "philox_rounds": "mamba_config.stochastic_rounding_philox_rounds",
    "speculative_method": "speculative_config.method",
    "stochastic_rounding": "mamba_config.enable_stochastic_rounding",
}


def serve_parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The parser of `vllm …` and that of its `serve`, nested as vLLM nests them."""
    whole = import_module("vllm.utils.argparse_utils").FlexibleArgumentParser()
    serve = whole.add_subparsers(dest="subparser").add_parser("serve")
    for name in PARSERS:
        try:
            module = import_module(name)
        except ModuleNotFoundError as error:
            if not name.startswith(str(error.name)):  # vLLM lacks something else: that is its own error
                raise
            continue
        return whole, module.make_arg_parser(serve)
    raise SystemExit(f"this vLLM makes the parser of `serve` in none of {', '.join(PARSERS)}")


def flags_of(parser: argparse.ArgumentParser) -> dict[str, dict]:
    """Every spelling of every flag → {"choices": closed list or null, "negatable": whether --no-… exists}."""
    flags = {}
    for action in parser._actions:
        negatable = isinstance(action, argparse.BooleanOptionalAction)
        negated = {f"--no-{name[2:]}" for name in action.option_strings} if negatable else set()
        for name in action.option_strings:
            if name not in negated:
                flags[name] = {"choices": choices_of(action), "negatable": negatable}
    return flags


def choices_of(action: argparse.Action) -> list[str] | None:
    """The closed list of a flag's values, or None where any value may do.

    vLLM gives the parser no choices for an enumeration, but refuses other names of it later.
    """
    if action.choices is not None:
        return [str(choice) for choice in action.choices if choice is not None]
    if isinstance(action.default, Enum):
        return [name.lower() for name in type(action.default).__members__]
    return None


def commit_of(version: str) -> str | None:
    """vLLM's commit as its build recorded it, or as its version ends with (+g<hex>)."""
    recorded = getattr(import_module("vllm._version"), "__commit_id__", None)
    _, mark, local = version.partition("+g")
    found = recorded or (local.partition(".")[0] if mark else None)
    return found.removeprefix("g") if found else None


def version_of(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def facts() -> dict:
    """What this engine is and what it accepts."""
    _, serve = serve_parsers()
    torch = import_module("torch")
    version = import_module("vllm").__version__
    return {
        "version": version,
        "commit": commit_of(version),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "platform": import_module("vllm.platforms").current_platform._enum.name.lower(),
        "arch_list": torch.cuda.get_arch_list(),
        "nvcc": shutil.which("nvcc") is not None,
        "ninja": shutil.which("ninja") is not None,
        "flashinfer": version_of("flashinfer-python"),
        "flags": flags_of(serve),
        "env": sorted(name for name in import_module("vllm.envs").environment_variables if name.startswith("VLLM_")),
    }


def config(argv: list[str]) -> dict:
    """What vLLM makes of a `serve` command line, without starting anything."""
    args = serve_parsers()[0].parse_args(argv)
    args.model = args.model_tag or args.model
    engine_args = import_module("vllm.engine.arg_utils").AsyncEngineArgs.from_cli_args(args)
    usage = import_module("vllm.usage.usage_lib").UsageContext.OPENAI_API_SERVER  # max_num_seqs' default depends on it
    resolved = engine_args.create_engine_config(usage_context=usage)
    return {name: plain(resolved, path) for name, path in RESOLVED.items()}


def plain(value: object, path: str) -> str | int | float | bool | None:
    """The value at a dotted path as JSON can say it; None where there is no such attribute."""
    for name in path.split("."):
        value = getattr(value, name, None)
    if isinstance(value, Enum):
        return value.name.lower()
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value).removeprefix("torch.")


def main() -> None:
    """Answer the question on the command line. vLLM logs to stdout: that goes to stderr, the answer alone out."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        question = json.loads(sys.argv[1])
        answer = facts() if question["ask"] == "facts" else config(question["argv"])
        json.dump(answer, out)


if __name__ == "__main__":
    main()
