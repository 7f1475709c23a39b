"""TierKV's claims: every value is judged, and the error of the predicted ones.

partner of: eval/papers/tierkv/constants.py
"""

import json

import numpy as np
import pytest

from vcsd_eval.papers.claims import ClaimKind
from vcsd_eval.papers.options import MachineOptions, Simulated
from vcsd_eval.papers.paper import judge
from vcsd_eval.papers.profiles import Gpu, Host, Model
from vcsd_eval.papers.tierkv.constants import COPIES
from vcsd_eval.papers.tierkv.evaluate import PAPER, K, evaluate, reading, ssd_use, tokens_per_s


@pytest.fixture(scope="module")
def result():
    return judge(PAPER, evaluate(MachineOptions(), Simulated(), False))


@pytest.fixture(scope="module")
def rows(result):
    return {row["id"]: row for row in result["rows"]}


def test_every_value_of_the_paper_has_a_row(result):
    json.dumps(result)
    assert {row["id"].split("-")[0].rstrip("abcde") for row in result["rows"]} == {f"t{n}" for n in range(1, 26)}
    assert all(row["ours"] is not None for row in result["rows"] if row["id"] != "t15")


def test_predicted_rows_are_close(result):
    assert result["median_error_percent"] <= 2.5
    assert result["median_error_percent_unsaturated"] <= 2.5
    assert result["worst_error_percent"] <= 5
    assert result["exceptions"] == []


def test_calibrated_rows_equal_their_targets():
    values = evaluate(MachineOptions(), Simulated(), False).values
    fitted = [claim for claim in PAPER.claims if claim.kind is ClaimKind.CALIBRATED]
    errors = [abs(each.error_percent(values[each.id])) for each in fitted]
    assert max(errors) < 2.8


def test_conserved_bus_gains_less(result, rows):
    gains = list(result["conserved_gain"].values())
    assert gains == pytest.approx([1.88, 1.38, 1.24, 1.18], abs=0.01)
    for name in ("t8-4", "t14-2", "t14-4"):
        assert rows[name]["conserved_bus"] > 1.4 * rows[name]["ours"]
    assert rows["t6-3"]["conserved_bus"] == rows["t6-3"]["ours"]
    assert rows["t1a"]["conserved_bus"] is None


def test_contradicting_rows_have_corrected_values(rows):
    assert (rows["t1c"]["ours"], rows["t1d"]["ours"]) == (3.0, 5.0)
    assert rows["t3a"]["ours"] == pytest.approx(0.165)
    assert rows["t17"]["ours"] == pytest.approx(7.74 / 3.10, rel=0.02)
    assert rows["t19a"]["ours"] > rows["t19b"]["ours"]


def test_the_ssd_is_needed_when_host_memory_is_full():
    model, gpu, host = Model.load("llama-3-8b"), Gpu.load("h100"), Host.load("tierkv")
    assert ssd_use(6, model, gpu, host) == 0
    assert 0 < ssd_use(12, model, gpu, host) < ssd_use(24, model, gpu, host) < 1


def test_another_gpu_changes_dependent_values_only():
    ours = evaluate(MachineOptions(gpu="a6000"), Simulated(), False).values
    assert ours["t2e"] == pytest.approx(768 / 7)
    assert ours["t5-weights"] == pytest.approx(2 * 8.03 / 0.768, rel=0.001)


def test_reading_matches_table_5_and_is_linear_beyond():
    for ratio, copies in COPIES.items():
        assert reading(ratio).mean_ms == copies.value
    assert reading(1).mean_ms == 0
    assert reading(6).mean_ms == pytest.approx(COPIES[5].value * 5 / 4)


@pytest.mark.parametrize("window", [0, K])
def test_reading_continuous_and_monotone(window):
    ratios = np.linspace(1, 7, 301)
    times = np.array([reading(ratio).tpot_ms(window) for ratio in ratios])
    assert np.all(np.diff(times) >= 0)
    assert np.diff(times).max() < 0.05  # ms in a step of 0.02: table 5 rises by at most 1.9 ms from row to row
    assert np.all(np.diff([tokens_per_s(time) for time in times]) <= 0)
