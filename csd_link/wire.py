"""Commands and completions as bytes: an entry of 64 bytes like NVMe's, ten parameters in it, and one payload.

A request's payload holds its arrays one after the other, little endian, wide items first so that each is aligned:
handles (uint64), counts (int64), then FP16 values. Sizes are computed from the parameters and must be met exactly;
nothing is allocated before. Whoever decodes trusts no number.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csd_spec.commands import (
    METHOD_BYTES,
    Attend,
    Command,
    Completion,
    FlashCounters,
    Flush,
    GetLog,
    KvAppend,
    KvCrop,
    KvFree,
    KvRead,
    Opcode,
    SeqCreate,
)
from csd_spec.status import Status

Buffer = bytes | bytearray | memoryview

PARAMETERS = 10
MOST_SEQUENCES = 1 << 16
MOST_TOKENS = 1 << 24  # of one sequence
MOST_VALUES = 1 << 40  # of an array, its empty dimensions left out
MOST_NS = 1 << 53  # of modelled time, a hundred days
ENTRY = struct.Struct(
    f"<BBHIQII{PARAMETERS}I"
)  # opcode, flags, id, namespace, time, payload bytes, its CRC, parameters
assert ENTRY.size == 64

_DONE = struct.Struct("<HHHHQQ4QQII")  # status, bytes of reason, units, arrays, 2 times, flash, link, data bytes, CRC
_UNIT = struct.Struct("<16sQ")
_ARRAY = struct.Struct("<cB2x4I")
_DTYPES: dict[bytes, np.dtype[Any]] = {
    b"e": np.dtype(np.float16),
    b"Q": np.dtype(np.uint64),
    b"q": np.dtype(np.int64),
    b"B": np.dtype(np.uint8),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_REASON_BYTES = 512


class WireError(Exception):
    """Bytes that are no command or no completion."""

    def __init__(self, reason: str, status: Status = Status.INVALID_FIELD) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, slots=True)
class Request:
    """A command as it travels: opcode, at most ten 32-bit parameters, payload."""

    opcode: int
    parameters: tuple[int, ...]
    payload: Buffer = b""


def encode(command: Command) -> Request:
    """The request of a command; raises ValueError for a number that has no place in an entry."""
    match command:
        case Flush():
            return Request(Opcode.FLUSH, ())
        case GetLog():
            return _request(Opcode.GET_LOG, (command.page,))
        case SeqCreate():
            c = command
            shape = c.count, c.layers, c.kv_heads, c.head_dim, c.max_tokens, c.embedding_bits
            return _request(Opcode.SEQ_CREATE, shape)
        case KvAppend():
            shape = len(command.seqs), command.layer, *command.k.shape[1:]
            return _request(Opcode.KV_APPEND, shape, command.seqs, command.lengths, command.k, command.v)
        case Attend():
            method = np.frombuffer(command.method.encode().ljust(METHOD_BYTES, b"\0"), np.uint8)
            if method.size != METHOD_BYTES:
                raise ValueError(f"method = {command.method!r}: at most {METHOD_BYTES} bytes")
            shape = len(command.seqs), command.layer, *command.q.shape[1:], command.r
            arrays = command.top_k, command.recent, method, command.q, command.k, command.v
            return _request(Opcode.ATTN_SUBMIT, shape, command.seqs, *arrays)
        case KvRead():
            return _request(Opcode.KV_READ, (len(command.seqs), command.layer), command.seqs)
        case KvCrop():
            return _request(Opcode.KV_CROP, (len(command.seqs), command.layer), command.seqs, command.lengths)
        case KvFree():
            return _request(Opcode.KV_FREE, (len(command.seqs),), command.seqs)


def _request(opcode: Opcode, parameters: tuple[int, ...], seqs: tuple[int, ...] = (), *arrays: NDArray[Any]) -> Request:
    if any(not 0 <= value < 1 << 32 for value in parameters):
        raise ValueError(f"{opcode.name.lower()} {parameters}: parameters are 32-bit numbers from 0 on")
    parts: list[Buffer] = [struct.pack(f"<{len(seqs)}Q", *seqs)]
    parts += [np.ascontiguousarray(array).data for array in arrays]
    return Request(opcode, parameters, b"".join(parts))


def decode(request: Request) -> Command:
    """The command of a request; raises WireError with an NVMe status."""
    reader = _READERS.get(request.opcode)
    if reader is None:
        raise WireError(f"opcode {request.opcode:#04x} is none of this drive's", Status.INVALID_OPCODE)
    values = (*request.parameters, *(0,) * (PARAMETERS - len(request.parameters)))
    payload = _Payload(request.payload)
    command = reader(values, payload)
    payload.end()
    return command


def _nbytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Bytes of an array; raises WireError for one that numpy could not even shape when it is empty."""
    if prod(max(1, size) for size in shape) > MOST_VALUES:
        raise WireError(f"an array of {' x '.join(map(str, shape))} values")
    return prod(shape) * dtype.itemsize


class _Payload:
    """Arrays taken from a payload one after the other."""

    def __init__(self, data: Buffer) -> None:
        self.data, self.at = data, 0

    def take(self, dtype: type, *shape: int) -> NDArray[Any]:
        end = self.at + _nbytes(shape, np.dtype(dtype))
        if end > len(self.data):
            raise WireError(f"payload of {len(self.data)} bytes: {end} or more are needed")
        array: NDArray[Any] = np.frombuffer(self.data, dtype, prod(shape), self.at).reshape(shape)
        self.at = end
        return array

    def seqs(self, count: int) -> tuple[int, ...]:
        if count > MOST_SEQUENCES:
            raise WireError(f"{count} sequences: a command has at most {MOST_SEQUENCES}")
        return tuple(self.take(np.uint64, count).tolist())

    def counts(self, count: int) -> NDArray[np.int64]:
        array: NDArray[np.int64] = self.take(np.int64, count)
        if count and not 0 <= int(array.min()) <= int(array.max()) <= MOST_TOKENS:
            raise WireError(f"a count of tokens lies outside 0 to {MOST_TOKENS}")
        return array

    def half(self, *shape: int) -> NDArray[np.float16]:
        return self.take(np.float16, *shape)

    def end(self) -> None:
        if self.at != len(self.data):
            raise WireError(f"payload of {len(self.data)} bytes: {self.at} are needed")


def _append(values: tuple[int, ...], payload: _Payload) -> KvAppend:
    count, layer, heads, dim = values[:4]
    seqs, lengths = payload.seqs(count), payload.counts(count)
    shape = int(lengths.sum()), heads, dim
    return KvAppend(seqs, layer, lengths, payload.half(*shape), payload.half(*shape))


def _attend(values: tuple[int, ...], payload: _Payload) -> Attend:
    count, layer, heads, group, dim, r = values[:6]
    seqs, top_k, recent = payload.seqs(count), payload.counts(count), payload.counts(count)
    method = bytes(payload.take(np.uint8, METHOD_BYTES)).rstrip(b"\0").decode("ascii", "replace")
    q, k, v = payload.half(count, heads, group, dim), payload.half(count, heads, dim), payload.half(count, heads, dim)
    return Attend(seqs, layer, q, k, v, method, r, top_k, recent)


_READERS: dict[int, Callable[[tuple[int, ...], _Payload], Command]] = {
    Opcode.FLUSH: lambda values, payload: Flush(),
    Opcode.GET_LOG: lambda values, payload: GetLog(values[0]),
    Opcode.SEQ_CREATE: lambda values, payload: SeqCreate(*values[:6]),
    Opcode.KV_APPEND: _append,
    Opcode.ATTN_SUBMIT: _attend,
    Opcode.KV_READ: lambda values, payload: KvRead(payload.seqs(values[0]), values[1]),
    Opcode.KV_CROP: lambda values, payload: KvCrop(payload.seqs(values[0]), values[1], payload.counts(values[0])),
    Opcode.KV_FREE: lambda values, payload: KvFree(payload.seqs(values[0])),
}


def encode_completion(done: Completion, data_crc: Callable[[bytes], int]) -> tuple[bytes, bytes]:
    """The completion's fields, and its data."""
    data = b"".join(np.ascontiguousarray(array).data for array in done.data)
    reason = done.reason.encode()[:_REASON_BYTES]
    f, counts = done.flash, (len(reason), len(done.breakdown_ns), len(done.data))
    flash = f.pages_read, f.pages_programmed, f.fetched_bytes, f.useful_bytes
    times = done.submit_ns, done.finish_ns
    parts = [_DONE.pack(done.status, *counts, *times, *flash, done.link_bytes, len(data), data_crc(data))]
    parts += [_UNIT.pack(unit.encode(), ns) for unit, ns in done.breakdown_ns.items()]
    for array in done.data:
        parts.append(_ARRAY.pack(_CODES[array.dtype], array.ndim, *array.shape, *(0,) * (4 - array.ndim)))
    return b"".join((*parts, reason)), data


@dataclass(frozen=True, slots=True)
class CompletionHead:
    """A completion whose data is still to be fetched."""

    done: Completion
    shapes: tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]
    data_bytes: int
    data_crc: int
    size: int  # of the fields

    def with_data(self, data: Buffer) -> Completion:
        """The completion with its arrays, whose memory is `data`'s."""
        arrays, at = [], 0
        for dtype, shape in self.shapes:
            arrays.append(np.frombuffer(data, dtype, prod(shape), at).reshape(shape))
            at += arrays[-1].nbytes
        return replace(self.done, data=tuple(arrays))


def decode_completion(body: Buffer) -> CompletionHead:
    """What `encode_completion` has written; raises WireError."""
    try:
        status, reason_bytes, units, arrays, submit_ns, finish_ns, *rest = _DONE.unpack_from(body)
        at = _DONE.size
        breakdown, shapes = {}, []
        for _ in range(units):
            unit, ns = _UNIT.unpack_from(body, at)
            breakdown[unit.rstrip(b"\0").decode()] = ns
            at += _UNIT.size
        for _ in range(arrays):
            code, ndim, *shape = _ARRAY.unpack_from(body, at)
            shapes.append((_DTYPES[code], tuple(shape[:ndim])))
            at += _ARRAY.size
        reason = bytes(body[at : at + reason_bytes]).decode("utf-8", "replace")
        known = Status(status)
    except (struct.error, KeyError, ValueError) as error:
        raise WireError(f"no completion: {error}") from error
    read, programmed, fetched, useful, link_bytes, data_bytes, data_crc = rest
    if sum(_nbytes(shape, dtype) for dtype, shape in shapes) != data_bytes:
        raise WireError(f"no completion: its arrays do not have {data_bytes} bytes")
    flash = FlashCounters(pages_read=read, pages_programmed=programmed, fetched_bytes=fetched, useful_bytes=useful)
    done = Completion(
        status=known,
        reason=reason,
        submit_ns=submit_ns,
        finish_ns=finish_ns,
        breakdown_ns=breakdown,
        flash=flash,
        link_bytes=link_bytes,
    )
    return CompletionHead(done, tuple(shapes), data_bytes, data_crc, at + reason_bytes)
