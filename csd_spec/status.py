"""Status of a command: NVMe status code type (bits 10:8) and status code (bits 7:0)."""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    """NVMe Base Specification 2.0, figures 94 to 104; type 7h is vendor-specific."""

    SUCCESS = 0x000
    INVALID_OPCODE = 0x001
    INVALID_FIELD = 0x002
    TRANSFER_ERROR = 0x004
    INTERNAL_ERROR = 0x006
    CAPACITY_EXCEEDED = 0x081
    READ_ONLY = 0x182
    INVALID_HOST = 0x184
    WRITE_FAULT = 0x280
    UNRECOVERED_READ_ERROR = 0x281
    PATH_LOST = 0x370
    UNKNOWN_SEQUENCE = 0x7C0
