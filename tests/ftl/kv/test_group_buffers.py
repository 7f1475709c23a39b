"""Buffers of unfinished groups: primary maps must have them, copies lose theirs first."""

from dataclasses import replace

import numpy as np
import pytest

from csd_spec import LAYOUTS
from ftl import Ftl, OutOfSpaceError
from ftl.kv.group_buffers import GroupBuffers

LAYOUT = LAYOUTS["fp16"].paged(512, 8, 4)


def test_released_buffers_are_reused():
    buffers = GroupBuffers(4 * 512, 512)
    first = buffers.allocate(3)
    assert buffers.left == 1
    with pytest.raises(OutOfSpaceError, match="2 group buffers wanted"):
        buffers.allocate(2)
    buffers.release(first[:2])
    assert set(buffers.allocate(2).tolist()) <= set(first.tolist())


def test_double_release_of_buffer_fails():
    buffers = GroupBuffers(2 * 512, 512)
    one = buffers.allocate(1)
    buffers.release(one)
    with pytest.raises(AssertionError, match="twice"):
        buffers.release(one)


def test_buffers_of_copies_are_evicted_for_primary_maps(small_drive):
    """Room for K, V and the copy of one sequence; K and V of a second one take the copy's."""
    streams = 1 + 1 + LAYOUT.embedding_pages
    ftl = Ftl(replace(small_drive, dram_bytes=streams * 512))
    rows = np.ones((3, 1, 8), np.float16)
    first, second = ftl.create(2, 1, 1, LAYOUT)
    ftl.append([first], 0, np.array([3]), rows, rows, 0)
    assert ftl.sequence(first).maps["embedding_k"].buffered(0)
    ftl.append([second], 0, np.array([3]), rows, rows, 0)
    assert not ftl.sequence(first).maps["embedding_k"].buffered(0)
    assert ftl.sequence(first).maps["k"].buffered(0) and ftl.sequence(second).maps["v"].buffered(0)
    ftl.crop(first, 0, 0, 0)
    assert not ftl.sequence(first).maps["k"].buffered(0)


def test_copy_keeps_last_free_buffer(small_drive):
    streams = 1 + 1 + LAYOUT.embedding_pages
    ftl = Ftl(replace(small_drive, dram_bytes=(streams + 2) * 512))
    rows = np.ones((3, 1, 8), np.float16)
    first, second = ftl.create(2, 1, 1, LAYOUT)
    for handle in (first, second):
        ftl.append([handle], 0, np.array([3]), rows, rows, 0)
    assert ftl.sequence(first).maps["embedding_k"].buffered(0) and ftl.kv.buffers.left == 0
    assert not ftl.sequence(second).maps["embedding_k"].buffered(0)


def test_new_group_uses_steps_of_previous_group(small_drive):
    layout = LAYOUTS["progressive4-exact"].form(small_drive.geometry.page_bytes, 16, 64)
    ftl, draw = Ftl(small_drive), np.random.default_rng(0)
    (handle,) = ftl.create(1, 1, 2, layout)
    mapped = ftl.sequence(handle).maps["scores"]
    for tokens in (mapped.per_group, 1):
        rows = draw.standard_normal((tokens, 2, 16)).astype(np.float16)
        ftl.append([handle], 0, np.array([tokens]), rows, rows, 0)
    header = layout.progressive.header_bytes
    before = ftl.nand.read(mapped.slots[0, :, 0])[:, :header]
    begun = ftl.kv.open_groups.content.view(np.uint8)[mapped.buffers[0]][:, :header]
    assert before.any()
    np.testing.assert_array_equal(begun, before)
