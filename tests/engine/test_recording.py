"""The recording that the dashboard and the alerts are tried with names what the real engine counts today."""

import json

from bench.counters import parse_counters
from tests.engine.conftest import Reproduced
from tests.replay import LOADED, recorded


def test_every_recorded_counter_is_one_of_the_live_engine(reproduced: Reproduced):
    live = json.loads((reproduced.run / "boots" / "1" / "w1" / "counters.json").read_text())["after"]
    told = parse_counters(recorded(LOADED))
    assert len(told) > 20 and told.keys() <= live.keys()
