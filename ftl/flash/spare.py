"""Spare area of a page: tag, write number, life (erase count) of its block, and checksums.

The content has a CRC-32, which is used to correct one flipped bit, and an Adler-32, which detects a wrong correction.
The spare area has its own CRC-32, so that it is readable even if the content is damaged.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csd_io.compiled import njit
from csd_io.crc import adler32, correct_single_bit, crc32
from csd_spec.arrays import I32, I64, U8, U64

Spare = NDArray[Any]
SPARE = np.dtype(
    [("tag", "<u8"), ("write_number", "<u8"), ("life", "<u4"), ("crc", "<u4"), ("adler", "<u4"), ("seal", "<u4")]
)
_SEALED = SPARE.itemsize - 4


def build_spares(pages: U8, tags: U64, write_numbers: U64, lives: NDArray[Any]) -> Spare:
    """Build spare areas (N,) for pages (N, page_bytes); `lives` are the erase counts of their blocks."""
    spare = np.zeros(tags.size, SPARE)
    spare["tag"], spare["write_number"], spare["life"] = tags, write_numbers, lives
    spare["crc"] = [crc32(page) for page in pages]
    spare["adler"] = [adler32(page) for page in pages]
    _seals(words(spare), _CRC, spare["seal"])
    return spare


def rows(spare: Spare) -> U8:
    """View spare areas as bytes, (N, 32)."""
    return spare.view(np.uint8).reshape(-1, SPARE.itemsize)


def words(spare: Spare) -> U64:
    """View spare areas as uint64, (N, 4), for faster scans."""
    return spare.view(np.uint64).reshape(-1, SPARE.itemsize // 8)


def _crc_tables() -> NDArray[np.uint32]:
    """CRC-32 contribution of each byte value followed by 0 to 7 zero bytes, (8, 256)."""
    zeros = [crc32(bytes(1 + behind)) for behind in range(8)]
    return np.array([[crc32(bytes([i, *bytes(k)])) ^ zeros[k] for i in range(256)] for k in range(8)], np.uint32)


_CRC = _crc_tables()


@njit(inline="always")
def _seal(area, tables):  # type: ignore[no-untyped-def]
    """CRC-32 of the first 28 bytes of a spare area (4,), equal to zlib's, which is slow for so few bytes."""
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
def _find_corrupt(areas, tables, out):  # type: ignore[no-untyped-def]
    """Find spare areas that are not erased and do not match their CRC; returns their number."""
    count = 0
    for i in range(areas.shape[0]):
        area = areas[i]
        if (area[0] | area[1] | area[2] | area[3]) and _seal(area, tables) != area[3] >> np.uint64(32):
            out[count] = i
            count += 1
    return count


def find_corrupt(spare: Spare) -> I64:
    """Indices of spare areas that are not erased and do not match their CRC."""
    corrupt: I64 = np.empty(spare.size, np.int64)
    return corrupt[: _find_corrupt(words(spare), _CRC, corrupt)]


def correct_single_bit_errors(spare: Spare) -> tuple[list[int], list[int]]:
    """Correct single-bit errors in spare areas; returns those corrected, and those lost, which are zeroed here."""
    fixed, lost = list[int](), list[int]()
    for i in find_corrupt(spare).tolist():
        if has_single_bit_set(rows(spare)[i]):
            rows(spare)[i] = 0
        elif not correct_spare(spare, i):
            spare[i] = 0
            lost.append(i)
            continue
        fixed.append(i)
    return fixed, lost


def has_single_bit_set(raw: U8) -> bool:
    """Whether exactly one bit is set."""
    return int(np.unpackbits(raw).sum()) == 1


def correct_spare(spare: Spare, i: int) -> bool:
    """Correct one flipped bit of spare area i; returns whether it matches its CRC now."""
    corrected = correct_single_bit(rows(spare)[i, :_SEALED].tobytes(), int(spare["seal"][i]))
    if corrected:
        rows(spare)[i, :_SEALED], spare["seal"][i] = np.frombuffer(corrected[0], np.uint8), corrected[1]
    return corrected is not None


def restore_from_copies(spare: Spare, copy: Spare) -> I64:
    """Restore lost spare areas from readable copies; returns their indices."""
    differ = np.unique(np.flatnonzero(words(spare).reshape(-1) != words(copy).reshape(-1)) // words(spare).shape[1])
    written = differ[words(copy[differ]).any(axis=1)]
    sealed = np.setdiff1d(written, written[find_corrupt(copy[written])])
    lost = np.array([i for i in sealed.tolist() if not _readable(spare, i)], np.int64)
    spare[lost] = copy[lost]
    return lost


def _readable(spare: Spare, i: int) -> bool:
    """Whether a spare area is not erased and matches its CRC after correcting at most one bit."""
    return bool(spare[i]["seal"]) and (
        not find_corrupt(spare[i : i + 1]).size or correct_spare(spare[i : i + 1].copy(), 0)
    )


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
    """Zero the spare areas of a superblock that belong to earlier lives of their blocks.

    Args:
        spare: Spare areas, (pages,).
        lost: Pages with unreadable spare areas; they count as programmed.
        lives: Erase count of each block, (lanes,); raised to the newest life found, in case the count was lost.
        next_page: Output: programmed pages of each block, (lanes,).

    Returns:
        The newest write number.
    """
    before = lives.copy()
    newest = int(_keep_present_life(words(spare), lives, next_page))
    assert (lives >= before).all(), "the wear of a block decreased"
    for i in lost:
        next_page[i % lives.size] = max(next_page[i % lives.size], i // lives.size + 1)
    assert next_page.max(initial=0) <= spare.size // max(1, lives.size)
    return newest


def correct_page(page: U8, spare: Any) -> bool:
    """Correct one flipped bit of a page; returns whether it matches its (intact) spare area now."""
    corrected = correct_single_bit(page.tobytes(), int(spare["crc"]))
    if corrected is None or adler32(corrected[0]) != spare["adler"]:
        return False
    page[:] = np.frombuffer(corrected[0], np.uint8)
    return True
