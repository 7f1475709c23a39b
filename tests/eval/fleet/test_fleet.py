"""`vcsd eval fleet` on a small trace: its keys, where scaling ends, and errors in a line."""

import json
from dataclasses import replace

import pytest

from eval.fleet.fleet import Setting, ends_of, experiment


@pytest.fixture(scope="module")
def setting(trace_path):
    return Setting(trace_path, hours=1, drives=16, hosts=2)


@pytest.fixture(scope="module")
def result(setting):
    return experiment(setting).result


def test_result_has_all_figures(result):
    assert {"tokens_per_s", "ttft_s", "tpot_s", "drives", "hosts", "requests", "resampled", "bound"} <= set(result)
    assert 0 < result["ttft_s"]["p50"] <= result["ttft_s"]["p99"]
    assert 0 < result["tpot_s"]["p50"] <= result["tpot_s"]["p99"]
    assert sum(result["shares"].values()) == pytest.approx(1)
    assert set(result["deviation_percent"]) == {1, 4, 8}
    assert "seed 0" in json.dumps(result)


def test_scaling_ends_where_rows_say(result):
    rates = {row["drives"]: row["tokens_per_s"] for row in result["sweep"]}
    ends = result["ends_at"]
    assert rates[2 * ends] < 1.25 * rates[ends]
    assert rates[ends] >= 1.25 * rates[ends // 2]
    assert result["why"] == next(row["bound"] for row in result["sweep"] if row["drives"] == 2 * ends)


def test_few_arrivals_are_the_bound(setting):
    assert experiment(replace(setting, rate=0.1)).result["bound"] == "arrivals"


def test_scaling_that_does_not_end_is_said():
    assert ends_of([{"drives": 1, "tokens_per_s": 1.0, "bound": "drives"}]) == (
        None,
        "does not end within 1 drives: drives",
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hours": 8784, "rate": 1000}, "take fewer --hours"),
        ({"drives": 15}, "choose a multiple of the 2 hosts"),
        ({"network": "10gbe"}, "must be one of 25gbe"),
        ({"model": "deepseek-v3"}, "latent"),
        ({"gpu": "rtx5060ti-16gb", "model": "llama-3-70b"}, "take several"),
    ],
)
def test_errors_say_what_to_do(setting, change, says):
    with pytest.raises(ValueError, match=says):
        experiment(replace(setting, **change))
