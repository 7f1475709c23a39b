"""`vcsd eval fleet` on a small trace: its keys, the end of scaling, and one-line errors.

partner of: eval/fleet/jobs.py
"""

import json
from dataclasses import replace

import pytest

from vcsd_eval.fleet.fleet import FleetOptions, bound_of, ends_of, experiment, machine_of, variants
from vcsd_eval.fleet.jobs import FleetJob, run_job, run_jobs
from vcsd_eval.fleet.machine import Scheme


@pytest.fixture(scope="module")
def setting(trace_path):
    return FleetOptions(trace_path, hours=1, drives=16, hosts=2)


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


def test_scaling_end_follows_from_rows(result):
    rates = {row["drives"]: row["tokens_per_s"] for row in result["sweep"]}
    ends = result["ends_at"]
    assert rates[2 * ends] < 1.25 * rates[ends]
    assert rates[ends] >= 1.25 * rates[ends // 2]
    assert result["why"] == next(row["bound"] for row in result["sweep"] if row["drives"] == 2 * ends)


def test_few_arrivals_are_reported_as_bound(setting, trace):
    job = FleetJob(machine=machine_of(setting, trace), hosts=2, trace=trace, hours=1, rate=0.1)
    assert bound_of(run_job(job)) == "arrivals"


def test_variants_change_one_thing(result):
    base, *others = result["variants"]
    assert base["capacity_ratio"] == 1 and base["reused_percent"] == 0
    assert not [row for row in others if "two drives" in row["what"]]  # 8 drives of a host have all 8 heads once
    assert all(row["capacity_ratio"] > 0.9 for row in others)


def test_variants_of_hosts_with_more_drives_shard_tokens(setting, trace):
    machine = machine_of(replace(setting, drives=32), trace)
    assert {variant.token_shards for variant in variants(machine).values()} == {1, 2}
    assert machine.shards == 1 and replace(machine, scheme=Scheme(token_shards=2)).group == 16


def test_ray_gives_same_figures(trace, ray_cluster, setting):
    jobs = [FleetJob(machine=machine_of(setting, trace), hosts=2, trace=trace, hours=0.2, seed=each) for each in (0, 1)]
    here, there = [run_job(job) for job in jobs], run_jobs(jobs, "local")
    for one, other in zip(here, there, strict=True):
        assert one.spent_s.tolist() == other.spent_s.tolist() and one.latencies.tolist() == other.latencies.tolist()


def test_endless_scaling_is_reported():
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
def test_fleet_errors_have_remedy(setting, change, says):
    with pytest.raises(ValueError, match=says):
        experiment(replace(setting, **change))
