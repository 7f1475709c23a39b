"""Commands and completions survive encoding to bytes; invalid bytes are refused."""

import zlib
from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from csd_link.wire import WireError, WireRequest, decode, decode_completion, encode, encode_completion
from csd_spec import (
    Attend,
    Completion,
    FlashCounters,
    Flush,
    GetLog,
    KvAppend,
    KvCrop,
    KvDrop,
    KvExist,
    KvFree,
    KvGather,
    KvList,
    KvName,
    KvRead,
    SeqCreate,
    SeqFork,
    SeqSweep,
    Status,
)
from csd_spec.arrays import keys_of
from csd_spec.units import UNITS
from csd_spec.verbs import VERBS

GENERATOR = np.random.default_rng(5)


def half(*shape):
    return GENERATOR.standard_normal(shape).astype(np.float16)


def steady(*shape):
    return (np.arange(np.prod(shape)) % 7 - 3).astype(np.float16).reshape(shape)


KEYS = keys_of([bytes(range(16)), bytes(range(1, 17))])
SEQS, LENGTHS = (3, 2**64 - 1), np.array([2, 0])
# Opcode, parameters, and the first digits of SHA-256 of the payload: both ends may be of different age
BYTES = [
    (Flush(), 0x00, (), "e3b0c44298fc1c14"),
    (SeqCreate(2, 4, 2, 64, 2048, 8), 0xC4, (2, 4, 2, 64, 2048, 8), "e3b0c44298fc1c14"),
    (KvAppend(SEQS, 1, LENGTHS, steady(2, 3, 8), steady(2, 3, 8)), 0xC1, (2, 1, 3, 8, 0), "d351ab033984fc1c"),
    (
        Attend(SEQS, 1, steady(2, 3, 2, 8), steady(2, 3, 8), steady(2, 3, 8), "sparf", 4, LENGTHS + 1, LENGTHS),
        0xC5,
        (2, 1, 3, 2, 8, 4, 0, 0),
        "9d787d8bcfcc1726",
    ),
    (KvRead(SEQS, 3), 0xC2, (2, 3, 0, 0), "c1591bd2ba341312"),
    (KvRead(SEQS, 3, 5, 7), 0xC2, (2, 3, 5, 7), "c1591bd2ba341312"),
    (KvCrop(SEQS, 0, LENGTHS), 0xCC, (2, 0), "f3b1b107c9996b28"),
    (KvFree(SEQS), 0xC8, (2,), "c1591bd2ba341312"),
    (GetLog(0xC2), 0xCA, (0xC2,), "e3b0c44298fc1c14"),
    (SeqFork(SEQS, LENGTHS), 0xD0, (2,), "f3b1b107c9996b28"),
    (KvGather(SEQS, LENGTHS, LENGTHS + 1, 1, 2), 0xCE, (2, 1, 2), "334154bc4714a8e0"),
    (KvName(SEQS[:1], LENGTHS, KEYS), 0xD5, (1, 2), "354df00c76e025cc"),
    (KvExist(KEYS), 0xD9, (2,), "bbd01d2f9faf43f2"),
    (SeqSweep(), 0xDC, (), "e3b0c44298fc1c14"),
    (KvDrop(KEYS), 0xE1, (2,), "bbd01d2f9faf43f2"),
    (KvList(KEYS[:1], 5), 0xDD, (5,), "be45cb2605bf36be"),
]
SINGLE = half(2, 2).astype(np.float32)
COMMANDS = [verb.example(SEQS, H=3, G=2, d=8) for verb in VERBS.values()]
TERMS = np.array([[[0.1, np.inf, -np.inf, 0.5], [0.2, 30, 1, 0]]] * 3, np.float32)
COMMANDS += [replace(command, terms=TERMS) for command in COMMANDS if isinstance(command, Attend)]
COMMANDS += [replace(command, v=command.v[..., :0]) for command in COMMANDS if isinstance(command, (Attend, KvAppend))]


def test_every_command_has_an_encoding():
    assert {type(command) for command, *_ in BYTES} == set(VERBS)
    for command, opcode, parameters, digest in BYTES:
        request = encode(command)
        assert (request.opcode, request.parameters) == (opcode, parameters)
        assert sha256(bytes(request.payload)).hexdigest().startswith(digest)


def same(one, other):
    for name in type(one).__slots__:
        left, right = getattr(one, name), getattr(other, name)
        if isinstance(left, np.ndarray):
            assert (left.dtype, right.flags.aligned, right.flags.writeable) == (right.dtype, True, True)
            np.testing.assert_array_equal(left, right)
        else:
            assert left == right


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_command_encoding_round_trips(command):
    request = encode(command)
    again = decode(WireRequest(request.opcode, request.parameters, bytearray(request.payload)))
    assert type(again) is type(command)
    same(command, again)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_payload_has_exactly_the_needed_bytes(command):
    request = encode(command)
    with pytest.raises(WireError, match="payload"):
        decode(WireRequest(request.opcode, request.parameters, bytes(request.payload) + b"\0"))
    if request.payload:
        with pytest.raises(WireError, match="payload"):
            decode(WireRequest(request.opcode, request.parameters, request.payload[:-1]))


@given(st.integers(0, 255), st.lists(st.integers(0, 2**32 - 1), max_size=10), st.binary(max_size=300))
def test_any_bytes_decode_to_command_or_are_refused(opcode, parameters, payload):
    request = WireRequest(opcode, tuple(parameters), bytearray(payload))
    try:
        command = decode(request)
    except WireError as error:
        assert error.status in (Status.INVALID_OPCODE, Status.INVALID_FIELD)
    else:
        assert encode(command).opcode == opcode


def test_empty_array_of_impossible_shape_is_refused():
    method = b"sparf".ljust(32, b"\0")
    with pytest.raises(WireError, match="0 x 2 x 2147483648 x 2147483647 values"):
        decode(WireRequest(0xC5, (0, 0, 2, 2**31, 2**31 - 1, 4), bytearray(method)))


def test_numbers_beyond_their_field_are_refused():
    with pytest.raises(ValueError, match=r"from 0 to 2\^32 - 1"):
        encode(KvRead((1,), -1))
    with pytest.raises(ValueError, match="at most 32 bytes"):
        encode(Attend((1,), 0, half(1, 1, 1, 8), half(1, 1, 8), half(1, 1, 8), "m" * 33, 4, LENGTHS, LENGTHS))


@given(
    st.sampled_from(Status),
    st.text(max_size=40),
    st.dictionaries(st.sampled_from(["link", "queue", "flash_program"]), st.integers(0, 2**63)),
    st.lists(st.sampled_from([half(2, 3), half(3), np.arange(3, dtype=np.uint64), SINGLE, half(0, 2)]), max_size=3),
)
def test_completion_encoding_round_trips(status, reason, breakdown, arrays):
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


def test_non_integer_time_is_refused():
    units = dict.fromkeys(UNITS, 7)
    body, _ = encode_completion(Completion(status=Status.SUCCESS, breakdown_ns=units), zlib.crc32)
    assert decode_completion(body).done.breakdown_ns == units
    with pytest.raises(ValueError, match="unit 'flash_programs_of_mine'"):
        encode_completion(Completion(status=Status.SUCCESS, breakdown_ns={"flash_programs_of_mine": 1}), zlib.crc32)


@given(st.binary(max_size=200))
def test_any_bytes_decode_to_completion_or_are_refused(body):
    try:
        head = decode_completion(body)
    except WireError:
        return
    assert sum(int(np.prod(shape)) * dtype.itemsize for dtype, shape in head.shapes) == head.data_bytes


def test_entry_without_v_channels_means_all_channels():
    command = KvAppend(SEQS, 1, LENGTHS, steady(2, 3, 8), steady(2, 3, 8))
    request = encode(command)
    assert decode(replace(request, parameters=request.parameters[:-1])).v.shape == (2, 3, 8)  # of an older host
    with pytest.raises(WireError, match="9 channels are left out of 8"):
        decode(replace(request, parameters=(*request.parameters[:-1], 9)))
