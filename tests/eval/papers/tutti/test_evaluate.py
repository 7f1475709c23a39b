"""Tutti's claims: every printed value is present with its kind, and predicted values are near the printed ones.

partner of: eval/papers/tutti/evaluate.py, eval/papers/tutti/constants.py
"""

import re

import pytest

from vcsd_eval.papers.claims import ClaimKind
from vcsd_eval.papers.options import MachineOptions, Simulated
from vcsd_eval.papers.paper import judge
from vcsd_eval.papers.tutti.evaluate import PAPER, REVIEW


@pytest.fixture(scope="module")
def result():
    return judge(PAPER, PAPER.evaluate(MachineOptions(), Simulated(), False))


@pytest.fixture(scope="module")
def rows(result):
    return {row["id"]: row for row in result["rows"]}


def test_all_printed_values_have_rows(rows):
    numbers = {int(re.sub(r"\D", "", name)) for name in rows if name.startswith("t")}
    assert numbers == set(range(1, 24))
    assert all(claim.page.endswith((REVIEW, "; notes")) for claim in PAPER.claims)


def test_predicted_values_are_within_limits(result):
    assert result["median_error_percent"] < 8 and result["worst_error_percent"] < 20
    assert result["median_error_percent_by_review"] < 8
    predicted = sum(row["kind"] == ClaimKind.PREDICTED for row in result["rows"])
    assert result["predicted_by_review"] + result["predicted_by_notes"] == predicted


def test_calibrated_values_are_reproduced(rows):
    calibrated = [row for row in rows.values() if row["kind"] == ClaimKind.CALIBRATED]
    assert all(abs(row["error_percent"]) < 1.5 for row in calibrated)


def test_counted_values_are_exact(rows):
    assert [rows[name]["error_percent"] for name in ("t11a", "t11b", "t11c", "t18a")] == [0, 0, 0, 0]
    assert rows["t18b"]["ours"] == 128 and rows["r3a"]["ours"] == 16


def test_contradicting_rows_have_large_errors(rows):
    for name in ("t2a", "t6e", "t7a", "t13b", "t14a", "t14b", "t18b", "t20b", "r1a", "r3a", "r4a"):
        assert rows[name]["kind"] == ClaimKind.CONTRADICTS and abs(rows[name]["error_percent"]) > 10
    ratio = (100 - rows["t3a"]["ours"]) / (100 - rows["t3a"]["paper"])
    assert 1.5 < ratio < 2.5  # of TTFT over DRAM's
    assert all(
        ("the review's own error" in row.get("reason", "")) == name.startswith("r") for name, row in rows.items()
    )


def test_rows_that_need_a_gpu_have_no_value(rows):
    needing = [row for row in rows.values() if row["kind"] == ClaimKind.UNMODELLED]
    assert needing and all(row["ours"] is None and "needs a GPU" in row["reason"] for row in needing)


def test_questions_are_faster_loaded_than_attended_to_in_drives(result):
    slower = {row["new"]: row["in_drives_s"] > row["load_s"] for row in result["in_drives"]}
    assert slower == {1: False, 16: True, 64: True, 256: True}
