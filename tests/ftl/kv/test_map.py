"""Information that the map of sequences gives to the flash store."""

import numpy as np
import pytest

from csd_spec import LAYOUTS
from ftl import Ftl
from ftl.flash.references import valid

LAYERS, HEADS, DIM = 2, 2, 16


@pytest.mark.parametrize("tokens", [3, 30])
def test_journal_reserve_fits_a_full_checkpoint(small_drive, tokens):
    ftl = Ftl(small_drive)
    layout = LAYOUTS["fp16"].paged(small_drive.geometry.page_bytes, DIM, 4)
    handles = ftl.create(6, LAYERS, HEADS, layout)
    rows = np.ones((6 * tokens, HEADS, DIM), np.float16)
    for layer in range(LAYERS):
        ftl.append(handles, layer, np.full(6, tokens), rows, rows, 0)
    reserve, before = ftl.kv.checkpoint_pages(), ftl.counters.journal
    ftl.journal.record(0, everything=True)
    recorded = ftl.counters.journal - before
    assert 0 < recorded <= reserve


@pytest.mark.parametrize(("layers", "heads"), [(1, 2), (2, 1), (1, 1)])
def test_pages_of_other_shape_have_no_owner(small_drive, layers, heads):
    """A sequence reused the owner number of one with more layers or heads whose pages are not erased yet."""
    ftl = Ftl(small_drive)
    layout = LAYOUTS["fp16"].paged(small_drive.geometry.page_bytes, DIM, 4)
    (before,) = ftl.create(1, LAYERS, HEADS, layout)
    rows = np.ones((100, HEADS, DIM), np.float16)
    for layer in range(LAYERS):
        ftl.append([before], layer, np.array([100]), rows, rows, 0)
    written = ftl.nand.programmed()
    tags = ftl.nand.tags[written]
    ftl.free([before], 0)
    ftl.kv.owners.next = 0
    (after,) = ftl.create(1, layers, heads, layout)
    rows = rows[:, :heads].copy()
    for layer in range(layers):
        ftl.append([after], layer, np.array([100]), rows, rows, 0)
    assert ftl.sequence(after).newest == 0
    assert not valid(ftl.store.referrers, written, tags).any()
