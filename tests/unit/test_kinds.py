"""`./inv test` says that all is well only where every phase that ran ended well."""

from types import SimpleNamespace

import pytest

from tests import kinds


@pytest.mark.parametrize(
    ("codes", "wanted"),
    [
        ((0, 0, 0), 0),
        ((0, 1, 0), 1),
        ((0, 0, -15), 2),
        ((-11, 1, 0), 2),
        ((0, 3, 0), 2),
        ((kinds.NOTHING, 0, kinds.NOTHING), 0),
        ((kinds.NOTHING,) * 3, 2),
    ],
)
def test_the_worst_phase_decides_and_one_that_was_killed_is_not_well(monkeypatch, capsys, codes, wanted):
    left, asked = iter(codes), []

    def run(argv, **_):
        asked.append(argv)
        return SimpleNamespace(returncode=next(left))

    monkeypatch.setattr(kinds.subprocess, "run", run)
    assert kinds.run_tests(list(kinds.KINDS), ["unit"], "") == wanted
    assert [argv[-1] for argv in asked] == ["tests/unit", "tests/engine", "tests/host"]
    assert all("--require=unit" in argv for argv in asked)
    assert "✔" in capsys.readouterr().out or 0 not in codes


def test_kinds_that_were_not_chosen_are_named_and_not_run(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(kinds.subprocess, "run", lambda argv, **_: asked.append(argv) or SimpleNamespace(returncode=0))
    assert kinds.run_tests(["docker"], [], "") == 0
    assert [argv[-1] for argv in asked] == ["tests/docker"] and "-n" not in asked[0]
    assert "left out: tests of unit, engine, browser, gpu, host" in capsys.readouterr().out
