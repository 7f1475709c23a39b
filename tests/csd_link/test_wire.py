"""Commands and completions survive their bytes; bytes that are none are refused."""

import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from csd_link.wire import Request, WireError, decode, decode_completion, encode, encode_completion
from csd_spec import (
    Attend,
    Completion,
    FlashCounters,
    Flush,
    KvAppend,
    KvCrop,
    KvFree,
    KvRead,
    SeqCreate,
    Status,
)

GENERATOR = np.random.default_rng(5)


def half(*shape):
    return GENERATOR.standard_normal(shape).astype(np.float16)


SEQS, LENGTHS = (3, 2**64 - 1), np.array([2, 0])
COMMANDS = [
    Flush(),
    SeqCreate(2, 4, 2, 64, 2048, 8),
    KvAppend(SEQS, 1, LENGTHS, half(2, 3, 8), half(2, 3, 8)),
    Attend(SEQS, 1, half(2, 3, 2, 8), half(2, 3, 8), half(2, 3, 8), "sparf", 4, LENGTHS + 1, LENGTHS),
    KvRead(SEQS, 3),
    KvCrop(SEQS, 0, LENGTHS),
    KvFree(SEQS),
]


def same(one, other):
    for name in type(one).__slots__:
        left, right = getattr(one, name), getattr(other, name)
        if isinstance(left, np.ndarray):
            assert (left.dtype, right.flags.aligned, right.flags.writeable) == (right.dtype, True, True)
            np.testing.assert_array_equal(left, right)
        else:
            assert left == right


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_a_command_survives_its_bytes(command):
    request = encode(command)
    again = decode(Request(request.opcode, request.parameters, bytearray(request.payload)))
    assert type(again) is type(command)
    same(command, again)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_a_payload_has_just_the_bytes_that_it_needs(command):
    request = encode(command)
    with pytest.raises(WireError, match="payload"):
        decode(Request(request.opcode, request.parameters, bytes(request.payload) + b"\0"))
    if request.payload:
        with pytest.raises(WireError, match="payload"):
            decode(Request(request.opcode, request.parameters, request.payload[:-1]))


@given(st.integers(0, 255), st.lists(st.integers(0, 2**32 - 1), max_size=10), st.binary(max_size=300))
def test_any_bytes_are_a_command_or_refused(opcode, parameters, payload):
    request = Request(opcode, tuple(parameters), bytearray(payload))
    try:
        command = decode(request)
    except WireError as error:
        assert error.status in (Status.INVALID_OPCODE, Status.INVALID_FIELD)
    else:
        assert encode(command).opcode == opcode


def test_an_empty_array_of_no_possible_shape_is_refused():
    method = b"sparf".ljust(32, b"\0")
    with pytest.raises(WireError, match="0 x 2 x 2147483648 x 2147483647 values"):
        decode(Request(0xC5, (0, 0, 2, 2**31, 2**31 - 1, 4), bytearray(method)))


def test_numbers_without_a_place_are_refused():
    with pytest.raises(ValueError, match="32-bit"):
        encode(KvRead((1,), -1))
    with pytest.raises(ValueError, match="at most 32 bytes"):
        encode(Attend((1,), 0, half(1, 1, 1, 8), half(1, 1, 8), half(1, 1, 8), "m" * 33, 4, LENGTHS, LENGTHS))


@given(
    st.sampled_from(Status),
    st.text(max_size=40),
    st.dictionaries(st.sampled_from(["link", "queue", "flash_program"]), st.integers(0, 2**63)),
    st.lists(st.sampled_from([half(2, 3), np.arange(3, dtype=np.uint64), half(0, 2)]), max_size=3),
)
def test_a_completion_survives_its_bytes(status, reason, breakdown, arrays):
    flash = FlashCounters(pages_read=1, pages_programmed=2, fetched_bytes=3, useful_bytes=4)
    done = Completion(
        status=status, reason=reason, submit_ns=5, finish_ns=9, breakdown_ns=breakdown, flash=flash, data=tuple(arrays)
    )
    body, data = encode_completion(done, zlib.crc32)
    head = decode_completion(body)
    assert (head.size, head.data_crc) == (len(body), zlib.crc32(data))
    again = head.with_data(bytearray(data))
    same(replace(done, data=()), replace(again, data=()))
    for left, right in zip(done.data, again.data, strict=True):
        np.testing.assert_array_equal(left, right)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_completion_or_refused(body):
    try:
        head = decode_completion(body)
    except WireError:
        return
    assert sum(int(np.prod(shape)) * dtype.itemsize for dtype, shape in head.shapes) == head.data_bytes
