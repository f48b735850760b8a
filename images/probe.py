"""Room images: ask an engine what it is and what it accepts, once, and what it makes of a command line.

A setting that an engine does not know is often ignored with a warning only. What it knows is therefore read from
its own parser and its own table of variables, never from a list of ours.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from images.command import TAIL_LINES, run
from images.console import note, stage
from images.engine import Engine
from images.errors import EngineProblem, nearest

SCHEMA = 1
INSIDE = Path(__file__).with_name("probe_inside.py")
# What an asked process inherits of ours: no VLLM_* or PYTHON* of the user's shell may colour the answer.
PASSED_ENV = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TMPDIR", "TZ", "XDG_CACHE_HOME", "LD_LIBRARY_PATH")
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True)
class Flag:
    """What `vllm serve` accepts for a flag: `choices` is the closed list of its values, None where any value may
    do; `negatable` says whether --no-… exists."""

    choices: tuple[str, ...] | None
    negatable: bool


@dataclass(frozen=True)
class EngineFacts:
    """What an engine says of itself.

    `version` and `commit` are vLLM's (commit None where the build didn't record it); `cuda` is torch's, None in a CPU
    build; `platform` is what vLLM chose (cpu, cuda, …, unspecified where it found no device); `arch_list` are the CUDA
    architectures torch was compiled for, [] in a CPU build; `nvcc` and `ninja`: on the PATH; `flags`: every spelling
    of every flag of `vllm serve`, dashes included, without the --no-… forms; `env`: every VLLM_* variable it knows.
    """

    version: str
    commit: str | None
    torch: str
    cuda: str | None
    python: str
    platform: str
    arch_list: tuple[str, ...]
    nvcc: bool
    ninja: bool
    flashinfer: str | None
    flags: dict[str, Flag]
    env: tuple[str, ...]

    def spellings(self) -> list[str]:
        """Every flag as it may stand on a command line, --no-… forms included."""
        negated = [f"--no-{name[2:]}" for name, flag in self.flags.items() if flag.negatable and name.startswith("--")]
        return [*self.flags, *negated]


def probe(engine: Engine, cache: Path) -> EngineFacts:
    """Ask an engine what it is; the answer is kept in <cache>/probes and asked anew when it can't be read.

    Asking takes 10 to 20 s. Whether nvcc and ninja are on the PATH is looked up each time: a process has the host's.
    Raises EngineProblem, with the engine's last words, when it does not answer.
    """
    file = cache / "probes" / f"{engine.name}-{engine.identity}.json"
    facts = _kept(file)
    if facts is None:
        environ = _environment({**OFFLINE, **engine.environ()})
        answer = ask([str(engine.python)], {"ask": "facts"}, environ, "asking the engine what it accepts")
        facts = _facts(answer)
        _keep(facts, file)
    found = {program: shutil.which(program) is not None for program in ("nvcc", "ninja")}
    return replace(facts, **found)


def resolved_config(engine: Engine, argv: Sequence[str], env: Mapping[str, str]) -> dict:
    """What the engine makes of a command line, without starting a server or loading the model's weights.

    `argv` begins with 'serve', `env` holds the declared variables. Returns values by name: async_scheduling, dtype,
    enable_prefix_caching, enforce_eager, mamba_backend, mamba_cache_dtype, mamba_cache_mode, mamba_ssm_cache_dtype,
    max_cudagraph_capture_size, max_num_seqs, num_speculative_tokens, philox_rounds, speculative_method,
    stochastic_rounding; None where this engine has no such attribute, or no drafts. They are the configuration's: a
    CPU worker replaces the Mamba backend `triton` by its own later, and a CPU ignores stochastic rounding although it
    resolves to True.
    Raises EngineProblem, with the engine's last words, when it refuses the command line.
    """
    question = {"ask": "config", "argv": list(argv)}
    environ = _environment({**env, **engine.environ()})
    return ask([str(engine.python)], question, environ, "asking the engine what it makes of the flags")


def unknown_names(facts: EngineFacts, flags: Iterable[str], env: Iterable[str]) -> list[str]:
    """One sentence for each flag the engine does not have and each VLLM_* variable it does not know.

    Flags may be names of a recipe (`mamba-backend`) or stand as on a command line (`--no-async-scheduling`,
    `--mamba_backend=triton`, `--speculative-config.method`). Variables that don't begin with VLLM_ are not vLLM's.
    """
    engine = f"vLLM {facts.version}"
    known = facts.spellings()
    sentences = []
    for flag in dict.fromkeys(map(_spelling, flags)):
        positive = flag.replace("--no-", "--", 1)
        if flag in known:
            continue
        if positive in facts.flags:
            sentences.append(f"{engine} has no flag {flag}: {positive} exists, but can't be negated")
        else:
            sentences.append(f"{engine} has no flag {flag}{_hint(flag, known)}")
    for name in sorted(set(env)):
        if name.startswith("VLLM_") and name not in facts.env:
            sentences.append(f"{engine} does not know {name} and would ignore it{_hint(name, list(facts.env))}")
    return sentences


def ask(python: Sequence[str], question: dict, environ: Mapping[str, str], description: str) -> dict:
    """Put a question to an engine and return its answer.

    `python` is the command that starts its interpreter: a path, or a container's whole command line.
    Raises EngineProblem when it can't be started, fails, or answers with anything but one JSON object.
    """
    argv = [*python, "-P", "-c", INSIDE.read_text(), json.dumps(question)]
    with stage(description):
        try:
            answer = run(argv, env=environ)
        except OSError as error:
            raise EngineProblem(f"the engine can't be started: {python[0]}: {error.strerror}") from error
    if answer.returncode == 0:
        with suppress(ValueError):
            said = json.loads(answer.stdout)
            if isinstance(said, dict):
                return said
    words = "\n".join((answer.stderr or answer.stdout).strip().splitlines()[-TAIL_LINES:]) or "(it said nothing)"
    raise EngineProblem(
        f"{words}\n\nThe engine gave no answer ({description}): {python[0]} ended with status {answer.returncode}. "
        "Its last words are above."
    )


def _environment(declared: Mapping[str, str]) -> dict[str, str]:
    return {**{name: os.environ[name] for name in PASSED_ENV if name in os.environ}, **declared}


def _facts(data: dict) -> EngineFacts:
    flags = {
        name: Flag(None if flag["choices"] is None else tuple(flag["choices"]), flag["negatable"])
        for name, flag in data["flags"].items()
    }
    lists = {"arch_list": tuple(data["arch_list"]), "env": tuple(data["env"])}
    return EngineFacts(**{**data, **lists, "flags": flags})


def _kept(file: Path) -> EngineFacts | None:
    try:
        kept = json.loads(file.read_text())
        return _facts(kept["facts"]) if kept["schema"] == SCHEMA else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None  # absent, cut short, or written by another version: a new answer replaces it


def _keep(facts: EngineFacts, file: Path) -> None:
    """Write the answer in one step, so that nobody ever reads half of it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            whole = Path(folder) / file.name
            whole.write_text(json.dumps({"schema": SCHEMA, "facts": asdict(facts)}, indent=1, sort_keys=True))
            whole.replace(file)
    except OSError as error:
        note(f"The engine's answer can't be kept in {file.parent}: {error.strerror}. It will be asked again.")


def _spelling(flag: str) -> str:
    """A flag as the engine's parser lists it: vLLM accepts underscores, =value and .key after its name."""
    if flag.startswith("-") and not flag.startswith("--"):
        return flag
    return "--" + flag.removeprefix("--").partition("=")[0].partition(".")[0].replace("_", "-")


def _hint(word: str, known: list[str]) -> str:
    close = nearest(word, known)
    return f"; nearest: {', '.join(close)}" if close else ""
