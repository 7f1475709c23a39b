"""Drives that are killed during a decode: nothing lost, nothing wrong.

partner of: eval/verify/kills.py, eval/verify/decode.py
"""

import pytest

from vcsd_eval.verify.kills import bench_kills


@pytest.mark.usefixtures("own_run_dir")
@pytest.mark.parametrize("medium", ["memory", "direct"])
def test_decode_survives_kills(medium):
    ticks = []
    result = bench_kills(2, 0, ticks.append, medium, tokens=24, flush_interval_steps=4)
    assert result["medium"] == medium
    assert (result["lost"], result["wrong"]) == (0, 0)
    assert result["kills"] == len(ticks) == 2
    assert 0 < result["recoveries"] <= 2
    assert result["max_recovery_s"] >= result["mean_recovery_s"] > 0
