"""A page's spare area: its tag, which write filled it and in which life of its block, and what its bits must be.

The content has a CRC-32, by which one flipped bit is corrected, and an Adler-32, by which a wrong correction is found
out. The spare area has a CRC-32 of its own, so that a page says what it was though its content is gone.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from csd_io.crc import corrected
from csd_spec.arrays import I64, U8, U64

Spare = NDArray[Any]
SPARE = np.dtype(
    [("tag", "<u8"), ("write_number", "<u8"), ("life", "<u4"), ("crc", "<u4"), ("adler", "<u4"), ("seal", "<u4")]
)
_SEALED = SPARE.itemsize - 4


def made(pages: U8, tags: U64, write_numbers: U64, lives: NDArray[Any]) -> Spare:
    """Spare areas (N,) of pages (N, page_bytes). lives: erases of their blocks."""
    spare = np.zeros(tags.size, SPARE)
    spare["tag"], spare["write_number"], spare["life"] = tags, write_numbers, lives
    spare["crc"] = [zlib.crc32(page) for page in pages]
    spare["adler"] = [zlib.adler32(page) for page in pages]
    _seals(rows(spare), _CRC, spare["seal"])
    return spare


def rows(spare: Spare) -> U8:
    """Spare areas as bytes, (N, 32)."""
    return spare.view(np.uint8).reshape(-1, SPARE.itemsize)


def words(spare: Spare) -> U64:
    """Spare areas as numbers, (N, 4): what is looked through as a whole is looked through faster."""
    return spare.view(np.uint64).reshape(-1, SPARE.itemsize // 8)


_CRC: NDArray[np.uint32] = np.array([zlib.crc32(bytes([i])) ^ zlib.crc32(b"\0") for i in range(256)], np.uint32)


@njit(cache=True, nogil=True)
def _seals(raw, table, out):  # type: ignore[no-untyped-def]
    """CRC-32 of the first 28 bytes of each row (N, 32), as zlib has it: zlib itself is slow at so few."""
    for i in range(raw.shape[0]):
        crc = np.uint32(0xFFFFFFFF)
        for j in range(28):
            crc = table[(crc ^ raw[i, j]) & np.uint32(0xFF)] ^ (crc >> np.uint32(8))
        out[i] = crc ^ np.uint32(0xFFFFFFFF)


def unsealed(spare: Spare) -> list[int]:
    """Which spare areas do not match their seal."""
    seals = np.empty(spare.size, np.uint32)
    _seals(rows(spare), _CRC, seals)
    found: list[int] = np.flatnonzero(seals != spare["seal"]).tolist()
    return found


def mend(spare: Spare) -> tuple[list[int], list[int]]:
    """Undo single flipped bits of spare areas; returns which were corrected, and which are lost and erased here."""
    fixed, lost = list[int](), list[int]()
    there = np.flatnonzero(words(spare).any(axis=1))
    for i in there[unsealed(spare[there])].tolist() if there.size else ():
        if one_bit(rows(spare)[i]):
            rows(spare)[i] = 0
        elif not correct_spare(spare, i):
            spare[i] = 0
            lost.append(i)
            continue
        fixed.append(i)
    return fixed, lost


def one_bit(raw: U8) -> bool:
    """Whether bytes would all be zero but for one bit."""
    return int(np.unpackbits(raw).sum()) == 1


def correct_spare(spare: Spare, i: int) -> bool:
    """Undo one flipped bit of spare area i; whether it matches its seal now."""
    found = corrected(rows(spare)[i, :_SEALED].tobytes(), int(spare["seal"][i]))
    if found:
        rows(spare)[i, :_SEALED], spare["seal"][i] = np.frombuffer(found[0], np.uint8), found[1]
    return found is not None


def take_copies(spare: Spare, copy: Spare) -> I64:
    """Where a spare area is lost and its copy is not, take the copy; returns which those are."""
    differ = np.flatnonzero((words(spare) != words(copy)).any(axis=1))
    sealed = np.setdiff1d(differ, differ[unsealed(copy[differ])])
    lost = np.array([i for i in sealed.tolist() if not _readable(spare, i)], np.int64)
    spare[lost] = copy[lost]
    return lost


def _readable(spare: Spare, i: int) -> bool:
    """Whether a spare area is not erased, and sealed but for one bit at the most."""
    return bool(spare[i]["seal"]) and (not unsealed(spare[i : i + 1]) or correct_spare(spare[i : i + 1].copy(), 0))


def correct_page(page: U8, spare: Any) -> bool:
    """Undo one flipped bit of a page; whether it is what its (good) spare area says now."""
    found = corrected(page.tobytes(), int(spare["crc"]))
    if found is None or zlib.adler32(found[0]) != spare["adler"]:
        return False
    page[:] = np.frombuffer(found[0], np.uint8)
    return True
