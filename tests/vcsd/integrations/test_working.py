"""Loads of a worker: what came is written to the engine's blocks in whole blocks, the others have failed.

partner of: vcsd/integrations/working.py
"""

from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest

from vcsd.integrations.plan import PrefixLoad, PrefixPlan
from vcsd.integrations.working import WorkerCache

TOKENS = 4


@pytest.mark.parametrize(
    ("rows", "written", "failed"),
    [
        (None, [], {7, 8, 9}),
        (3, [], {7, 8, 9}),
        (4, [7], {8, 9}),
        (11, [7, 8], {9}),
        (12, [7, 8, 9], set()),
        (16, [7, 8, 9], set()),
    ],
)
def test_whole_blocks_that_came_are_written(rows, written, failed):
    future = Future()
    worker = WorkerCache(SimpleNamespace(load=lambda keys, first: future), TOKENS)
    writes = []
    worker.cache = SimpleNamespace(write=lambda blocks, k, v: writes.append((blocks, k.shape[1], v.shape[1])))
    plan = PrefixPlan(loads=[PrefixLoad("r", [b"key"], 0, [7, 8, 9])], saves=[])
    worker.start(plan)
    assert worker.finish() == set() == worker.take_failed()
    future.set_result(None if rows is None else (np.zeros((2, rows, 1, 8)), np.zeros((2, rows, 1, 8))))
    assert worker.finish() == {"r"}
    assert writes == ([(written, TOKENS * len(written), TOKENS * len(written))] if written else [])
    assert worker.take_failed() == failed
    assert worker.take_failed() == set() == worker.finish()
