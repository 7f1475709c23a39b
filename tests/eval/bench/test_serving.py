"""The shipped model serves traces: correct under every policy, and no memory growth.

partner of: eval/bench/serving.py
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import threading
from pathlib import Path

import pytest

from vcsd.progress import no_tick
from vcsd_eval.bench import serving
from vcsd_eval.bench.serving import ServingLoad, experiment, requests

ROUNDS, MAX_GROWTH_BYTES = 8, 4 << 20  # growth in the second half of the rounds: noise of the allocator
FEW = {"policies": "orbitflow,ours,in-two-places,tierkv", "requests": 10, "longest": 96}


def test_served_answers_equal_each_request_alone() -> None:
    found = experiment(ServingLoad(**FEW))
    assert not found.failed
    assert set(found.result["policies"]) == set(FEW["policies"].split(","))
    for row in found.result["rows"]:
        assert (row["right"], row["wrong"], row["failed"], row["left_bytes"]) == (10, 0, 0, 0)
        assert row["cancelled"] == 1
        assert 0 < row["peak_bytes"]["device"] <= row["limit_bytes"]["device"]
    assert found.result["policies"]["ours"]["peak_bytes"]["csd"] > 0


def test_wrong_answer_is_detected(monkeypatch) -> None:
    alone = serving.alone
    monkeypatch.setattr(serving, "alone", lambda *given: [[*each[:-1], each[-1] ^ 1] for each in alone(*given)])
    found = experiment(ServingLoad(policies="orbitflow", requests=2, longest=64))
    assert found.failed and found.result["wrong"] == 2


def test_traces_are_shortened_to_context_of_model(tmp_path) -> None:
    lines = [{"timestamp": 1000 * n, "input_length": 6000 + n, "output_length": 300, "hash_ids": []} for n in range(9)]
    trace = tmp_path / "mooncake.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)))
    asked = requests(ServingLoad(trace=trace, longest=128))
    assert len(asked) == 9 and all(1 <= len(each.prompt) <= 124 and each.new >= 4 for each in asked)
    assert asked[0].at == 0 and asked == sorted(asked, key=lambda each: each.at)


def usage() -> tuple[int, int, int]:
    """Resident memory of this process, bytes; its open files; its threads."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")), threading.active_count()


def test_server_that_serves_again_does_not_grow() -> None:
    load = ServingLoad(policies="orbitflow", requests=8, longest=96)
    asked = requests(load)
    with serving._served(serving.setting(load, "orbitflow", asked)) as server:
        before = after = (0, 0, 0)
        for number in range(ROUNDS):
            serving.answered(server, asked, no_tick)
            before, after = (after if number == ROUNDS // 2 else before), usage()
        assert server.kv.runner.table.used.total() == 0
    assert after[0] - before[0] <= MAX_GROWTH_BYTES and after[1:] == before[1:]


def test_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match=r"policies = 'best': must be all, or of reactive, flexgen, dual-blade"):
        experiment(ServingLoad(policies="best"))
