"""`vcsd verify`: each check runs and is judged by its counts.

partner of: eval/verify/verify.py
"""

from __future__ import annotations

from typing import get_args

import pytest

from vcsd.options import OptionError
from vcsd_eval.verify import verify as checks
from vcsd_eval.verify.verify import CHECKS, Attempts, Check, CheckName, InjectedBug, verify

FEW = {"simulation": 4, "power-loss": 20, "exceptions": 60, "bit-flips": 40, "commands": 300, "pdus": 200}


def test_every_name_has_a_check():
    assert set(get_args(CheckName)) == set(CHECKS)


@pytest.mark.parametrize("name", FEW)
def test_check_finds_nothing_in_few_attempts(name):
    outcome = verify(name, Attempts(count=FEW[name], seed=3))
    assert not outcome.failed
    assert {outcome.result[zero] for zero in CHECKS[name].zeros} == {0}
    assert max(value for value in outcome.result.values() if isinstance(value, int)) >= FEW[name]


@pytest.mark.parametrize(("zeros", "fails"), [((), False), (("wrong",), True), (("lost", "wrong"), True)])
def test_a_count_that_must_be_zero_fails_the_check(monkeypatch, zeros, fails):
    result = {
        "lost": 0,
        "wrong": 2,
        "rows": [{"policy": "ours", "wrong": 2}],
        "found": ["a token"],
        "by_kind": {"a": 1},
    }
    monkeypatch.setitem(CHECKS, "kills", Check("", 5, lambda count, *_: result | {"tries": count}, zeros))
    outcome = verify("kills", Attempts())
    assert (outcome.failed, outcome.result["tries"], outcome.notes) == (fails, 5, ["a token"])
    assert [shown.title for shown in outcome.shown] == ["kills", "rows", "by_kind"]


@pytest.mark.parametrize("wrong", [0, 1])
def test_an_injected_bug_must_be_found(monkeypatch, wrong):
    def simulation(count, attempts, tick):
        assert attempts.inject_bug is InjectedBug.LOCK
        return {"wrong": wrong}

    monkeypatch.setitem(CHECKS, "simulation", Check("", 5, simulation, ("wrong",), ("inject_bug",)))
    assert verify("simulation", Attempts(inject_bug=InjectedBug.LOCK)).failed == (not wrong)


@pytest.mark.parametrize(
    ("name", "attempts"),
    [
        ("kills", Attempts(workers=3)),
        ("pdus", Attempts(medium="direct")),
        ("power-loss", Attempts(inject_bug=InjectedBug.LOCK)),
    ],
)
def test_option_that_a_check_has_not_is_refused(name, attempts):
    with pytest.raises(OptionError, match=f"has no effect on {name}"):
        verify(name, attempts)


def test_number_of_attempts_ends_the_simulation_not_the_time(monkeypatch):
    """Without --count it starts no seed after eight minutes."""
    calls = []
    monkeypatch.setattr(
        "vcsd_eval.verify.simulation.simulate.bench_simulate",
        lambda seeds, minutes, *_: calls.append((seeds, minutes)) or {"lost": 0, "wrong": 0, "hangs": 0},
    )
    verify("simulation", Attempts(seed=7, count=2))
    verify("simulation", Attempts())
    assert calls == [(range(7, 9), float("inf")), (range(1000), checks.SIMULATED_MINUTES)]
