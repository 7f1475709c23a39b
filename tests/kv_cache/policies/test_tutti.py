"""Tutti's order of reads, computation and writes, in simulated time against its closed form."""

from types import SimpleNamespace

import pytest

from kv_cache import DEVICE, DIRECT, IterationRunner, Machine, Route, SharedLink, Tier
from kv_cache.block_table import BlockKey
from kv_cache.cost import BASE
from kv_cache.policies.preload import Preload
from kv_cache.policies.tutti import Tutti, _make_room
from kv_cache.transfer.simulated import LayerTime, SimulatedTransfers
from vcsd_eval.papers.profiles import Gpu, Model
from vcsd_eval.papers.tutti import reading

READ, WRITE = 25.9e9, 9.8e9
READING = reading.GpuReading.on(Model.load("llama-3-8b"), Gpu.load("h100"), BASE)
WHOLE, BY_LAYER = reading.Path(READ), reading.Path(READ, layered=True)
LAYERS = READING.model.layers
ROW = READING.model.shape.kv_bytes_per_token // LAYERS // 2
MACHINE = Machine.of(
    [Tier(DEVICE, 80 << 30, attends=True), Tier(DIRECT)],
    [SharedLink("read", READ), SharedLink("write", WRITE)],
    {(DIRECT, DEVICE): Route("in", ("read",)), (DEVICE, DIRECT): Route("out", ("write",))},
)


class Run:
    """A stored document, and prompts after it. copies: all copies that were started."""

    def __init__(self, prefix: int) -> None:
        self.transfers, self.layer_ns = SimulatedTransfers(MACHINE, lambda attention: LayerTime(self.layer_ns)), 1000
        self.runner = IterationRunner(MACHINE, range(LAYERS), Tutti().layers, self.transfers)
        self.copies, begin = [], self.transfers.begin

        def noted(*asked):
            self.copies.append(begin(*asked))
            return self.copies[-1]

        self.transfers.begin = noted
        self.prefix = prefix
        self.run(prefix)
        self.transfers.settle()

    def run(self, new: int) -> float:
        """Seconds of an iteration."""
        began_ns = self.transfers.now_ns
        self.runner.run({"r": new}, {"r": ROW})
        return (self.transfers.now_ns - began_ns) / 1e9

    def forget(self, new: int) -> None:
        """Drop everything from the device, and everything but the document from the disk."""
        self.transfers.settle()
        for block in list(self.runner.table.entries):
            self.runner.crop(block, self.prefix)
            self.runner.table.drop(block, DEVICE)
        self.copies.clear()
        self.layer_ns = round(READING.compute_s(new, self.prefix) / LAYERS * 1e9)


@pytest.mark.parametrize(("new", "prefix"), [(4096, 61440), (512, 32768), (16384, 49152)])
def test_load_time_equals_closed_form(new, prefix):
    run = Run(prefix)
    for policy, route in ((Tutti(), BY_LAYER), (Preload(), WHOLE)):
        run.forget(new)
        run.runner.policy = policy.layers
        assert run.run(new) == pytest.approx(READING.first_token_s(new, prefix, route), rel=0.01)


@pytest.mark.parametrize(("new", "prefix"), [(16384, 8192), (512, 32768)])
def test_ssd_never_reads_and_writes_at_once(new, prefix):
    run = Run(prefix)
    for _ in range(2):  # the second knows how long a layer takes
        run.forget(new)
        took_s = run.run(new)
        run.transfers.settle()
    reads, writes = ([c for c in run.copies if c.route.name == name] for name in ("in", "out"))
    assert len(reads) == len(writes) == 2 * LAYERS
    together = [(r, w) for r in reads for w in writes if r.began_ns < w.ended_ns and w.began_ns < r.ended_ns]
    assert not together
    beside = sum(w.ended_ns < run.transfers.now_ns for w in writes)
    slack = READING.compute_s(new, prefix) / LAYERS - READING.load_s(prefix, BY_LAYER) / LAYERS
    assert (beside > LAYERS) == (slack > 2 * ROW * new / WRITE)
    assert took_s == pytest.approx(READING.first_token_s(new, prefix, BY_LAYER), rel=0.01)


def test_decode_writes_whole_blocks():
    run = Run(128)
    run.copies.clear()
    for _ in range(130):
        run.run(1)
    run.transfers.settle()
    assert {c.route.name for c in run.copies} == {"out"}
    assert [c.copy_range.tokens for c in run.copies] == [64] * (2 * 2 * LAYERS)


def test_eviction_spares_own_rows_of_attended_layer(monkeypatch):
    dropped, rows = [], [BlockKey("mine", 3), BlockKey("mine", 2), BlockKey("other", 3)]
    monkeypatch.setitem(_make_room.__globals__, "_write", lambda it, home, blocks, after: [])
    iteration = SimpleNamespace(
        batch=["mine"],
        blocks_at=lambda tier: rows,
        free_bytes=lambda tier: 0,
        drop=lambda block, tier: dropped.append(block),
    )
    _make_room(iteration, DIRECT, 1, 3, [])
    assert dropped == rows[1:]
