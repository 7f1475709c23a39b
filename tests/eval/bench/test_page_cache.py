"""Tensors read cyclically: in a control group if this user may create one, else in a modelled page cache.

partner of: eval/bench/page_cache.py, eval/bench/cyclic.py, eval/bench/child.py
"""

import os

import pytest

from csd_io.queue import aligned
from tests.conftest import missing
from vcsd_eval.bench import cyclic, page_cache
from vcsd_eval.bench.cyclic import Capped, CyclicRead, Mapped, cached_layers
from vcsd_eval.bench.page_cache import PageCacheLoad, bench_page_cache, off

MIB = 1 << 20
SMALL = {"layers": 8, "tensor_mib": 1, "rounds": 2}


def refuse(limit_bytes):
    raise PermissionError(13, "not for this user")


def test_page_cache_without_cgroup_gives_same_result(tmp_path, monkeypatch):
    monkeypatch.setattr(page_cache, "temporary_cgroup", refuse)
    result = bench_page_cache(PageCacheLoad(**SMALL, limits="0.375,0.875", folder=tmp_path))
    assert result["how"] == "lru" and "not for this user" in result["why"]
    assert [(row["policy"], row["n1"], row["hit_ratio"], row["wrong"]) for row in result["rows"]] == [
        ("baseline", 8, 0, 0),
        ("dual-blade", 3, 0.375, 0),
        ("baseline", 8, 0, 0),
        ("dual-blade", 7, 0.875, 0),
    ]
    assert [row["kernel_bytes"] for row in result["rows"]] == [32 * MIB, 20 * MIB, 32 * MIB, 4 * MIB]
    assert list(tmp_path.iterdir()) == []


def test_page_cache_in_cgroup_caches_part_of_layers(tmp_path):
    if os.geteuid():
        missing("cgroup", "control groups are root's")
    result = bench_page_cache(PageCacheLoad(layers=16, tensor_mib=4, rounds=2, limits="0.625", folder=tmp_path))
    assert result["how"] in ("cgroup-v1", "cgroup-v2") and result["why"] is None
    baseline, dual = result["rows"]
    assert not off(baseline) and not off(dual)
    assert 4 <= dual["n1"] <= 10 and dual["wrong"] == baseline["wrong"] == 0
    assert dual["direct_io_engine"] and baseline["direct_io_engine"] is None


def test_failed_child_is_one_line_error(tmp_path):
    folder = tmp_path / "gone"
    with pytest.raises(OSError, match="gone"):
        page_cache._child(
            CyclicRead(folder=str(folder), layers=2, tensor_bytes=MIB, rounds=1, direct=True, lru_bytes=MIB), None
        )


def test_layers_within_budget_are_cached(monkeypatch):
    def layers(budget, direct=True, lru_bytes=None):
        monkeypatch.setattr(cyclic, "available_bytes", lambda _: budget)
        job = CyclicRead(folder="", layers=4, tensor_bytes=10, rounds=1, direct=direct, lru_bytes=lru_bytes)
        return cached_layers(job)

    assert [layers(budget) for budget in (0, 29, 30, 49, 50, 1000)] == [0, 0, 1, 1, 2, 4]
    assert layers(0, direct=False) == 4
    assert layers(0, lru_bytes=60) == 3, "of our own cache nothing is the kernel's"


def test_both_caches_read_back_written_data(tmp_path):
    size = 3 * cyclic.LRU_BYTES
    for store in (Mapped(str(tmp_path)), Capped(str(tmp_path), 4 * size, 2 * cyclic.LRU_BYTES)):
        data, back = [aligned(size) for _ in range(4)], aligned(size)
        for number, each in enumerate(data):
            each[:] = bytes([number + 1]) * size
            store.write(number, each)
        for number in (0, 1, 1, 3, 0, 2):
            store.read(number, back)
            assert back == data[number]
        store.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("limits", ["x", "0", "5", ""])
def test_invalid_limit_is_refused(limits):
    with pytest.raises(ValueError, match="limits"):
        PageCacheLoad(limits=limits).shares()
