"""Groups of one head are striped over channels; a writer fills its own blocks, which are returned when empty."""

from dataclasses import replace

import numpy as np
import pytest

from csd_spec.presets import INSTCSD_ZYNQ7045_8CH as DRIVE
from ftl.errors import OutOfSpaceError
from ftl.flash.nand import Nand
from ftl.flash.placement import Placement, Writer


@pytest.fixture
def small(small_drive):
    return Placement(Nand(small_drive.geometry))


def allocate(placement, writer, starts, reserve=0):
    (ppns,) = placement.allocate([(writer, np.asarray(starts, np.int64))], reserve)
    return ppns


def test_groups_of_head_spread_evenly_over_channels():
    placement, writer = Placement(Nand(DRIVE.geometry, payload=False)), Writer(8)
    streams = np.arange(240, dtype=np.uint64)[:, None]
    ppns = [allocate(placement, writer, placement.starts(streams, np.array([[g]]), True).ravel()) for g in range(64)]
    channels = np.stack(ppns) % DRIVE.geometry.lanes % DRIVE.geometry.channels
    for stream in range(240):
        counts = np.bincount(channels[:, stream], minlength=8)
        assert counts.tolist() == [8] * 8


def test_streams_start_on_different_lanes():
    placement = Placement(Nand(DRIVE.geometry, payload=False))
    lanes = placement.starts(np.arange(256, dtype=np.uint64), np.zeros(256, np.int64), True) % 256
    assert np.bincount(lanes, minlength=256).max() <= 2


@pytest.mark.parametrize("channels", [8, 6])
def test_alternating_streams_fill_lanes_evenly(channels):
    geometry = replace(DRIVE.geometry, channels=channels)
    placement = Placement(Nand(geometry, payload=False))
    streams = np.arange(10 * geometry.lanes, dtype=np.uint64)
    lanes = placement.starts(streams, np.zeros(streams.size, np.int64), False) % geometry.lanes
    assert np.bincount(lanes, minlength=geometry.lanes).tolist() == [10] * geometry.lanes
    same_page_of_each_head = lanes[5::64]
    assert np.bincount(same_page_of_each_head).max() <= 2


def test_pages_of_a_block_come_in_program_order(small):
    ppns = allocate(small, Writer(2), np.zeros(40))
    assert len(np.unique(ppns)) == 40
    assert small.nand.program(np.sort(ppns), np.zeros((40, 512), np.uint8), ppns.astype(np.uint64)) == 40


def test_writers_do_not_share_blocks(small):
    first, second = (small.nand.block_of(allocate(small, Writer(2), np.arange(30))) for _ in range(2))
    assert not set(first.tolist()) & set(second.tolist())


def test_writer_stripes_follow_expected_pages(small):
    wide, narrow = Writer(2), Writer(2)
    wide.expected_pages, narrow.expected_pages = 32, 8
    allocate(small, wide, [0])
    allocate(small, narrow, [0])
    assert (wide.blocks.shape, narrow.blocks.shape) == ((2, 2), (1, 2))


def test_full_blocks_are_closed_before_an_extent_is_opened(small):
    writer, lanes = Writer(2), small.geometry.lanes
    for filled in range(1, 6):
        allocate(small, writer, np.arange(lanes * small.geometry.pages_per_block))
        allocate(small, writer, [0])
        assert len(small.open) == writer.blocks.size <= lanes, filled
        assert (small.claimed[writer.blocks] < small.geometry.pages_per_block).all()
        allocate(small, writer, np.arange(1, writer.blocks.size * small.geometry.pages_per_block))


def test_a_narrow_writer_has_one_block_of_each_channel(small):
    writer = Writer(2, narrow=True)
    ppns = allocate(small, writer, np.zeros(20))
    assert writer.blocks.shape == (1, 2)
    assert (ppns % small.geometry.channels == 0).all()


def test_out_of_space_changes_nothing(small):
    pages, writer = small.geometry.pages, Writer(2)
    allocate(small, writer, np.arange(5))
    before = small.claimed.copy(), small.valid.copy(), small.free_blocks, set(small.open), writer.blocks.tolist()
    small.nand.next_page[:] = small.claimed
    jobs = [(writer, np.arange(10)), (Writer(2), np.arange(pages))]
    with pytest.raises(OutOfSpaceError, match="blocks left"):
        small.allocate(jobs, 0)
    after = small.claimed.copy(), small.valid.copy(), small.free_blocks, set(small.open), writer.blocks.tolist()
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    assert (writer.written, jobs[1][0].written) == (5, 0)


def lending(placement, pages):
    """A writer that has filled a part of its only extent, and that lends it."""
    writer = Writer(2, lends=True)
    ppns = np.sort(allocate(placement, writer, np.arange(pages)))
    placement.nand.program(ppns, np.zeros((ppns.size, 512), np.uint8), ppns.astype(np.uint64))
    return writer


def fill(placement, left=0):
    """Take all free blocks but some for a writer that lends none."""
    taken = Writer(2)
    while placement.free_blocks - left >= 2:
        taken.blocks = np.zeros((0, 2), np.int64)
        allocate(placement, taken, [0, 1])


def test_full_placement_keeps_bad_blocks_sealed(small):
    """A bad block takes no more pages, also after an allocation that did not fit."""
    writer, g = Writer(2), small.geometry
    ppns = np.sort(allocate(small, writer, np.zeros(1)))
    small.nand.program(ppns, np.zeros((1, 512), np.uint8), ppns.astype(np.uint64))
    (block,) = small.nand.block_of(ppns).tolist()
    small.nand.bad[block] = 1
    small.seal(block)
    with pytest.raises(OutOfSpaceError):
        allocate(small, writer, np.zeros(g.pages), reserve=g.blocks // 2)
    assert block in writer.blocks
    assert block not in small.nand.block_of(allocate(small, writer, np.zeros(2 * g.pages_per_block)))


def test_take_over_fills_blocks_of_least_recently_used_writer(small):
    older, newer, wanting = lending(small, 3), lending(small, 5), Writer(2, lends=True)
    fill(small)
    blocks = older.blocks.ravel().tolist()
    with pytest.raises(OutOfSpaceError):
        small.allocate([(wanting, np.arange(2))], 0)
    (ppns,) = small.allocate([(wanting, np.arange(2))], 0, take_over=True)
    assert set(small.nand.block_of(ppns).tolist()) <= set(blocks)
    assert older.blocks.size == 0 and newer.blocks.size and wanting.blocks.ravel().tolist() == blocks
    assert set(blocks) <= small.open


def test_take_over_spares_free_blocks_reserve_and_other_writers(small):
    lender, wanting = lending(small, 3), Writer(2, lends=True)
    small.allocate([(wanting, np.arange(2))], 0, take_over=True)
    assert lender.blocks.size  # a free block is taken first
    fill(small, left=4)
    small.allocate([(Writer(2, lends=True), np.arange(2))], 4, take_over=True)
    assert small.free_blocks == 4


def test_take_over_that_does_not_suffice_changes_nothing(small):
    lender, wanting = lending(small, 3), Writer(2, lends=True)
    fill(small)
    blocks = lender.blocks.copy()
    small.nand.next_page[:] = small.claimed
    before = small.claimed.copy(), small.valid.copy(), set(small.open)
    with pytest.raises(OutOfSpaceError):
        small.allocate([(wanting, np.arange(small.geometry.pages))], 0, take_over=True)
    assert np.array_equal(lender.blocks, blocks) and wanting.blocks.size == 0
    assert all(np.array_equal(a, b) for a, b in zip(before, (small.claimed, small.valid), strict=False))
    assert small.open == before[2]
    small.allocate([(wanting, np.arange(2))], 0, take_over=True)  # it still lends


def test_closed_writer_lends_no_blocks(small):
    small.close(lending(small, 3))
    fill(small)
    with pytest.raises(OutOfSpaceError):
        small.allocate([(Writer(2, lends=True), np.arange(2))], 0, take_over=True)


def test_reserved_blocks_are_not_allocated(small):
    with pytest.raises(OutOfSpaceError):
        allocate(small, Writer(2), np.arange(small.geometry.pages), reserve=4)
    assert allocate(small, Writer(2), np.arange(small.geometry.pages)).size == small.geometry.pages


def test_freed_blocks_are_reused_least_worn_first(small):
    writer = Writer(2)
    ppns = allocate(small, writer, np.arange(small.geometry.pages))
    small.nand.program(np.sort(ppns), np.zeros((ppns.size, 512), np.uint8), np.sort(ppns).astype(np.uint64))
    small.close(writer)
    small.invalidate(ppns)
    assert len(small.erasable_blocks()) == small.geometry.blocks
    for block in small.erasable_blocks():
        small.nand.erase_count[block] = 9 if block // small.geometry.lanes != 3 else 1
        small.nand.erase(block)
        small.release(block)
    assert small.free_blocks == small.geometry.blocks
    assert (small.nand.block_of(allocate(small, Writer(2), [0, 1])) // small.geometry.lanes == 3).all()
