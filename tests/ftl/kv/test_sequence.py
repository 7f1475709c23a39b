"""Owners of a sequence's groups against a list of them, the pages that it expects, and the checks of its layers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csd_spec import LAYOUTS
from csd_spec.view import UNMAPPED
from ftl import Ftl
from ftl.flash.placement import Writer
from ftl.kv.sequence import Sequence
from tests.properties import examples

H, D = 2, 10
FORM = LAYOUTS["fp16"].paged(512, D, 2)  # 25 rows or 128 tokens a page: neither divides the other


def sequence(layout="fp16", layers=1):
    return Sequence(0, LAYOUTS[layout].paged(512, D, 2), layers, H, Writer(2))


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 300)), max_size=12))
def test_a_group_belongs_to_the_owner_that_filled_it(steps):
    """Each step appends tokens, or crops and changes the owner, as a fork does without a crop."""
    seq, length, owner = sequence(), 0, 1
    seq.write_as(0, owner, 0)
    expected = {25: list[int](), 128: list[int]()}
    for appends, tokens in steps:
        length = length + tokens if appends else min(length, tokens)
        owner += not appends
        for per_group, owners in expected.items():
            full = length // per_group
            owners[full:] = []
            owners += [owner] * (full - len(owners))
        if not appends:
            seq.write_as(0, owner, length)
    for per_group, owners in expected.items():
        assert seq.owners_of(0, per_group, len(owners)).tolist() == owners
        assert [seq.owner_of(0, per_group, group) for group in range(len(owners))] == owners
    assert seq.all_owners == {*expected[25], *expected[128], owner, seq.newest}, "others are forgotten"


@pytest.mark.parametrize("layout", ["fp16", "progressive", "progressive-exact"])
def test_writer_expects_the_pages_that_all_layers_write(small_drive, layout):
    """As soon as the first layer has its tokens, so that the extents are wide enough for the others."""
    ftl, layers = Ftl(small_drive), 3
    (handle,) = ftl.create(1, layers, H, LAYOUTS[layout].form(512, D, 128))
    writer = ftl.sequence(handle).writer
    for tokens in (150, 70):
        rows = np.ones((tokens, H, D), np.float16)
        for layer in range(layers):
            ftl.append([handle], layer, np.array([tokens]), rows, rows, 0)
            if layer == 0:
                expected = writer.expected_pages
        assert writer.written == writer.expected_pages == expected > 0


def test_layers_that_have_more_tokens_are_expected_to_write_nothing():
    seq = sequence(layers=2)
    seq.lengths[:] = 0, 500
    seq.expect(256)
    rows, channels = 2 * H * (256 // 25), 5 * H * 2
    assert seq.writer.expected_pages == rows + channels
    seq.writer.written = 100
    seq.expect(25)
    assert seq.writer.expected_pages == 100 + 2 * H
    seq.writer.written = 0
    seq.expect(25)
    assert seq.writer.expected_pages == 100 + 2 * H, "it expects no less than before"


def layer_of(length):
    """A sequence with the pages of its full groups, and buffers for the open ones."""
    seq = sequence()
    seq.lengths[0] = length
    for mapped in seq.maps.values():
        full, position = divmod(length, mapped.per_group)
        mapped.reserve(full + 2)
        mapped.slots[0, :, :full] = 7
        mapped.buffers[0] = 3 if position else -1
    return seq


@pytest.mark.parametrize("length", [0, 1, 24, 25, 26, 50, 74, 75])
def test_layer_has_exactly_the_pages_of_its_tokens(length):
    seq = layer_of(length)
    seq.check_layer(0)
    full = length // 25
    for name in "kv":
        for group, slot in ((full - 1, UNMAPPED), (full, 7)):
            if group >= 0:
                wrong = layer_of(length)
                wrong.maps[name].slots[0, :, group] = slot
                with pytest.raises(AssertionError):
                    wrong.check_layer(0)
        wrong = layer_of(length)
        wrong.maps[name].buffers[0] = -1 if length % 25 else 3
        with pytest.raises(AssertionError):
            wrong.check_layer(0)


def test_rows_are_stored_in_the_pages_that_hold_any_of_them():
    seq = layer_of(100)
    for number, name in enumerate("kv"):
        seq.maps[name].slots[0, :, :4] = 10 * number + np.arange(4)
    for tokens, groups in ((range(1), [0]), (range(24, 26), [0, 1]), (range(25, 75), [1, 2]), (range(76, 100), [3])):
        assert seq.stored_in("k", 0, tokens).tolist() == [groups] * H
        assert seq.stored_in("v", 0, tokens).tolist() == [[10 + group for group in groups]] * H
    assert seq.stored_in("kv", 0, range(30, 40)).tolist() == [[1]] * H + [[11]] * H
