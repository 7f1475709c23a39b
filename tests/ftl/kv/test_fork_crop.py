"""Forks reserve the blocks that they need themselves."""

from dataclasses import replace

import numpy as np
import pytest

from csd_spec import LAYOUTS
from ftl import Ftl
from ftl.flash.nand import Nand


@pytest.mark.parametrize("has_sums", [True, False])
def test_fork_has_its_own_sums(small_drive, has_sums):
    ftl = Ftl(small_drive)
    layout = LAYOUTS["fp16"].paged(small_drive.geometry.page_bytes, 16, 4)
    (handle,) = ftl.create(1, 2, 2, layout)
    parent = ftl.sequence(handle)
    parent.v_sums = np.ones((2, 2, 16), np.float32) if has_sums else None
    child = ftl.sequence(ftl.fork(handle))
    if not has_sums:
        assert child.v_sums is None
        return
    child.v_sums[:] = 7
    assert (parent.v_sums == 1).all()


def test_fork_expects_blocks_only_for_its_own_pages(small_drive):
    """Shared pages need no new blocks: a few more tokens take one block of each channel."""
    geometry = replace(small_drive.geometry, dies_per_channel=8, blocks_per_plane=4)
    ftl = Ftl(replace(small_drive, geometry=geometry), Nand(geometry, payload=False))
    (handle,) = ftl.create(1, 2, 1, LAYOUTS["plain"].paged(geometry.page_bytes, 16, 16))
    for layer in range(2):
        ftl.append([handle], layer, np.array([16 * 24]), None, None, 0)
    child = ftl.sequence(ftl.fork(handle))
    ftl.append([child.handle], 0, np.array([16]), None, None, 0)
    assert ftl.sequence(handle).writer.blocks.size > geometry.channels
    assert child.writer.blocks.size == geometry.channels
