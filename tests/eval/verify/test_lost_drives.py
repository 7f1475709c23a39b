"""Drives and nodes that are lost permanently."""

import pytest

from vcsd_eval.verify.lost_drives import bench_lost_drives


@pytest.mark.usefixtures("own_run_dir")
def test_tokens_stay_the_same_with_redundancy():
    ticks = []
    result = bench_lost_drives(3, 0, ticks.append, tokens=16)
    assert (result["kills"], result["lost"], result["wrong"], result["not_refused"]) == (6, 0, 0, 0)
    assert len(ticks) == 7
    for each in (result["by_redundancy"][name] for name in ("mirror", "recompute")):
        assert (each["nodes"], each["refused"], each["not_redundant"]) == (1, 0, 0)
        assert 0 < each["time_to_degraded_service_s_median"] <= each["time_to_full_redundancy_s_max"]
    overheads = [each["storage_overhead"] for each in result["by_redundancy"].values()]
    assert overheads == [0, 1, 0]
