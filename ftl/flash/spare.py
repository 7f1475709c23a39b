"""A page's spare area: its tag, which write filled it and in which life of its block, and what its bits must be.

The content has a CRC-32, by which one flipped bit is corrected, and an Adler-32, by which a wrong correction is found
out. The spare area has a CRC-32 of its own, so that a page says what it was though its content is gone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csd_io.compiled import njit
from csd_io.crc import adler32, corrected, crc32
from csd_spec.arrays import I32, I64, U8, U64

Spare = NDArray[Any]
SPARE = np.dtype(
    [("tag", "<u8"), ("write_number", "<u8"), ("life", "<u4"), ("crc", "<u4"), ("adler", "<u4"), ("seal", "<u4")]
)
_SEALED = SPARE.itemsize - 4


def made(pages: U8, tags: U64, write_numbers: U64, lives: NDArray[Any]) -> Spare:
    """Spare areas (N,) of pages (N, page_bytes). lives: erases of their blocks."""
    spare = np.zeros(tags.size, SPARE)
    spare["tag"], spare["write_number"], spare["life"] = tags, write_numbers, lives
    spare["crc"] = [crc32(page) for page in pages]
    spare["adler"] = [adler32(page) for page in pages]
    _seals(words(spare), _CRC, spare["seal"])
    return spare


def rows(spare: Spare) -> U8:
    """Spare areas as bytes, (N, 32)."""
    return spare.view(np.uint8).reshape(-1, SPARE.itemsize)


def words(spare: Spare) -> U64:
    """Spare areas as numbers, (N, 4): what is looked through as a whole is looked through faster."""
    return spare.view(np.uint64).reshape(-1, SPARE.itemsize // 8)


def _crc_tables() -> NDArray[np.uint32]:
    """What a byte does to a CRC-32, (8, 256): with 0 to 7 bytes of zeros behind it."""
    zeros = [crc32(bytes(1 + behind)) for behind in range(8)]
    return np.array([[crc32(bytes([i, *bytes(k)])) ^ zeros[k] for i in range(256)] for k in range(8)], np.uint32)


_CRC = _crc_tables()


@njit(inline="always")
def _seal(area, tables):  # type: ignore[no-untyped-def]
    """CRC-32 of the first 28 bytes of a spare area (4,), as zlib has it: zlib itself is slow at so few."""
    crc = np.uint64(0xFFFFFFFF)
    for word in area[:3]:
        x = word ^ crc
        crc = np.uint64(0)
        for k in range(8):
            crc ^= np.uint64(tables[7 - k, x >> np.uint64(8 * k) & np.uint64(0xFF)])
    x = (area[3] ^ crc) & np.uint64(0xFFFFFFFF)
    crc = np.uint64(0)
    for k in range(4):
        crc ^= np.uint64(tables[3 - k, x >> np.uint64(8 * k) & np.uint64(0xFF)])
    return crc ^ np.uint64(0xFFFFFFFF)


@njit(cache=True, nogil=True)
def _seals(areas, tables, out):  # type: ignore[no-untyped-def]
    for i in range(areas.shape[0]):
        out[i] = _seal(areas[i], tables)


@njit(cache=True, nogil=True)
def _unsealed(areas, tables, out):  # type: ignore[no-untyped-def]
    """Which spare areas are not erased and do not match their seal; returns how many."""
    count = 0
    for i in range(areas.shape[0]):
        area = areas[i]
        if (area[0] | area[1] | area[2] | area[3]) and _seal(area, tables) != area[3] >> np.uint64(32):
            out[count] = i
            count += 1
    return count


def unsealed(spare: Spare) -> I64:
    """Which spare areas are not erased and do not match their seal."""
    found: I64 = np.empty(spare.size, np.int64)
    return found[: _unsealed(words(spare), _CRC, found)]


def mend(spare: Spare) -> tuple[list[int], list[int]]:
    """Undo single flipped bits of spare areas; returns which were corrected, and which are lost and erased here."""
    fixed, lost = list[int](), list[int]()
    for i in unsealed(spare).tolist():
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
    differ = np.unique(np.flatnonzero(words(spare).reshape(-1) != words(copy).reshape(-1)) // words(spare).shape[1])
    written = differ[words(copy[differ]).any(axis=1)]
    sealed = np.setdiff1d(written, written[unsealed(copy[written])])
    lost = np.array([i for i in sealed.tolist() if not _readable(spare, i)], np.int64)
    spare[lost] = copy[lost]
    return lost


def _readable(spare: Spare, i: int) -> bool:
    """Whether a spare area is not erased, and sealed but for one bit at the most."""
    return bool(spare[i]["seal"]) and (not unsealed(spare[i : i + 1]).size or correct_spare(spare[i : i + 1].copy(), 0))


@njit(cache=True, nogil=True)
def _keep_present_life(areas, lives, next_page):  # type: ignore[no-untyped-def]
    lanes, newest = lives.size, np.uint64(0)
    for i in range(areas.shape[0]):
        lives[i % lanes] = max(lives[i % lanes], np.int32(areas[i, 2] & np.uint64(0xFFFFFFFF)))
    next_page[:] = 0
    for i in range(areas.shape[0]):
        area = areas[i]
        if area[1] and area[2] & np.uint64(0xFFFFFFFF) == np.uint64(lives[i % lanes]):
            next_page[i % lanes] = i // lanes + 1
            newest = max(newest, area[1])
        elif area[0] | area[1] | area[2] | area[3]:
            area[:] = 0
    return newest


def keep_present_life(spare: Spare, lost: list[int], lives: I32, next_page: I32) -> int:
    """Erase those spare areas of a superblock (pages,) that are of earlier lives of their blocks; where the count of a
    block's lives (lanes,) is lost, its last pages have it. next_page (lanes,): how much of each block is programmed;
    pages with lost spare areas were. Returns the newest write number."""
    newest = int(_keep_present_life(words(spare), lives, next_page))
    for i in lost:
        next_page[i % lives.size] = max(next_page[i % lives.size], i // lives.size + 1)
    return newest


def correct_page(page: U8, spare: Any) -> bool:
    """Undo one flipped bit of a page; whether it is what its (good) spare area says now."""
    found = corrected(page.tobytes(), int(spare["crc"]))
    if found is None or adler32(found[0]) != spare["adler"]:
        return False
    page[:] = np.frombuffer(found[0], np.uint8)
    return True
