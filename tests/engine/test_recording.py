"""The recording that the dashboard and the alerts are tried with names what the real engine counts today."""

import json

from bench.counters import parse_counters
from tests.engine.conftest import Reproduced
from tests.replay import LOADED


def test_every_recorded_counter_is_one_of_the_live_engine(reproduced: Reproduced):
    live = json.loads((reproduced.run / "boots" / "1" / "w1" / "counters.json").read_text())["after"]
    recorded = parse_counters(LOADED.read_text())
    assert len(recorded) > 20 and recorded.keys() <= live.keys()
