"""Page tables of several sequences, combined."""

import numpy as np
import pytest

from csd_spec.view import UNMAPPED
from ftl.kv.pages import stack


@pytest.mark.parametrize("capacities", [(4,), (4, 2), (2, 7), (7, 7, 1)])
def test_stacked_tables_have_requested_width(capacities):
    tables = [np.arange(3 * capacity, dtype=np.uint32).reshape(3, capacity) for capacity in capacities]
    stacked = stack(tables, 3 if len(tables) > 1 else 2)
    assert stacked.shape == (3 * len(tables), 3 if len(tables) > 1 else 2) and stacked.flags.c_contiguous
    for rows, table in zip(np.split(stacked, len(tables)), tables, strict=True):
        width = min(stacked.shape[1], table.shape[1])
        np.testing.assert_array_equal(rows[:, :width], table[:, :width])
        assert (rows[:, width:] == UNMAPPED).all()
