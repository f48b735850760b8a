"""Room recipes: what would make an engine run code, or load files, that come with a stranger's recipe.

Nothing of a bundle is run when it is adopted. But serving it is running an engine by its settings, and some of those
name programs. They are refused unless a person allows them; what isn't listed as harmless counts as not.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from recipes.schema import Recipe

# What an engine reads of a model without running any of it. Pickles (.bin, .pt) and code are not among them.
MODEL_SUFFIXES = frozenset({".safetensors", ".json", ".jsonl", ".txt", ".model", ".md", ".tiktoken"})
# Flags of vLLM 0.32 by which it imports what they name, or reads files beyond the model's.
FLAGS = re.compile(
    r"trust-remote-code|middleware|.*-cls|.*-plugins?|.*logits-processors?|code-revision|config|hf-config-path|tokenizer"
    r"|chat-template|lora-modules|distributed-executor-backend|download-dir|allowed-local-media-path|ssl-.*|.*-path"
)
KEYS = re.compile(r".*(module|class|path|plugin|passes|processor|custom).*|model|connector")  # inside JSON flags
HARMLESS_LOADING = frozenset({"auto", "safetensors", "dummy"})
ENV = re.compile(
    r"(VLLM|OMP|MKL|KMP|NCCL|TORCH|PYTORCH|FLASHINFER|TRITON|TOKENIZERS|CUBLAS)_[A-Z0-9_]+"
    r"|CUDA_(DEVICE_ORDER|DEVICE_MAX_CONNECTIONS|MODULE_LOADING|LAUNCH_BLOCKING)|HF_HUB_OFFLINE"
)
ENV_CODE = re.compile(r".*(PLUGIN|PATH|DIR|ROOT|HOME|INSECURE|SERIALIZATION|INJECTION|MODULE)S?(_.*)?")


def code_in(recipe: Recipe, model_files: Iterable[str]) -> list[str]:
    """What makes an engine run code, or load files, that come with a recipe: flags, variables, the model's files."""
    flags = [f"--{name}" for name, value in sorted(recipe.engine.flags.items()) if _flag(name, value)]
    env = [f"{name}=" for name, value in sorted(recipe.engine.env.items()) if _variable(name, value)]
    files = sorted(name for name in model_files if Path(name).suffix not in MODEL_SUFFIXES)
    return [*flags, *env, *files]


def _flag(name: str, value: object) -> bool:
    if name == "load-format":
        return value not in HARMLESS_LOADING
    return FLAGS.fullmatch(name) is not None or any(KEYS.fullmatch(key) for key in _keys(value))


def _keys(value: object) -> Iterator[str]:
    """Every key inside a JSON flag's value."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield str(key).lower()
            yield from _keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _keys(inner)


def _variable(name: str, value: str) -> bool:
    harmless = ENV.fullmatch(name) is not None and ENV_CODE.fullmatch(name) is None
    return not harmless or "/" in value
