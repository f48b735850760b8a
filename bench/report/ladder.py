"""Room bench: a ladder in a terminal: published beside measured, what each step gained and cost, and what proves it."""

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from bench.ladder.exits import incomplete
from bench.report.text import COLOURS
from images.console import printable, table

NONE = "–"
STEP = "step, ms: GPU busy + rest"


def print_ladder_table(found: dict, console: Console) -> None:
    """Print a ladder.json for a person."""
    gpus = f", {', '.join(found['gpus'])}" if found["gpus"] else ""
    where = f"{found['machine']}{gpus}" if found["machine"] else "nothing measured yet"
    load = dict(zip(("in", "out", "streams", "requests"), found["shape"].split("/"), strict=True))
    console.print()
    console.print(printable(f"Ladder {found['family']} on {where}"), style="bold", markup=False)
    said = f"{load['in']} tokens in, {load['out']} out, {load['streams']} streams, {load['requests']} requests a window"
    windows = f"{found['windows_a_boot']} window(s) a boot"
    visits = f", over {found['visits']} visits: compare steps, not rates" if found["visits"] > 1 else ""
    console.print(f"{said}; {windows}; order {found['order']}{visits}", markup=False)
    _print_rates(found, console)
    _print_costs(found, console)
    _print_notes(found, console)


def _print_rates(found: dict, console: Console) -> None:
    rows = [
        (
            row["rung"],
            "\n".join(row["delta"]) or NONE,
            NONE if row["published_tok_s"] is None else f"{row['published_tok_s']:,.0f}",
            _rate(row),
            _interval(row),
            _step(row),
            _number(row.get("acceptance_length"), ".3f"),
            _proved(row),
            _state(row),
        )
        for row in found["rungs"]
    ]
    columns = ("rung", "change", "published (claimed)", f"output tok/s ({found['status']})", "95% interval")
    columns += ("step", "acceptance", "effect", "claims")
    console.print()
    console.print(table("", columns, rows, below=("change", "95% interval", "step")))


def _rate(row: dict) -> str:
    if row.get("output_tok_s") is not None:
        return f"{row['output_tok_s']:,.0f}"
    return "does not apply" if row["applies"] else "failed to boot" if row["failed"] and not row["boots"] else NONE


def _interval(row: dict) -> str:
    if row.get("output_tok_s") is None:
        return NONE
    lost = len(row["failed"]) + sum(bool(boot["voided_by"]) for boot in row["boots"])
    of = f"\n{len(row['run'])} of {len(row['run']) + lost} boots" if lost else ""
    if not row["ci95"]:
        return ("one boot, no interval" if len(row["run"]) == 1 else "no interval") + of
    return f"{row['ci95'][0]:,.0f} to {row['ci95'][1]:,.0f}{of}"


def _step(row: dict) -> str:
    if row.get("step_gain") is None:
        return NONE
    said = f"{row['step_gain']:+.1%} on {row['against']}"
    if row["step_ci95"]:
        said += f"\n{row['step_ci95'][0]:+.1%} to {row['step_ci95'][1]:+.1%}"
    elif row["step_why"]:
        said += f"\n{row['step_why']}"
    return said + ("\nbelow noise" if row["below_noise"] else "")


def _proved(row: dict) -> Text:
    if "effect_proved" not in row:
        return Text(NONE)
    words = {True: ("proved", "green"), False: ("not proved", "bold red"), None: ("can't be shown", "yellow")}
    text, style = words[row["effect_proved"]]
    return Text(text, style=style)


def _state(row: dict) -> Text:
    return Text(row["state"], style=COLOURS[row["state"]]) if row.get("state") else Text(NONE)


def _print_costs(found: dict, console: Console) -> None:
    rows = [
        (
            row["rung"],
            *(_percentiles(row, name) for name in ("ttft", "tpot", "e2e")),
            step_parts(row),
            _number(row["gpu_memory_gb"], ".1f"),
            _number(row["power_w"], ".0f"),
            _number(row["energy_j_per_token"], ".3g"),
            _quality(row),
            _boots(row),
        )
        for row in found["rungs"]
        if row.get("output_tok_s") is not None or row.get("quality")
    ]
    if rows:
        columns = ("rung", "TTFT p50/p95, ms", "TPOT p50/p95, ms", "E2E p50/p95, s", STEP, "GPU GB", "W", "J/token")
        columns += ("quality, exact", "boot, s")
        below = ("quality, exact", "E2E p50/p95, s", "boot, s", STEP)
        console.print()
        console.print(table("What it costs", columns, rows, whole=20, below=below))


def step_parts(row: dict) -> str:
    """A decode step's time: while the GPU was busy, and the rest of it; the whole where no GPU tells."""
    step, busy = row.get("step_ms"), row.get("gpu_busy_pct")
    if step is None or busy is None:
        return _number(step, ".1f")
    return f"{step * busy / 100:.1f} + {step * (1 - busy / 100):.1f}"


def _percentiles(row: dict, name: str) -> str:
    found = row["latency_ms"].get(name)
    if not found or found["p50"] is None:
        return NONE
    p50, p95 = (None if found[p] is None else found[p] / (1000 if name == "e2e" else 1) for p in ("p50", "p95"))
    return f"{p50:,.1f} / {'∞' if p95 is None else f'{p95:,.1f}'}"


def _quality(row: dict) -> str:
    lines = []
    for suite, tasks in (row["quality"] or {}).items():
        change = (row.get("quality_change") or {}).get(suite)
        said = f"{tasks['all']['exact']} of {tasks['all']['n']}"
        lines.append(said + (f", {change['difference']:+.1%} (p {change['p']:.2g})" if change else ""))
    return "\n".join(lines) or "not asked"


def _boots(row: dict) -> str:
    found: dict[str, list[float]] = {}
    for boot in row["boots"]:
        if boot["boot_s"] is not None:
            found.setdefault(boot["caches"] or "", []).append(boot["boot_s"])
    return "\n".join(f"{'/'.join(f'{each:.0f}' for each in times)} {state}".strip() for state, times in found.items())


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)


def _print_notes(found: dict, console: Console) -> None:
    console.print()
    for line in notes(found):
        console.print(printable(line), markup=False, soft_wrap=True)


def notes(found: dict) -> list[str]:
    """What a reader of the tables has to know, one sentence each."""
    several = len(found["visit_gpus"]) > 1
    lines = [line for row in found["rungs"] for line in _row_notes(row, several)]
    lines += _whole_notes(found)
    for decision in found["decisions"]:
        verb = "kept" if decision["kept"] else "rejected"
        lines.append(f"{verb}: {decision['rung']} on {decision['against']}: {'; '.join(decision['reasons'])}")
    return [*lines, *_caveats(found)]


def _row_notes(row: dict, several: bool) -> Iterator[str]:
    name, voided = row["rung"], [boot for boot in row["boots"] if boot["voided_by"]]
    if row["applies"]:
        yield f"{name}: {row['applies']}."
    for boot in row["failed"]:
        yield f"✘ {name}, boot {boot['boot']}: {_first_line(boot['cause'])}"
    for boot in voided:
        lost = "nothing timed counts" if boot["sound"] else "counts for nothing"
        visit = f" of visit {boot['visit']}" if several else ""
        yield f"✘ {name}, boot {boot['boot']}{visit}: {lost}: {'; '.join(boot['voided_by'])}"
    if row.get("state") == "INVALID" and row.get("why") and not voided:
        yield f"✘ {name}: {row['why']}"
    if row.get("against") and row.get("step_gain") is None and row.get("step_why"):
        yield f"{name}: no step. {row['step_why']}."
    if row.get("limits"):
        yield f"→ {name} is host-bound, so its rate and the steps from and to it are the host's: {row['limits']}"
    if row.get("graphs"):
        yield f"→ {name}: {row['graphs']}"
    if row.get("effect_proved") is not True and row.get("effect_why"):
        yield f"✘ {name}: effect not proved. {row['effect_why']}"


def _whole_notes(found: dict) -> Iterator[str]:
    """The last rung against the first, what acceptance would change of it, and how the machine drifted meanwhile."""
    whole, sensitive, drift = found["whole"], found["sensitivity"], found["drift"]
    if whole and whole["ratio"] is not None:
        interval = f", 95% {whole['ci95'][0]:.3f} to {whole['ci95'][1]:.3f}" if whole["ci95"] else f" ({whole['why']})"
        interval += _by_visit(whole)
        published = f"; published: {whole['published']:.3f} (claimed)" if whole["published"] else ""
        chosen = "; by the boots that chose these rungs, so it flatters them" if found["keep_if_better"] else ""
        ratio = f"{whole['to']} ÷ {whole['from']}: {whole['ratio']:.3f}"
        yield f"{ratio}{interval}{chosen}{published}{_without_host(found)}"
    if len(found["visit_gpus"]) > 1 and all(found["visit_gpus"].values()):
        cards = ", ".join(f"{name} on {' '.join(uuids)}" for name, uuids in found["visit_gpus"].items())
        yield f"Visits: {cards}"
    if sensitive:
        factors = ", ".join(f"acceptance {by}: ×{factor:.3f}" for by, factor in sensitive["rate_factor"].items())
        bound = any(row.get("limits") for row in found["rungs"] if row["rung"] == sensitive["rung"])
        only = ", had the GPU set the rate" if bound else ""
        yield f"{sensitive['rung']} with other draft acceptance ({sensitive['status']}{only}): {factors}"
    if drift:
        interval = f", 95% {drift['ci95'][0]:+.2%} to {drift['ci95'][1]:+.2%}" if drift["ci95"] else ""
        yield f"Drift, last round against the first: {drift['change']:+.2%}{interval}"


def _without_host(found: dict) -> str:
    """What the ratio would be by the time alone in which the GPU was busy, where one of the two rungs is host-bound."""
    rows = {row["rung"]: row for row in found["rungs"]}
    ends = [rows.get(found["whole"][end], {}) for end in ("from", "to")]
    bound = [row["rung"] for row in ends if row.get("limits")]
    if not bound or any(not row.get("gpu_busy_pct") for row in ends):
        return ""
    first, last = (row["output_tok_s"] / row["gpu_busy_pct"] for row in ends)
    return f"; {' and '.join(bound)} being host-bound, {last / first:.2f} by the GPU's busy time alone (modelled)"


def _by_visit(whole: dict) -> str:
    """What each visit's ratio was, where there were several, and of how many rungs' scatter the interval is."""
    if not whole["by_visit"]:
        return ""
    each = ", ".join(f"{ratio:.3f} on visit {visit}" for visit, ratio in whole["by_visit"].items())
    return f" by the scatter of {whole['scatter_of']} rungs over the visits ({each})"


def _caveats(found: dict) -> Iterator[str]:
    """What the figures of this ladder may not be taken for."""
    published, before = any(row["published_tok_s"] is not None for row in found["rungs"]), found["begun_with"]
    if published and _load(found["shape"]) != _load(found["published_shape"]):
        yield f"Published for {_load(found['published_shape'])}, which is another load: compare steps, not rates."
    if before:
        more = "more were asked for once figures were known, and an interval of 95% is too narrow then"
        yield f"Begun with {before} boot(s) a rung: {more}."
    if found["void_boots"]:
        yield f"{len(found['void_boots'])} boot(s) were cut off or changed; they count for nothing."
    if not published:
        yield "No rate is claimed here: the column claims is about what the recipes claim, not about speed."
    missing = incomplete(found)
    if missing:
        yield f"Not a whole ladder yet, so exit code 7: {'; '.join(missing)}. {'. '.join(_ways_on(found))}."


def _ways_on(found: dict) -> Iterator[str]:
    """What makes a ladder whole: going on, another boot where the machine spoilt those there are, or a new ladder."""
    here = [row for row in found["rungs"] if not row["applies"]]
    lost = [row for row in here if row.get("output_tok_s") is None and (row["boots"] or row["failed"])]
    spoilt = [row for row in lost if row["boots"] and all(boot["voided_by"] for boot in row["boots"])]
    wrong = [row for row in here if row.get("effect_proved", True) is not True and row not in spoilt]
    wrong += [row for row in lost if row not in spoilt and row not in wrong]
    if found["left"]:
        yield "./inv ladder --resume FOLDER goes on"
    elif spoilt:
        more = 1 + max(len(row["boots"]) + len(row["failed"]) for row in here)
        yield f"./inv ladder --resume FOLDER --boots {more} measures once more: {_named(spoilt)}"
    if wrong:
        yield f"More boots can't mend {_named(wrong)}: mend the recipe and start a new ladder"


def _named(rows: list[dict]) -> str:
    return ", ".join(row["rung"] for row in rows)


def _load(shape: str) -> str:
    """IN/OUT/STREAMS of a shape: how many requests there were makes no other load."""
    return shape.rpartition("/")[0]


def _first_line(text: str | None) -> str:
    return (text or "no cause recorded").splitlines()[0][:300]
