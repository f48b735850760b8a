"""Room bench: `./inv compare MINE THEIRS`: finds the two runs, compares them, prints."""

from pathlib import Path

from bench.evidence import read_evidence
from bench.handover.compare import Side, compare, side
from bench.verdict import EXIT_CODES
from images.console import emit_json, out, printable, table
from images.errors import RunProblem, UsageProblem
from recipes.adopted import find_adopted

ESTIMATES = {"steady": "steady state", "whole": "whole run"}


def find_run(text: str) -> Path:
    """The run that a person names: its folder, or an adopted recipe for the newest run that came with it.

    Raises UsageProblem where there is none.
    """
    folder = Path(text)
    if folder.is_dir():
        return folder
    found = find_adopted(text)
    if found is None:
        raise UsageProblem(f"{text} is no run: wanted a run's folder, or an adopted recipe such as micro/mtp1@1f2e3d4c")
    runs = sorted((file.parent for file in found.bundle.glob("results/*/recipe.yaml")), key=lambda run: run.name)
    if not runs:
        raise UsageProblem(f"{found.reference} came without runs: ask for a bundle made with --with-results")
    return runs[-1]


def read_side(run: Path) -> Side:
    """Read one run. Raises RunProblem when it can't be read."""
    evidence = read_evidence(run)
    if evidence.seal_faults:
        raise RunProblem(f"{run} is not what was sealed: {evidence.seal_faults[0]}; nothing is compared with it")
    prompts = {}
    file = run / "prompts.sha256"
    if file.is_file():
        for line in file.read_text(errors="replace").splitlines():
            digest, _, name = line.partition("  ")
            prompts[name] = digest
    return side(evidence, prompts)


def compare_runs(mine: str, theirs: str, as_json: bool) -> int:
    """Compare and print. Returns 0 where every claim comes out the same, 3 where one doesn't, 5 where none can."""
    runs = [find_run(mine), find_run(theirs)]
    found = compare(*(read_side(run) for run in runs))
    if as_json:
        emit_json({**found, "runs": [str(run) for run in runs]})
    else:
        _print(found, runs)
    states = {row[name]["state"] for row in found["claims"] for name in ("mine", "theirs")}
    if states & {"NOT_COMPARABLE", "INVALID"} or {found["mine"]["state"], found["theirs"]["state"]} & {"INVALID"}:
        return EXIT_CODES["NOT_COMPARABLE"]
    return EXIT_CODES["REPRODUCED" if found["agree"] else "NOT_REPRODUCED"]


def _print(found: dict, runs: list[Path]) -> None:
    console = out()
    names = [
        (name, f"{found[name]['recipe']} on {found[name]['machine']}, {found[name]['state']}: {run.name}")
        for name, run in zip(("mine", "theirs"), runs, strict=True)
    ]
    console.print(table("Two runs", ("", ""), names))
    rows = []
    for row in found["claims"]:
        gap = "–" if row["gap"] is None else f"{row['gap']:+.4g}{' apart' if row['apart'] else ''}"
        said = [f"{row[name]['state']} {_figure(row[name]['measured'])}" for name in ("mine", "theirs")]
        rows.append((row["id"], f"{row['published']:g} ± {row['tolerance']:g} ({row['status']})", *said, gap))
    if rows:
        console.print(table("\nTheir claims on both runs", ("claim", "published", "mine", "theirs", "gap"), rows))
    rate = found["rate"]
    if rate:
        statuses = "/".join(dict.fromkeys((found["mine"]["status"], found["theirs"]["status"])))
        what = f"output tok/s ({statuses}, {ESTIMATES[rate['estimate']]})"
        said = f"{rate['theirs']:,.0f} → {rate['mine']:,.0f} {what}: {rate['gap']:+.1%}"
        console.print(f"\nRate, theirs → mine: {said}", markup=False)
        if rate["text"]:
            console.print(f"  {rate['text']}", markup=False)
        for whose, why in rate["limits"].items():
            if why:
                console.print(printable(f"  → {whose} is host-bound: {why}."), markup=False)
    rows = [(each["kind"], each["what"], _said(each["mine"]), _said(each["theirs"])) for each in found["fingerprint"]]
    if rows:
        console.print(table("\nFingerprints differ in", ("", "", "mine", "theirs"), rows))
    else:
        console.print("\nFingerprints: nothing that was recorded differs.")
    console.print(f"\nLikeliest cause: {found['cause']['text']}", markup=False)


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.5g}"


def _said(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(str(part) for part in value)
    return "–" if value is None else str(value)
