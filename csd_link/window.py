"""Window: a range of 4 KiB blocks through which a host and a drive's firmware communicate.

| blocks                 | content                                                 | written by |
|------------------------|---------------------------------------------------------|------------|
| 0                      | drive header: identity, generation, heartbeat           | drive      |
| 1                      | host header: generation, drive that it attaches to      | host       |
| 8 to 8 + depth         | submission ring, one request per block                  | host       |
| then depth             | completion ring, one completion per block               | drive      |
| then depth x slot      | payloads to the drive that do not fit their block       | host       |
| then depth x slot      | data to the host that does not fit its block            | drive      |

The protocol only assumes that an aligned block is written atomically, and that earlier writes are visible before later
ones. Every block has one writer. A control block carries its kind, both generations, a sequence number and a CRC-32; a
payload's CRC is in the block that announces it. A generation is a number that its side has never used before: after a
restart of either side, old blocks no longer match. Request s of a host's generation and its completion are stored at
index s modulo depth, so a block itself shows whether it is the expected one.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, Protocol

from csd_io.crc import crc32
from csd_spec._bounds import at_least
from csd_spec.drive import DriveSpec

BLOCK_BYTES = 4096
VERSION = 1
MAGIC = b"vcsdwin\0"
_HEAD = struct.Struct("<8sHHIQQQI")  # magic, version, kind, body bytes, host, drive, sequence, CRC of the rest
BODY_BYTES = BLOCK_BYTES - _HEAD.size
_BEFORE_CRC = _HEAD.size - 4
_RINGS = 8  # first block of the rings
MAX_DEPTH, MAX_SLOT_BLOCKS = 1024, 1 << 18


class WindowMedium(Protocol):
    """Storage of a window: blocks of 4 KiB that are read and written as a whole."""

    @property
    def blocks(self) -> int: ...

    def read(self, block: int, count: int = 1) -> bytearray:
        """Read a private copy of blocks."""
        ...

    def write(self, block: int, data: bytes | bytearray | memoryview) -> None:
        """Write blocks; the rest of the last block may keep its old content."""
        ...


class BlockKind(IntEnum):
    """Kind of a control block."""

    DRIVE = 1
    HOST = 2
    REQUEST = 3
    COMPLETION = 4


@dataclass(frozen=True, slots=True)
class ControlBlock:
    """A control block. `host` and `drive` are the generations to which it belongs."""

    kind: BlockKind
    host: int
    drive: int
    sequence: int
    body: bytes | bytearray | memoryview = b""

    def pack(self) -> bytes:
        """Encode the block, at most 4 KiB."""
        assert len(self.body) <= BODY_BYTES, f"{len(self.body)} bytes would reach into the next block"
        head = _HEAD.pack(MAGIC, VERSION, self.kind, len(self.body), self.host, self.drive, self.sequence, 0)
        crc = crc32(self.body, crc32(head[:_BEFORE_CRC]))
        return b"".join((head[:_BEFORE_CRC], crc.to_bytes(4, "little"), self.body))


def unpack(raw: bytearray) -> ControlBlock | None:
    """Decode a control block; None if it is invalid or torn."""
    magic, version, kind, size, host, drive, sequence, crc = _HEAD.unpack_from(raw)
    if magic != MAGIC or version != VERSION or size > BODY_BYTES or not BlockKind.DRIVE <= kind <= BlockKind.COMPLETION:
        return None
    body = raw[_HEAD.size : _HEAD.size + size]
    if crc32(body, crc32(raw[:_BEFORE_CRC])) != crc:
        return None
    return ControlBlock(BlockKind(kind), host, drive, sequence, body)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowLayout:
    """Size of a window.

    Attributes:
        depth: Maximum number of requests in flight.
        slot_blocks: Maximum payload of a request and data of a completion, in 4 KiB blocks.
    """

    depth: int = 8
    slot_blocks: int = 8192

    def __post_init__(self) -> None:
        at_least(1, depth=self.depth, slot_blocks=self.slot_blocks)
        if self.depth > MAX_DEPTH or self.slot_blocks > MAX_SLOT_BLOCKS:
            raise ValueError(f"depth = {self.depth}, slot_blocks = {self.slot_blocks}: at most {MAX_DEPTH}, 2^18")

    @property
    def blocks(self) -> int:
        return _RINGS + 2 * self.depth * (1 + self.slot_blocks)

    @property
    def slot_bytes(self) -> int:
        return self.slot_blocks * BLOCK_BYTES

    def request(self, sequence: int) -> int:
        return _RINGS + sequence % self.depth

    def completion(self, sequence: int) -> int:
        return _RINGS + self.depth + sequence % self.depth

    def to_drive(self, sequence: int) -> int:
        """First block of the payload of a request."""
        return _RINGS + 2 * self.depth + sequence % self.depth * self.slot_blocks

    def to_host(self, sequence: int) -> int:
        """First block of the data of a completion."""
        return self.to_drive(sequence) + self.depth * self.slot_blocks


DRIVE_HEADER, HOST_HEADER = 0, 1


@dataclass(frozen=True, slots=True)
class Identity:
    """Description of a drive in its header; `restarts` is whether it is restarted when it dies."""

    name: str
    spec: DriveSpec
    layout: WindowLayout
    restarts: bool = True

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, text: bytes | bytearray | memoryview) -> Identity:
        """Decode an identity; raises ValueError for invalid JSON."""
        values: Any = json.loads(bytes(text))
        try:
            spec = DriveSpec.from_dict(values["spec"])
            return cls(str(values["name"]), spec, WindowLayout(**values["layout"]), bool(values["restarts"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no drive's header: {error}") from error


def next_generation(*used: int) -> int:
    """Return a generation number above the used ones.

    If none is known, or a corrupt one leaves no room above it, the number is drawn at random.
    """
    return max(used) + 1 if 0 < max(used) < 1 << 62 else int.from_bytes(os.urandom(6), "little") + 1
