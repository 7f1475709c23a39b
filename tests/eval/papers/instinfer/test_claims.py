"""Claims on a small model: a row for each, and what is judged how.

partner of: eval/papers/instinfer/calibrated.py
"""

import json

import pytest

from eval.papers.instinfer.calibrated import ALL
from eval.papers.instinfer.claims import CLAIMS, cases, evaluate_claims
from eval.papers.instinfer.runs import simulate
from tests.eval.papers.instinfer.setups import small_setup


@pytest.fixture(scope="module")
def result():
    return evaluate_claims(simulate(small_setup(), cases(0.4)), 0.4)


def test_every_claim_has_a_row(result):
    json.dumps(result)
    assert [row["id"] for row in result["rows"]] == [*(claim.id for claim in CLAIMS), "c13"]
    fixed = {row["id"] for row in result["rows"] if row["kind"] == "calibrated"}
    assert len(ALL) <= 7
    assert {each["fixed_by"] for each in result["calibrated"]} - {"c5"} == fixed  # c5: only that swapping begins
    assert result["ours"]["over_instinfer_sparf"] > 1
    assert "layers" not in result  # all were simulated


@pytest.mark.parametrize(
    ("claim", "near", "far"),
    [("c6", 10.5 * 1.14, 10.5 * 1.16), ("c7", 3.11 * 0.86, 3.11 * 0.84), ("c8a", 96.0, 95.8), ("c9c", 76.9, 77.1)],
)
def test_shares_are_judged_in_points_and_the_rest_in_percent(claim, near, far):
    (claim,) = (each for each in CLAIMS if each.id == claim)
    assert not claim.is_off(near)
    assert claim.is_off(far)


def test_only_what_was_not_fitted_can_be_an_exception(result):
    """On such a model most claims are off, c5 by far: nothing is swapped at batch 32."""
    exceptions = {each["id"] for each in result["exceptions"]}
    assert {"c5", "c12"} <= exceptions
    assert not exceptions & {each["fixed_by"] for each in result["calibrated"]} - {"c5"}


def test_the_worst_and_the_median_are_of_the_predicted_rows(result):
    errors = sorted(abs(row["error_percent"]) for row in result["rows"] if row["kind"] == "predicted")
    assert len(errors) == 13
    assert (result["median_error_percent"], result["worst_error_percent"]) == (errors[6], errors[12])
