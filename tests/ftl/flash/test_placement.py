"""Groups of one head are striped over channels; a writer fills its own blocks, which are returned when empty."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csd_spec.presets import INSTCSD_ZYNQ7045_8CH as DRIVE
from csd_spec.view import UNMAPPED
from ftl.errors import OutOfSpaceError, ReadOnlyError
from ftl.flash import placement as placement_module
from ftl.flash.nand import Nand
from ftl.flash.placement import Placement, Writer
from tests.properties import examples

SMALL = replace(
    DRIVE.geometry,
    channels=2,
    dies_per_channel=2,
    planes_per_die=1,
    blocks_per_plane=16,
    pages_per_block=8,
    page_bytes=512,
)
WIDE = replace(SMALL, dies_per_channel=4, blocks_per_plane=64)  # extents of up to 4 rows of 2 blocks, 16 pages a row


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


@settings(max_examples=examples(40))
@given(st.integers(0, 1 << 32), st.integers(0, 16))
def test_unused_blocks_are_taken_first_then_least_worn(seed, used):
    """At power-on: no bad block, and none with pages."""
    nand, generator = Nand(SMALL, payload=False), np.random.default_rng(seed)
    nand.erase_count[: 4 * used] = generator.integers(0, 4, 4 * used)
    nand.next_page[: 4 * used] = generator.integers(-4, 4, 4 * used).clip(0)
    nand.bad[:] = generator.random(64) < 0.2
    placement = Placement(nand)
    touched = np.flatnonzero((nand.next_page > 0) | (nand.erase_count > 0))
    rows = touched[-1] // 4 + 1 if touched.size else 0
    empty = [block for block in range(64) if not nand.next_page[block] and not nand.bad[block]]
    assert placement.free_blocks == len(empty)
    for lane in range(4):
        of_lane = [block for block in empty if block % 4 == lane]
        worn = sorted(
            (block for block in of_lane if block // 4 < rows), key=lambda block: (nand.erase_count[block], block)
        )
        assert [placement._take(lane) for _ in of_lane] == [block for block in of_lane if block // 4 >= rows] + worn
        with pytest.raises(AssertionError):
            placement._take(lane)
    assert placement.free_blocks == 0


def worn(*counts, lane=0):
    """A placement on an array whose blocks were all erased once, but the first ones of a lane more often."""
    nand = Nand(SMALL, payload=False)
    nand.erase_count[:] = 1
    nand.erase_count[lane :: SMALL.lanes][: len(counts)] = counts
    return Placement(nand)


def test_cold_data_takes_the_most_worn_blocks_but_for_the_very_most():
    """These wait until there are no others."""
    placement = worn(3, 9, 5, 9, 7)
    rows = [placement._take(0, worn=True) // 4 for _ in range(16)]
    assert rows == [4, 2, 0, *range(15, 4, -1), 1, 3]
    placement = worn(3, 9, 5, 9, 7)
    assert [placement._take(0, worn=each) // 4 for each in (True, False, True, False)] == [4, 5, 2, 6]


@pytest.mark.parametrize(
    ("rows", "pages", "writer"),
    [
        (1, 1, {}),
        (1, 16, {}),
        (2, 17, {}),
        (4, 64, {}),
        (4, 65, {}),
        (1, 1, {"expected_pages": 16}),
        (3, 1, {"expected_pages": 33}),
        (1, 1, {"expected_pages": 40, "written": 24}),
        (2, 1, {"expected_pages": 41, "written": 24}),
        (1, 1, {"written": 1000}),
        (1, 1, {"written": 67, "growth": 4}),
        (2, 1, {"written": 68, "growth": 4}),
        (1, 64, {"narrow": True}),
    ],
)
def test_extent_is_as_wide_as_the_pages_expected(monkeypatch, rows, pages, writer):
    monkeypatch.setattr(placement_module, "OPEN_SHARE", 1 << 20)
    placement, asked = Placement(Nand(WIDE, payload=False)), Writer(2)
    for name, value in writer.items():
        setattr(asked, name, value)
    assert placement._open_extent(asked, pages, 0).shape == (rows, 2)


def test_extents_are_wide_while_few_blocks_are_open():
    placement, writers = Placement(Nand(WIDE, payload=False)), [Writer(2) for _ in range(6)]
    for writer in writers:
        allocate(placement, writer, [0])
    assert [len(writer.blocks) for writer in writers] == [4, 4, 4, 4, 1, 1], "up to 1/16 of all blocks"
    narrow = Writer(2, narrow=True)
    allocate(Placement(Nand(WIDE, payload=False)), narrow, [0])
    assert len(narrow.blocks) == 1


@pytest.mark.parametrize(("left", "rows"), [(8, 4), (7, 3), (5, 2), (3, 1), (2, 1)])
def test_extent_leaves_the_reserve(left, rows):
    placement, writer = Placement(Nand(WIDE, payload=False)), Writer(2)
    blocks = placement._open_extent(writer, 64, placement.free_blocks - left)
    assert blocks.shape == (rows, 2)
    assert (blocks % WIDE.lanes % 2 == [0, 1]).all() and np.unique(blocks).size == blocks.size
    assert placement.open == set(blocks.ravel().tolist())
    for reserve in (placement.free_blocks - 1, placement.free_blocks):
        with pytest.raises(OutOfSpaceError):
            placement._open_extent(writer, 1, reserve)


def test_extent_takes_least_worn_lanes_and_of_equal_ones_those_with_most_free_blocks():
    nand = Nand(SMALL, payload=False)
    for lane, count in enumerate((5, 4, 3, 4)):
        nand.erase_count[lane::4] = count
    nand.bad[1] = 1
    placement, narrow = Placement(nand), Writer(2, narrow=True)
    assert (placement._open_extent(narrow, 1, 0) % 4).tolist() == [[2, 3]]
    nand.erase_count[0] = 0
    assert (Placement(nand)._open_extent(narrow, 1, 0) % 4).tolist() == [[0, 3]]


def test_extent_uses_other_channels_if_one_has_no_free_block(small):
    for lane in (0, 2):
        while small._free[lane]:
            small._take(lane)
    blocks = small._open_extent(Writer(2), 64, 0)
    assert blocks.shape == (1, 2) and sorted((blocks % 4).ravel()) == [1, 3]


def test_narrow_writer_replaces_the_full_block_alone():
    placement = worn(5, 6, 7, 1, 1, lane=2)
    writer = Writer(2, narrow=True, worn_blocks=True)
    allocate(placement, writer, [0] * 8 + [1])
    before = writer.blocks.copy()
    with pytest.raises(OutOfSpaceError):
        allocate(placement, writer, [0], reserve=placement.free_blocks)
    np.testing.assert_array_equal(writer.blocks, before)
    free = placement.free_blocks
    allocate(placement, writer, [0], reserve=free - 1)
    assert placement.free_blocks == free - 1
    assert writer.blocks[0, 1] == before[0, 1] and writer.blocks[0, 0] != before[0, 0]
    assert writer.blocks[0, 0] % 2 == 0 and placement.open == set(writer.blocks.ravel().tolist())


def test_narrow_writer_takes_another_channel_if_its_own_is_full(small):
    writer = Writer(2, narrow=True)
    allocate(small, writer, [0] * 8)
    for lane in (0, 2):
        while small._free[lane]:
            small._take(lane)
    allocate(small, writer, [0])
    assert writer.blocks[0, 0] % 2 == 1


def program(placement, ppns):
    ppns = np.sort(ppns)
    placement.nand.program(ppns, np.zeros((ppns.size, 512), np.uint8), ppns.astype(np.uint64))


def test_closed_writer_returns_blocks_that_it_has_not_programmed(small):
    writer, free = Writer(2), small.free_blocks
    ppns = allocate(small, writer, [0])
    assert small.free_blocks == free - 4
    program(small, ppns)
    small.close(writer)
    assert (small.free_blocks, small.open, writer.blocks.size) == (free - 1, set(), 0)


def test_pages_of_an_allocation_that_is_undone_are_allocated_again(small):
    writer = Writer(2)
    first, more = allocate(small, writer, np.arange(4)), allocate(small, writer, np.arange(8))
    program(small, first)
    block = int(small.nand.block_of(first)[0])
    small.nand.bad[block] = 1
    small.seal(block)
    small.undo_allocation(np.append(more, UNMAPPED))
    assert small.valid.sum() == 4 and small.claimed[block] == 8, "a bad block stays closed"
    others = np.setdiff1d(small.nand.block_of(first), block)
    assert (small.claimed[others] == 1).all()


def test_blocks_of_a_channel_are_sealed_if_they_have_pages(small):
    writer = Writer(2)
    program(small, allocate(small, writer, [0, 1]))
    small.seal_open_blocks(writer, 1)
    sealed = small.claimed == small.geometry.pages_per_block
    assert np.flatnonzero(sealed).tolist() == [block for block in writer.blocks[:, 1] if small.nand.next_page[block]]
    assert sealed.sum() == 1


def test_victims_are_closed_blocks_with_fewest_valid_pages(small):
    writer = Writer(2)
    ppns = allocate(small, writer, np.arange(4 * 8))
    program(small, ppns)
    blocks = small.nand.block_of(ppns)
    assert small.gc_victims(9) == [] == small.erasable_blocks()
    small.close(writer)
    by_block = {int(block): ppns[blocks == block] for block in np.unique(blocks)}
    for count, (block, mine) in zip((1, 8, 0, 3), sorted(by_block.items()), strict=True):
        small.invalidate(mine[:count])
        assert small.valid[block] == 8 - count
    one, two, _, four = sorted(by_block)
    assert small.gc_victims(9) == [two, four, one] and small.gc_victims(2) == [two, four]
    assert small.erasable_blocks() == [two]
    small.open.add(two)
    assert small.erasable_blocks() == [] and small.gc_victims(9) == [four, one]


@pytest.mark.parametrize(
    ("geometry", "bad"), [(SMALL, 32), (replace(SMALL, channels=8, dies_per_channel=1, blocks_per_plane=5), 8)]
)
def test_drive_is_alive_with_half_of_its_blocks_and_four_of_each_channel(geometry, bad):
    placement = Placement(Nand(geometry, payload=False))
    placement.nand.bad_blocks = bad
    placement.check_alive()
    placement.nand.bad_blocks = bad + 1
    assert not placement.alive
    with pytest.raises(ReadOnlyError):
        placement.check_alive()
