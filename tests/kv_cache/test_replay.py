"""Actions between iterations: a request is freed, or one of its blocks is cut.

partner of: kv_cache/replay.py
"""

import pytest

from kv_cache import DEVICE, HOST, Iteration, IterationRunner, Machine, Route, SharedLink, Tier
from kv_cache.replay import replay
from kv_cache.transfer.simulated import LayerTime, SimulatedTransfers

ROW = 64


def machine():
    tiers = [Tier(DEVICE, 1 << 20, attends=True), Tier(HOST, 1 << 20)]
    routes = {(HOST, DEVICE): Route("in", ("link",)), (DEVICE, HOST): Route("out", ("link",))}
    return Machine.of(tiers, [SharedLink("link", 1e9)], routes)


def attend_all(it: Iteration) -> None:
    for layer in it.layers:
        it.attend(layer)


@pytest.fixture
def recorded():
    """Two requests, of which one is freed and the other cut to four tokens in one layer."""
    one = machine()
    run = IterationRunner(one, range(2), attend_all, SimulatedTransfers(one, lambda attention: LayerTime(1)))
    run.recorded = []
    run.run({"a": 10, "b": 12}, {"a": ROW, "b": ROW})
    run.free("a")
    cut = next(block for block in run.now.blocks_at(DEVICE) if (block.request, block.layer) == ("b", 1))
    run.crop(cut, 4)
    return run


def test_frees_and_cuts_are_replayed(recorded):
    again = machine()
    ran = replay(recorded.recorded, again, SimulatedTransfers(again, lambda attention: LayerTime(1)), recorded)
    assert [act.kind for record in recorded.recorded if not record.new for act in record.acts] == ["free", "crop"]
    assert ran.table.used == recorded.table.used
    assert 0 < ran.table.used[DEVICE] < 2 * 2 * ROW * (10 + 12)
