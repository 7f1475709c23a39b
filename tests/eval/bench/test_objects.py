"""partner of: eval/bench/objects.py"""

from __future__ import annotations

from pathlib import Path

from vcsd_eval.bench.objects import ForkLoad, experiment


def test_gather_reads_requested_bytes_from_device(tmp_path: Path) -> None:
    found = experiment(ForkLoad(objects=40, layers=4, relatives=5, folder=tmp_path)).result
    assert found["objects"] == 40 and found["commands"] == 1
    assert found["asked_bytes"] == 40 * 128 * 1024 <= found["device_bytes"] <= 1.1 * found["asked_bytes"]
    assert found["queue_depth"] >= 16 or found["requests"] < 16
    assert found["fork_us"] > 0 and found["free_us"] > 0 and found["relatives"] == 5
    assert not list(tmp_path.iterdir())
