"""Extents never overlap, and a tensor reads back as it was written."""

import errno
import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from csd_io.extents import Extent, Extents, translate
from csd_io.queue import aligned, carry_out
from tests.properties import examples
from vcsd_eval.verify.simulation.disk import SECTOR, SimDisk
from vcsd_eval.verify.simulation.queue import SimQueue

BLOCKS = 64


def sim_queue(seed=0, blocks=BLOCKS):
    draw = random.Random(seed)
    return SimQueue(SimDisk("disk", "process", draw), "blocks", blocks * SECTOR, draw)


def test_tensors_are_packed_in_given_order():
    extents = Extents(sim_queue())
    packed = [extents.bind((layer, kind), 3 * SECTOR - 1) for layer in range(3) for kind in "kv"]
    assert packed == [Extent(3 * number, 3) for number in range(6)]
    assert extents[1, "v"] == Extent(9, 3) and (1, "v") in extents and (3, "k") not in extents


def test_bind_on_full_device_or_bound_key_is_refused():
    extents = Extents(sim_queue())
    extents.bind("a", 60 * SECTOR)
    with pytest.raises(OSError) as raised:
        extents.bind("b", 5 * SECTOR)
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, "disk/blocks")
    assert extents.bind("b", 4 * SECTOR) == Extent(60, 4)
    with pytest.raises(ValueError, match="is bound"):
        extents.bind("a", SECTOR)
    with pytest.raises(ValueError, match="0 bytes"):
        extents.bind("c", 0)


def test_a_released_extent_is_free_again_and_discarded():
    queue = sim_queue()
    extents, data = Extents(queue), aligned(BLOCKS * SECTOR)
    data[:] = b"x" * len(data)
    for key in "abcd":
        extents.bind(key, 16 * SECTOR)
        carry_out(queue, extents.requests("write", key, 0, data[: 16 * SECTOR]))
    for key in "cab":  # next to each other, in any order: one place
        extents.release(key)
    assert extents.bind("e", 48 * SECTOR) == Extent(0, 48)
    carry_out(queue, extents.requests("read", "e", 0, data[: 48 * SECTOR]))
    assert not any(data[: 48 * SECTOR]) and all(data[48 * SECTOR :])


def test_unsupported_discard_is_ignored_failed_one_raises(monkeypatch):
    queue = sim_queue()
    extents, said = Extents(queue), [errno.EOPNOTSUPP, errno.EIO]

    def refuse(*_):
        raise OSError(said.pop(0), "refused")

    monkeypatch.setattr(queue, "discard", refuse)
    extents.bind("a", SECTOR)
    extents.release("a")
    extents.bind("a", SECTOR)
    with pytest.raises(OSError, match="refused"):
        extents.release("a")
    assert extents.bind("a", SECTOR) == Extent(0, 1)


@given(
    block=st.sampled_from([512, 4096]),
    first=st.integers(0, 1 << 40),
    at=st.integers(0, 100),
    count=st.integers(0, 100),
    rest=st.integers(0, 10),
    limit=st.integers(4096, 40000),
)
def test_requests_cover_part_in_order_within_size_limit(block, first, at, count, rest, limit):
    extent = Extent(first, at + count + rest)
    requests = list(translate(extent, block, at * block, count * block, limit))
    end = (first + at) * block
    for offset, size in requests:
        assert offset == end and 0 < size <= limit and size % block == 0
        end += size
    assert end == (first + at + count) * block
    assert len(requests) == -(-count // (limit // block))


@pytest.mark.parametrize(("at", "size"), [(1, 4096), (0, 4095), (4096 * 3, 4096 * 2), (-4096, 4096)])
def test_part_beyond_extent_is_refused(at, size):
    with pytest.raises(ValueError, match="4 blocks"):
        translate(Extent(10, 4), 4096, at, size, 1 << 20)


class Tensors(RuleBasedStateMachine):
    """A dictionary of bytes, compared with a device."""

    def __init__(self):
        super().__init__()
        self.queue = sim_queue()
        self.queue.max_bytes = 3 * SECTOR + 1
        self.extents, self.bytes = Extents(self.queue), {}

    @rule(key=st.integers(0, 9), blocks=st.integers(1, 20))
    def bind(self, key, blocks):
        if key in self.bytes:
            return
        used = sum(len(content) for content in self.bytes.values())
        try:
            self.extents.bind(key, blocks * SECTOR)
        except OSError:
            assert used or blocks > BLOCKS
            return
        self.bytes[key] = bytearray(blocks * SECTOR)
        self.write(key, 0, blocks, blocks)

    @precondition(lambda self: self.bytes)
    @rule(data=st.data(), seed=st.integers(0, 99))
    def overwrite(self, data, seed):
        key = data.draw(st.sampled_from(sorted(self.bytes)))
        blocks = len(self.bytes[key]) // SECTOR
        first = data.draw(st.integers(0, blocks - 1))
        self.write(key, first, data.draw(st.integers(1, blocks - first)), seed)

    def write(self, key, first, blocks, seed):
        buffer = aligned(blocks * SECTOR)
        buffer[:] = np.random.default_rng(seed).bytes(len(buffer))
        self.bytes[key][first * SECTOR : (first + blocks) * SECTOR] = buffer
        carry_out(self.queue, self.extents.requests("write", key, first * SECTOR, buffer))

    @precondition(lambda self: self.bytes)
    @rule(data=st.data())
    def release(self, data):
        key = data.draw(st.sampled_from(sorted(self.bytes)))
        self.extents.release(key)
        del self.bytes[key]

    @invariant()
    def all_bytes_are_there(self):
        for key, content in self.bytes.items():
            buffer = aligned(len(content))
            carry_out(self.queue, self.extents.requests("read", key, 0, buffer))
            assert buffer == content

    @invariant()
    def extents_are_disjoint(self):
        ranges = sorted((self.extents[key].first_block, self.extents[key].end_block) for key in self.bytes)
        assert all(end <= first for (_, end), (first, _) in pairwise(ranges))
        assert not ranges or ranges[-1][1] <= BLOCKS


TestTensors = Tensors.TestCase
TestTensors.settings = settings(max_examples=examples(30), stateful_step_count=20)
