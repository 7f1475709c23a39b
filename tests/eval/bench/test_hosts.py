"""Honest hosts keep all that they store beside hostile ones; what would go wrong is counted with a reason.

partner of: eval/bench/hosts.py, eval/bench/hosts_child.py, eval/bench/child.py
"""

from __future__ import annotations

import pytest

from vcsd_eval.bench import child, hosts
from vcsd_eval.bench.hosts import HostsLoad, experiment


@pytest.mark.usefixtures("own_run_dir")
def test_honest_hosts_are_served_beside_each_kind_of_hostile_host() -> None:
    outcome = experiment(HostsLoad(honest=2, seconds=8, rounds=1))
    result = outcome.result
    assert not outcome.failed and not outcome.notes
    assert (result["lost"], result["wrong"], result["refused_within_share"]) == (0, 0, 0)
    assert min(result["commands"], result["commands_alone"]) > 10
    assert all(result[f"hostile_{kind}"] for kind in ("silent", "slow", "resets", "floods"))
    assert result["p99_over_alone"] == result["p99_over_alone_worst"]
    assert result["p50_ms"] <= result["p99_ms"] <= result["longest_ms"]


def test_ratio_is_the_median_over_rounds_and_failures_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(*took_ms: float) -> list[dict[str, object]]:
        return [{"took_ms": list(took_ms)}]

    answer = hosts._times([told(1, 1), told(1, 1), told(1, 1)], [told(2, 2), told(9, 9), told(3, 3)])
    assert (answer["p99_over_alone"], answer["p99_over_alone_worst"]) == (3, 9)
    assert (answer["commands"], answer["longest_ms"], answer["p50_ms_alone"]) == (6, 9, 1)
    result = {"lost": 0, "wrong": 1, "refused_within_share": 0}
    monkeypatch.setattr(hosts, "measured", lambda load: (result, ["wrong: block 3", "wrong: block 3"]))
    outcome = experiment(HostsLoad())
    assert outcome.failed and outcome.notes == ("wrong: block 3",)


def test_failed_child_error_has_reason():
    with (
        child.started("vcsd_eval.bench.hosts_child", "no job\n") as process,
        pytest.raises(OSError, match="JSONDecode"),
    ):
        child.answer(process)
