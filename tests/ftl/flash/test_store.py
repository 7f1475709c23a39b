"""The flash store alone, with a table of page numbers: allocation, program failures, garbage collection, wear.

partner of: ftl/flash/plan.py, ftl/flash/references.py, ftl/flash/collect.py, ftl/flash/wear.py
"""

from dataclasses import replace

import numpy as np
import pytest

from csd_spec import Geometry
from ftl import FaultPlan, Nand, OutOfSpaceError, UncorrectableReadError
from ftl.flash import tag
from ftl.flash.collect import GarbageCollector
from ftl.flash.placement import Writer
from ftl.flash.plan import PagePlan
from ftl.flash.references import Reference, Referrer
from ftl.flash.store import FlashStore
from ftl.flash.wear import cold_blocks


class Table(Referrer):
    """Logical pages in a plain array; a journal that needs no pages."""

    def __init__(self, store):
        self.store, self.pages = store, np.full(200, 0xFFFFFFFF, np.uint32)
        self.writer = Writer(store.geometry.channels)
        self.writers = (self.writer,)
        self.records, self.lost = 0, []
        store.referrers.append(self)
        store.reclaim = GarbageCollector(store, self)

    def write(self, lpns, fill):
        lpns = np.array(lpns)
        (ppns,) = self.store.allocate([(self.writer, lpns)], 0)
        data = np.full((lpns.size, self.store.geometry.page_bytes), fill, np.uint8)
        self.store.program(self.writer, ppns, data, tag.block_tags(lpns), 0)
        old, self.pages[lpns] = self.pages[lpns].copy(), ppns
        self.store.placement.invalidate(old[old < 0xFFFFFFFF])
        self.store.counters.blocks += lpns.size

    def record(self, start_ns, everything):
        self.records += 1
        return start_ns

    def references(self, tags):
        yield Reference(self.pages, np.arange(tags.size), tag.logical_pages(tags))

    def lose(self, tags, for_good):
        self.lost += tag.logical_pages(tags).tolist()
        return self.lost


def test_collection_moves_only_valid_pages(small_drive):
    """Half of the pages never change: the others are written until the drive was filled five times."""
    store = FlashStore(small_drive)
    table = Table(store)
    table.write(range(200), 1)
    written, generator = 200, np.random.default_rng(0)
    while written < 5 * store.geometry.pages:
        some = np.unique(generator.integers(100, 200, 30))
        table.write(some, written % 251)
        np.testing.assert_array_equal(store.nand.content[table.pages[some]], written % 251)
        written += some.size
    assert (store.nand.content[table.pages[:100]] == 1).all()
    assert store.counters.moved > 0 and table.records > 0
    assert int(store.placement.valid.sum()) == 200
    assert np.unique(table.pages).size == 200


def test_collection_moves_mostly_valid_blocks_if_needed(small_drive):
    """Overwrites at random of a store that is two thirds full: hardly a block is less than a quarter valid."""
    store = FlashStore(small_drive)
    table = Table(store)
    table.pages = np.full(340, 0xFFFFFFFF, np.uint32)
    table.write(range(340), 1)
    generator = np.random.default_rng(0)
    for fill in range(2, 200):
        some = np.unique(generator.integers(0, 340, 5))
        table.write(some, fill)
        np.testing.assert_array_equal(store.nand.content[table.pages[some]], fill)
    assert store.counters.moved > 0 and int(store.placement.valid.sum()) == 340


def test_full_store_refuses_and_is_unchanged(small_drive):
    store = FlashStore(small_drive)
    table = Table(store)
    table.pages = np.full(4096, 0xFFFFFFFF, np.uint32)
    with pytest.raises(OutOfSpaceError, match="blocks left"):
        for first in range(0, 4096, 64):
            table.write(range(first, first + 64), first // 64)
    stored = table.pages[table.pages < 0xFFFFFFFF]
    assert stored.size == int(store.placement.valid.sum())
    assert store.placement.free_blocks >= store.reserve


def test_failed_programs_are_repeated_in_other_blocks(small_drive):
    store = FlashStore(small_drive, Nand(small_drive.geometry, FaultPlan(program_fail=0.05, seed=3)))
    table = Table(store)
    for fill in range(10):
        table.write(range(20), fill)
    assert store.nand.bad.any()
    assert (store.nand.content[table.pages[:20]] == 9).all()


def test_unreadable_page_is_reported_to_its_owner(small_drive):
    faults = FaultPlan(raw_bit_errors=0.2, ecc_bits=1, retry_bits=2)
    store = FlashStore(small_drive, Nand(small_drive.geometry, faults))
    table = Table(store)
    table.write([7, 9], 1)
    with pytest.raises(UncorrectableReadError):
        store.read(store.all_of(table.pages[[7, 9]]), 0)
    assert sorted(table.lost) == [7, 9] and store.counters.unrecovered == 2


def test_a_block_in_use_is_never_erased(small_drive):
    store = FlashStore(small_drive)
    table = Table(store)
    table.write([0], 1)
    with pytest.raises(AssertionError, match="still holds valid pages"):
        store.erase(int(store.nand.block_of(table.pages[:1])[0]), 0)


def test_wear_leveling_starts_at_its_limit(small_drive):
    store = FlashStore(small_drive)
    table = Table(store)
    table.write(range(200), 1)
    store.nand.erase_count[:] = 10
    worn_little = store.nand.block_of(table.pages[:8])
    store.nand.erase_count[worn_little] = 0
    store.counters.blocks = 0
    assert cold_blocks(store) == []
    store.counters.blocks = 1_000_000
    assert set(worn_little.tolist()) <= set(cold_blocks(store))


def test_part_of_plan_has_pages_of_its_streams():
    plan = PagePlan(np.arange(6, dtype=np.uint32), np.arange(6), 10 * np.arange(6), np.array([2, 2, 5, 6]))
    assert plan.part(2, 4).ppns.tolist() == [2, 3, 4, 5] and plan.part(2, 4).ends.tolist() == [3, 4]
    assert plan.part(1, 2).ppns.size == 0
    for first in range(5):
        for last in range(first, 5):
            part = plan.part(first, last)
            begins = [0, *plan.ends.tolist()]
            of_streams = slice(begins[first], begins[last])
            for name in ("ppns", "useful", "nbytes"):
                assert getattr(part, name).tolist() == getattr(plan, name)[of_streams].tolist()
            assert part.ends.tolist() == (plan.ends[first:last] - begins[first]).tolist()
    assert (plan.useful_bytes, plan.fetched_bytes) == (15, 150)
    whole = PagePlan.all_of(plan.ppns, 512)
    assert (whole.useful_bytes, whole.fetched_bytes, whole.ends.tolist()) == (6 * 512, 6 * 512, [6])
    odd = plan.only(plan.ppns % 2 == 1)
    assert odd.useful.tolist() == [1, 3, 5] and odd.nbytes.tolist() == [10, 30, 50]
    assert plan.only(plan.ppns < 9) is plan
    assert odd.ppns.tolist() == [1, 3, 5] and odd.ends.tolist() == [1, 1, 2, 3]


def test_gc_records_loss_before_moving(small_drive, monkeypatch):
    """Moved, a page that lost its content would look whole."""
    store = FlashStore(small_drive)
    table = Table(store)
    table.write(range(64), 1)
    block = store.nand.block_of(table.pages[:1])[0]
    seen, program = [], store.program
    monkeypatch.setattr(store, "find_lost", lambda ppns: [7])
    monkeypatch.setattr(table, "record", lambda start_ns, everything: seen.append(("record", everything)))
    monkeypatch.setattr(store, "program", lambda *arguments: (seen.append("move"), program(*arguments))[1])
    assert store.reclaim._move(int(block), store.reclaim.writer, 0) > 0
    assert seen == [("record", False), "move"]


def test_read_pages_in_from_medium(small_drive, monkeypatch):
    store = FlashStore(small_drive)
    table = Table(store)
    table.write(range(8), 1)
    plan = store.all_of(table.pages[:8])
    assert store.read(plan, 0) > 0
    monkeypatch.setattr(type(store.nand.page_store), "lazy", True)
    monkeypatch.setattr(store, "find_lost", lambda ppns: [7])
    with pytest.raises(UncorrectableReadError):
        store.read(plan, 0)


@pytest.mark.parametrize("places", [None, np.array([1, 3])])
def test_references_hold_and_move_pages_with_and_without_places(places):
    table, pages = np.array([7, 8, 9, 10], np.uint32), np.array([8, 99, 10], np.uint32)
    reference = Reference(table, np.array([0, 2]), places)
    assert reference.holds(pages).tolist() == [True, True]
    reference.move(pages, np.array([80, 81, 82], np.uint32))
    assert table.tolist() == [7, 80, 9, 82]
    assert not reference.holds(pages).any()


@pytest.mark.parametrize(("blocks_per_plane", "reserved"), [(64, 12), (8, 4)])
def test_a_small_array_reserves_an_eighth(small_drive, blocks_per_plane, reserved):
    """And a larger one an extent of a block a channel, for each of three writers."""
    geometry = Geometry(
        channels=4,
        dies_per_channel=1,
        planes_per_die=1,
        blocks_per_plane=blocks_per_plane,
        pages_per_block=16,
        page_bytes=4096,
    )
    store = FlashStore(replace(small_drive, geometry=geometry))
    assert (geometry.blocks, store.reserve) == (4 * blocks_per_plane, reserved)
