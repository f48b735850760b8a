"""Room images: the checks that an image's `verify` is made of; standard library only, run inside the image.

A check yields findings: id, ok (None: can't be checked here), what was found and what was wanted.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

HOME = Path(__file__).resolve().parent
PINS = HOME / "pins.txt"
# What lies beside the pinned packages: the engine's second name, and our plugins.
OURS = re.compile(r"^(vllm|station[-_]recipes[-_].*)$")
MACHINES = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}
ENGINE_TIMEOUT_S = 600
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
# Random weights, no tokenizer: the engine must load, run and stop, all without a network.
ENGINE = """
import sys
from vllm import LLM, SamplingParams
own = {"dtype": "bfloat16", "gpu_memory_utilization": 0.2} if sys.argv[2] == "cuda" else {"dtype": "float32"}
llm = LLM(model=sys.argv[1], load_format="dummy", skip_tokenizer_init=True, enforce_eager=True,
          max_model_len=64, max_num_seqs=2, seed=0, **own)
wanted = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)
answer = llm.generate([{"prompt_token_ids": [1, 2, 3, 4]}], wanted, use_tqdm=False)
print("TOKENS", len(answer[0].outputs[0].token_ids))
"""


@dataclass(frozen=True)
class Finding:
    """One check's finding. `ok` is None where the check can't be made here; `found` then says why."""

    id: str
    ok: bool | None
    found: str
    wanted: str


Check = Callable[[argparse.Namespace], Iterable[Finding]]


def arguments(description: str) -> argparse.ArgumentParser:
    """The options that every image's verify takes."""
    parser = argparse.ArgumentParser(prog="verify", description=description)
    parser.add_argument("--platform", required=True, choices=sorted(MACHINES))
    parser.add_argument("--version", required=True, help="what the engine must call itself")
    parser.add_argument("--uid", required=True, type=int, help="the user that the engine runs as")
    parser.add_argument("--cache", default="/cache", type=Path, help="the folder of the engine's caches")
    parser.add_argument(
        "--upstream", action="store_true", help="an image of somebody's: its packages aren't pinned here"
    )
    parser.add_argument("--skip-engine", action="store_true", help="don't start the engine")
    return parser


def main(options: argparse.Namespace, checks: Iterable[Check]) -> int:
    """Run the checks, print each finding as a JSON line; 0 when none failed."""
    failed = 0
    for check in checks:
        try:
            findings = list(check(options))
        except Exception as error:  # a check that breaks has failed, and the others still run
            findings = [Finding(check.__name__, False, f"{type(error).__name__}: {error}", "a finding")]
        for finding in findings:
            sys.stdout.write(json.dumps(asdict(finding)) + "\n")
            sys.stdout.flush()
            failed += finding.ok is False
    return 1 if failed else 0


def normalised(name: str) -> str:
    """A distribution's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned_versions(text: str) -> dict[str, str]:
    """Name → version of a pins file."""
    return {normalised(name): version for name, version in re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", text, re.M)}


def pins(options: argparse.Namespace) -> Iterator[Finding]:
    """Every installed distribution is the pinned version, none is missing, and none beside them is there."""
    if options.upstream:
        yield Finding(
            "pins", None, "cannot check: upstream's packages, told by the image's digest alone", "pinned ones"
        )
        return
    wanted = pinned_versions(PINS.read_text())
    found = {normalised(each.metadata["Name"]): each.version for each in metadata.distributions(path=[site()])}
    wrong = [
        f"{name} {found.get(name, 'missing')} (pinned {wanted[name]})"
        for name in wanted
        if found.get(name) != wanted[name]
    ]
    extra = [f"{name} {found[name]} (not pinned)" for name in found.keys() - wanted.keys() if not OURS.match(name)]
    said = "; ".join(sorted(wrong) + sorted(extra)) or f"{len(wanted)} distributions"
    yield Finding("pins", not wrong and not extra, said, "exactly the pinned versions")


def site() -> str:
    """The folder of the engine's packages."""
    return str(metadata.distribution("vllm").locate_file(""))


def architecture(options: argparse.Namespace) -> Iterator[Finding]:
    """The image runs on the architecture it says."""
    wanted = MACHINES[options.platform]
    yield Finding("architecture", platform.machine() == wanted, platform.machine(), wanted)


def version(options: argparse.Namespace) -> Iterator[Finding]:
    """The engine calls itself what the recipe's claim was measured on."""
    found = metadata.version("vllm")
    yield Finding("version", found.split("+")[0] == options.version.split("+")[0], found, options.version)


def user(options: argparse.Namespace) -> Iterator[Finding]:
    """The engine doesn't run as root, and can't change itself."""
    found = f"{os.getuid()}:{os.getgid()}"
    yield Finding("user", found == f"{options.uid}:{options.uid}", found, f"{options.uid}:{options.uid}")
    own = [path for path in (Path(site()), Path(sys.executable).parent, HOME) if path.exists()]
    writable = [str(path) for path in own if may_write(path)]
    yield Finding("own files", not writable, ", ".join(writable) or "not writable", "not writable by the engine's user")


def may_write(path: Path) -> bool:
    """Whether this user's rights let it write there: asked of the mode, since verify's root is mounted read-only."""
    status = path.stat()
    owner, group = status.st_uid == os.getuid(), status.st_gid in {os.getgid(), *os.getgroups()}
    return bool(status.st_mode & ((0o200 * owner) | (0o020 * group) | 0o002))


def caches(options: argparse.Namespace) -> Iterator[Finding]:
    """The caches can be written, and hold programs that can be run: kernels are compiled there."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=options.cache, suffix=".sh", delete=False) as probe:
            probe.write("#!/bin/sh\nexit 0\n")
        file = Path(probe.name)
        file.chmod(0o700)
        ran = subprocess.run([str(file)], check=False).returncode == 0
        file.unlink()
        found = "writable, executable" if ran else "writable, but mounted noexec"
    except OSError as error:
        ran, found = False, f"{options.cache}: {error.strerror} (uid {os.getuid()})"
    yield Finding("caches", ran, found, "writable, executable")


def engine(options: argparse.Namespace) -> Iterator[Finding]:
    """The engine starts, decodes eight tokens of a tiny random model, and stops, without a network."""
    if options.skip_engine:
        return
    networks = sorted(path.name for path in Path("/sys/class/net").glob("*") if path.name != "lo")
    yield Finding("no network", not networks, ", ".join(networks) or "none", "none: run verify with --network none")
    if networks:
        return
    with tempfile.TemporaryDirectory(dir=options.cache) as folder:
        (Path(folder) / "config.json").write_text(json.dumps(TINY))
        environ = {**os.environ, "TMPDIR": folder, "VLLM_NO_USAGE_STATS": "1", "VLLM_CACHE_ROOT": f"{folder}/vllm"}
        environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        argv = [sys.executable, "-c", ENGINE, folder, getattr(options, "device", "cpu")]
        try:
            answer = subprocess.run(
                argv, env=environ, capture_output=True, text=True, timeout=ENGINE_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            yield Finding("engine", False, f"no answer after {ENGINE_TIMEOUT_S} s", "8 tokens")
            return
    tokens = re.search(r"^TOKENS (\d+)$", answer.stdout, re.M)
    said = f"{tokens[1]} tokens" if tokens else _reason(answer.stderr + answer.stdout)
    yield Finding("engine", bool(tokens) and tokens[1] == "8" and answer.returncode == 0, said, "8 tokens")


def _reason(text: str) -> str:
    """The line that says most about a failed start."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    signs = [line for line in lines if re.search(r"Error|error:|refused|unreachable", line)]
    with suppress(IndexError):
        return (signs or lines)[-1][:300]
    return "it said nothing"
