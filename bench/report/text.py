"""Room bench: a verdict in a terminal, in plain words: what was confirmed and what was not."""

from rich.console import Console
from rich.text import Text

from bench.report.remedies import REMEDIES
from images.console import printable, table

COLOURS = {
    "REPRODUCED": "bold green",
    "MEASURED": "bold green",
    "NOT_REPRODUCED": "bold red",
    "INVALID": "bold red",
    "INCONCLUSIVE": "bold yellow",
    "NOT_COMPARABLE": "bold yellow",
    "EXCEEDED": "bold magenta",
}
MEANINGS = {
    "REPRODUCED": "every judged claim holds on this machine",
    "MEASURED": "nothing was claimed; the figures are this machine's own",
    "NOT_REPRODUCED": "a judged claim does not hold on this machine",
    "INVALID": "the run proves nothing; no figure may be taken from it",
    "INVALID timing": "nothing timed may be taken from this run; claims that need no clock stand",
    "INCONCLUSIVE": "the evidence does not decide",
    "NOT_COMPARABLE": "the claim is about another machine, model or engine",
    "EXCEEDED": "better than claimed: a finding to explain, not a pass",
}


def print_verdict(verdict: dict, console: Console) -> None:
    """Print a verdict.json for a person."""
    state = verdict["state"]
    imported = verdict["setting"].get("imported")
    where = verdict["setting"]["url"] or ("a file of somebody's client" if imported else verdict["machine"])
    console.print()
    console.print(
        Text(state, style=COLOURS[state]), printable(f"{verdict['recipe']} on {where}: {MEANINGS[_meaning(verdict)]}.")
    )
    _print_setting(verdict["setting"], verdict["boots"], verdict["windows"], console)
    _print_voids(verdict, console)
    _print_claims(verdict, console)
    _print_figures(verdict, console)
    _print_quality(verdict, console)
    _print_guards(verdict, console)


def _meaning(verdict: dict) -> str:
    """The key of what the verdict's state means: a run of which only the timing is void proves what needs no clock."""
    stands = any(claim["state"] != "INVALID" for claim in verdict["claims"])
    return "INVALID timing" if verdict["state"] == "INVALID" and stands else verdict["state"]


def _print_setting(setting: dict, boots: int, windows: int, console: Console) -> None:
    load, engine, machine = setting["load"], setting["engine"], setting["machine"]
    if windows:
        asked = f"{load['requests']} requests of {load['input_len']} tokens in and {load['output_len']} out"
        how = f"{load['concurrency']} streams, {load['prompts']} prompts, temperature {load['temperature']:g}"
        console.print(f"Load: {asked}, {how}; boots {boots}, windows {windows}", markup=False)
    version = " ".join(engine["answered"]) or "of unknown version"
    patched = f", patched: {', '.join(str(each or '?') for each in engine['patches'])}" if engine["patches"] else ""
    console.print(f"Engine: vLLM {version} ({engine['name'] or 'not ours'}{patched})", markup=False)
    for file in (setting.get("imported") or {}).get("files", []):
        named = f"Imported: {file.get('name')}, model {file.get('model_id')}, sha256 {str(file.get('sha256'))[:16]}…"
        console.print(printable(named), markup=False)
    if setting["url"] or setting.get("imported"):
        console.print("Not checked: the server's weights, types, flags, environment and machine", markup=False)
        return
    gpus = ", ".join(str(each or "?") for each in machine["gpus"]) or "no GPU"
    console.print(f"Machine: {machine['cpu'] or 'unknown CPU'}, {machine['cores']} cores, {gpus}", markup=False)
    if setting["model_files_that_differ"]:
        console.print(f"Model: not the recipe's: {', '.join(setting['model_files_that_differ'])} differ", markup=False)


def _print_voids(verdict: dict, console: Console) -> None:
    """Each failed guard, and once for each cause what to do about it."""
    failed = [guard for guard in verdict["guards"] if guard["ok"] is False]
    for guard in failed:
        note = f" (waived: {guard['waived']})" if guard["waived"] else ""
        rule = f"{guard['rule']} " if guard.get("rule") else ""
        line = f"  ✘ {guard['id']}: found {_number(guard['observed'])}, wanted {rule}{_number(guard['limit'])}"
        console.print(printable(f"{line} {guard['unit']}{note}".rstrip()), markup=False)
    causes = [guard["id"] for guard in failed if not guard["waived"] and not guard.get("because")]
    for remedy in dict.fromkeys(REMEDIES[cause] for cause in causes if cause in REMEDIES):
        about = ", ".join(cause for cause in causes if REMEDIES.get(cause) == remedy)
        console.print(printable(f"  → {about}: {remedy}"), markup=False)


def _print_claims(verdict: dict, console: Console) -> None:
    rows = [
        (
            Text(claim["state"], style=COLOURS[claim["state"]]),
            claim["id"],
            f"{claim['published']:g} ± {_tolerance(claim)} ({claim['status']})",
            "–" if claim["measured"] is None else f"{claim['measured']:.5g}",
            claim["reason"],
        )
        for claim in verdict["claims"]
    ]
    if rows:
        console.print()
        console.print(table("Claims", ("state", "claim", "published", "measured", "why"), rows))
    for claim in verdict["claims"]:
        if claim.get("attribution"):
            other = (
                " (modelled; the claim is of another machine or model)" if claim["state"] == "NOT_COMPARABLE" else ""
            )
            console.print(printable(f"{claim['id']}{other}: {claim['attribution']['text']}."), markup=False)
    if verdict["server_cpu"] and verdict["server_cpu"]["limits"]:
        console.print(printable(f"→ Host-bound: {verdict['server_cpu']['limits']}."), style="bold", markup=False)
    graphs = verdict["setting"].get("cuda_graphs")
    if graphs and graphs["said"]:
        console.print(printable(f"→ Outside CUDA graphs: {graphs['said']}."), style="bold", markup=False)


def _tolerance(claim: dict) -> str:
    """The claim's tolerance, and the wider one that was used where the machine's noise floor is above it."""
    used = claim.get("tolerance_used")
    widened = used is not None and used > claim["tolerance"]
    return f"{claim['tolerance']:g}" + (f", ± {used:.4g} used: the noise floor" if widened else "")


def _print_figures(verdict: dict, console: Console) -> None:
    rates, reasons = verdict["output_tok_s"], verdict["reasons"]
    if rates["whole"] is None:
        why = reasons.get("output_tok_s")
        if why and verdict["windows"] and verdict["state"] != "INVALID":
            console.print(printable(f"\nNo rate and no latency: {why}."), markup=False)
        return
    rows = [
        (
            "whole run",
            f"{rates['whole']:,.0f} output tok/s",
            _spread(verdict["ci95"], reasons["ci95"] if verdict["ci95"] is None else ""),
        )
    ]
    steady = "–" if rates["steady"] is None else f"{rates['steady']:,.0f} output tok/s"
    why = reasons.get("output_tok_s.steady", "without the end, where streams fall idle")
    rows.append(("steady state", steady, _spread(verdict.get("ci95_steady"), why)))
    rows.append(("C × OSL / mean E2E", f"{rates['little']:,.0f} output tok/s", "needs no arrays: a cross-check"))
    rows += _more_figures(verdict)
    console.print()
    console.print(table(f"Figures ({verdict['status']})", ("", "", ""), rows))
    _print_latency(verdict, console)


def _spread(interval: list[float] | None, otherwise: str) -> str:
    return f"95% interval {interval[0]:,.0f} to {interval[1]:,.0f}" if interval else otherwise


def _more_figures(verdict: dict) -> list[tuple[str, str, str]]:
    """The rows below the rates; what was not measured has none."""
    rows = []
    streams = verdict["streams"]
    if streams["n_eff"] is not None:
        gap = verdict["little_gap"]
        little = f"; Little's law within {gap:.1%}" if gap is not None else ""
        rows.append(
            ("streams in flight", f"{streams['n_eff']:,.1f} of {streams['asked']}", f"peak {streams['peak']}{little}")
        )
    rows.append(("per user", f"{verdict['per_user_tok_s']:,.1f} output tok/s", "OSL / mean E2E"))
    if verdict["acceptance_length"] is not None:
        said = "tokens a step, from the server's counters"
        rows.append(("acceptance length", f"{verdict['acceptance_length']:.3f}", said))
    if verdict["gpu_memory_gb"] is not None:
        rows.append(("GPU memory", f"{verdict['gpu_memory_gb']:.1f} GB", "most in the steady window, all GPUs"))
    if verdict["energy_j_per_token"] is not None:
        scope = f"scope: {verdict['energy_scope']}; counter and power agree"
        rows.append(("energy", f"{verdict['energy_j_per_token']:.3g} J per output token", scope))
    conditions = verdict["conditions"]
    if conditions and conditions["sm_clock_mhz"] is not None:
        clock = f"{conditions['sm_clock_mhz']:,.0f} MHz"
        power = "" if conditions["power_w"] is None else f"{conditions['power_w']:,.0f} W"
        shares = (conditions["throttle"] or {}).items()
        limits = ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.005)
        rows.append(("GPU", f"{clock} {power}".strip(), f"throttle reasons: {limits or 'none'}"))
    server = verdict["server_cpu"]
    if server:
        pairs = (("API server", server["api_server"]), ("engine core", server["engine_core"]))
        shares = ", ".join(f"{name} {share:.2f}" for name, share in pairs if share is not None)
        busy = (conditions or {}).get("utilisation_pct")
        idle = "" if busy is None else f"GPU busy {busy:.0f}%"
        waited = "" if server["engine_idle"] is None else f"engine idle {server['engine_idle']:.0%} of the time"
        rows.append(("server", f"{shares} of a core", "; ".join(filter(None, (waited, idle)))))
        if server.get("others") is not None:
            rows.append(("other work", f"{server['others']:.1f} cores", "on this machine, beside server and load"))
    noise = verdict["noise_floor"]
    if noise and "output_tok_s" in noise["relative"]:
        floor = noise["relative"]["output_tok_s"]
        rows.append(("noise floor", f"{floor:.1%} of the rate", f"{noise['boots']} boots of {noise['run']}"))
    ceiling = verdict["client_ceiling"]
    if ceiling and ceiling["chunks_per_s"] is not None:
        said = f"by one client process; this load had {ceiling['clients']}"
        rows.append(("client ceiling", f"{ceiling['chunks_per_s']:,.0f} chunks/s", said))
    return rows


def _print_latency(verdict: dict, console: Console) -> None:
    latency = verdict["latency_ms"]
    columns = ("latency, ms", "p50", "p90", "p95", "p99", "requests")
    lines = [
        (
            name.upper(),
            *(_milliseconds(latency[name][p]) for p in ("p50", "p90", "p95", "p99")),
            str(latency[name]["n"]),
        )
        for name in ("ttft", "tpot", "e2e")
    ]
    console.print()
    console.print(table("", columns, lines))


def _print_quality(verdict: dict, console: Console) -> None:
    for suite, tasks in (verdict["quality"] or {}).items():
        rows = [
            (name, f"{task['exact']} of {task['n']}", f"{task['wilson95'][0]:.3f} to {task['wilson95'][1]:.3f}")
            for name, task in sorted(tasks.items(), key=lambda pair: (pair[0] == "all", pair[0]))
        ]
        console.print()
        console.print(
            table(f"Quality: {suite}, exact answers at temperature 0", ("task", "exact", "95% for new items"), rows)
        )


def print_paired(first: str, second: str, differences: dict[str, dict], console: Console) -> None:
    """Print how two runs differ on the same items."""
    rows = [
        (
            suite,
            str(found["n"]),
            str(found["only_first"]),
            str(found["only_second"]),
            f"{found['difference']:+.4f}",
            f"{found['interval95'][0]:+.4f} to {found['interval95'][1]:+.4f}",
            f"{found['p']:.3g}",
        )
        for suite, found in differences.items()
    ]
    columns = ("suite", "items", "right only before", "right only after", "difference", "95% interval", "McNemar p")
    console.print()
    console.print(table(f"Quality, item by item: {first} → {second}", columns, rows))
    for suite, found in differences.items():
        low, high = found["interval95"]
        verb = "changed nothing that this suite can see" if low <= 0 <= high else "changed the answers"
        console.print(
            f"{suite}: {second} {verb}; 95% interval of the true difference: {low:+.2%} to {high:+.2%}.", markup=False
        )


def _print_guards(verdict: dict, console: Console) -> None:
    good = [guard["id"] for guard in verdict["guards"] if guard["ok"] is True]
    blind = [_blind(guard) for guard in verdict["guards"] if guard["ok"] is None]
    console.print()
    console.print(f"Guards passed: {', '.join(good) or 'none'}", markup=False)
    if blind:
        console.print(f"Guards that cannot check, without evidence in this run: {', '.join(blind)}", markup=False)
    if MEANINGS[_meaning(verdict)] == MEANINGS["INVALID"]:
        return
    confirmed = [claim["id"] for claim in verdict["claims"] if claim["state"] == "REPRODUCED"]
    others = [claim["id"] for claim in verdict["claims"] if claim["state"] != "REPRODUCED"]
    console.print(f"Confirmed: {'; '.join(confirmed) or 'no claim'}.", markup=False)
    if others:
        console.print(f"Not confirmed: {'; '.join(others)}.", markup=False)
    rated = any(claim["metric"] == "output_tok_s" for claim in verdict["claims"])
    if verdict["output_tok_s"]["whole"] and not rated:
        console.print("Throughput is reported, not judged: the recipe claims none.", markup=False)


def _blind(guard: dict) -> str:
    """A guard that can't check, with what it lacks where it says so."""
    return printable(f"{guard['id']} ({guard['observed']})" if guard["observed"] else guard["id"])


def _number(value: object) -> str:
    if value is None:
        return "nothing"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"
