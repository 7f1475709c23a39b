"""PDUs of NVMe/TCP (NVMe TCP Transport Specification 1.0, section 3.6).

A PDU has a common header of 8 bytes, the rest of a fixed-length header, a header digest, padding up to PDO, data,
and a data digest. Digests are present if both sides have negotiated them. `parse_head` validates a common header before
anything else is read.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

from csd_io.crc32c import crc32c

Buffer = bytes | bytearray | memoryview

COMMON = struct.Struct("<BBBBI")  # type, flags, HLEN, PDO, PLEN
DIGEST_BYTES = 4
_HEADERS = 256  # cached common headers: those of one connection are similar
MAX_HEADER_BYTES = 128
_OFFSET_UNIT = 4  # unit of PDO, CPDA and HPDA, bytes
_TERM_DATA_BYTES = 128  # maximum bytes of the offending PDU in a termination request


class PduType(IntEnum):
    """PDU-Type. H2C is from the host to the controller, C2H the reverse."""

    IC_REQ = 0x00
    IC_RESP = 0x01
    H2C_TERM = 0x02
    C2H_TERM = 0x03
    CAPSULE_CMD = 0x04
    CAPSULE_RESP = 0x05
    H2C_DATA = 0x06
    C2H_DATA = 0x07
    R2T = 0x09


FROM_HOST = frozenset({PduType.IC_REQ, PduType.H2C_TERM, PduType.CAPSULE_CMD, PduType.H2C_DATA})
FROM_CONTROLLER = frozenset(PduType) - FROM_HOST

HEADER_BYTES = {
    PduType.IC_REQ: 128,
    PduType.IC_RESP: 128,
    PduType.H2C_TERM: 24,
    PduType.C2H_TERM: 24,
    PduType.CAPSULE_CMD: 72,
    PduType.CAPSULE_RESP: 24,
    PduType.H2C_DATA: 24,
    PduType.C2H_DATA: 24,
    PduType.R2T: 24,
}
_CAPSULES = frozenset({PduType.CAPSULE_CMD, PduType.CAPSULE_RESP})
_TYPES = {int(kind): kind for kind in PduType}
_WITH_DATA = frozenset({PduType.CAPSULE_CMD, PduType.H2C_DATA, PduType.C2H_DATA})
_WITHOUT_DIGESTS = frozenset({PduType.IC_REQ, PduType.IC_RESP, PduType.H2C_TERM, PduType.C2H_TERM})


class Flag(IntEnum):
    """Bits of FLAGS of a common header."""

    HEADER_DIGEST = 1
    DATA_DIGEST = 2
    LAST = 4
    SUCCESS = 8  # the command is complete: no response capsule follows


class Fes(IntEnum):
    """Fatal error status of a termination request (figures 20 and 22)."""

    INVALID_HEADER_FIELD = 1
    SEQUENCE_ERROR = 2
    HEADER_DIGEST_ERROR = 3
    DATA_OUT_OF_RANGE = 4
    DATA_LIMIT_EXCEEDED = 5
    UNSUPPORTED_PARAMETER = 6


class PduError(Exception):
    """A fatal transport error; the connection is closed after a termination request that reports it.

    Attributes:
        fes: Fatal error status.
        information: Byte offset of the invalid field, or the digest received.
    """

    def __init__(self, fes: Fes, information: int, reason: str) -> None:
        super().__init__(reason)
        self.fes, self.information = fes, information


class PduHeader(NamedTuple):
    """A validated common header; `data_bytes` excludes padding and digests."""

    kind: PduType
    flags: int
    header_bytes: int  # bytes between common header and data: header, digest, padding
    data_bytes: int
    raw: bytes


class Digests(NamedTuple):
    """Negotiated digests."""

    header: bool = False
    data: bool = False

    @classmethod
    def of(cls, bits: int) -> Digests:
        """Decode DGST of an initialize connection PDU."""
        return cls(bool(bits & 1), bool(bits & 2))

    @property
    def bits(self) -> int:
        return self.header | self.data << 1


class IcReq(NamedTuple):
    """PFV, HPDA, digests, MAXR2T (0's based)."""

    version: int = 0
    align: int = 0
    digests: Digests = Digests()
    max_r2t: int = 0


class IcResp(NamedTuple):
    """PFV, CPDA, digests, MAXH2CDATA in bytes."""

    version: int = 0
    align: int = 0
    digests: Digests = Digests()
    max_h2c_bytes: int = 1 << 20


class Term(NamedTuple):
    """A termination request; `header` is the beginning of the invalid PDU."""

    fes: int
    information: int
    header: bytes = b""


class Data(NamedTuple):
    """H2CData or C2HData: `length` bytes at `offset` of a command's data; `tag` is TTAG, 0 in C2HData."""

    cid: int
    tag: int
    offset: int
    length: int


class R2T(NamedTuple):
    """Ready to Transfer: requests `length` bytes at `offset` of a command's data."""

    cid: int
    tag: int
    offset: int
    length: int


_IC = struct.Struct("<HBBI112x")
_TERM = struct.Struct("<HI10x")
_DATA = struct.Struct("<HHII4x")


@lru_cache(_HEADERS)
def parse_head(raw: bytes, allowed: frozenset[PduType], digests: Digests, max_data_bytes: int) -> PduHeader:
    """Validate a common header.

    Args:
        raw: Its 8 bytes.
        allowed: PDU types that are valid in the current state.
        digests: Negotiated digests.
        max_data_bytes: Maximum data of a PDU.

    Raises:
        PduError: The header is invalid.
    """
    number, flags, header_len, offset, total = COMMON.unpack(raw)
    kind = _TYPES.get(number)
    if kind is None:
        raise PduError(Fes.INVALID_HEADER_FIELD, 0, f"PDU type {number:#04x} is unknown")
    if kind not in allowed:
        raise PduError(Fes.SEQUENCE_ERROR, 0, f"a PDU of type {kind.name} is not valid in this state")
    if header_len != HEADER_BYTES[kind]:
        raise PduError(Fes.INVALID_HEADER_FIELD, 2, f"HLEN = {header_len}: {kind.name} has {HEADER_BYTES[kind]}")
    if kind in _WITHOUT_DIGESTS:
        data = total - header_len
        most = _TERM_DATA_BYTES if kind in (PduType.H2C_TERM, PduType.C2H_TERM) else 0
        if not 0 <= data <= most:
            raise PduError(Fes.INVALID_HEADER_FIELD, 4, f"PLEN = {total} of {kind.name}")
        return PduHeader(kind, flags, header_len - COMMON.size, data, raw)
    if bool(flags & Flag.HEADER_DIGEST) != digests.header:
        raise PduError(Fes.INVALID_HEADER_FIELD, 1, f"HDGSTF of {kind.name} is not as negotiated")
    before = header_len + DIGEST_BYTES * digests.header
    if total == before:
        return PduHeader(kind, flags, before - COMMON.size, 0, raw)
    if kind not in _WITH_DATA or total < before:
        raise PduError(Fes.INVALID_HEADER_FIELD, 4, f"PLEN = {total} of {kind.name}")
    if not before <= offset <= total or offset % _OFFSET_UNIT:
        raise PduError(Fes.INVALID_HEADER_FIELD, 3, f"PDO = {offset} of a PDU of {total} bytes")
    if bool(flags & Flag.DATA_DIGEST) != digests.data:
        raise PduError(Fes.INVALID_HEADER_FIELD, 1, f"DDGSTF of {kind.name} is not as negotiated")
    data = total - offset - DIGEST_BYTES * digests.data
    if data < 0:
        raise PduError(Fes.INVALID_HEADER_FIELD, 4, f"PLEN = {total} has no room for a data digest")
    if data > max_data_bytes:
        raise PduError(Fes.DATA_LIMIT_EXCEEDED, 4, f"{data} bytes of data: at most {max_data_bytes}")
    return PduHeader(kind, flags, offset - COMMON.size, data, raw)


def check_header_digest(head: PduHeader, rest: Buffer) -> None:
    """Raise PduError if a header does not match its digest; `rest` is the header after its common part."""
    at = HEADER_BYTES[head.kind] - COMMON.size
    (digest,) = struct.unpack_from("<I", rest, at)
    if crc32c(head.raw + bytes(rest[:at])) != digest:
        raise PduError(Fes.HEADER_DIGEST_ERROR, digest, f"header digest of {head.kind.name}")


def parse(head: PduHeader, rest: Buffer) -> IcReq | IcResp | Term | Data | R2T | bytes:
    """Decode the PDU of a validated header; a capsule is returned as the bytes of its queue entry.

    Args:
        rest: `head.header_bytes` after the common header; for termination requests also their data.
    """
    if head.kind in _CAPSULES:
        return bytes(rest[: HEADER_BYTES[head.kind] - COMMON.size])
    match head.kind:
        case PduType.IC_REQ | PduType.IC_RESP:
            version, align, digests, last = _IC.unpack_from(rest)
            pdu_class = IcReq if head.kind is PduType.IC_REQ else IcResp
            return pdu_class(version, align, Digests.of(digests), last)
        case PduType.H2C_TERM | PduType.C2H_TERM:
            fes, information = _TERM.unpack_from(rest)
            return Term(fes, information, bytes(rest[_TERM.size :]))
        case PduType.H2C_DATA | PduType.C2H_DATA:
            return Data(*_DATA.unpack_from(rest))
        case _:
            return R2T(*_DATA.unpack_from(rest))


def pack_ic(value: IcReq | IcResp) -> bytes:
    """Encode an initialize connection request or response."""
    kind = PduType.IC_REQ if isinstance(value, IcReq) else PduType.IC_RESP
    version, align, digests, last = value
    return COMMON.pack(kind, 0, 128, 0, 128) + _IC.pack(version, align, digests.bits, last)


def pack_term(kind: PduType, value: Term) -> bytes:
    """Encode a termination request."""
    data = value.header[:_TERM_DATA_BYTES]
    return COMMON.pack(kind, 0, 24, 0, 24 + len(data)) + _TERM.pack(value.fes, value.information) + data


def pack(
    kind: PduType, header: bytes, data: Sequence[Buffer], digests: Digests, flags: int = 0, align: int = 0
) -> list[Buffer]:
    """Encode a PDU as buffers to send one after the other; the data is not copied.

    Args:
        kind: A capsule, data, or R2T.
        header: The header after its common part: a queue entry, or `pack_data`.
        data: Buffers of bytes.
        digests: Negotiated digests.
        flags: LAST and SUCCESS; those of the digests are added.
        align: HPDA or CPDA of the receiver: data begins at a multiple of 4 * (align + 1) bytes.
    """
    size = sum(map(len, data))
    common, padding = _common(kind, len(header), size, digests, flags, align)
    head = common + header
    if digests.header:
        head += crc32c(head).to_bytes(DIGEST_BYTES, "little")
    parts: list[Buffer] = [head + padding if padding else head, *data]
    if digests.data and size:
        joined = data[0] if len(data) == 1 else b"".join(data)
        parts.append(crc32c(joined).to_bytes(DIGEST_BYTES, "little"))
    return parts


@lru_cache(_HEADERS)
def _common(kind: PduType, rest: int, size: int, digests: Digests, flags: int, align: int) -> tuple[bytes, bytes]:
    """Common header and padding of a PDU with `rest` more bytes of header and `size` bytes of data."""
    before = COMMON.size + rest
    if not size:
        flags |= Flag.HEADER_DIGEST * digests.header
        return COMMON.pack(kind, flags, before, 0, before + DIGEST_BYTES * digests.header), b""
    offset = before + DIGEST_BYTES * digests.header
    padding = -offset % (_OFFSET_UNIT * (align + 1))
    total = offset + padding + size + DIGEST_BYTES * digests.data
    return COMMON.pack(kind, flags | digests.bits, before, offset + padding, total), bytes(padding)


def pack_data(value: Data | R2T) -> bytes:
    """Encode the header of a data PDU or an R2T after its common part."""
    return _DATA.pack(*value)


def part_of(buffers: Sequence[Buffer], at: int, length: int) -> list[Buffer]:
    """Slice `length` bytes of consecutive buffers from byte `at` on, without copying."""
    part: list[Buffer] = []
    for buffer in buffers:
        taken = memoryview(buffer)[at : at + length]
        if taken:
            part.append(taken)
            length -= len(taken)
        at = max(0, at - len(buffer))
    return part
