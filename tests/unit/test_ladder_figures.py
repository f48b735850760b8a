"""A ladder's figures against computations of somebody else, and when an effect or a decision is granted or refused."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from bench.evidence import Boot, Resolved, Settings, read_evidence
from bench.guards import run_guards
from bench.ladder.begun import as_begun, write_begun
from bench.ladder.combine import combine, incomparable, other_recipe
from bench.ladder.decide import decide
from bench.ladder.join import join_ladders, remake
from bench.ladder.journal import RUNS, read_boots
from bench.ladder.proof import Proof, effect, proofs
from bench.ladder.resume import as_measured, require_recipes, require_same_host, strays
from bench.ladder.rows import Ladder, read_measured, whole_ladder
from bench.ladder.sequence import rungs_here
from bench.ladder.setting import read_setting, write_setting
from bench.ladder.steps import drift, step
from bench.report.ladder import notes
from bench.verdict import judge
from images.engine import Engine
from images.errors import RunProblem, UsageProblem
from recipes.compose import rungs_of
from recipes.graphs import GraphFit
from recipes.load import Loaded
from recipes.schema import Claim
from tests.ladders import written_ladder
from tests.runs import claim, closed_loop, recipe, write_run

NO_GPU = {"gpus": [], "pci_gpus": [], "cpu": {"flags": []}, "slug": "cpu-x86-64"}
rates = st.lists(st.floats(50, 200), min_size=2, max_size=6)


@given(rates, rates)
def test_a_step_within_a_visit_is_scipy_s_welch_interval_of_the_logarithms(before, after):
    assume(np.std(before) > 1e-3 and np.std(after) > 1e-3)
    found = step({"1": before}, {"1": after}, None)
    welch = stats.ttest_ind(np.log(after), np.log(before), equal_var=False)
    low, high = welch.confidence_interval(0.95)
    assert found.ci95 == pytest.approx((np.expm1(low), np.expm1(high)), rel=1e-9, abs=1e-12)
    assert found.gain == pytest.approx(stats.gmean(after) / stats.gmean(before) - 1)
    assume(abs(welch.pvalue - 0.05) > 1e-9)
    assert found.below_noise is bool(welch.pvalue > 0.05)


@given(st.lists(st.tuples(st.floats(50, 200), st.floats(50, 200)), min_size=2, max_size=5))
def test_a_step_over_visits_is_scipy_s_paired_interval_of_the_logarithms(pairs):
    ratios = [np.log(new / old) for old, new in pairs]
    assume(np.std(ratios) > 1e-3)
    before, after = ({str(visit): [pair[at]] for visit, pair in enumerate(pairs)} for at in (0, 1))
    low, high = stats.ttest_1samp(ratios, 0).confidence_interval(0.95)
    assert step(before, after, None).ci95 == pytest.approx((np.expm1(low), np.expm1(high)), rel=1e-9, abs=1e-12)


@given(st.integers(2, 6), st.integers(2, 4), st.integers(0, 2**32 - 1))
def test_several_rungs_tell_the_scatter_over_visits_as_the_least_squares_fit_of_rungs_and_visits_does(
    rungs, visits, seed
):
    table = np.random.default_rng(seed).normal(0, 0.03, (rungs, visits)) + np.arange(rungs)[:, None]
    every = [{str(visit): [float(np.exp(log))] for visit, log in enumerate(row)} for row in table]
    found = step(every[0], every[-1], None, every)
    at = [(rung, visit) for rung in range(rungs) for visit in range(visits)]
    design = np.array(
        [[rung == each for each in range(rungs)] + [visit == each for each in range(1, visits)] for rung, visit in at],
        float,
    )
    fit, *_ = np.linalg.lstsq(design, table.ravel(), rcond=None)
    freedom = len(at) - design.shape[1]
    spread = np.linalg.inv(design.T @ design) * float(((design @ fit - table.ravel()) ** 2).sum()) / freedom
    error = (spread[0, 0] + spread[rungs - 1, rungs - 1] - 2 * spread[0, rungs - 1]) ** 0.5
    half, shift = stats.t.ppf(0.975, freedom) * error, fit[rungs - 1] - fit[0]
    assert found.ci95 == pytest.approx((np.expm1(shift - half), np.expm1(shift + half)), rel=1e-6)
    assert found.scatter_of == rungs and sorted(found.by_visit) == sorted(map(str, range(visits)))


def test_the_interval_over_two_cards_holds_the_true_step_nineteen_times_in_twenty():
    """A rung's ratio differs from card to card, by 3%, and so does a card from another, by 10%."""
    rng, held, trials = np.random.default_rng(5), 0, 3000
    for _ in range(trials):
        cards = rng.normal(0, 0.1, 2)
        logs = np.log([100, 110, 150, 190])[:, None] + cards + rng.normal(0, 0.03, (4, 2))
        every = [{"1": [float(np.exp(one))], "2": [float(np.exp(two))]} for one, two in logs]
        low, high = step(every[0], every[-1], None, every).ci95
        held += low <= 0.9 <= high
    assert 0.94 < held / trials < 0.96


@pytest.mark.parametrize("boots", [(1, 1, 5, 5, 5, 5), (1, 3, 3, 3, 3, 3), (3, 3, 1, 1, 1, 1)])
def test_rungs_of_more_boots_than_the_step_s_do_not_make_its_interval_narrow(boots):
    rng, held, trials = np.random.default_rng(6), 0, 1500
    for _ in range(trials):
        cards = rng.normal(0, 0.1, 2)
        every = [
            {str(n): list(np.exp(rng.normal(card, 0.03, count))) for n, card in enumerate(cards)} for count in boots
        ]
        low, high = step(every[0], every[1], None, every).ci95
        held += low <= 0 <= high
    assert held / trials > 0.93


def test_a_step_of_single_boots_has_its_interval_from_the_rungs_that_several_visits_saw():
    seen_twice = [{"1": [100.0], "2": [105.0]}, {"1": [200.0], "2": [198.0]}]
    before, after = {"1": [120.0]}, {"1": [150.0]}
    found = step(before, after, None, [*seen_twice, before, after])
    rest = (np.log(105 / 100) - np.log(198 / 200)) / 2  # of each of the four cells, up to its sign
    half = stats.t.ppf(0.975, 1) * (2 * rest**2) ** 0.5
    assert found.ci95 == pytest.approx((0.8**-1 * np.exp(-half) - 1, 0.8**-1 * np.exp(half) - 1))
    assert found.scatter_of == 2 and found.by_visit is None
    assert step(before, after, None, [before, after]).ci95 is None, "nothing tells how much it scatters"


def test_what_stands_beside_the_ladder_is_no_end_of_it(tmp_path):
    folder = written_ladder(tmp_path / "ladder", {"base": [0.01], "mtp1": [0.008], "random-text": [0.002]})
    whole = remake(folder)["whole"]
    assert (whole["from"], whole["to"]) == ("base", "mtp1")
    alone = remake(written_ladder(tmp_path / "beside", {"base": [0.01], "random-text": [0.002]}))["whole"]
    assert (alone["from"], alone["to"]) == ("base", "random-text")


@given(st.lists(st.tuples(st.floats(0.9, 1.1), st.floats(0.9, 1.1)), min_size=2, max_size=6))
def test_drift_is_scipy_s_paired_interval_over_rungs(pairs):
    assume(np.std([new - old for old, new in pairs]) > 1e-4)
    found = drift([{1: old, 3: new} for old, new in pairs])
    old, new = zip(*pairs, strict=True)
    low, high = stats.ttest_rel(new, old).confidence_interval(0.95)
    assert found["ci95"] == pytest.approx((low, high), rel=1e-9, abs=1e-12)


def test_single_boots_put_together_are_judged_as_one_run_of_several_boots(tmp_path):
    steps = [0.0100, 0.0103, 0.0098]
    published = claim("output_tok_s", 780.0, 0.1)
    several = recipe(benchmark={"boots": 3}, claims=[published])
    windows = [closed_loop(8, 80, 32, step_s) for step_s in steps]
    whole = read_evidence(write_run(tmp_path / "whole", several, [[window] for window in windows]))
    single = recipe(benchmark={"boots": 1}, claims=[published])
    parts = [read_evidence(write_run(tmp_path / str(at), single, [[each]])) for at, each in enumerate(windows)]
    mine, theirs = judge(combine(parts)), judge(whole)
    assert mine == theirs
    assert mine["ci95"] is not None and mine["boots"] == 3


def test_a_ladder_s_rungs_have_the_figures_that_one_run_with_their_boots_has(tmp_path):
    folder = written_ladder(tmp_path / "ladder", {"base": [0.01, 0.0102, 0.0099]})
    (row,) = remake(folder)["rungs"]
    parts = [read_evidence(folder / RUNS / boot.run) for boot in read_boots(folder)]
    found = judge(combine(parts))
    assert row["whole_tok_s"] == found["output_tok_s"]["whole"]
    assert row["ci95"] == found["ci95_steady" if row["estimate"] == "steady" else "ci95"]
    assert row["output_tok_s"] == pytest.approx(found["output_tok_s"][row["estimate"]])
    assert row["latency_ms"]["tpot"]["p95"] == found["latency_ms"]["tpot"]["p95"]


def test_a_port_or_a_runtime_is_no_other_recipe_and_anything_measured_is():
    mine = recipe()
    assert other_recipe(mine, mine.model_copy(update={"runtime": mine.runtime.model_copy(update={"port": 9000})})) == []
    assert other_recipe(mine, recipe(benchmark={"seed": 2})) == ["benchmark.seed"]
    assert other_recipe(mine, recipe(claims=[claim("output_tok_s", 780.0, 0.1)])) == ["claims"]
    mine = recipe(claims=[claim("output_tok_s", 780.0, 0.1)])
    other_words = [each.model_copy(update={"source": "the same, told otherwise"}) for each in mine.claims]
    assert other_words != mine.claims and other_recipe(mine, mine.model_copy(update={"claims": other_words})) == []


def test_what_a_rung_is_to_change_has_to_be_what_the_rung_before_it_was_given(tmp_path):
    folder = written_ladder(tmp_path / "ladder", {"base": [0.01], "mtp3": [0.008]})
    runs = read_measured(folder, read_boots(folder))
    base, rung = runs["base"].measured[0].evidence, runs["mtp3"].measured[0].evidence

    def given_to(recipe_id: str, *flags: str) -> Settings:
        return Settings(id=recipe_id, argv=["m", "--port", flags[0], *flags[1:]], env={})

    base = replace(
        base, resolved=Resolved(changes=[], before=None, after=given_to("micro/base", "1", "--max-num-seqs"))
    )
    for flag, why in (("--max-num-seqs", None), ("--enforce-eager", "the recipe of micro/base changed between them")):
        record = Resolved(changes=["x"], before=given_to("micro/base", "2", flag), after=given_to("micro/mtp3", "2"))
        assert incomparable(base, replace(rung, resolved=record)) == why


def test_the_published_ratio_is_of_the_two_rungs_beside_which_it_stands(tmp_path):
    folder = written_ladder(tmp_path / "ladder", {"base": [0.01], "mtp3": [0.009], "mtp1": [0.008]})
    runs = list(read_measured(folder, read_boots(folder)).values())
    assert whole_ladder(Ladder(runs), runs, [100.0, 150.0, 300.0])["published"] == 3
    assert whole_ladder(Ladder(runs), runs, [100.0, 150.0, None])["published"] is None, "150/100 is of another pair"
    assert whole_ladder(Ladder(runs), runs, [None, 150.0, 300.0])["published"] is None


def test_a_change_is_kept_only_where_every_guard_metric_was_measured_and_is_told_with_its_figures(
    tmp_path, monkeypatch
):
    steps = {"base": [0.01, 0.0101, 0.0099], "mtp3": [0.008, 0.0081, 0.0079]}
    folder = written_ladder(tmp_path / "ladder", steps, keep="output_tok_s")
    runs = read_measured(folder, read_boots(folder))
    proved = replace(
        runs["mtp3"], measured=[replace(each, proofs=[Proof("x", True, "")]) for each in runs["mtp3"].measured]
    )
    setting = replace(read_setting(folder), guards=["tpot_p95_ms"])
    ladder = Ladder([runs["base"], proved], deciding=True)
    found = decide(setting, runs["base"], proved, ladder)
    assert found.kept, found.reasons
    assert any(
        reason.startswith("guard metric no worse, or by less than 5%: tpot_p95_ms -") for reason in found.reasons
    )
    found = decide(replace(setting, guards=["energy_j_per_token"]), runs["base"], proved, ladder)
    assert not found.kept
    assert "guard metric not known to be no worse: energy_j_per_token: energy_j_per_token was not measured" in str(
        found.reasons
    )
    found = decide(replace(setting, keep="energy_j_per_token", guards=[]), runs["base"], proved, ladder)
    assert not found.kept and "one visit" not in str(found.reasons)
    alone = replace(proved, measured=proved.measured[:1])
    monkeypatch.setattr("bench.ladder.rows.floors_of", lambda _: {"output_tok_s": 0.01})
    found = decide(setting, replace(runs["base"], measured=runs["base"].measured[:1]), alone, ladder)
    assert not found.kept, "with one boot and no floor, nobody knows of a guard metric whether it is worse"


FLOORS = {
    "no floor": {},
    "the kept rung's is the wider": {"base": 0.05, "mtp3": 0.001, "mtp1": 0.001},
}


@pytest.mark.parametrize("floors", FLOORS.values(), ids=FLOORS)
@pytest.mark.parametrize("visits", [1, 2])
def test_a_decision_is_by_the_step_that_its_table_shows_whatever_was_measured_since(
    tmp_path, monkeypatch, floors, visits
):
    steps = {
        "base": [0.0100, 0.0101],
        "mtp3": [0.0097, 0.0098],
        "mtp1": [0.0099, 0.0097],
        "fp16-mamba-state": [0.0085, 0.0091],
    }
    known = {rung: {"output_tok_s": floor} for rung, floor in floors.items()}
    monkeypatch.setattr("bench.ladder.rows.floors_of", lambda runs: known.get(runs.rung, {}))
    monkeypatch.setattr("bench.ladder.rows.visit_of", lambda evidence: evidence.manifest.visit)
    changed = {f"{name}-{boot}": {"visit": str(min(boot, visits))} for name in steps for boot in (1, 2)}
    tables = []
    for count in (3, 4):
        rungs = dict(list(steps.items())[:count])
        tables.append(remake(written_ladder(tmp_path / str(count), rungs, "output_tok_s", changed)))
    early, late = tables
    assert len(late["decisions"]) == 3 and late["decisions"][:2] == early["decisions"]
    gains = ("step_gain", "step_ci95", "step_scatter_of", "below_noise")
    assert [[row[key] for key in gains] for row in late["rungs"][:3]] == [
        [row[key] for key in gains] for row in early["rungs"]
    ]
    rows = {row["rung"]: row for row in late["rungs"]}
    for decision in late["decisions"]:
        row, said = rows[decision["rung"]], decision["reasons"][0]
        low, high = row["step_ci95"]
        assert f"{row['step_gain']:+.1%}, 95% {low:+.1%} to {high:+.1%}" in said
        assert said.endswith("below noise") is row["below_noise"], said
    if floors.get("base"):
        assert rows["mtp3"]["below_noise"], "the wider of the two floors counts"


def test_where_the_first_rung_gives_no_figure_changes_are_tried_on_the_first_that_does(tmp_path):
    died = {"base-1": {"failure": {"stage": "boot 1", "cause": "it died"}}}
    folder = written_ladder(tmp_path / "a", {"base": [0.01], "mtp3": [0.009], "mtp1": [0.008]}, "output_tok_s", died)
    table = remake(folder)
    (decision,) = table["decisions"]
    assert (decision["rung"], decision["against"]) == ("mtp1", "mtp3")
    assert table["rungs"][0].get("output_tok_s") is None


def changed_library(rungs: list[Loaded]) -> list[Loaded]:
    """The library later: another load, and other figures published."""
    load = rungs[0].recipe.benchmark.model_copy(update={"input_len": 999})
    claims = [Claim.model_validate(claim("output_tok_s", 77, 1))]
    return [
        replace(each, recipe=each.recipe.model_copy(update={"benchmark": load, "claims": claims})) for each in rungs
    ]


@pytest.mark.parametrize("with_recipes", [True, False], ids=["recipes.json", "a ladder of before"])
@pytest.mark.parametrize("later", ["changed", "gone"])
def test_a_ladder_s_table_does_not_change_with_the_library(tmp_path, monkeypatch, with_recipes, later):
    folder = written_ladder(tmp_path / "a", {"base": [0.01, 0.0101], "mtp3": [0.009, 0.0091]})
    if with_recipes:
        rungs = rungs_here(read_setting(folder), rungs_of("micro", "base,mtp3"), NO_GPU)
        claims = [Claim.model_validate(claim("output_tok_s", 500, 1))]
        rungs = [replace(rung, own=rung.own.model_copy(update={"claims": claims})) for rung in rungs]
        write_begun(folder, rungs)
    before = remake(folder)
    assert before["rungs"][0]["published_tok_s"] == (500 if with_recipes else None)

    def now(family: str, chosen: str, own: object = None) -> list[Loaded]:
        if later == "gone":
            raise UsageProblem("unknown recipe")
        return changed_library(rungs_of(family, chosen, own))

    monkeypatch.setattr("bench.ladder.begun.rungs_of", now)
    assert remake(folder) == before
    read = as_begun(
        folder,
        read_setting(folder),
        rungs_here(read_setting(folder), changed_library(rungs_of("micro", "base")), NO_GPU),
    )
    assert read[0].own.benchmark.input_len == (256 if with_recipes else 999), "going on with it publishes the same"


def test_a_rung_that_is_nowhere_any_more_is_left_out_of_a_table_and_told(tmp_path, monkeypatch, capsys):
    folder = written_ladder(tmp_path / "a", {"base": [0.01], "mtp3": [0.009]})
    write_setting(folder, replace(read_setting(folder), rungs=["base", "retired", "mtp3"]))
    assert [row["rung"] for row in remake(folder)["rungs"]] == ["base", "mtp3"]
    assert "never measured, and left out: retired" in capsys.readouterr().err


def test_ladders_put_together_keep_what_was_published_when_they_were_begun(tmp_path):
    folders = [
        written_ladder(tmp_path / tag, {"base": [step_s]}, tag=tag) for tag, step_s in (("a", 0.01), ("b", 0.011))
    ]
    (rung,) = rungs_here(read_setting(folders[0]), changed_library(rungs_of("micro", "base")), NO_GPU)
    write_begun(folders[1], [rung])
    _, table = join_ladders(folders, tmp_path / "joined")
    assert table["rungs"][0]["published_tok_s"] == 77 and len(table["rungs"][0]["boots"]) == 2


def test_boots_of_another_recipe_than_their_rung_has_now_are_found_and_told(tmp_path):
    folder = written_ladder(tmp_path / "a", {"base": [0.01, 0.0101], "mtp3": [0.009]})
    setting, boots = read_setting(folder), read_boots(folder)
    rungs = {rung.name: rung for rung in rungs_here(setting, rungs_of("micro", "base,mtp3"), NO_GPU)}
    rungs = {rung.name: rung for rung in as_measured(folder, list(rungs.values()), boots)}
    assert strays(folder, rungs, boots) == []
    base = rungs["base"].loaded
    flags = {**base.recipe.engine.flags, "max-num-seqs": 99}
    engine = base.recipe.engine.model_copy(update={"flags": flags})
    edited = replace(base, recipe=base.recipe.model_copy(update={"engine": engine}))
    rungs["base"] = replace(rungs["base"], loaded=edited)
    assert [(boot.run, keys) for boot, keys in strays(folder, rungs, boots)] == [
        ("base-1", ["engine.flags.max-num-seqs"]),
        ("base-2", ["engine.flags.max-num-seqs"]),
    ]
    with pytest.raises(RunProblem, match="Boots of two recipes are never mixed"):
        require_recipes(folder, rungs, boots)


def test_a_ladder_does_not_go_on_with_another_engine_or_on_another_machine(tmp_path):
    folder = written_ladder(tmp_path / "a", {"base": [0.01]})
    boots = read_boots(folder)

    def going_on(slug: str, identity: str) -> None:
        plan = SimpleNamespace(engine=Engine("cpu", "0.32.0", Path(sys.executable), identity))
        require_same_host(folder, boots, {"slug": slug}, plan)

    going_on("cpu-x86-64", "0" * 16)
    with pytest.raises(RunProblem, match="begun with another engine: 0000000000000000"):
        going_on("cpu-x86-64", "1" * 16)
    with pytest.raises(RunProblem, match="begun with another machine: cpu-x86-64"):
        going_on("h200", "0" * 16)


def proved_by(evidence, changes, before, after) -> dict[str, bool | None]:
    record = Resolved(changes=changes, before=before, after=after)
    evidence = replace(evidence, resolved=record)
    return {each.subject: each.ok for each in proofs(evidence, run_guards(evidence))}


@pytest.fixture
def drafting(tmp_path):
    folder = written_ladder(tmp_path / "ladder", {"mtp3": [0.008]})
    return read_evidence(folder / RUNS / "mtp3-1")


BEFORE = Settings(id="micro/base", argv=["m"], env={}, resolved={"num_speculative_tokens": None})
AFTER = Settings(id="micro/mtp3", argv=["m", "--speculative-config"], env={}, resolved={"num_speculative_tokens": 3})


def test_drafts_that_nobody_could_count_prove_nothing_either_way(drafting):
    key = ["engine.flags.speculative-config"]
    unread = replace(drafting, windows=[replace(window, counted=None) for window in drafting.windows])
    assert proved_by(unread, key, BEFORE, AFTER)["speculative-config"] is None
    mute = BEFORE.model_copy(update={"resolved": None, "why": "it said nothing"})
    assert proved_by(drafting, key, mute, AFTER)["speculative-config"] is None, "what it was before isn't known"


def test_a_variable_that_the_engine_does_not_know_or_that_nothing_reads_proves_nothing(drafting):
    def answer(name: str, log: str, changes: tuple[str, ...] = ()):
        recipe_ = drafting.recipe
        if changes:
            delta = recipe_.delta.model_copy(update={"changes": list(changes)})
            recipe_ = recipe_.model_copy(
                update={"delta": delta, "proof": recipe_.proof.model_copy(update={"must_log": ["read it"]})}
            )
        live = drafting.boots[0].env.model_copy(update={"live": {name: "1"}, "rendered": {name: "1"}})
        subject = replace(drafting, recipe=recipe_, boots=[Boot(1, drafting.boots[0].argv, live, log)])
        after = AFTER.model_copy(update={"env": {name: "1"}})
        return proved_by(subject, [f"engine.env.{name}"], BEFORE, after)[f"engine.env.{name}"]

    assert answer("OMP_NUM_THREADS", "") is True
    assert answer("VLLM_NO_SUCH", "WARNING Unknown vLLM environment variable detected: VLLM_NO_SUCH") is False
    assert answer("SPEED", "") is None
    assert answer("SPEED", "read it", ("engine.env.SPEED", "proof.must_log")) is True
    assert answer("SPEED", "", ("engine.env.SPEED", "proof.must_log")) is None


def test_an_interpreter_that_stands_in_for_an_image_proves_no_change_of_image(drafting):
    assert proved_by(drafting, ["engine.image"], BEFORE, AFTER)["engine.image"] is None


def test_a_flag_of_which_the_configuration_does_not_tell_is_proved_by_a_log_line_of_its_rung(drafting):
    key = ["engine.flags.swap-space"]

    def declaring(*keys: str):
        delta = drafting.recipe.delta.model_copy(update={"changes": list(keys)})
        return drafting.recipe.model_copy(update={"delta": delta})

    assert proved_by(replace(drafting, recipe=declaring(*key)), key, BEFORE, AFTER)["swap-space"] is None
    named = declaring(*key, "proof.must_log")
    assert proved_by(replace(drafting, recipe=named), key, BEFORE, AFTER)["swap-space"] is True
    same = AFTER.model_copy(update={"argv": BEFORE.argv})
    assert proved_by(replace(drafting, recipe=named), key, BEFORE, same)["swap-space"] is False


def test_api_servers_are_counted_in_the_log_since_the_configuration_does_not_tell_of_them(drafting):
    engine = drafting.recipe.engine
    flags = {**engine.flags, "api-server-count": 2}
    subject = replace(
        drafting, recipe=drafting.recipe.model_copy(update={"engine": engine.model_copy(update={"flags": flags})})
    )

    def answer(log: str | None):
        boots = [Boot(1, drafting.boots[0].argv, drafting.boots[0].env, log)]
        found = proved_by(replace(subject, boots=boots), ["engine.flags.api-server-count"], BEFORE, AFTER)
        return found["api-server-count"]

    assert answer("(ApiServer_0 pid=7) INFO up\n(ApiServer_1 pid=8) INFO up\n(ApiServer_0 pid=7) INFO more") is True
    assert answer("(APIServer pid=7) INFO of them\n(ApiServer_0 pid=8) INFO up\n(ApiServer_1 pid=9) INFO up") is True
    assert answer("(APIServer pid=7) INFO the only one") is False
    assert answer(None) is None
    assert answer("") is None, "a log without any is no log of one"


@given(st.integers(1, 700), st.integers(0, 8))
def test_the_graphs_that_are_advised_hold_the_step_by_vllm_s_own_rule(streams, drafts):
    fit = GraphFit(1, streams, 1 + drafts)
    asked, query = fit.room, 1 + drafts
    grid = [1, 2, 4, *range(8, min(asked + 1, 256), 8), *range(256, asked + 1, 16)]
    truncated = max(size for size in grid if size <= asked)
    rounded = {-(-size // query) * query for size in grid}
    assert truncated >= fit.step, "the second model runner"
    assert max(size for size in rounded if size <= truncated) >= fit.step, "the first one, with drafts"


def test_a_step_that_no_cuda_graph_holds_is_told_with_the_way_out(drafting):
    """Three drafts and the next token of each stream: 64 tokens of 16 streams."""

    def fit(log: str | None):
        boots = [Boot(1, drafting.boots[0].argv, drafting.boots[0].env, log)]
        return judge(replace(drafting, boots=boots))["setting"]["cuda_graphs"]

    streams = drafting.recipe.benchmark.concurrency
    assert fit(f"compilation_config={{'max_cudagraph_capture_size': {4 * streams}}}")["said"] is None
    assert f"--max-cudagraph-capture-size {4 * streams} makes" in fit("'max_cudagraph_capture_size': 32,")["said"]
    for log in (None, "a log", "'max_cudagraph_capture_size': None", "'max_cudagraph_capture_size': 0"):
        assert fit(log) is None


def test_no_proof_at_all_is_no_effect():
    assert effect([]) is None


def test_a_table_says_what_its_figures_may_not_be_taken_for(tmp_path):
    folder = written_ladder(tmp_path / "ladder", {"base": [0.05, 0.05], "mtp1": [0.04, 0.04]})
    plain = remake(folder)
    assert not [line for line in notes(plain) if "another load" in line or "too narrow" in line]
    write_setting(folder, replace(read_setting(folder), begun_with=1))
    later = remake(folder)
    assert any(line.startswith("Begun with 1 boot(s) a rung") for line in notes(later))
    shape = {**later, "shape": "64/64/8/40", "rungs": [{**later["rungs"][0], "published_tok_s": 6058}]}
    assert any(line.startswith("Published for 256/128/16, which is another load") for line in notes(shape))
