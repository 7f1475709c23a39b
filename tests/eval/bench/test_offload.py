"""A KV cache larger than memory: every variant attends, and a drive's reads from its disk stay within its plan.

partner of: eval/bench/offload.py, eval/bench/offload_child.py
"""

import pytest
import torch

from vcsd_eval.bench import offload, offload_child
from vcsd_eval.bench.offload import OffloadLoad, bench_offload
from vcsd_eval.bench.offload_child import OffloadJob, SequenceShape, rows_of

SMALL = {"kv_mib": 16, "limit_mib": 900, "layers": 2, "kv_heads": 4, "steps": 1, "warm": 1, "rounds": 1}


def refuse(limit_bytes):
    raise PermissionError(13, "not for this user")


@pytest.fixture
def one_process(monkeypatch):
    """Run every variant in this process; the memory limit of a variant is not tested here."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(offload, "_child", lambda job, group: offload_child.run(job))
    yield
    torch.set_num_threads(threads)


def test_every_variant_attends_and_leaves_no_files(tmp_path, monkeypatch, one_process):
    monkeypatch.setattr(offload, "temporary_cgroup", refuse)
    ways = "mmap,prefetch,mapped-dense,direct-dense,direct-sparf-8,direct-ours"
    result = bench_offload(OffloadLoad(**SMALL, ways=ways, folder=tmp_path))
    rows = {row["way"]: row for row in result["rows"]}
    assert list(rows) == [way for way in ways.split(",") if way != "mapped-dense"]  # which needs a control group
    assert "not for this user" in result["why"]
    dense, sparse = rows["direct-dense"], rows["direct-sparf-8"]
    assert dense["planned_mib"] == pytest.approx(16, abs=0.1) and sparse["planned_mib"] < dense["planned_mib"]
    for row in (dense, sparse, rows["direct-ours"]):
        counts = row["counts"]
        assert 0 < counts["asked"] <= 1.1 * counts["wanted"]
        assert counts["hits"] > 0
    assert max(rows["mmap"]["over_rivals"], rows["prefetch"]["over_rivals"]) == 1
    assert list(tmp_path.iterdir()) == []


def test_variant_runs_in_limited_child_process(tmp_path):
    result = bench_offload(OffloadLoad(**SMALL, ways="prefetch", folder=tmp_path))
    (row,) = result["rows"]
    assert row["tokens_per_s"] > 0 and "planned_mib" not in row
    assert result["why"] is not None or result["how"].startswith("cgroup")


def test_failed_variant_is_one_line_error(tmp_path):
    shape = SequenceShape(layers=1, kv_heads=1, queries=1, head_dim=128, tokens=64)
    job = OffloadJob(way="mmap", folder=str(tmp_path), shape=shape, cache_bytes=1 << 20, steps=1, warm=0, drop=False)
    with pytest.raises(OSError, match="mmap: FileNotFoundError"):
        offload._child(job, None)


def test_token_correlation_is_as_requested():
    shape = SequenceShape(layers=1, kv_heads=2, queries=1, head_dim=128, tokens=400)
    for drift in (0.0, 0.9):
        for rows in rows_of(shape, 0, drift):
            found = float((rows[1:].astype("f4") * rows[:-1].astype("f4")).mean() / rows.astype("f4").var())
            assert found == pytest.approx(drift, abs=0.05)


def test_unknown_variant_is_refused(tmp_path):
    with pytest.raises(ValueError, match="ways = 'tape'"):
        bench_offload(OffloadLoad(**SMALL, ways="mmap,tape", folder=tmp_path))
    with pytest.raises(OSError, match="MiB are needed"):
        bench_offload(OffloadLoad(kv_mib=1 << 16, folder=tmp_path))
