"""Wire format of commands and completions: a 64-byte entry like NVMe's with ten parameters, and one payload.

The row of a command in `csd_spec.verbs` defines its parameters and arrays. A payload holds its arrays one after the
other, little endian, wide items first for alignment: handles (uint64), counts (int64), then keys and FP16 values. A
completion's data holds the arrays of the reply in order, each with dtype and shape in the header. Sizes are computed
from the parameters and must match exactly before anything is allocated. The decoder does not trust any number.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csd_io.crc import crc32
from csd_spec.arrays import KEY
from csd_spec.commands import Command, Completion, FlashCounters
from csd_spec.status import Status
from csd_spec.units import MAX_UNIT_BYTES, UNITS, check_unit
from csd_spec.verbs import MAX_SEQUENCES, MAX_TOKENS, OMITTED, VERBS, Array, ArrayType, verb_of

Buffer = bytes | bytearray | memoryview

PARAMETERS = 10
MAX_VALUES = 1 << 40  # per array, without counting empty dimensions
MAX_NS = 1 << 53  # of simulated time, about a hundred days
ENTRY = struct.Struct(
    f"<BBHIQII{PARAMETERS}I"
)  # opcode, flags, id, namespace, time, payload bytes, its CRC, parameters
assert ENTRY.size == 64

_DONE = struct.Struct("<HHHHQQ4QQII")  # status, reason bytes, units, arrays, 2 times, flash, link, data bytes, CRC
_UNIT = struct.Struct(f"<{MAX_UNIT_BYTES}sQ")
assert all(len(unit) <= MAX_UNIT_BYTES for unit in UNITS)
_ARRAY = struct.Struct("<cB2x4I")
_DTYPES: dict[bytes, np.dtype[Any]] = {
    b"e": np.dtype(np.float16),
    b"f": np.dtype(np.float32),
    b"Q": np.dtype(np.uint64),
    b"q": np.dtype(np.int64),
    b"B": np.dtype(np.uint8),
    b"K": KEY,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_REASON_BYTES = 512


class WireError(Exception):
    """Bytes that are not a valid command or completion."""

    def __init__(self, reason: str, status: Status = Status.INVALID_FIELD) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, slots=True)
class WireRequest:
    """An encoded command: opcode, at most ten 32-bit parameters, payload."""

    opcode: int
    parameters: tuple[int, ...]
    payload: Buffer = b""


def encode(command: Command) -> WireRequest:
    """Encode a command; raises ValueError for a number or a name that is too large."""
    opcode, parameters, arrays = encode_arrays(command)
    return WireRequest(opcode, parameters, b"".join(arrays))


def encode_arrays(command: Command) -> tuple[int, tuple[int, ...], list[Buffer]]:
    """Encode a command to opcode, parameters and payload arrays (zero-copy). Raises ValueError."""
    verb = VERBS[type(command)]
    sizes = verb.sizes(command)
    parameters = tuple(
        sizes.get(parameter, 0) if isinstance(parameter, str) else getattr(command, parameter.name)
        for parameter in verb.parameters
    )
    if any(not 0 <= value < 1 << 32 for value in parameters):
        raise ValueError(f"{verb.name} {parameters}: parameters must be from 0 to 2^32 - 1")
    return verb.opcode, parameters, [_pack_array(array, getattr(command, array.name)) for array in verb.arrays]


def pack_entry(opcode: int, parameters: tuple[int, ...], sequence: int, submit_ns: int, size: int, crc: int) -> bytes:
    """Encode the entry of a request; `size` and `crc` are the bytes and the CRC-32 of its payload."""
    padded = (*parameters, *(0,) * (PARAMETERS - len(parameters)))
    return ENTRY.pack(opcode, 0, sequence & 0xFFFF, 1, submit_ns, size, crc, *padded)


def unpack_entry(body: Buffer) -> tuple[int, tuple[int, ...], int, int, int]:
    """Decode an entry: opcode, parameters, submission time (ns), payload bytes and CRC-32; raises WireError."""
    if len(body) < ENTRY.size:
        raise WireError(f"an entry of {len(body)} bytes: must have {ENTRY.size}")
    opcode, _, _, _, submit_ns, size, crc, *parameters = ENTRY.unpack_from(body)
    if submit_ns > MAX_NS:
        raise WireError(f"submit_ns = {submit_ns}: must be at most {MAX_NS}")
    return opcode, tuple(parameters), submit_ns, size, crc


def check_payload(request: WireRequest, size: int, crc: int) -> WireRequest:
    """Check a request's payload against size and CRC of its entry; raises WireError."""
    if len(request.payload) != size or crc32(request.payload) != crc:
        raise WireError(f"payload of {size} bytes does not match its checksum", Status.TRANSFER_ERROR)
    return request


def _pack_array(array: Array, value: Any) -> Buffer:
    if array.presence_symbol and value is None:
        return b""
    if array.kind is ArrayType.HANDLES:
        return struct.pack(f"<{len(value)}Q", *value)
    if array.kind is ArrayType.TEXT:
        (size,) = array.sized({})
        text: bytes = value.encode()
        if len(text) > size:
            raise ValueError(f"{array.name} = {value!r}: at most {size} bytes")
        return text.ljust(size, b"\0")
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8).data


def decode(request: WireRequest) -> Command:
    """Decode a request; raises WireError with an NVMe status."""
    verb = verb_of(request.opcode)
    if verb is None:
        raise WireError(f"opcode {request.opcode:#04x}: unknown command", Status.INVALID_OPCODE)
    payload, form = request.payload, form_of(request.opcode, request.parameters)
    _check_size(payload, form.size, bool(form.counted))
    fields = form.scalars | {array.name: _unpack_array(array, shape, payload, at) for array, shape, at in form.items}
    if form.counted:
        sizes = dict(form.sizes)
        for array, _, _ in form.items:
            if array.kind is ArrayType.COUNTS:
                sizes[array.total] = _sum(fields[array.name])
        items, size = _place_arrays(form.counted, sizes, form.size)
        _check_size(payload, size)
        fields |= {array.name: _unpack_array(array, shape, payload, at) for array, shape, at in items}
    command: Command = verb.command(**fields)
    return command


Item = tuple[Array, tuple[int, ...] | None, int]  # array, shape (None if omitted), offset in the payload


@dataclass(frozen=True, slots=True)
class Form:
    """Structure of a request, derived from its parameters.

    Attributes:
        scalars: Fields of the command.
        sizes: Sizes of symbols.
        items: Arrays of the payload.
        size: Their bytes.
        counted: Trailing arrays whose shape depends on the content of other arrays.
    """

    scalars: dict[str, Any]
    sizes: dict[str, int]
    items: list[Item]
    size: int
    counted: tuple[Array, ...]


@lru_cache(maxsize=256)
def form_of(opcode: int, parameters: tuple[int, ...]) -> Form:
    """Derive the structure of a request; cached because decode steps repeat it. Raises WireError."""
    verb = verb_of(opcode)
    assert verb is not None
    scalars: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    for parameter, value in zip(verb.parameters, (*parameters, *(0,) * PARAMETERS), strict=False):
        if isinstance(parameter, str):
            sizes[parameter] = value
        else:
            scalars[parameter.name] = value
    if OMITTED in sizes:
        sizes["dv"] = sizes["d"] - sizes[OMITTED]
        if sizes["dv"] < 0:
            raise WireError(f"v: {sizes[OMITTED]} channels are left out of {sizes['d']}")
    items, size = _place_arrays([array for array in verb.arrays if array not in verb.counted], sizes, 0)
    return Form(scalars, sizes, items, size, verb.counted)


def _place_arrays(arrays: Sequence[Array], sizes: Mapping[str, int], at: int) -> tuple[list[Item], int]:
    """Place arrays in a payload from byte `at` on; returns them and the end. Raises WireError."""
    items: list[Item] = []
    for array in arrays:
        if array.presence_symbol and sizes[array.presence_symbol] > 1:
            raise WireError(f"{array.name}: is there {sizes[array.presence_symbol]} times")
        if array.presence_symbol and not sizes[array.presence_symbol]:
            items.append((array, None, at))
            continue
        shape = array.sized(sizes)
        if array.kind is ArrayType.HANDLES and prod(shape) > MAX_SEQUENCES:
            raise WireError(f"{prod(shape)} sequences: a command has at most {MAX_SEQUENCES}")
        items.append((array, shape, at))
        at += _count(shape) * array.dtype.itemsize
    return items, at


def _unpack_array(array: Array, shape: tuple[int, ...] | None, payload: Buffer, at: int) -> Any:
    """Decode one array."""
    if shape is None:
        return None
    value: NDArray[Any] = np.ndarray(shape, array.dtype, payload, at)
    if array.kind is ArrayType.HANDLES:
        return tuple(value.tolist())
    if array.kind is ArrayType.TEXT:
        return bytes(value).rstrip(b"\0").decode("ascii", "replace")
    return value


def _sum(counts: NDArray[np.int64]) -> int:
    """Sum of token counts; raises WireError for an invalid count."""
    values: list[int] = counts.tolist()
    if values and not 0 <= min(values) <= max(values) <= MAX_TOKENS:
        raise WireError(f"a count of tokens lies outside 0 to {MAX_TOKENS}")
    return sum(values)


def _check_size(payload: Buffer, size: int, or_more: bool = False) -> None:
    if len(payload) < size or (len(payload) > size and not or_more):
        raise WireError(f"payload of {len(payload)} bytes: {size}{' or more' * or_more} are needed")


def _count(shape: tuple[int, ...]) -> int:
    """Number of values of a shape; raises WireError for shapes that numpy rejects even if empty."""
    count = prod(shape)
    if (count or prod(max(1, size) for size in shape)) > MAX_VALUES:
        raise WireError(f"an array of {' x '.join(map(str, shape))} values")
    return count


def encode_completion(done: Completion, data_crc: Callable[[bytes], int]) -> tuple[bytes, bytes]:
    """Encode a completion to its fields and its data; raises ValueError for an unknown unit of time."""
    data = b"".join(np.ascontiguousarray(array).data for array in done.data)
    reason = done.reason.encode()[:_REASON_BYTES]
    f, counts = done.flash, (len(reason), len(done.breakdown_ns), len(done.data))
    flash = f.pages_read, f.pages_programmed, f.fetched_bytes, f.useful_bytes
    times = done.submit_ns, done.finish_ns
    parts = [_DONE.pack(done.status, *counts, *times, *flash, done.link_bytes, len(data), data_crc(data))]
    for unit, ns in done.breakdown_ns.items():
        check_unit(unit)
        parts.append(_UNIT.pack(unit.encode(), ns))
    for array in done.data:
        parts.append(_ARRAY.pack(_CODES[array.dtype], array.ndim, *array.shape, *(0,) * (4 - array.ndim)))
    return b"".join((*parts, reason)), data


@dataclass(frozen=True, slots=True)
class CompletionHead:
    """A decoded completion whose data is not yet read."""

    done: Completion
    shapes: tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]
    data_bytes: int
    data_crc: int
    size: int  # of the fields

    def with_data(self, data: Buffer) -> Completion:
        """Return the completion with its arrays, which share the memory of `data`."""
        arrays, at = [], 0
        for dtype, shape in self.shapes:
            arrays.append(np.frombuffer(data, dtype, prod(shape), at).reshape(shape))
            at += arrays[-1].nbytes
        return replace(self.done, data=tuple(arrays))


def decode_completion(body: Buffer) -> CompletionHead:
    """Decode the fields of `encode_completion`; raises WireError."""
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
        checked_status = Status(status)
    except (struct.error, KeyError, ValueError) as error:
        raise WireError(f"invalid completion: {error}") from error
    read, programmed, fetched, useful, link_bytes, data_bytes, data_crc = rest
    if sum(_count(shape) * dtype.itemsize for dtype, shape in shapes) != data_bytes:
        raise WireError(f"invalid completion: its arrays do not have {data_bytes} bytes")
    flash = FlashCounters(pages_read=read, pages_programmed=programmed, fetched_bytes=fetched, useful_bytes=useful)
    done = Completion(
        status=checked_status,
        reason=reason,
        submit_ns=submit_ns,
        finish_ns=finish_ns,
        breakdown_ns=breakdown,
        flash=flash,
        link_bytes=link_bytes,
    )
    return CompletionHead(done, tuple(shapes), data_bytes, data_crc, at + reason_bytes)
