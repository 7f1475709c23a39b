"""The block namespace: an ordinary drive next to the KV groups."""

from dataclasses import replace

import numpy as np
import pytest

from csd_spec import LAYOUTS
from ftl import Ftl, FtlError, OutOfSpaceError, UncorrectableReadError
from ftl.flash.nand import Nand
from ftl.flash.placement import Writer


def test_random_overwrites_survive_restart(small_drive):
    ftl, generator = Ftl(small_drive), np.random.default_rng(0)
    ftl.blocks.resize(60)
    content = np.zeros((60, small_drive.geometry.page_bytes), np.uint8)
    for _ in range(400):
        lpns = generator.choice(60, 5, replace=False)
        data = generator.integers(0, 256, (5, content.shape[1]), dtype=np.uint8)
        ftl.blocks.write(lpns, data, 0)
        content[lpns] = data
    assert ftl.nand.erase_count.sum() > 0
    np.testing.assert_array_equal(ftl.blocks.read(np.arange(60), 0)[0], content)
    ftl.flush(0)
    ftl.nand.power_on()
    np.testing.assert_array_equal(Ftl(small_drive, ftl.nand).blocks.read(np.arange(60), 0)[0], content)


def test_overwrites_continue_if_sequences_fill_drive(small_drive):
    ftl, generator, page = Ftl(small_drive), np.random.default_rng(1), small_drive.geometry.page_bytes
    ftl.blocks.resize(100)
    content = generator.integers(0, 256, (60, page), dtype=np.uint8)
    ftl.blocks.write(np.arange(60), content, 0)
    (handle,) = ftl.create(1, 1, 1, LAYOUTS["fp16"].paged(page, 16, 8))
    kv = generator.standard_normal((64, 1, 16)).astype(np.float16)
    with pytest.raises(OutOfSpaceError):
        while True:
            ftl.append([handle], 0, np.array([64]), kv, kv, 0)
    for _ in range(1000):
        lpns = generator.choice(60, 3, replace=False)
        content[lpns] = generator.integers(0, 256, (3, page), dtype=np.uint8)
        ftl.blocks.write(lpns, content[lpns], 0)
    with pytest.raises(OutOfSpaceError):
        for lpn in range(60, 100):
            ftl.blocks.write(np.array([lpn]), content[:1], 0)
    assert ftl.nand.erase_count.sum() > 0
    np.testing.assert_array_equal(ftl.blocks.read(np.arange(60), 0)[0], content)
    stored, _, _ = ftl.read_back(handle, 0)
    np.testing.assert_array_equal(stored, np.tile(kv, (len(stored) // 64, 1, 1)))


def test_repeated_overwrites_take_no_more_space(small_drive):
    ftl, data = Ftl(small_drive), np.ones((1, small_drive.geometry.page_bytes), np.uint8)
    ftl.blocks.resize(10)
    for _ in range(2000):
        ftl.blocks.write(np.array([3]), data, 0)
    assert len(ftl.placement.open) <= 2 * small_drive.geometry.lanes


def test_grown_namespace_survives_restart(small_drive):
    ftl = Ftl(small_drive)
    ftl.flush(0)
    ftl.blocks.resize(10)
    data = np.full((1, small_drive.geometry.page_bytes), 7, np.uint8)
    ftl.blocks.write(np.array([9]), data, 0)
    ftl.flush(0)
    ftl.nand.power_on()
    np.testing.assert_array_equal(Ftl(small_drive, ftl.nand).blocks.read(np.array([9]), 0)[0], data)


def test_unwritten_pages_read_zero_at_no_cost(small_drive):
    ftl = Ftl(small_drive)
    ftl.blocks.resize(10)
    data, finish_ns = ftl.blocks.read(np.arange(10), 7)
    assert not data.any()
    assert finish_ns == 7


def test_addresses_beyond_the_namespace_are_refused(small_drive):
    ftl = Ftl(small_drive)
    ftl.blocks.resize(10)
    with pytest.raises(FtlError, match="has 10"):
        ftl.blocks.read(np.array([10]), 0)
    with pytest.raises(FtlError, match="only grow"):
        ftl.blocks.resize(5)


def test_flushed_overwrite_never_silently_older(small_drive):
    ftl, page = Ftl(small_drive), np.ones((1, small_drive.geometry.page_bytes), np.uint8)
    ftl.blocks.resize(8)
    for value in (1, 2):
        ftl.blocks.write(np.array([3]), page * value, 0)
        ftl.flush(0)
    ftl.nand.content[ftl.blocks.map[3], :9] ^= 3  # beyond correction
    ftl.nand.power_on()
    again = Ftl(small_drive, ftl.nand)
    assert again.findings == ("block namespace: logical page 3 cannot be read",)
    with pytest.raises(UncorrectableReadError, match="logical page 3"):
        again.blocks.read(np.array([3]), 0)
    again.blocks.write(np.array([3]), page * 4, 0)
    assert (again.blocks.read(np.array([3]), 0)[0] == 4).all()


def numbered(drive, *values):
    """Pages that are full of a value each."""
    return np.repeat(np.array(values, np.uint8)[:, None], drive.geometry.page_bytes, axis=1)


def firsts(ftl):
    """The first byte of each logical page."""
    return ftl.blocks.read(np.arange(ftl.blocks.pages), 0)[0][:, 0].tolist()


def test_discarded_pages_read_as_zeros(small_drive):
    ftl = Ftl(small_drive)
    ftl.blocks.resize(6)
    ftl.blocks.write(np.arange(6), numbered(small_drive, 1, 2, 3, 4, 5, 6), 0)
    ftl.flush(0)
    ftl.blocks.discard(1, 3)
    assert firsts(ftl) == [1, 0, 0, 0, 5, 6] and ftl.blocks.mapped == 3
    ftl.flush(0)
    ftl.blocks.write(np.array([2]), numbered(small_drive, 7), 0)
    ftl.flush(0)
    for _ in range(2):  # a second power-on: the records of the first one must give the same state
        ftl.nand.power_on()
        ftl = Ftl(small_drive, ftl.nand)
        assert firsts(ftl) == [1, 0, 7, 0, 5, 6] and ftl.findings == ()
        assert ftl.blocks.mapped == 4
        ftl.flush(0)


def test_power_loss_undoes_only_unflushed_discards(small_drive):
    ftl = Ftl(small_drive)
    ftl.blocks.resize(4)
    for value in (1, 2):
        ftl.blocks.write(np.arange(4), numbered(small_drive, *[value] * 4), 0)
        ftl.flush(0)
    ftl.blocks.discard(0, 4)
    ftl.nand.power_on()
    assert firsts(Ftl(small_drive, ftl.nand)) == [2] * 4


def test_torn_write_does_not_undo_earlier_discard(small_drive):
    ftl = Ftl(small_drive)
    ftl.blocks.resize(4)
    ftl.blocks.write(np.arange(4), numbered(small_drive, 1, 1, 1, 1), 0)
    ftl.blocks.discard(0, 4)
    ftl.flush(0)
    ftl.blocks.write(np.array([2]), numbered(small_drive, 9), 0)
    ftl.nand.content[ftl.blocks.map[2], 100:] ^= 0xFF
    ftl.nand.power_on()
    assert firsts(Ftl(small_drive, ftl.nand)) == [0] * 4


def test_discarded_pages_free_space(small_drive):
    ftl, count = Ftl(small_drive), 300
    ftl.blocks.resize(count)
    for value in range(1, 8):
        ftl.blocks.write(np.arange(count), numbered(small_drive, *[value] * count), 0)
        ftl.blocks.discard(0, count)
    assert ftl.counters.moved == ftl.counters.levelled, "garbage in whole blocks"
    assert not any(firsts(ftl))


def test_discard_clears_lost_page(small_drive):
    ftl = Ftl(small_drive)
    ftl.blocks.resize(4)
    ftl.blocks.write(np.array([3]), numbered(small_drive, 1), 0)
    ftl.flush(0)
    ftl.nand.content[ftl.blocks.map[3], :9] ^= 3
    ftl.nand.power_on()
    again = Ftl(small_drive, ftl.nand)
    assert again.blocks.lost == {3}
    again.blocks.discard(0, 4)
    assert firsts(again) == [0] * 4
    again.flush(0)
    again.nand.power_on()
    last = Ftl(small_drive, again.nand)
    assert firsts(last) == [0] * 4 and last.findings == ()


def test_a_discard_beyond_the_namespace_is_refused(small_drive):
    ftl = Ftl(small_drive)
    ftl.blocks.resize(4)
    with pytest.raises(FtlError, match="has 4"):
        ftl.blocks.discard(2, 3)


def test_blocks_for_overwrites_grow_with_the_mapped_pages(small_drive):
    """Four of each channel, and one for each extent's worth of pages twice."""
    ftl = Ftl(small_drive)
    ftl.blocks.resize(100)
    assert ftl.blocks.overwrite_blocks() == 0
    for mapped, blocks in ((1, 8), (31, 8), (32, 9), (64, 10), (100, 11)):
        ftl.blocks.mapped = mapped
        assert ftl.blocks.overwrite_blocks() == blocks


def test_single_page_read_equals_batched_read(small_drive):
    ftl, other = (Ftl(small_drive) for _ in range(2))
    page = np.arange(small_drive.geometry.page_bytes, dtype=np.uint32).astype(np.uint8)
    for drive in (ftl, other):
        drive.blocks.resize(8)
        drive.blocks.write(np.array([3]), page[None], 0)
    now_ns = ftl.timing.idle_ns()
    for lpn in (3, 4):
        data, finish_ns = other.blocks.read(np.array([lpn]), now_ns)
        assert ftl.blocks.read_page(lpn, now_ns) == (data[0].tobytes(), finish_ns)


def test_writer_shares_no_block_with_another(small_drive):
    ftl, data = Ftl(small_drive), np.ones((1, small_drive.geometry.page_bytes), np.uint8)
    ftl.blocks.resize(40)
    handles = [Writer(small_drive.geometry.channels) for _ in range(2)]
    for lpn in range(40):
        ftl.blocks.write(np.array([lpn]), data, 0, handles[lpn % 2])
    even, odd = (set(ftl.nand.block_of(ftl.blocks.map[start::2]).tolist()) for start in range(2))
    assert even.isdisjoint(odd)


def test_full_drive_keeps_blocks_for_second_record(small_drive):
    """Journal extents take a block of each channel then, and not all lanes for bandwidth."""
    geometry = replace(small_drive.geometry, channels=8, dies_per_channel=4, planes_per_die=2, blocks_per_plane=64)
    ftl = Ftl(replace(small_drive, geometry=geometry, dram_bytes=1 << 20), Nand(geometry, payload=False))
    generator = np.random.default_rng(0)
    objects, pages = 32, geometry.pages // 41  # 28 % over-provisioning
    ftl.blocks.resize(objects * pages)
    for number in (*range(objects), *generator.integers(0, objects, 4 * objects)):
        ftl.blocks.write(np.arange(number * pages, (number + 1) * pages), None, 0)
    assert ftl.counters.journal > 0


def test_collection_leaves_blocks_for_both_journal_copies(small_drive):
    """No block is erased without a record: a drive whose garbage collection took the last blocks could not continue."""
    ftl, channels = Ftl(small_drive, Nand(small_drive.geometry, payload=False)), small_drive.geometry.channels
    ftl.blocks.resize(40)
    ftl.blocks.write(np.arange(40), None, 0)
    other = Writer(channels)
    while ftl.placement.free_blocks > 2 * channels:
        ftl.placement.allocate([(other, np.arange(8))], 0)
    block = int(ftl.nand.block_of(ftl.blocks.map[:1])[0])
    with pytest.raises(OutOfSpaceError):
        ftl.collector._move(block, ftl.collector.writer, 0)
    assert ftl.placement.free_blocks == 2 * channels
