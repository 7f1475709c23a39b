"""Groups of one head are strided over channels; superblocks open, close and come back."""

import numpy as np
import pytest

from csd_spec.presets import INSTCSD_ZYNQ7045_8CH as DRIVE
from ftl.errors import OutOfSpace
from ftl.placement import Placement


def test_a_heads_groups_are_even_over_channels_whenever_they_come():
    placement = Placement(DRIVE.geometry)
    streams = np.arange(240, dtype=np.uint64)[:, None]
    ppns = [placement.allocate(placement.lanes_for(streams, np.array([[group]])).ravel()) for group in range(64)]
    channels = np.stack(ppns) % DRIVE.geometry.lanes % DRIVE.geometry.channels
    for stream in range(240):
        assert np.bincount(channels[:, stream], minlength=8).tolist() == [8] * 8


def test_streams_start_on_different_lanes():
    placement = Placement(DRIVE.geometry)
    lanes = placement.lanes_for(np.arange(256, dtype=np.uint64), np.zeros(256, np.int64))
    assert np.bincount(lanes, minlength=256).max() <= 2


def test_pages_of_a_lane_come_in_program_order(small_drive):
    placement = Placement(small_drive.geometry)
    ppns = placement.allocate(np.zeros(20, np.int64))
    assert (np.diff(ppns.astype(np.int64)) > 0).all()
    assert len(np.unique(ppns)) == 20


def test_out_of_space_changes_nothing(small_drive):
    placement = Placement(small_drive.geometry)
    pages = small_drive.geometry.pages
    with pytest.raises(OutOfSpace):
        placement.allocate(np.arange(pages + 1) % 4)
    assert placement.allocate(np.arange(pages) % 4).size == pages
    with pytest.raises(OutOfSpace):
        placement.allocate(np.zeros(1, np.int64))


def test_empty_superblocks_are_handed_out_once(small_drive):
    placement = Placement(small_drive.geometry)
    per = small_drive.geometry.superblock_pages
    ppns = placement.allocate(np.arange(2 * per) % 4)
    assert placement.take_empty() == []
    placement.invalidate(ppns[:per])
    (empty,) = placement.take_empty()
    assert empty == ppns[0] // per
    assert placement.take_empty() == []
