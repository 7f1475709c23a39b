"""Tutti's order of reads, computing and writes, in modelled time against its closed form."""

from types import SimpleNamespace

import pytest

from eval.papers.profiles import Model
from eval.papers.tutti import reading
from residency import DEVICE, DIRECT, Link, Machine, Path, Place, Residency
from residency.modelled.executor import Modelled, Work
from residency.policies.preload import preload
from residency.policies.tutti import _make_room, tutti
from residency.table import Extent

READ, WRITE = 25.9e9, 9.8e9
READING = reading.Reading(Model.load("llama-3-8b"), 384e12, 8e-3)
WHOLE, BY_LAYER = reading.Path(READ), reading.Path(READ, layered=True)
LAYERS = READING.model.layers
ROW = READING.model.shape.kv_bytes_per_token // LAYERS // 2
MACHINE = Machine.of(
    [Place(DEVICE, 80 << 30, attends=True), Place(DIRECT)],
    [Link("read", READ), Link("write", WRITE)],
    {(DIRECT, DEVICE): Path("in", ("read",)), (DEVICE, DIRECT): Path("out", ("write",))},
)


class Run:
    """A document that is stored, and prompts behind it. copies: all that were begun."""

    def __init__(self, prefix: int) -> None:
        self.executor, self.layer_ns = Modelled(MACHINE, lambda attention: Work(self.layer_ns)), 1000
        self.run = Residency(MACHINE, range(LAYERS), tutti, self.executor)
        self.copies, begin = [], self.executor.begin

        def noted(*asked):
            self.copies.append(begin(*asked))
            return self.copies[-1]

        self.executor.begin = noted
        self.prefix = prefix
        self.turn(prefix)
        self.executor.settle()

    def turn(self, new: int) -> float:
        """Seconds of a turn."""
        began_ns = self.executor.now_ns
        self.run.turn({"r": new}, {"r": ROW})
        return (self.executor.now_ns - began_ns) / 1e9

    def forget(self, new: int) -> None:
        """The device has nothing any more, and the disk only the document."""
        self.executor.settle()
        for extent in list(self.run.table.entries):
            self.run.crop(extent, self.prefix)
            self.run.table.drop(extent, DEVICE)
        self.copies.clear()
        self.layer_ns = round(READING.compute_s(new, self.prefix) / LAYERS * 1e9)


@pytest.mark.parametrize(("new", "prefix"), [(4096, 61440), (512, 32768), (16384, 49152)])
def test_layers_come_as_the_closed_form_says(new, prefix):
    run = Run(prefix)
    for policy, path in ((tutti, BY_LAYER), (preload, WHOLE)):
        run.forget(new)
        run.run.policy = policy
        assert run.turn(new) == pytest.approx(READING.first_token_s(new, prefix, path), rel=0.01)


@pytest.mark.parametrize(("new", "prefix"), [(16384, 8192), (512, 32768)])
def test_an_ssd_never_reads_beside_writes(new, prefix):
    run = Run(prefix)
    for _ in range(2):  # the second knows how long a layer takes
        run.forget(new)
        took_s = run.turn(new)
        run.executor.settle()
    reads, writes = ([c for c in run.copies if c.path.name == name] for name in ("in", "out"))
    assert len(reads) == len(writes) == 2 * LAYERS
    together = [(r, w) for r in reads for w in writes if r.began_ns < w.ended_ns and w.began_ns < r.ended_ns]
    assert not together
    beside = sum(w.ended_ns < run.executor.now_ns for w in writes)
    slack = READING.compute_s(new, prefix) / LAYERS - READING.load_s(prefix, BY_LAYER) / LAYERS
    assert (beside > LAYERS) == (slack > 2 * ROW * new / WRITE)
    assert took_s == pytest.approx(READING.first_token_s(new, prefix, BY_LAYER), rel=0.01)


def test_in_decode_whole_blocks_are_written():
    run = Run(128)
    run.copies.clear()
    for _ in range(130):
        run.turn(1)
    run.executor.settle()
    assert {c.path.name for c in run.copies} == {"out"}
    assert [c.transfer.tokens for c in run.copies] == [64] * (2 * 2 * LAYERS)


def test_of_the_layer_that_is_attended_only_rows_of_others_leave(monkeypatch):
    dropped, rows = [], [Extent("mine", 3), Extent("mine", 2), Extent("other", 3)]
    monkeypatch.setitem(_make_room.__globals__, "_write", lambda t, home, extents, after: [])
    turn = SimpleNamespace(
        batch=["mine"],
        held=lambda place: rows,
        room=lambda place: 0,
        drop=lambda extent, place: dropped.append(extent),
    )
    _make_room(turn, DIRECT, 1, 3, [])
    assert dropped == rows[1:]
