"""Violations of the NAND rules raise errors.

partner of: ftl/flash/operations.py, ftl/flash/program_order.py
"""

from contextlib import closing

import numpy as np
import pytest

from csd_io.folder import DiskFolder
from ftl.errors import NandRuleError
from ftl.flash.nand import Nand


@pytest.fixture
def nand(small_drive):
    return Nand(small_drive.geometry)


def program(nand, *ppns):
    ppns = np.array(ppns, np.uint32)
    data = np.arange(ppns.size, dtype=np.uint8)[:, None].repeat(nand.geometry.page_bytes, 1)
    nand.program(ppns, data, ppns.astype(np.uint64) + 7)


def test_a_page_is_programmed_once(nand):
    program(nand, 0)
    with pytest.raises(NandRuleError, match="page 0"):
        program(nand, 0)


def test_pages_of_a_block_are_programmed_in_order(nand):
    lanes = nand.geometry.lanes
    program(nand, 0, lanes)  # page 0, then page 1 of block 0
    with pytest.raises(NandRuleError):
        program(nand, 3 * lanes)


def test_blocks_are_programmed_independently(nand):
    program(nand, 3, 0, 1, nand.geometry.superblock_pages)


def test_read_of_unprogrammed_page_is_an_error(nand):
    program(nand, 0)
    nand.check_readable(np.array([0], np.uint32))
    with pytest.raises(NandRuleError, match="page 1"):
        nand.check_readable(np.array([0, 1], np.uint32))


def test_spare_area_has_tag_write_number_and_ecc(nand):
    program(nand, 0, 1, 2)
    assert nand.tags[:3].tolist() == [7, 8, 9]
    assert nand.write_numbers[:3].tolist() == [1, 2, 3]
    assert nand.intact(np.arange(4, dtype=np.uint32)).tolist() == [True, True, True, False]
    nand.content[0, 7] ^= 4
    nand.content[1, 5] ^= 3
    nand.power_on()
    assert nand.intact(np.arange(3, dtype=np.uint32)).tolist() == [True, False, True]
    assert (nand.damage.corrected, nand.damage.pages, nand.content[0, 7]) == (1, {1}, 0)


def test_power_on_reports_lost_spare_areas(nand):
    program(nand, 0, 1, 2)
    nand.spare["tag"][1] ^= np.uint64(0b111)  # more than a code of one bit corrects
    nand.spare["tag"][2] ^= np.uint64(0b1)
    nand.power_on()
    assert nand.damage.spares == {1} and nand.damage.corrected == 1
    assert nand.tags[2] == 9


def test_erase_clears_only_its_block(nand):
    lanes = nand.geometry.lanes
    program(nand, 0, 1, lanes)
    assert nand.erase(0)
    assert nand.erase_count[:3].tolist() == [1, 0, 0]
    assert nand.intact(np.array([1], np.uint32)).all()
    with pytest.raises(NandRuleError):
        nand.check_readable(np.array([0], np.uint32))
    program(nand, 0)
    assert not nand.content[lanes].any()  # the rest of the block was given back


def test_an_array_is_copied_to_memory_and_to_a_folder(nand, tmp_path):
    program(nand, *range(20))
    nand.erase(3)
    pages = nand.programmed()
    with closing(DiskFolder(tmp_path)) as folder:
        in_memory, in_files = nand.copy(), nand.copy(folder)
        assert in_memory.writes == in_files.writes == nand.writes
        for copy in (in_memory, in_files, Nand(nand.geometry, folder=folder)):
            for name, which in (
                ("content", pages),
                ("spare", pages),
                ("erase_count", slice(None)),
                ("next_page", slice(None)),
            ):
                np.testing.assert_array_equal(getattr(copy, name)[which], getattr(nand, name)[which], name)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) > nand.content.nbytes


@pytest.mark.parametrize("seed", range(5))
def test_pages_of_erased_blocks_are_released_and_no_others(nand, monkeypatch, seed):
    """Once; those of whole superblocks in one piece."""
    g, released = nand.geometry, list[range]()
    monkeypatch.setattr(nand, "_discard", lambda first, count: released.append(range(first, first + count)))
    generator = np.random.default_rng(seed)
    blocks = {*generator.choice(g.blocks, 9, replace=False).tolist(), *range(2 * g.lanes, 4 * g.lanes)}
    nand._erased += generator.permutation(list(blocks)).tolist()
    nand.release_erased()
    pages = np.arange(g.pages)
    erased = pages[np.isin(pages // g.superblock_pages * g.lanes + pages % g.lanes, list(blocks))]
    assert sorted(page for run in released for page in run) == erased.tolist()
    assert range(2 * g.superblock_pages, 3 * g.superblock_pages) in released
    nand.release_erased()
    assert sum(map(len, released)) == erased.size
