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


def made_up(monkeypatch, name, result, *more):
    """Replace a check by one with a given result."""
    calls = []
    monkeypatch.setattr(checks, "made_up", lambda count, **given: calls.append((count, given)) or result, raising=False)
    monkeypatch.setitem(CHECKS, name, Check("", "verify:made_up", 5, *more))
    return calls


@pytest.mark.parametrize(("zeros", "fails"), [((), False), (("wrong",), True), (("lost", "wrong"), True)])
def test_a_count_that_must_be_zero_fails_the_check(monkeypatch, zeros, fails):
    result = {
        "lost": 0,
        "wrong": 2,
        "rows": [{"policy": "ours", "wrong": 2}],
        "found": ["a token"],
        "by_kind": {"a": 1},
    }
    calls = made_up(monkeypatch, "kills", result, zeros)
    outcome = verify("kills", Attempts(seed=3))
    assert (outcome.failed, outcome.result, outcome.notes) == (fails, result, ["a token"])
    assert [shown.title for shown in outcome.shown] == ["kills", "rows", "by_kind"]
    ((count, given),) = calls
    assert (count, given["seed"], set(given)) == (5, 3, {"seed", "tick"})


@pytest.mark.parametrize("wrong", [0, 1])
def test_an_injected_bug_must_be_found(monkeypatch, wrong):
    calls = made_up(monkeypatch, "simulation", {"wrong": wrong}, ("wrong",), ("inject_bug",))
    assert verify("simulation", Attempts(count=7, inject_bug=InjectedBug.LOCK)).failed == (not wrong)
    assert (calls[0][0], calls[0][1]["inject_bug"]) == (7, "lock")


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
