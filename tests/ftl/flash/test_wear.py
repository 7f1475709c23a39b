"""Blocks that wear leveling moves: which, and how many."""

from dataclasses import replace

import pytest

from csd_spec.presets import INSTCSD_ZYNQ7045_8CH as DRIVE
from ftl.flash.nand import Nand
from ftl.flash.store import FlashStore
from ftl.flash.wear import DATA_PAGES, SPREAD, cold_blocks

GEOMETRY = replace(
    DRIVE.geometry, channels=2, dies_per_channel=2, blocks_per_plane=16, pages_per_block=8, planes_per_die=1
)
WORN = 9


@pytest.fixture
def store():
    """Blocks 0 to 5 are written: 1 and 3 are cold, and of 4 and 5 the wear is about that of the most worn one."""
    made = FlashStore(replace(DRIVE, geometry=GEOMETRY), Nand(GEOMETRY, payload=False))
    made.nand.erase_count[:7] = WORN, 3, WORN, 1, WORN - SPREAD, WORN - SPREAD - 1, 0
    made.nand.next_page[:6] = 8, 1, 8, 8, 8, 8
    made.nand.bad[5] = 1
    return made


def pages_for(blocks):
    """Pages of host data after which that many blocks are due."""
    return blocks * GEOMETRY.pages_per_block * DATA_PAGES


@pytest.mark.parametrize(
    ("groups", "levelled", "found"),
    [
        (pages_for(9), 0, [3, 1]),
        (pages_for(2), 0, [3, 1]),
        (pages_for(1), 0, [3]),
        (pages_for(1) - 1, 0, []),
        (pages_for(2), 8, [3]),
        (pages_for(2), 16, []),
        (pages_for(2), 160, []),
    ],
)
def test_cold_blocks_are_moved_as_hosts_write(store, groups, levelled, found):
    store.counters.groups, store.counters.levelled = groups, levelled
    assert cold_blocks(store) == found


def test_cold_blocks_wait_for_free_ones(store):
    store.counters.groups = pages_for(2)
    needed = 2 * store.reserve + GEOMETRY.channels
    store.placement._free[:] = 0
    store.placement._free[0] = needed
    assert cold_blocks(store) == [3, 1]
    store.placement._free[0] -= 1
    assert cold_blocks(store) == []
