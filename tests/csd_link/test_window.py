"""Blocks of a window: read whole, or not at all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csd_link.window import (
    BLOCK_BYTES,
    BODY_BYTES,
    BlockKind,
    ControlBlock,
    Identity,
    WindowLayout,
    next_generation,
    unpack,
)
from csd_spec.presets import DRIVES

u64 = st.integers(0, 2**64 - 1)


def raw(block):
    return bytearray(block.pack().ljust(BLOCK_BYTES, b"\0"))


@given(st.sampled_from(BlockKind), u64, u64, u64, st.binary(max_size=100) | st.just(b"x" * BODY_BYTES))
def test_control_block_round_trips(kind, host, drive, sequence, body):
    block = ControlBlock(kind, host, drive, sequence, body)
    assert unpack(raw(block)) == block


@given(st.binary(min_size=1, max_size=64), st.integers(0, 51 + 64), st.integers(1, 255))
def test_changed_control_block_is_rejected(body, at, change):
    block = raw(ControlBlock(BlockKind.REQUEST, 1, 2, 3, body))
    at %= 44 + len(body)  # the head, then the body
    block[at] ^= change
    assert unpack(block) is None


@given(st.binary(max_size=100))
def test_foreign_bytes_are_no_control_block(start):
    assert unpack(bytearray(start.ljust(BLOCK_BYTES, b"\xff"))) is None


def test_layout_blocks_do_not_overlap():
    layout = WindowLayout(depth=3, slot_blocks=2)
    used = [0, 1]
    for sequence in range(3):
        used += [layout.request(sequence), layout.completion(sequence)]
        for first in (layout.to_drive(sequence), layout.to_host(sequence)):
            used += [first, first + 1]
    assert len(set(used)) == len(used)
    assert max(used) == layout.blocks - 1


@pytest.mark.parametrize("field", [{"depth": 0}, {"depth": 5000}, {"slot_blocks": 0}, {"slot_blocks": 1 << 30}])
def test_invalid_layout_is_refused(field):
    with pytest.raises(ValueError, match=next(iter(field))):
        WindowLayout(**field)


def test_identity_round_trips_and_fits_a_block():
    for spec in DRIVES.values():
        identity = Identity("a drive of some name", spec, WindowLayout())
        assert Identity.from_json(identity.to_json()) == identity
        assert len(identity.to_json()) <= BODY_BYTES


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"name": 1, "spec": {}, "layout": {}}'])
def test_foreign_identity_is_refused(text):
    with pytest.raises(ValueError, match=r"."):
        Identity.from_json(text)


def test_new_generation_differs():
    assert next_generation(4, 9) == 10
    assert next_generation(0, 0) > 0
    assert 0 < next_generation(2**64 - 1) < 2**63
