"""InstInfer's claims on a small model: each has a value of ours, and each constant names the claims that determine it.

partner of: eval/papers/instinfer/constants.py, eval/papers/instinfer/figures.py
"""

import json

import pytest

from tests.eval.papers.instinfer.setups import small_setup
from vcsd_eval.papers.instinfer.evaluate import PAPER, VALUES, cases, claimed
from vcsd_eval.papers.instinfer.runs import simulate
from vcsd_eval.papers.paper import judge


@pytest.fixture(scope="module")
def result():
    return judge(PAPER, claimed(simulate(small_setup(), cases(0.4)), 0.4, "none"))


def test_every_claim_has_a_row(result):
    json.dumps(result)
    assert [row["id"] for row in result["rows"]] == [*VALUES, "c13"]
    fixed = {row["id"] for row in result["rows"] if row["kind"] == "calibrated"}
    assert {name for each in result["calibrated"] for name in each["fixed_by"].split(", ")} == fixed
    assert result["methods"]["paged"]["over_instinfer_sparf"] > 1
    assert "layers" not in result  # all were simulated


def test_calibrated_claims_are_never_exceptions(result):
    """On such a model most claims have large errors, c5 the largest: nothing is swapped at batch 32."""
    exceptions = {each["id"] for each in result["exceptions"]}
    assert {"c5", "c12"} <= exceptions
    assert not exceptions & {"c1", "c4", "c6", "c8b", "c8c"}


@pytest.mark.parametrize(
    ("claim", "near", "far"),
    [("c3", 11.1 * 1.14, 11.1 * 1.16), ("c7", 3.11 * 0.86, 3.11 * 0.84), ("c8a", 96.0, 95.8), ("c9c", 76.9, 77.1)],
)
def test_shares_are_judged_in_percentage_points(claim, near, far):
    (claim,) = (each for each in PAPER.claims if each.id == claim)
    assert not claim.is_off(near)
    assert claim.is_off(far)


def test_pcie_volume_is_counted_from_the_shape(result):
    """c13 at s = 95.5: KV data of all tokens over q, k, v and outputs of one token, plus 64 command bytes per layer."""
    kv, vectors = 95.5 * 2 * 20 * 128 * 2, 64 + 4 * 20 * 128 * 2
    (row,) = (row for row in result["rows"] if row["id"] == "c13")
    assert row["ours"] == pytest.approx(kv / vectors)
