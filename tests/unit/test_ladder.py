"""Ladders without an engine: steps and their intervals, the journal, composed rungs, kept caches, wrong usage."""

import io
import json
import random
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.ladder.idle import wait_idle
from bench.ladder.journal import Boot, Journal, locked, read_boots
from bench.ladder.steps import drift, step
from images.engine import Engine
from images.errors import EngineProblem, RunProblem, UsageProblem
from images.given import given_engine
from recipes.compose import ancestor, compose
from recipes.load import changes, load_recipe
from recipes.run.jit import LABEL, CacheState, cache_home, found, look, restore, save

rate = st.floats(1.0, 1e5)
NO_GPU = {"gpus": [], "pci_gpus": [], "cpu": {"flags": []}, "slug": "cpu-x86-64"}
A_GPU = {**NO_GPU, "gpus": [{"name": "NVIDIA H200", "uuid": "GPU-1"}]}


@given(st.lists(rate, min_size=2, max_size=6), st.floats(0.2, 5.0))
def test_a_rate_that_is_k_times_as_high_is_a_step_of_k_whatever_its_unit(values, factor):
    found = step({"1": values}, {"1": [value * factor for value in values]}, None)
    assert found.gain == pytest.approx(factor - 1, rel=1e-6, abs=1e-9)
    low, high = found.ci95
    assert low <= found.gain + 1e-9 and found.gain - 1e-9 <= high
    scaled = step({"1": [value * 7 for value in values]}, {"1": [value * factor * 7 for value in values]}, None)
    assert scaled.ci95 == pytest.approx(found.ci95, rel=1e-4, abs=1e-6)


def test_a_step_inside_its_interval_or_the_noise_floor_is_below_noise_and_one_boot_has_no_interval():
    assert step({"1": [100, 104, 96]}, {"1": [101, 97, 105]}, None).below_noise is True
    assert step({"1": [100, 100.1, 99.9]}, {"1": [102, 102.1, 101.9]}, None).below_noise is False
    assert step({"1": [100, 100.1, 99.9]}, {"1": [102, 102.1, 101.9]}, 0.05).below_noise is True
    alone = step({"1": [100]}, {"1": [150]}, None)
    assert (alone.gain, alone.ci95, alone.below_noise) == (pytest.approx(0.5), None, None)
    assert alone.why == "one boot, no interval"


def test_rates_of_different_visits_are_never_compared_but_the_steps_of_several_visits_are_put_together():
    apart = step({"1": [100, 101]}, {"2": [200, 202]}, None)
    assert apart.gain is None and "one visit" in apart.why
    both = step({"1": [100], "2": [50]}, {"1": [190], "2": [97]}, None)
    assert both.gain == pytest.approx((1.9 * 1.94) ** 0.5 - 1)
    assert both.ci95[0] < both.gain < both.ci95[1]


def test_drift_is_seen_over_rounds_and_not_told_of_one():
    assert drift([{1: 1.0}, {1: 1.0}]) is None
    found = drift([{1: 1.02, 2: 0.98}, {1: 1.01, 2: 0.99}])
    assert found["change"] == pytest.approx(-0.03)
    assert found["ci95"][0] < -0.03 < found["ci95"][1]
    # A rung that was only measured early and one that was only measured late say nothing of each other.
    assert drift([{1: 1.01, 2: 0.99}, {2: 1.2, 3: 0.8}]) is None


def test_a_journal_keeps_what_was_finished_and_a_line_cut_off_costs_itself_only(tmp_path):
    journal = Journal(tmp_path)
    journal.begun("base", 1, "a")
    journal.ended(Boot("base", 1, "a", "failed", "it died"))
    journal.begun("base", 2, "b")
    with (tmp_path / "journal.jsonl").open("a") as sink:
        sink.write('{"event": "fini')  # killed in the middle of a line
    journal.begun("mtp1", 1, "c")
    boots = {boot.run: boot for boot in read_boots(tmp_path)}
    assert (boots["a"].state, boots["a"].cause) == ("failed", "it died")
    assert boots["b"].state == boots["c"].state == "void"


def test_a_second_ladder_in_the_same_folder_is_refused(tmp_path):
    with locked(tmp_path), pytest.raises(RunProblem, match="another ./inv ladder is at work"), locked(tmp_path):
        pass


def test_a_rung_is_measured_against_what_it_extends_and_can_run_here():
    assert ancestor(load_recipe("micro/mtp1"), NO_GPU).recipe.id == "micro/mtp3"
    assert ancestor(load_recipe("micro/base"), NO_GPU) is None
    assert ancestor(load_recipe("micro-cuda/base"), A_GPU) is None, "a ladder begins in its own family"
    assert ancestor(load_recipe("micro-cuda/mtp1"), A_GPU).recipe.id == "micro-cuda/flashinfer-mamba"


def test_a_change_is_tried_on_what_was_kept_and_claims_nothing_there():
    base, mtp3, mtp1 = (load_recipe(f"micro-cuda/{name}") for name in ("base", "mtp3", "mtp1"))
    asynchronous = load_recipe("micro-cuda/async-scheduling")
    assert compose(mtp3, asynchronous, mtp3) is asynchronous
    tried = compose(base, asynchronous, mtp3).recipe
    assert changes(base.recipe, tried) == ["engine.flags.async-scheduling"]
    assert {claim.metric for claim in tried.claims} == {"exact_match"}
    flashinfer = load_recipe("micro-cuda/flashinfer-mamba")
    assert changes(base.recipe, compose(base, mtp1, flashinfer).recipe) == ["engine.flags.speculative-config"]


@pytest.fixture
def engine(tmp_path, monkeypatch) -> Engine:
    monkeypatch.setenv("STATION_RECIPES_CACHE", str(tmp_path / "cache"))
    return Engine("cuda", "0.32.0", Path(sys.executable), "0123456789abcdef")


def test_compiled_kernels_are_saved_and_restored_to_the_byte(engine, tmp_path):
    assert look(engine).state == "cold"
    kernel = cache_home(engine) / "triton" / "kernel.cubin"
    kernel.parent.mkdir(parents=True)
    kernel.write_bytes(b"compiled")
    warm = look(engine)
    assert (warm.state, warm.files, warm.bytes) == ("warm", 1, 8)
    digest = save(engine, tmp_path / "kept.tar.gz")
    kernel.write_bytes(b"tuned otherwise")
    assert look(engine).sha256 != warm.sha256
    assert found(warm, look(engine)) == replace(warm, state="partly"), "a boot that compiled more found a part"
    assert restore(engine, tmp_path / "kept.tar.gz") == digest
    assert look(engine) == found(warm, look(engine)) == warm
    assert found(CacheState("cold", 0, 0, None), warm).state == "cold"
    other = Engine("cuda", "0.32.0", Path(sys.executable), "f" * 16)
    with pytest.raises(UsageProblem, match="holds caches of cuda 0123456789abcdef; this engine is cuda ffff"):
        restore(other, tmp_path / "kept.tar.gz")


@pytest.mark.parametrize("content", ["random", "text"])
def test_kernels_that_were_damaged_on_the_way_are_refused_and_the_caches_stay_as_they_were(engine, tmp_path, content):
    """Random bytes are stored as they are, and unpack to something whatever befell them: only the checksum tells."""
    kernel = cache_home(engine) / "triton" / "kernel.cubin"
    kernel.parent.mkdir(parents=True)
    kernel.write_bytes(random.Random(1).randbytes(400_000) if content == "random" else b"all kinds of text" * 99_999)
    before, file = look(engine), tmp_path / "kept.tar.gz"
    save(engine, file)
    whole = bytearray(file.read_bytes())
    middle = len(whole) // 2
    whole[middle : middle + 1000] = bytes(byte ^ 0xFF for byte in whole[middle : middle + 1000])
    file.write_bytes(whole)
    with pytest.raises(UsageProblem, match="no caches that were saved by this tool"):
        restore(engine, file)
    assert look(engine) == before


@pytest.mark.parametrize("hostile", ["../escaped", "/absolute", "link", "device", "cut", "text"])
def test_a_hostile_file_of_kernels_is_refused_and_the_caches_stay_as_they_were(engine, tmp_path, hostile):
    kernel = cache_home(engine) / "triton" / "kernel.cubin"
    kernel.parent.mkdir(parents=True)
    kernel.write_bytes(b"compiled")
    before = look(engine)
    file = tmp_path / "hostile.tar.gz"
    with tarfile.open(file, "w:gz") as packed:
        label = json.dumps({"engine": engine.name, "identity": engine.identity}).encode()
        entry = tarfile.TarInfo(LABEL)
        entry.size = len(label)
        packed.addfile(entry, io.BytesIO(label))
        entry = tarfile.TarInfo(hostile if "/" in hostile else "caches/kernel")
        kinds = {"link": tarfile.SYMTYPE, "device": tarfile.CHRTYPE}
        entry.type, entry.linkname = kinds.get(hostile, tarfile.REGTYPE), "/etc/passwd"
        packed.addfile(entry)
    if hostile == "cut":
        file.write_bytes(file.read_bytes()[:60])
    if hostile == "text":
        file.write_text("no archive")
    with pytest.raises(UsageProblem):
        restore(engine, file)
    assert look(engine) == before
    assert not (tmp_path / "cache" / "escaped").exists() and not Path("/absolute").exists()


def test_an_interpreter_without_vllm_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(EngineProblem, match="has no vLLM: install it there, or name its folder with --engine-path"):
        given_engine("cuda", sys.executable)
    with pytest.raises(UsageProblem, match="wanted the path of a Python interpreter"):
        given_engine("cuda", str(tmp_path / "nowhere"))
    with pytest.raises(UsageProblem, match="wanted a folder"):
        given_engine("cuda", sys.executable, (str(tmp_path / "nowhere"),))
    with pytest.raises(EngineProblem, match="can't say what it has installed"):
        given_engine("cuda", "/bin/true")


def test_the_next_boot_waits_for_the_gpu_s_memory_and_says_when_somebody_keeps_it():
    used = iter([90e9, 60e9, 2e9])
    assert wait_idle([], 1.5e9, lambda _: next(used)) == 2e9
    assert wait_idle([], None, lambda _: 90e9) == 90e9, "where nothing was known before, nothing can be waited for"
    with pytest.raises(EngineProblem, match=r"90\.0 GB of GPU memory are in use 0 s after the last engine ended"):
        wait_idle([], 1.5e9, lambda _: 90e9, limit_s=0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "ladder needs --recipe FAMILY, or --resume FOLDER"),
        (["--recipe", "micro/base"], "a ladder is a family's: --recipe micro; see --rungs"),
        (["--recipe", "micr"], "did you mean micro"),
        (["--recipe", "micro", "--rungs", "base,base"], "one stands twice"),
        (["--recipe", "micro", "--rungs", "bas"], "did you mean micro/base"),
        (["--recipe", "micro", "--order", "random"], "wanted interleaved or replicated"),
        (["--recipe", "micro", "--boots", "-1"], "wanted a number from 1 on"),
        (["--recipe", "micro", "--shape", "512"], "wanted IN/OUT/STREAMS or IN/OUT/STREAMS/PROMPTS"),
        (["--recipe", "micro", "--shape", "0/1/2"], "--shape 0/1/2: input_len"),
        (["--recipe", "micro", "--shape", "64/64/16/20"], "prompts must be a multiple of concurrency"),
        (["--recipe", "micro", "--keep-if-better", "speed"], "wanted one of output_tok_s"),
        (["--recipe", "micro", "--keep-if-better", "output_tok_s", "--order", "interleaved"], "goes with --order repl"),
        (["--recipe", "nemotron-h-synthetic"], "none of these rungs can run on this machine"),
        (["--recipe", "micro", "--engine-python", "/nowhere"], "wanted the path of a Python interpreter"),
        (["--resume", "results"], "is no ladder's folder"),
        (["--resume", "results", "--shape", "1/2/3"], "a ladder that is resumed keeps what it was begun with"),
        (["--join", "results"], "two at least"),
        (["--join"], "--join needs a value"),
        (["--recipe", "micro", "--port", "99999"], "port"),
        (["--recipe", "micro", "--caches", "nofile"], "--caches nofile: there is no such file"),
        (["--recipe", "micro", "--keep-caches", "/nowhere/x.tar"], "wanted the name of a file in a folder"),
        (["--recipe", "micro", "--guard", "ttft_p95_ms"], "it goes with --keep-if-better METRIC"),
        (["--recipe", "micro", "--engine-path", "/nowhere"], "--engine-python, which isn't named"),
    ],
)
def test_wrong_usage_of_a_ladder_ends_with_one_clear_error(inv, tmp_path, arguments, said):
    answer = inv("ladder", *arguments, "--out", str(tmp_path))
    assert answer.returncode in {1, 2}
    assert said in " ".join(answer.stderr.split())
    assert "Traceback" not in answer.stderr
