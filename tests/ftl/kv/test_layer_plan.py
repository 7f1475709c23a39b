"""Tokens added by a plan are stored as if they had been appended with the rest; epochs end when tables change.

partner of: ftl/kv/layer_plan.py, ftl/kv/fork_crop.py, ftl/kv/relayout.py
"""

from itertools import pairwise

import numpy as np
import pytest

from csd_spec import LAYOUTS
from ftl import Ftl

LAYOUT, H = LAYOUTS["fp16"].paged(512, 8, 4), 2


def waiting(ftl, handle):
    """The pages under construction of a sequence's first layer."""
    pages = {}
    for name, mapped in ftl.sequence(handle).maps.items():
        pages[name] = ftl.buffers.content[mapped.buffers[0]]
    return pages


def filled(drive, rows, cuts):
    """Two sequences, one of another form from before its first token on, that get rows (B, tokens, H, d) in parts."""
    ftl = Ftl(drive)
    handles = ftl.create(2, 1, H, LAYOUT)
    ftl.relayout(handles[0], 2, 0)
    for first, last in pairwise(cuts):
        k = np.concatenate(rows[:, first:last])
        v = (-k)[:]
        k.flags.writeable = False
        ftl.append(handles, 0, np.full(2, last - first), k, v, 0)
    return ftl, handles


def test_single_token_append_equals_bulk_append(small_drive):
    rows = np.random.default_rng(0).standard_normal((2, 7, H, LAYOUT.head_dim)).astype(np.float16)
    one, handles = filled(small_drive, rows, [0, 3, 4, 5, 6, 7])
    other, _ = filled(small_drive, rows, [0, 7])
    for number, handle in enumerate(handles):
        assert one.sequence(handle).lengths.tolist() == [7]
        for name, pages in waiting(other, handle).items():
            assert (waiting(one, handle)[name] == pages).all(), name
        k, v, _ = one.read_back(handle, 0)
        assert (k == rows[number]).all() and (v == -rows[number]).all()


def decoding(drive):
    """Two sequences with a token each, and a row for each to append."""
    ftl = Ftl(drive)
    handles = tuple(ftl.create(2, 1, H, LAYOUT))
    rows = np.ones((2, H, LAYOUT.head_dim), np.float16)
    ftl.append(handles, 0, np.ones(2, np.int64), rows, rows, 0)
    return ftl, handles, rows


def test_plan_is_built_once_per_epoch(small_drive):
    ftl, handles, rows = decoding(small_drive)
    plan = ftl.kv.plan(handles, 0)
    assert plan.in_bounds()
    ftl.append(handles, 0, np.ones(2, np.int64), rows, rows, 0)
    assert ftl.kv.plan(handles, 0) is plan and plan.stored() == [2, 2]
    assert ftl.view(handles, 0).seq_lens.tolist() == [2] * 2 * H
    ftl.crop(handles[1], 0, 1, 0)
    assert ftl.kv.plan(handles, 0) is not plan


CHANGES = {
    "fork": lambda ftl, handles: ftl.fork(handles[0]),
    "crop": lambda ftl, handles: ftl.crop(handles[0], 0, 1, 0),
    "free": lambda ftl, handles: ftl.free([handles[1]], 0),
    "relayout": lambda ftl, handles: ftl.relayout(handles[0], 4, 0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_slots_and_buffers_end_the_epoch(small_drive, change):
    """A fork's buffers may evict those of its parent's copies, which a plan would go on using."""
    ftl, handles, rows = decoding(small_drive)
    ftl.append(handles, 0, np.ones(2, np.int64), rows, rows, 0)
    plan = ftl.kv.plan(handles[:1], 0)
    CHANGES[change](ftl, handles)
    assert ftl.kv.plan(handles[:1], 0) is not plan


def test_first_or_last_token_of_group_ends_epoch(small_drive):
    ftl, handles, rows = decoding(small_drive)
    per_group = min(mapped.per_group for mapped in ftl.sequence(handles[0]).maps.values())
    ended = []
    for stored in range(1, 2 * per_group):
        plan = ftl.kv.plan(handles, 0)
        in_bounds = plan.in_bounds()
        ftl.append(handles, 0, np.ones(2, np.int64), rows, rows, 0)
        assert (ftl.kv.plan(handles, 0) is plan) == in_bounds
        ended += [stored] * (not in_bounds)
    assert ended == [per_group - 1, per_group, 2 * per_group - 1]


def test_two_batches_of_an_epoch_add_to_the_same_sequence(small_drive):
    ftl, handles, rows = decoding(small_drive)
    both, one = ftl.kv.plan(handles, 0), ftl.kv.plan(handles[1:], 0)
    both.append(rows, rows)
    one.append(rows[1:], rows[1:])
    assert both.stored() == [2, 3] and one.stored() == [3] and one.bounds == both.bounds[1:]
