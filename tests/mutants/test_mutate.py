"""A mutation test catches the mutants that its stages detect, and none by a stage that fails anyway; twelve mutants of
the list.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from ftl.kv.owners import Owners
from tests.mutants import mutate
from tests.mutants.mutate import (
    CAUGHT,
    HANGS,
    IMPOSSIBLE,
    SURVIVED,
    UNSOUND,
    Stage,
    attempt,
    judge,
    stages,
    summary,
    verdicts,
)
from tests.mutants.plant import Mutant, load

SEEN = Mutant("ftl.kv.owners:Owners.share", "self.sharers[owner].add(handle)", "pass")
UNSEEN = Mutant("ftl.kv.owners:Owners.new", "self.next = owner + 1", "pass")
GONE = Mutant("ftl.kv.owners:Owners.new", "self.last = owner + 1", "pass")


class Shares(Stage):
    """Two sequences share an owner."""

    def run(self, mutant: Mutant | None = None) -> str:
        if self.name == "endless":
            time.sleep(60)
        owners = Owners()
        owner = owners.new(1, 0)
        owners.share([owner], 2)
        return "" if self.name != "bad" and owners.sequences([owner]) == {1, 2} else "shares"


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for verdicts and logs."""
    monkeypatch.setattr(mutate, "MEMORY", tmp_path / "mutants.json")
    return tmp_path


@pytest.mark.parametrize(("mutant", "outcome"), [(SEEN, CAUGHT), (UNSEEN, SURVIVED), (None, SURVIVED)])
def test_stage_reports_whether_it_detects_mutant(logs: Path, mutant: Mutant | None, outcome: str) -> None:
    assert attempt(mutant, Shares("shares"), 30) == (outcome, "shares" if outcome == CAUGHT else "")
    assert Owners().next == 0 and not Shares("shares").run()  # of this process nothing has changed


@pytest.mark.parametrize("limit_s", [0.0, 0.2])
def test_endless_stage_counts_as_hang(logs: Path, limit_s: float) -> None:
    """Also if its process has not begun when the time is over."""
    assert attempt(None, Shares("endless"), limit_s) == (HANGS, "")


def test_unplantable_mutant_is_told(logs: Path) -> None:
    outcome, why = attempt(GONE, Shares("shares"), 30)
    assert outcome == IMPOSSIBLE and "0 modules have such code" in why


@pytest.mark.parametrize(("name", "verdict"), [("shares", CAUGHT), ("bad", UNSOUND)])
def test_a_check_that_fails_without_the_mutant_catches_nothing(
    logs: Path, name: str, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutate, "stages", lambda mutant: [Shares(name)])
    assert judge(SEEN)["verdict"] == verdict


def test_first_failing_test_is_named(logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "test_it.py"
    file.write_text("def test_right(): pass\ndef test_wrong(): assert False\ndef test_never(): assert False\n")
    outcome, what = attempt(None, Stage("tests", (str(file),)), 60)
    assert outcome == CAUGHT and what.endswith("test_it.py::test_wrong")


def test_stages_are_tests_of_partner_modules() -> None:
    names = [stage.name for stage in stages(SEEN)]
    assert names == ["tests", "types", "lint", "crash", "simulate", "slow tests", "tests with models", "all tests"]
    assert "tests/ftl/kv/test_owners.py" in stages(SEEN)[0].tests
    assert [
        stage.name for stage in stages(Mutant("kv_cache.block_table:BlockTable._release_copy", "still", "False"))
    ] == [
        "tests",
        "types",
        "lint",
        "slow tests",
        "tests with models",
        "all tests",
    ]


def test_last_are_other_tests_that_reach_the_function() -> None:
    own, *_, last = stages(SEEN)
    files = {test.partition("::")[0] for test in last.tests}
    assert files and not files & set(own.tests)
    assert all((mutate.ROOT / file).exists() for file in files)


def test_linter_sees_exceptions_that_a_mutant_hides() -> None:
    at = "csd_link.nvmeof.sequences:decode_frame"
    assert Stage("lint").run(Mutant(at, "(WireError, struct.error)", "Exception"))
    assert not Stage("lint").run(Mutant(at, "(WireError, struct.error)", "(WireError, struct.error, KeyError)"))
    assert not Stage("lint").run()


@pytest.mark.slow
def test_type_checker_sees_the_mutant(logs: Path) -> None:
    swapped = Mutant("ftl.kv.owners:Owners.new", "self.next = owner + 1", "self.next = str(owner)")
    assert "Incompatible types in assignment" in Stage("types").run(swapped)
    assert Stage("types").run(UNSEEN) == ""


def test_equivalent_mutants_are_not_counted() -> None:
    mutants = [SEEN, UNSEEN, Mutant("a:b", "c", "d", equivalent="for a reason")]
    result = {SEEN: {"verdict": CAUGHT, "by": "tests"}}
    result |= {mutant: {"verdict": SURVIVED, "by": ""} for mutant in mutants[1:]}
    counts = summary(mutants, result)
    assert (counts["mutants"], counts["caught"], counts["survived"], counts["equivalent"]) == (2, 1, 1, 1)
    assert (counts["survived_percent"], counts["caught_by"]) == (50.0, {"tests": 1})


@pytest.mark.long
def test_twelve_mutants_are_caught(logs: Path) -> None:
    quick = [mutant for mutant in load() if mutant.quick]
    assert len(quick) == 12
    assert [str(mutant) for mutant, result in verdicts(quick, 1) if result["verdict"] != CAUGHT] == []


def test_results_match_list_and_few_mutants_survive() -> None:
    """Mutants that were listed after the last full run have no verdict yet: at most one in twenty."""
    results = json.loads(mutate.RESULTS.read_text())
    judged, listed = {row["mutant"]: row for row in results["rows"]}, {str(mutant) for mutant in load()}
    assert len(listed) >= 150 and len(listed - judged.keys()) <= len(listed) // 20
    counted = [row for row in judged.values() if not row["equivalent"]]
    survived = sum(row["verdict"] == SURVIVED for row in counted)
    assert (len(counted), survived) == (results["mutants"], results["survived"])
    assert 100 * survived <= mutate.MOST_PERCENT * len(counted)
