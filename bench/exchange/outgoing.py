"""Room bench: a run written in another tool's form."""

from pathlib import Path

from bench.evidence import Evidence, Window, judging
from bench.exchange.forms import csv_text, inferencex_row, vllm_result
from bench.runfolder import dump_json, dump_rows, write_text
from bench.verdict import judged
from images.errors import UsageProblem

TARGETS = ("vllm", "csv", "inferencex")


def export(run: Path, target: str, out: Path) -> list[Path]:
    """Write a run in another tool's form; the files written. vLLM's form has one file a window.

    Raises UsageProblem for an unknown target or a place that can't be written.
    """
    texts = exported(run, target, out)
    for file, text in texts.items():
        try:
            write_text(file, text)
        except OSError as error:
            raise UsageProblem(f"{file} can't be written: {error.strerror}") from error
    return list(texts)


def exported(run: Path, target: str, out: Path) -> dict[Path, str]:
    """A run in another tool's form, by the file that `export` would write.

    Raises UsageProblem for an unknown target or a run without a window.
    """
    if target not in TARGETS:
        raise UsageProblem(f"no such form: {target!r}; there are {', '.join(TARGETS)}")
    evidence, verdict = judged(run)
    with judging(str(run)):
        texts = _texts(run, target, out, evidence, verdict)
    if not texts:
        raise UsageProblem(f"{run} has no finished window to export")
    return texts


def _texts(run: Path, target: str, out: Path, evidence: Evidence, verdict: dict) -> dict[Path, str]:
    """What is written, by file."""
    if target == "csv":
        return {out: csv_text(evidence, verdict, run.resolve().name)}
    if target == "inferencex":
        return {out: dump_json(inferencex_row(evidence, verdict))}
    single = len(evidence.windows) == 1
    names = {id(each): out if single else _beside(out, each) for each in evidence.windows}
    return {names[id(each)]: dump_rows(vllm_result(evidence, verdict, each)) for each in evidence.windows}


def _beside(out: Path, window: Window) -> Path:
    return out.with_name(f"{out.stem}-b{window.boot}-w{window.number}{out.suffix}")
