"""Slots of either bank, and the rows that they refer to."""

import numpy as np

from csd_spec import LAYOUTS
from csd_spec.view import UNMAPPED, buffers_of, dram_slots, gather_rows, in_flash


def test_slot_belongs_to_one_bank():
    slots = np.append(np.array([0, 7, (1 << 31) - 1], np.uint32), dram_slots(np.array([0, 5])))
    np.testing.assert_array_equal(in_flash(slots), [True, True, True, False, False])
    np.testing.assert_array_equal(buffers_of(slots[3:]), [0, 5])
    assert not in_flash(UNMAPPED)


def test_rows_are_gathered_from_both_banks():
    """Two heads of seven tokens, four a page: the first page in flash, the unfinished one in a buffer."""
    layout = LAYOUTS["fp16"].paged(256, 32, 2)
    rows = np.random.default_rng(0).standard_normal((2, 8, 32)).astype(np.float16)
    pages = rows.reshape(2, 2, 4 * 32).view(np.uint16)
    flash, dram = np.zeros((9, 128), np.uint16), np.zeros((4, 128), np.uint16)
    flash[[3, 8]], dram[[2, 1]] = pages[:, 0], pages[:, 1]
    slots = np.stack([np.array([3, 8], np.uint32), dram_slots(np.array([2, 1]))], axis=1)
    result = gather_rows((flash, dram), slots, 7, layout)
    np.testing.assert_array_equal(result, rows.transpose(1, 0, 2)[:7])
