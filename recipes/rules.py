"""Room recipes: the table of engine traps. One row a trap: engine range, condition, message, source.

A row's condition is a pure function of the recipe and the device; it returns the key at fault, or None.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from images.declaration import declaration
from images.errors import UsageProblem
from recipes.load import Loaded
from recipes.schema import Recipe

TABLE_VERSION = 3

Fault = tuple[str, ...] | None
Condition = Callable[[Recipe, str], Fault]


@dataclass(frozen=True)
class Rule:
    """One trap. `engines` are version prefixes it is known for; `finds` returns the key path at fault."""

    id: str
    engines: tuple[str, ...]
    finds: Condition
    message: str
    source: str


def flag(name: str) -> tuple[str, ...]:
    """The key path of a flag."""
    return ("engine", "flags", name)


def _undeclared(*path: str) -> Condition:
    def finds(recipe: Recipe, _device: str) -> Fault:
        declared = recipe.engine.flags if path[1] == "flags" else recipe.engine.env
        return None if path[2] in declared else path[:2]

    return finds


def _cpu_without_eager(recipe: Recipe, device: str) -> Fault:
    eager = recipe.engine.flags.get("enforce-eager") is True
    return None if device != "cpu" or eager else flag("enforce-eager")


def _cpu_async(recipe: Recipe, device: str) -> Fault:
    asked = recipe.engine.flags.get("async-scheduling") is True
    return flag("async-scheduling") if device == "cpu" and asked else None


def _cpu_mtp_prefix(recipe: Recipe, device: str) -> Fault:
    speculative = "speculative-config" in recipe.engine.flags
    caching = recipe.engine.flags.get("enable-prefix-caching") is not False
    return flag("enable-prefix-caching") if device == "cpu" and speculative and caching else None


def _few_prompts(recipe: Recipe, _device: str) -> Fault:
    load = recipe.benchmark
    enough = load.prompts >= 5 * load.concurrency and load.prompts % load.concurrency == 0
    return None if enough else ("benchmark", "prompts")


def _short_context(recipe: Recipe, _device: str) -> Fault:
    limit = recipe.engine.flags.get("max-model-len")
    needed = recipe.benchmark.input_len + recipe.benchmark.output_len
    return flag("max-model-len") if isinstance(limit, int) and limit < needed else None


# The architectures whose checkpoint configuration `--mamba-ssm-cache-dtype auto` follows.
SSM_DTYPE_HOOKS = frozenset({"NemotronHForCausalLM", "NemotronHPuzzleForCausalLM", "NemotronH_Nano_VL_V2"})
DEAD_ENV = frozenset(
    {
        "VLLM_ATTENTION_BACKEND",
        "VLLM_FLASHINFER_MOE_BACKEND",
        "VLLM_NVFP4_GEMM_BACKEND",
        "VLLM_USE_FLASHINFER_MOE_FP16",
        "VLLM_USE_FLASHINFER_MOE_FP4",
        "VLLM_USE_FLASHINFER_MOE_FP8",
        "VLLM_USE_V1",
    }
)
SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|API_KEY|ACCESS_KEY|CREDENTIAL)S?$")


def _rounds(recipe: Recipe) -> bool:
    return recipe.engine.flags.get("enable-mamba-cache-stochastic-rounding") is True


def _speculative(recipe: Recipe) -> dict:
    config = recipe.engine.flags.get("speculative-config")
    return config if isinstance(config, dict) else {}


def _ssm_dtype_auto(recipe: Recipe, _device: str) -> Fault:
    auto = recipe.engine.flags.get("mamba-ssm-cache-dtype", "auto") == "auto"
    unhooked = recipe.model.architecture not in {None, *SSM_DTYPE_HOOKS}
    return flag("mamba-ssm-cache-dtype") if auto and unhooked else None


def _mamba_config(recipe: Recipe, _device: str) -> Fault:
    return flag("mamba-config") if "mamba-config" in recipe.engine.flags else None


def _rounding_without_fp16(recipe: Recipe, _device: str) -> Fault:
    explicit = recipe.engine.flags.get("mamba-ssm-cache-dtype") == "float16"
    return flag("enable-mamba-cache-stochastic-rounding") if _rounds(recipe) and not explicit else None


def _rounding_on_cpu(recipe: Recipe, device: str) -> Fault:
    return flag("enable-mamba-cache-stochastic-rounding") if _rounds(recipe) and device == "cpu" else None


def _rounding_in_triton(recipe: Recipe, _device: str) -> Fault:
    flashinfer = recipe.engine.flags.get("mamba-backend") == "flashinfer"
    blackwell = recipe.engine.env.get("FLASHINFER_CUDA_ARCH_LIST", "").startswith("10.")
    return flag("mamba-backend") if _rounds(recipe) and not flashinfer and not blackwell else None


def _philox(recipe: Recipe, _device: str) -> Fault:
    rounds = recipe.engine.flags.get("mamba-cache-philox-rounds")
    wrong = rounds is not None and (not _rounds(recipe) or not isinstance(rounds, int) or rounds < 1)
    return flag("mamba-cache-philox-rounds") if wrong else None


def _ssu_algorithm(recipe: Recipe, _device: str) -> Fault:
    fixed = recipe.engine.flags.get("mamba-ssu-algorithm") in {"vertical", "horizontal"}
    return flag("mamba-ssu-algorithm") if fixed and _speculative(recipe) else None


def _dead_env(recipe: Recipe, _device: str) -> Fault:
    dead = sorted(DEAD_ENV & recipe.engine.env.keys())
    return ("engine", "env", dead[0]) if dead else None


def _old_method(recipe: Recipe, _device: str) -> Fault:
    return flag("speculative-config") if _speculative(recipe).get("method") == "nemotron_h_mtp" else None


def _unpinned_moe(recipe: Recipe, _device: str) -> Fault:
    unpinned = recipe.engine.flags.get("moe-backend", "auto") == "auto"
    return flag("moe-backend") if recipe.model.quantization and unpinned else None


def _quantised_draft(recipe: Recipe, _device: str) -> Fault:
    config = _speculative(recipe)
    inherits = recipe.model.quantization and config and "moe_backend" not in config
    return flag("speculative-config") if inherits else None


def _short_stop(recipe: Recipe, _device: str) -> Fault:
    drains = recipe.engine.flags.get("shutdown-timeout", 0)
    short = isinstance(drains, int) and drains > 0 and recipe.runtime.stop_timeout_s <= drains
    return ("runtime", "stop_timeout_s") if short else None


def _secret(recipe: Recipe, _device: str) -> Fault:
    if "api-key" in recipe.engine.flags:
        return flag("api-key")
    named = sorted(name for name in recipe.engine.env if SECRET.search(name))
    return ("engine", "env", named[0]) if named else None


# Said elsewhere in a recipe or by us: as a flag they would win over it, and over loopback only.
SET_ELSEWHERE = frozenset({"model", "served-model-name", "host", "port", "dtype", "revision", "uds", "root-path"})
NOT_THE_RECIPES = frozenset({"HOME", "LD_LIBRARY_PATH", "LD_PRELOAD", "PATH", "PYTHONHOME", "PYTHONPATH", "TMPDIR"})


def _said_twice(recipe: Recipe, _device: str) -> Fault:
    twice = sorted(SET_ELSEWHERE & recipe.engine.flags.keys())
    return flag(twice[0]) if twice else None


def _machine_s_env(recipe: Recipe, _device: str) -> Fault:
    theirs = sorted(NOT_THE_RECIPES & recipe.engine.env.keys())
    return ("engine", "env", theirs[0]) if theirs else None


RULES = (
    Rule(
        "async-declared",
        ("0.32",),
        _undeclared(*flag("async-scheduling")),
        "async-scheduling must be declared: it is on unless refused, so leaving it out hides the step that adds it",
        "vllm/config/vllm.py: None resolves to True",
    ),
    Rule(
        "prefix-caching-declared",
        ("0.32",),
        _undeclared(*flag("enable-prefix-caching")),
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
    Rule(
        "ssm-dtype-explicit",
        ("0.32",),
        _ssm_dtype_auto,
        "mamba-ssm-cache-dtype must be explicit: for this architecture `auto` is the model's dtype, not the checkpoint's",
        "vllm: the hook exists for NemotronHForCausalLM, NemotronHPuzzleForCausalLM and NemotronH_Nano_VL_V2 only",
    ),
    Rule(
        "mamba-config",
        ("0.32",),
        _mamba_config,
        "mamba-config can't be used: its backend is silently overwritten to triton; use mamba-backend",
        "read in vLLM 0.32",
    ),
    Rule(
        "rounding-fp16",
        ("0.32",),
        _rounding_without_fp16,
        "stochastic rounding needs mamba-ssm-cache-dtype: float16, said explicitly; mamba-cache-dtype doesn't count",
        "read in vLLM 0.32",
    ),
    Rule(
        "rounding-cpu",
        ("0.32",),
        _rounding_on_cpu,
        "stochastic rounding can't be on with the CPU engine: it accepts the flag and ignores it",
        "seen on vLLM 0.32.0: command line flags bypass the device check",
    ),
    Rule(
        "rounding-triton",
        ("0.32",),
        _rounding_in_triton,
        "stochastic rounding needs mamba-backend: flashinfer, except on compute capability 10.x, where Triton does it too",
        "read in vLLM 0.32; the check is bypassed by command line flags",
    ),
    Rule(
        "philox",
        ("0.32",),
        _philox,
        "mamba-cache-philox-rounds must be 1 or more, and only beside stochastic rounding: alone it is ignored, 0 means 10",
        "read in vLLM 0.32 and FlashInfer 0.7",
    ),
    Rule(
        "ssu-algorithm",
        ("0.32",),
        _ssu_algorithm,
        "mamba-ssu-algorithm vertical or horizontal can't be used with draft tokens: it passes the start and fails later",
        "read in vLLM 0.32",
    ),
    Rule(
        "dead-env",
        ("0.32",),
        _dead_env,
        "this variable is dead in vLLM 0.32: it is warned about and ignored; drop it",
        "vllm/envs.py",
    ),
    Rule(
        "old-method",
        ("0.32",),
        _old_method,
        "method nemotron_h_mtp is a deprecated alias; write mtp",
        "vllm/config/speculative.py",
    ),
    Rule(
        "moe-backend-pinned",
        ("0.32",),
        _unpinned_moe,
        "moe-backend must be pinned for quantised weights: the kernel chosen by itself gave fluent but corrupt text",
        "vllm#52308",
    ),
    Rule(
        "draft-moe-backend",
        ("0.32",),
        _quantised_draft,
        "speculative-config needs moe_backend for a quantised target: the unquantised draft inherits the target's otherwise",
        "read in vLLM 0.32",
    ),
    Rule(
        "stop-after-drain",
        ("",),
        _short_stop,
        "stop_timeout_s must be longer than the engine's shutdown-timeout, or draining requests are killed",
        "the engine drains until shutdown-timeout, then ends",
    ),
    Rule(
        "no-secret",
        ("",),
        _secret,
        "a secret must not stand in a recipe: pass it by file or by environment when serving",
        "a recipe is handed to others",
    ),
    Rule(
        "set-elsewhere",
        ("",),
        _said_twice,
        "this flag is set from model and runtime; as a flag it would override them, and the loopback address",
        "recipes/spec.py",
    ),
    Rule(
        "machine-env",
        ("",),
        _machine_s_env,
        "this variable belongs to the machine, not to a recipe",
        "recipes/run/supervised.py",
    ),
)


def broken_rules(loaded: Loaded) -> list[str]:
    """Check a recipe against the table: one line a broken rule, naming file, line, rule and source."""
    recipe = loaded.recipe
    needed = recipe.applies.device if recipe.applies else None
    try:
        device = needed or declaration(recipe.engine.image).device
    except UsageProblem as problem:
        raise UsageProblem(f"{loaded.mark('engine', 'image')}: engine.image: {problem}") from None
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
