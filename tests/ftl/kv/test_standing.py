"""Tokens that only join groups that wait lie as if they had come with the rest."""

from itertools import pairwise

import numpy as np

from csd_spec import LAYOUTS
from ftl import Ftl

LAYOUT, H = LAYOUTS["fp16"].paged(512, 8, 4), 2


def waiting(ftl, handle):
    """The pages under construction of a sequence's first layer, as far as rows are in them."""
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


def test_a_token_each_of_two_forms_lies_as_if_it_had_come_with_the_rest(small_drive):
    rows = np.random.default_rng(0).standard_normal((2, 7, H, LAYOUT.head_dim)).astype(np.float16)
    one, handles = filled(small_drive, rows, [0, 3, 4, 5, 6, 7])
    other, _ = filled(small_drive, rows, [0, 7])
    for number, handle in enumerate(handles):
        assert one.sequence(handle).lengths.tolist() == [7]
        for name, pages in waiting(other, handle).items():
            assert (waiting(one, handle)[name] == pages).all(), name
        k, v, _ = one.read_back(handle, 0)
        assert (k == rows[number]).all() and (v == -rows[number]).all()


def test_what_stands_is_found_out_once_between_changes(small_drive):
    ftl = Ftl(small_drive)
    handles = tuple(ftl.create(2, 1, H, LAYOUT))
    rows = np.ones((2, H, LAYOUT.head_dim), np.float16)
    ftl.append(handles, 0, np.ones(2, np.int64), rows, rows, 0)
    stands = ftl.kv.standing(handles, 0)
    assert stands.waits()
    ftl.append(handles, 0, np.ones(2, np.int64), rows, rows, 0)
    assert ftl.kv.standing(handles, 0) is stands and stands.stored() == [2, 2]
    assert ftl.view(handles, 0).seq_lens.tolist() == [2] * 2 * H
    ftl.crop(handles[1], 0, 1, 0)
    assert ftl.kv.standing(handles, 0) is not stands
