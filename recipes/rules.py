"""Room recipes: the table of engine traps. One row a trap: engine range, condition, message, source.

A row's condition is a pure function of the recipe and the device; it returns the key at fault, or None.
"""

from collections.abc import Callable
from dataclasses import dataclass

from images.engine import image_facts
from images.errors import UsageProblem
from recipes.load import Loaded
from recipes.schema import Recipe

TABLE_VERSION = 1

Condition = Callable[[Recipe, str], tuple[str, ...] | None]


@dataclass(frozen=True)
class Rule:
    """One trap. `engines` are version prefixes it is known for; `finds` returns the key path at fault."""

    id: str
    engines: tuple[str, ...]
    finds: Condition
    message: str
    source: str


def _undeclared(*path: str) -> Condition:
    def finds(recipe: Recipe, _device: str) -> tuple[str, ...] | None:
        declared = recipe.engine.flags if path[1] == "flags" else recipe.engine.env
        return None if path[2] in declared else path[:2]

    return finds


def _cpu_without_eager(recipe: Recipe, device: str) -> tuple[str, ...] | None:
    eager = recipe.engine.flags.get("enforce-eager") is True
    return None if device != "cpu" or eager else ("engine", "flags", "enforce-eager")


def _cpu_async(recipe: Recipe, device: str) -> tuple[str, ...] | None:
    asked = recipe.engine.flags.get("async-scheduling") is True
    return ("engine", "flags", "async-scheduling") if device == "cpu" and asked else None


def _cpu_mtp_prefix(recipe: Recipe, device: str) -> tuple[str, ...] | None:
    speculative = "speculative-config" in recipe.engine.flags
    caching = recipe.engine.flags.get("enable-prefix-caching") is not False
    return ("engine", "flags", "enable-prefix-caching") if device == "cpu" and speculative and caching else None


def _few_prompts(recipe: Recipe, _device: str) -> tuple[str, ...] | None:
    load = recipe.benchmark
    enough = load.prompts >= 5 * load.concurrency and load.prompts % load.concurrency == 0
    return None if enough else ("benchmark", "prompts")


def _short_context(recipe: Recipe, _device: str) -> tuple[str, ...] | None:
    limit = recipe.engine.flags.get("max-model-len")
    needed = recipe.benchmark.input_len + recipe.benchmark.output_len
    return ("engine", "flags", "max-model-len") if isinstance(limit, int) and limit < needed else None


RULES = (
    Rule(
        "async-declared",
        ("0.32",),
        _undeclared("engine", "flags", "async-scheduling"),
        "async-scheduling must be declared: it is on unless refused, so leaving it out hides the step that adds it",
        "vllm/config/vllm.py: None resolves to True",
    ),
    Rule(
        "prefix-caching-declared",
        ("0.32",),
        _undeclared("engine", "flags", "enable-prefix-caching"),
        "enable-prefix-caching must be declared: it is on by default and changes the Mamba cache mode",
        "vllm#52884, vllm#54227",
    ),
    Rule(
        "omp-declared",
        ("0.32",),
        _undeclared("engine", "env", "OMP_NUM_THREADS"),
        "OMP_NUM_THREADS must be declared: unset, serving sets torch's threads to 1 itself",
        "vllm#49919",
    ),
    Rule(
        "cpu-eager",
        ("0.32",),
        _cpu_without_eager,
        "enforce-eager must be true on a CPU: without it, boot dies on a host that has no C++ compiler",
        "seen on vLLM 0.32.0: InvalidCxxCompiler",
    ),
    Rule(
        "cpu-async",
        ("0.32",),
        _cpu_async,
        "async-scheduling can't be on with the CPU engine: it is forced off without an error",
        "vllm/platforms/cpu.py",
    ),
    Rule(
        "cpu-mtp-prefix",
        ("0.32",),
        _cpu_mtp_prefix,
        "enable-prefix-caching must be false with MTP on a CPU: its pre-copy kernel needs Triton",
        "seen on vLLM 0.32.0",
    ),
    Rule(
        "enough-prompts",
        ("",),
        _few_prompts,
        "prompts must be a multiple of concurrency and at least five times it, or ramps weigh as much as the plateau",
        "closed-loop measurements: 512 prompts at 256 streams printed 10,614 where the steady rate was 11,540",
    ),
    Rule(
        "context-fits",
        ("",),
        _short_context,
        "max-model-len must hold input_len + output_len",
        "vLLM refuses such requests",
    ),
)


def broken_rules(loaded: Loaded) -> list[str]:
    """Check a recipe against the table: one line a broken rule, naming file, line, rule and source."""
    recipe = loaded.recipe
    needed = recipe.applies.device if recipe.applies else None
    device = needed or image_facts(recipe.engine.image)["device"]
    lines = []
    for rule in RULES:
        if not recipe.engine.version.startswith(rule.engines):
            continue
        path = rule.finds(recipe, device)
        if path:
            lines.append(f"{loaded.mark(*path)}: {rule.message} [rule {rule.id}; {rule.source}]")
    return lines


def require_rules(loaded: Loaded) -> None:
    """Raise UsageProblem, one line a broken rule, unless the recipe keeps them all."""
    lines = broken_rules(loaded)
    if lines:
        raise UsageProblem("\n".join(lines))
