"""What the map of sequences says of itself to the flash store."""

import numpy as np
import pytest

from csd_spec import KvLayout
from ftl import Ftl

LAYERS, HEADS, DIM = 2, 2, 16


@pytest.mark.parametrize("tokens", [3, 30])
def test_room_is_kept_for_all_that_a_checkpoint_records(small_drive, tokens):
    ftl = Ftl(small_drive)
    layout = KvLayout(page_bytes=small_drive.geometry.page_bytes, head_dim=DIM, m=4)
    handles = ftl.create(6, LAYERS, HEADS, layout)
    rows = np.ones((6 * tokens, HEADS, DIM), np.float16)
    for layer in range(LAYERS):
        ftl.append(handles, layer, np.full(6, tokens), rows, rows, 0)
    kept, before = ftl.kv.checkpoint_pages(), ftl.counters.journal
    ftl.journal.record(0, everything=True)
    recorded = ftl.counters.journal - before
    assert 0 < recorded <= kept
