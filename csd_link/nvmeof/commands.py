"""Queue entries, opcodes and status codes of NVMe (NVMe Base Specification 2.0)."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

SQE_BYTES, CQE_BYTES = 64, 16
_SQE = struct.Struct("<BBHIIIQQI3xB6I")
_CQE = struct.Struct("<QHHHH")
assert (_SQE.size, _CQE.size) == (SQE_BYTES, CQE_BYTES)

SGL_IN_CAPSULE = 0x01  # data block descriptor, address is an offset in the capsule (figure 125)
SGL_TRANSPORT = 0x5A  # transport data block descriptor: data follows by R2T, or goes by C2HData
DO_NOT_RETRY = 1 << 14
ALL_NAMESPACES = 0xFFFFFFFF

DISCOVERY_NQN = "nqn.2014-08.org.nvmexpress.discovery"
MAX_NQN_BYTES = 223
RETRY_S = 60.0  # our initiators repeat a command that the controller asks to retry for that long


class Code(IntEnum):
    """Status code type (bits 10:8) and status code, as in `csd_spec.Status`."""

    SUCCESS = 0x000
    INVALID_OPCODE = 0x001
    INVALID_FIELD = 0x002
    TRANSFER_ERROR = 0x004
    INTERNAL_ERROR = 0x006
    ABORTED = 0x007
    INVALID_NAMESPACE = 0x00B
    SEQUENCE_ERROR = 0x00C
    SGL_LENGTH = 0x00F
    SGL_TYPE = 0x011
    SGL_OFFSET = 0x016
    INTERRUPTED = 0x021
    TRANSIENT = 0x022
    LBA_RANGE = 0x080
    CAPACITY_EXCEEDED = 0x081
    INVALID_VALUE_SIZE = 0x085
    INVALID_KEY_SIZE = 0x086
    UNKNOWN_KEY = 0x087
    UNRECOVERED_ERROR = 0x088
    KEY_EXISTS = 0x089
    EVENT_LIMIT = 0x105
    INVALID_LOG_PAGE = 0x109
    NOT_SAVEABLE = 0x10D
    NOT_CHANGEABLE = 0x10E
    CONNECT_FORMAT = 0x180
    CONTROLLER_BUSY = 0x181
    CONNECT_PARAMETERS = 0x182
    INVALID_HOST = 0x184
    READ_ONLY = 0x182  # NVM command set; same number as CONNECT_PARAMETERS of Fabrics
    WRITE_FAULT = 0x280
    UNRECOVERED_READ_ERROR = 0x281
    COMPARE_FAILURE = 0x285


class Admin(IntEnum):
    """Opcodes of admin commands."""

    GET_LOG_PAGE = 0x02
    IDENTIFY = 0x06
    ABORT = 0x08
    SET_FEATURES = 0x09
    GET_FEATURES = 0x0A
    ASYNC_EVENT = 0x0C
    KEEP_ALIVE = 0x18
    FABRICS = 0x7F


class Fabrics(IntEnum):
    """Types of Fabrics commands."""

    PROPERTY_SET = 0x00
    CONNECT = 0x01
    PROPERTY_GET = 0x04


class Csi(IntEnum):
    """Command set identifiers; 30h to 3Fh are vendor-specific."""

    NVM = 0x00
    KEY_VALUE = 0x01
    SEQUENCES = 0x30


RETRIED = frozenset({Code.INTERRUPTED, Code.TRANSIENT, Code.CONTROLLER_BUSY})  # without DO_NOT_RETRY


class CommandError(Exception):
    """A command completes with a status other than success; `dw0` is that of its completion."""

    def __init__(self, status: int, dw0: int = 0) -> None:
        super().__init__(f"status {status:#05x}")
        self.status, self.dw0 = status, dw0


class Sqe(NamedTuple):
    """A submission queue entry; sgl_* are the fields of its SGL descriptor."""

    opcode: int
    flags: int = 0x40  # SGLs, as in every Fabrics command
    cid: int = 0
    nsid: int = 0
    cdw2: int = 0
    cdw3: int = 0
    metadata: int = 0
    sgl_address: int = 0
    sgl_bytes: int = 0
    sgl_type: int = SGL_TRANSPORT
    cdw10: int = 0
    cdw11: int = 0
    cdw12: int = 0
    cdw13: int = 0
    cdw14: int = 0
    cdw15: int = 0

    @classmethod
    def parse(cls, raw: bytes) -> Sqe:
        """Decode 64 bytes."""
        return cls(*_SQE.unpack(raw))

    def pack(self) -> bytes:
        """Encode to 64 bytes."""
        return _SQE.pack(*self)

    def pack_as(self, cid: int, sgl_bytes: int, sgl_type: int) -> bytes:
        """Encode to 64 bytes with another command identifier and SGL descriptor."""
        return _SQE.pack(self.opcode, self.flags, cid, *self[3:8], sgl_bytes, sgl_type, *self[10:])

    @property
    def fabrics_type(self) -> int:
        """FCTYPE of a Fabrics command."""
        return self.nsid & 0xFF

    @property
    def to_controller(self) -> bool:
        """Whether data goes from the host to the controller."""
        kind = self.fabrics_type if self.opcode == Admin.FABRICS else self.opcode
        return kind & 3 == 1


class Cqe(NamedTuple):
    """A completion queue entry. `result` is DW0 and DW1; `status` has no phase tag."""

    result: int
    sq_head: int
    sq_id: int
    cid: int
    status: int

    @classmethod
    def parse(cls, raw: bytes) -> Cqe:
        """Decode 16 bytes."""
        result, sq_head, sq_id, cid, status = _CQE.unpack(raw)
        return cls(result, sq_head, sq_id, cid, status >> 1)

    def pack(self) -> bytes:
        """Encode to 16 bytes."""
        return _CQE.pack(self.result, self.sq_head, self.sq_id, self.cid, self.status << 1)


class Answer(NamedTuple):
    """Result of a successful command; `result` is DW0 and DW1 of its completion."""

    data: tuple[bytes | bytearray | memoryview, ...] = ()
    result: int = 0


def words(low: int, high: int) -> int:
    """Combine two dwords to a 64-bit number."""
    return low | high << 32
