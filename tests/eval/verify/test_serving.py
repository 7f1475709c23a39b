"""The shipped model serves traces: correct under every policy, and no memory growth.

partner of: eval/verify/serving.py
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from pathlib import Path

from vcsd.progress import no_tick
from vcsd_eval.verify import serving
from vcsd_eval.verify.serving import ServingLoad, bench_serving, requests

ROUNDS, MAX_GROWTH_BYTES = 8, 4 << 20  # growth in the second half of the rounds: noise of the allocator
FEW = ServingLoad(policies=("orbitflow", "ours", "in-two-places", "tierkv"), longest=96)


def test_served_answers_equal_each_request_alone() -> None:
    rows = {row["policy"]: row for row in bench_serving(10, 0, no_tick, FEW)["rows"]}
    assert set(rows) == set(FEW.policies)
    for row in rows.values():
        assert (row["right"], row["wrong"], row["failed"], row["left_bytes"]) == (10, 0, 0, 0)
        assert row["cancelled"] == 1
        assert 0 < row["peak_bytes"]["device"] <= row["limit_bytes"]["device"]
    assert rows["ours"]["peak_bytes"]["csd"] > 0


def test_wrong_answer_is_detected(monkeypatch) -> None:
    alone = serving.alone
    monkeypatch.setattr(serving, "alone", lambda *given: [[*each[:-1], each[-1] ^ 1] for each in alone(*given)])
    assert bench_serving(2, 0, no_tick, ServingLoad(policies=("orbitflow",), longest=64))["wrong"] == 2


def usage() -> tuple[int, int, int]:
    """Resident memory of this process, bytes; its open files; its threads."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")), threading.active_count()


def test_server_that_serves_again_does_not_grow() -> None:
    load = ServingLoad(policies=("orbitflow",), requests=8, longest=96)
    asked = requests(load)
    with serving._served(serving.setting(load, "orbitflow", asked)) as server:
        before = after = (0, 0, 0)
        for number in range(ROUNDS):
            serving.answered(server, asked, no_tick)
            before, after = (after if number == ROUNDS // 2 else before), usage()
        assert server.kv.runner.table.used.total() == 0
    assert after[0] - before[0] <= MAX_GROWTH_BYTES and after[1:] == before[1:]
