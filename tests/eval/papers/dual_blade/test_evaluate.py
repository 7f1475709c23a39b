"""Dual-Blade's claims: every value is judged, and simulated results equal those of a closed-form model.

partner of: eval/papers/dual_blade/constants.py

The closed-form model: 31 decode steps; a tensor is the keys or the values of a layer, 138.1 MB in the mean. Reads of
SSD A run at Table I's rate, those of SSD B at Table IV's; DMA at 28 GB/s. The time of weights and KV data at the GPU's
448 GB/s is not hidden. Layers of Group 1 arrive at the rates of figure 15. Half of a tensor's DMA is hidden if P.P can
choose.
"""

import json

import pytest

from tests.eval.papers.dual_blade.setups import paper_setup
from vcsd_eval.papers.claims import WITH_REASON, ClaimKind
from vcsd_eval.papers.dual_blade.evaluate import NOTHING_HIT, PAPER, InferenceRuns, evaluate
from vcsd_eval.papers.dual_blade.systems import SYSTEMS, WITHOUT_PIPELINE
from vcsd_eval.papers.options import MachineOptions, Simulated
from vcsd_eval.papers.paper import judge

LAYERS, STEPS = 32, 31
TENSOR = 527 * 32 * 32 * 128 * 2  # tokens x batch x heads x dimensions x FP16
DMA_S = TENSOR / 28e9
READ_S = {"A": TENSOR / (32 * 131072 / 340e-6), "B": 19.03e-3}
FAULTS_S = {"A": 18.80e-3, "B": 32.29e-3}
GPU_S = STEPS * (2 * 6.66e9 + LAYERS * 2 * TENSOR) / 448e9


def decode_s(ssd, cached, pipelined, hidden=0.5):
    """Seconds of decode with `cached` layers in Group 1."""
    group_1 = 2 * TENSOR / (13.13e9 if pipelined else 11.93e9)
    group_2 = 2 * READ_S[ssd] + 2 * DMA_S - (hidden * DMA_S if pipelined else 0)
    return STEPS * (cached * group_1 + (LAYERS - cached) * group_2) + GPU_S


def thrashing_s(ssd):
    """Decode time of the baseline if its cache finds nothing: two threads wait for each other's faults."""
    return STEPS * LAYERS * (2 * FAULTS_S[ssd] + DMA_S) + GPU_S


@pytest.fixture(scope="module")
def runs():
    return InferenceRuns(paper_setup())


@pytest.mark.parametrize("ssd", ["A", "B"])
@pytest.mark.parametrize("alpha", [0.3, 0.5, 0.7])
def test_table_v_equals_the_reading(runs, ssd, alpha):
    cached = int(alpha * LAYERS)
    without = runs.at(ssd, WITHOUT_PIPELINE, share=alpha).decode_s
    assert without == pytest.approx(decode_s(ssd, cached, False), rel=0.002)
    both = runs.at(ssd, SYSTEMS["dual-blade"], share=alpha).decode_s
    assert both == pytest.approx(decode_s(ssd, cached, True), rel=0.015)  # two steps warm up and try the other path


@pytest.mark.parametrize(("ssd", "cut"), [("A", 41.9), ("B", 56.4)])
def test_largest_cut_equals_the_reading(runs, ssd, cut):
    assert 100 * (1 - decode_s(ssd, 21, True) / thrashing_s(ssd)) == pytest.approx(cut, abs=0.1)
    assert runs.at(ssd, SYSTEMS["baseline"], 7).decode_s == pytest.approx(thrashing_s(ssd), rel=0.001)
    assert runs.at(ssd, SYSTEMS["dual-blade"], 7).cached_share == pytest.approx(21 / LAYERS)
    assert max(runs.cuts(ssd)) == pytest.approx(cut, abs=1)


def test_fitting_cache_always_hits_smaller_one_never(runs):
    for limit in (10, 11):
        assert runs.at("A", SYSTEMS["baseline"], limit).hit_share == 1
    for limit in NOTHING_HIT:
        assert runs.at("A", SYSTEMS["baseline"], limit).hit_share == 0


@pytest.fixture(scope="module")
def result():
    return judge(PAPER, evaluate(MachineOptions(), Simulated(), False))


@pytest.mark.slow
def test_every_value_of_the_paper_has_a_row(result):
    json.dumps(result)
    numbers = {row["id"].rstrip("abcdefghijklmnopqrstuvwxyz") for row in result["rows"]}
    assert numbers == {f"d{number}" for number in range(1, 22)}
    assert all(row["ours"] is not None for row in result["rows"] if row["kind"] != ClaimKind.UNDETERMINED)
    assert all(row.get("reason") for row in result["rows"] if row["kind"] in WITH_REASON)


@pytest.mark.slow
def test_prediction_errors_are_within_limits(result):
    assert result["median_error_percent"] <= 3
    assert result["worst_error_percent"] <= 10
    assert result["exceptions"] == []
    assert len(result["calibrated"]) <= 4
    fitted = [row for row in result["rows"] if row["kind"] == ClaimKind.CALIBRATED]
    assert all(abs(row["error_percent"]) < 0.5 for row in fitted)


@pytest.mark.slow
def test_split_pairs_and_steps_faster_than_paper(result):
    for ssd in "AB":
        assert result["ours_over_dual_blade"][ssd] >= 1.35
        steps = [worth[ssd] for name, worth in result["split_by_step"].items() if name.startswith("split")]
        assert steps == sorted(steps)
        assert steps[-1] == result["ours_over_dual_blade"][ssd]


@pytest.mark.slow
def test_feedback_leaves_too_small_page_cache(result):
    seconds = result["cache_smaller_than_planned"]
    for ssd in "AB":
        assert seconds["split, fed back"][ssd] < 0.9 * seconds["split"][ssd]
        assert seconds["split, fed back"][ssd] < 0.6 * seconds["dual-blade"][ssd]


@pytest.mark.slow
def test_dual_blade_no_slower_than_its_parts(result):
    seconds = {(row["ssd"], row["system"], row["limit_gib"]): row["decode_s"] for row in result["configurations"]}
    for (ssd, system, limit), took in seconds.items():
        if system in ("baseline", "cache-policy-only", "nvme-direct-only"):
            assert seconds[ssd, "dual-blade", limit] <= took


def test_model_larger_than_gpu_is_refused():
    with pytest.raises(ValueError, match="gpu = rtx5060ti-16gb: 16 GiB do not hold the weights of opt-13b"):
        evaluate(MachineOptions(model="opt-13b"), Simulated(), False)
