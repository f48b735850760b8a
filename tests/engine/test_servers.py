"""A server that stays, on the real engine: started, found, measured as a stranger's, drained and stopped."""

import json
from pathlib import Path

from recipes.run.fetch import fetch
from recipes.run.supervised import birth_of
from tests.disturbed import until_timed
from tests.ports import free_port
from tests.replay import LOADED, families, recorded


def test_a_served_recipe_is_measured_at_its_address_and_judges_no_claim(inv, tmp_path: Path):
    state = {"STATION_RECIPES_STATE": str(tmp_path / "state")}
    port = str(free_port())
    served = inv("serve", "--recipe", "micro/base", "--port", port, "--json", **state)
    assert served.returncode == 0, served.stderr
    record = json.loads(served.stdout)
    try:
        (seen,) = json.loads(inv("status", "--json", **state).stdout)
        assert (seen["state"], seen["in_flight"], seen["pid"]) == ("ready", 0, record["pid"])
        live = families(fetch(f"{record['url']}/metrics").text)
        told = families(recorded(LOADED)).items()
        assert {name: kind for name, kind in told if "spec_decode" not in name}.items() <= live.items()
        argv = ["bench", "--recipe", "micro/base", "--url", record["url"], "--out", str(tmp_path / "runs"), "--json"]
        answers = []

        def measure() -> dict:
            answers.append(inv(*argv))
            return json.loads(answers[-1].stdout)

        verdict = until_timed(measure)
        assert answers[-1].returncode == 5 and verdict["state"] == "NOT_COMPARABLE", answers[-1].stderr
        assert verdict["output_tok_s"]["whole"] > 0
        blind = {guard["id"] for guard in verdict["guards"] if guard["ok"] is None}
        assert blind == {"live_argv", "live_env"}
        manifest = json.loads((Path(verdict["run"]) / "manifest.json").read_text())
        assert manifest["model"]["files"] is None and manifest["engine"]["identity"] is None
    finally:
        stopped = inv("stop", "--port", port, "--json", **state)
    assert json.loads(stopped.stdout)["cut"] == 0
    assert birth_of(record["pid"]) != record["birth"], "gone, or a zombie that init has not collected yet"
    assert inv("status", "--json", **state).stdout.strip() == "[]"
