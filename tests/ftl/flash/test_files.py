"""The files of an array: they hold the complete array, and a flipped bit in them is detected.

partner of: ftl/flash/spare.py
"""

import errno
import random
import zlib

import numpy as np
import pytest

from csd_io.folder import DiskFolder
from ftl.errors import MediaFailedError
from ftl.flash.files import (
    BLOCKS,
    CONTENT,
    COPY,
    SPARES,
    NandFiles,
    clip_ranges,
    sizes,
    write_generation,
)
from ftl.flash.nand import Nand
from ftl.flash.spare import SPARE, build_spares, find_corrupt, keep_present_life, rows
from vcsd_eval.verify.simulation.disk import SimDisk


@pytest.fixture
def folder(small_drive, tmp_path):
    folder = DiskFolder(tmp_path)
    NandFiles.make(folder, small_drive.geometry)
    return folder


@pytest.fixture
def written(small_drive, folder):
    """An array with a block that was erased, one in its second life, and pages of others."""
    nand, lanes = Nand(small_drive.geometry, folder=folder), small_drive.geometry.lanes
    for ppns in ([0, 1, 2, lanes, 2 * lanes], [3]):
        program(nand, *ppns)
    nand.erase(0)
    nand.erase(1)
    program(nand, 1, 3 + lanes)
    return nand


def program(nand, *ppns):
    ppns = np.array(ppns, np.uint32)
    data = np.random.default_rng(ppns[0]).integers(0, 255, (ppns.size, nand.geometry.page_bytes), dtype=np.uint8)
    nand.program(ppns, data, ppns.astype(np.uint64) + 7)


def opened(nand, tmp_path, private=True):
    return Nand(nand.geometry, folder=DiskFolder(tmp_path, writable=not private), private=private)


def same(one, other):
    pages = one.programmed()
    np.testing.assert_array_equal(pages, other.programmed())
    for name in ("tags", "write_numbers", "content"):
        np.testing.assert_array_equal(getattr(one, name)[pages], getattr(other, name)[pages], err_msg=name)
    np.testing.assert_array_equal(one.erase_count, other.erase_count)
    np.testing.assert_array_equal(one.bad, other.bad)
    return other.intact(pages).all()


def test_array_reopens_from_files(written, tmp_path):
    again = opened(written, tmp_path)
    assert same(written, again)
    assert again.writes == written.writes and not again.damage.corrected


@pytest.mark.parametrize("name", [CONTENT, SPARES, COPY, BLOCKS])
def test_every_flipped_bit_is_corrected_or_harmless(written, tmp_path, name):
    file, size = tmp_path / name, sizes(written.geometry)[name]
    outcomes = set()
    for bit in np.random.default_rng(0).integers(0, 8 * size, 150).tolist():
        raw = file.read_bytes()
        file.write_bytes(raw[: bit // 8] + bytes([raw[bit // 8] ^ 1 << bit % 8]) + raw[bit // 8 + 1 :])
        again = opened(written, tmp_path)
        assert same(written, again)
        outcomes.add(again.damage.corrected)
        file.write_bytes(raw)
    assert outcomes == {0} if name == COPY else 1 in outcomes and outcomes <= {0, 1}


def test_corrected_spare_area_is_written_back(written, tmp_path):
    raw = (tmp_path / SPARES).read_bytes()
    (tmp_path / SPARES).write_bytes(raw[:40] + bytes([raw[40] ^ 8]) + raw[41:])
    assert opened(written, tmp_path, private=False).damage.corrected == 1
    assert (tmp_path / SPARES).read_bytes() == raw


def test_seals_are_the_crc_of_zlib():
    generator = np.random.default_rng(0)
    pages = generator.integers(0, 255, (40, 512), dtype=np.uint8)
    tags, numbers = generator.integers(0, 1 << 63, (2, 40), dtype=np.uint64)
    spare = build_spares(pages, tags, numbers, np.arange(40))
    assert spare["seal"].tolist() == [zlib.crc32(area[:28].tobytes()) for area in rows(spare)]
    assert spare["crc"].tolist() == [zlib.crc32(page) for page in pages]
    assert not find_corrupt(spare).size
    rows(spare)[5:40:7, 3] ^= 1
    spare[0] = 0
    assert find_corrupt(spare).tolist() == list(range(5, 40, 7))  # erased pages have no seal


def test_pages_of_earlier_generations_are_erased():
    lanes, spare = 4, np.zeros(32, SPARE)
    spare["life"][:16], spare["write_number"][:16] = 1, np.arange(1, 17)
    spare["life"][[1, 5]], spare["life"][3] = 3, 0  # lane 1 in its third life, a page of lane 3 before its second
    before, lives, next_page = spare.copy(), np.array([1, 2, 5, 0], np.int32), np.full(lanes, 7, np.int32)
    assert keep_present_life(spare, [26, 3], lives, next_page) == 16
    assert (lives.tolist(), next_page.tolist()) == ([1, 3, 5, 1], [4, 2, 7, 4])  # lane 2: its last page is lost
    programmed = np.flatnonzero(spare["write_number"])
    assert programmed.tolist() == [0, 1, 4, 5, 7, 8, 11, 12, 15]
    assert (spare[programmed] == before[programmed]).all() and not rows(spare)[
        np.setdiff1d(np.arange(32), programmed)
    ].any()


def test_ranges_are_clipped_to_part():
    ranges = [(0, 10), (12, 20), (35, 90)]
    assert [clip_ranges(ranges, first, 20) for first in (0, 20, 40, 90)] == [
        [(0, 10), (12, 20)],
        [(35, 40)],
        [(40, 60)],
        [],
    ]
    assert clip_ranges(ranges, 10, 2) == clip_ranges([], 0, 5) == []


def test_programmed_ranges_are_listed_by_block(small_drive):
    nand, g = Nand(small_drive.geometry), small_drive.geometry
    program(nand, 0, 1, g.lanes, g.lanes + 1, 2 * g.lanes, g.superblock_pages + 2)
    assert nand.programmed().tolist() == [0, g.lanes, 2 * g.lanes, 1, g.lanes + 1, g.superblock_pages + 2]


def test_damaged_pages_and_spare_areas_are_reported(written, tmp_path):
    with (tmp_path / CONTENT).open("r+b") as file:
        file.seek(2 * written.geometry.page_bytes)
        file.write(b"garbage")
    again = opened(written, tmp_path)
    assert (again.damage.pages, again.tags[2]) == ({2}, 9)
    for name in (SPARES, COPY):
        again = opened(written, tmp_path)
        assert (again.damage.spares, again.tags[3]) == (set(), 10)  # one of its two places will do
        with (tmp_path / name).open("r+b") as file:
            file.seek(3 * 32)
            file.write(b"garbage")
    again = opened(written, tmp_path)
    assert again.damage.spares == {3}
    assert again.next_page[3] == 2  # it is not programmed again


def test_a_missing_or_cut_file_is_named(written, tmp_path):
    (tmp_path / SPARES).write_bytes((tmp_path / SPARES).read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"spare.bin: has 20,479 bytes instead of 20,480: vcsd drive fsck"):
        opened(written, tmp_path, private=False)
    (tmp_path / CONTENT).unlink()
    assert len(opened(written, tmp_path).damage.files) == 2  # a reader sees the remaining files
    with pytest.raises(ValueError, match=r"content.bin is missing"):
        opened(written, tmp_path, private=False)


def test_power_loss_in_generation_update_keeps_files(small_drive):
    """Power may be lost right after the generation advances for the first record."""
    for seed in range(200):
        disk = SimDisk("drive", "host", random.Random(seed))
        NandFiles.make(disk, small_drive.geometry)
        generation, size = NandFiles(disk, small_drive.geometry).generation, sizes(small_drive.geometry)[CONTENT]
        write_generation(disk.open(CONTENT, 0), size, generation + 1)
        disk.sync()
        Nand(small_drive.geometry, folder=disk).advance_generation()
        disk.lose_power()
        NandFiles(disk, small_drive.geometry)


def test_failed_disk_refuses_all_further_writes(small_drive, tmp_path, folder):
    nand = Nand(small_drive.geometry, folder=folder)
    program(nand, 0)

    def full(offset, data):
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / CONTENT))

    nand._files.content.write = full
    with pytest.raises(MediaFailedError, match=r"content.bin: No space left on device; flushed data is safe"):
        program(nand, 1)
    with pytest.raises(MediaFailedError):
        nand.erase(0)


def test_erased_blocks_free_disk_space(small_drive, tmp_path, folder):
    nand, g = Nand(small_drive.geometry, folder=folder), small_drive.geometry
    for superblock in range(12):
        program(nand, *(superblock * g.superblock_pages + np.arange(g.superblock_pages)))
    before = (tmp_path / CONTENT).stat().st_blocks
    for block in range(11 * g.lanes):
        nand.erase(block)
    program(nand, 0)
    assert (tmp_path / CONTENT).stat().st_blocks < before / 3
