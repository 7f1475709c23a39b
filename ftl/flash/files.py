"""Files of a NAND array: content, spare areas, and the erase count and bad-block flag of each block.

| file | entry per | bytes |
|---|---|---|
| content.bin | page | page_bytes |
| spare.bin, spare_copy.bin | page | 32, see `ftl.flash.spare` |
| blocks.bin | block | 12: erases, bad, CRC-32 of both |

A page's spare area is written before its content, so that a torn write is detected, and again after it: without its
tag, an older page with the same tag would be taken for the newest. A block is erased by one write of its entry, which
invalidates the pages of earlier lives.

Each file ends in a footer with its generation. Each journal record advances it twice by one, in one file after the
other with a sync in between. So generations of files that belong together differ by at most one, and those of files
copied before and after a record by at least two. A file without a footer has generation 0.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csd_io.crc import correct_single_bit, crc32
from csd_io.folder import File, Folder
from csd_spec import Geometry
from csd_spec.arrays import I64, U8, U32
from ftl.flash.spare import SPARE, Spare, has_single_bit_set, restore_from_copies, rows

BLOCK = np.dtype([("erases", "<u4"), ("bad", "<u4"), ("seal", "<u4")])
CONTENT, SPARES, COPY, BLOCKS = "content.bin", "spare.bin", "spare_copy.bin", "blocks.bin"
Range = tuple[int, int]  # bytes, [first, end)
FOOTER_BYTES = 4096
_COPIES = 0, 2048  # offsets in a footer of its two copies: 8 bytes generation, 4 bytes CRC-32
_FIRST_GENERATION_BITS = 48  # random, so that files of different drives do not match


def data_sizes(geometry: Geometry) -> dict[str, int]:
    """Names of an array's files and their bytes without the footer."""
    pages, blocks = geometry.pages, geometry.blocks
    spares = dict.fromkeys((SPARES, COPY), pages * SPARE.itemsize)
    return {CONTENT: pages * geometry.page_bytes, **spares, BLOCKS: blocks * BLOCK.itemsize}


def sizes(geometry: Geometry) -> dict[str, int]:
    """Names of an array's files and their bytes with the footer."""
    return {name: size + FOOTER_BYTES for name, size in data_sizes(geometry).items()}


def check_sizes(folder: Folder, wanted: dict[str, int]) -> None:
    """Raise ValueError if a file is missing or has a wrong size.

    Args:
        folder: Folder of the files.
        wanted: Expected sizes by file name, bytes.
    """
    present = folder.sizes()
    for name, size in wanted.items():
        if name not in present:
            raise ValueError(f"{folder.name}/{name} is missing: vcsd drive fsck {folder.name} says what is left")
        if present[name] != size:
            raise ValueError(
                f"{folder.name}/{name}: has {present[name]:,} bytes instead of {size:,}: "
                f"vcsd drive fsck {folder.name} says what is left"
            )


def runs(numbers: I64) -> list[slice]:
    """Slices of consecutive numbers."""
    ends = [*(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), numbers.size]
    return [slice(first, end) for first, end in zip([0, *ends], ends, strict=False) if first < end]


def touched_parts(ranges: list[Range], size: int) -> list[int]:
    """Indices of the parts of `size` bytes that overlap the ranges."""
    return sorted({part for first, end in ranges for part in range(first // size, -(-end // size))})


def clip_ranges(ranges: list[Range], first: int, size: int) -> list[Range]:
    """Clip ascending ranges to `size` bytes starting at `first`."""
    begin = bisect_right(ranges, first, key=itemgetter(1))
    last = bisect_left(ranges, first + size, key=itemgetter(0))
    return [(max(start, first), min(end, first + size)) for start, end in ranges[begin:last]]


def _written(file: File, size: int) -> list[Range]:
    return [(first, min(end, size)) for first, end in file.written() if first < size]


def _read(file: File, ranges: list[Range], offset: int, into: U8) -> None:
    """Read ranges of a file into `into`, whose first byte is at file offset `offset`."""
    for first, end in ranges:
        file.read(first, into[first - offset : end - offset].data)


class TruncatedFile:
    """Read-only view of a file that is missing or has a wrong size; missing bytes read as zeros."""

    def __init__(self, file: File | None, size: int) -> None:
        self._file, self._size = file, size

    def read(self, offset: int, into: memoryview) -> None:
        there = into[: max(0, self._size - offset)]
        if self._file and there:
            self._file.read(offset, there)

    def written(self) -> list[tuple[int, int]]:
        return self._file.written() if self._file else []

    def write(self, offset: int, data: object) -> None:
        raise NotImplementedError  # such an array keeps all changes in memory

    discard = write


class NandFiles:
    """Reads and writes the files of an array.

    Attributes:
        generation: Newest generation of the files.
        same_generation: Whether all files have that generation.
        wrong: Errors of files that are missing or have a wrong size.
    """

    def __init__(self, folder: Folder, geometry: Geometry, allow_truncated: bool = False) -> None:
        """Open the files.

        Args:
            allow_truncated: Read missing or short files as zeros instead of raising.

        Raises:
            ValueError: A file has a wrong size, or the files are not of one copy.
        """
        self.folder, self.geometry = folder, geometry
        self.wrong: list[str] = []
        self._files = {name: self._open(name, size, allow_truncated) for name, size in sizes(geometry).items()}
        self.content, self.spares, self.copy, self.blocks = self._files.values()
        generations = self._generations()
        older = "; ".join(f"{name} {what}" for name, what in older_files(generations).items())
        if older:
            raise ValueError(
                f"{folder.name}: {older}: put all files of one copy there, or run vcsd drive fsck {folder.name}"
            )
        readable = [generation for generation in generations.values() if generation is not None]
        self.generation = max(readable, default=0)
        self.same_generation = set(generations.values()) <= {self.generation}

    def _open(self, name: str, size: int, allow_truncated: bool) -> File:
        try:
            check_sizes(self.folder, {name: size})
            return self.folder.open(name, size)
        except ValueError as error:
            if not allow_truncated:
                raise
            self.wrong.append(str(error))
            have = self.folder.sizes().get(name)
            return TruncatedFile(None if have is None else self.folder.open(name, size), min(have or 0, size))

    @staticmethod
    def make(folder: Folder, geometry: Geometry) -> None:
        """Create the files of an array that was never written; raises ValueError if others exist."""
        present, wanted = folder.sizes(), sizes(geometry)
        check_sizes(folder, {name: size for name, size in wanted.items() if present.get(name)})
        generation = secrets.randbits(_FIRST_GENERATION_BITS)
        for name, size in wanted.items():
            write_generation(folder.open(name, size), size, generation)
        folder.sync()

    def _generations(self) -> dict[str, int | None]:
        """Generations by file name; incomplete files are left out."""
        return read_generations(
            {n: file for n, file in self._files.items() if not isinstance(file, TruncatedFile)}, self.geometry
        )

    def write_generation(self, generation: int) -> None:
        """Set the generation of all files; it may be one higher than the current one."""
        self.generation, self.same_generation = generation, True
        for name, size in sizes(self.geometry).items():
            write_generation(self._files[name], size, generation)

    def read_blocks(self) -> NDArray[Any]:
        """Entries of all blocks."""
        entries = np.zeros(self.geometry.blocks, BLOCK)
        raw = entries.view(np.uint8)
        _read(self.blocks, _written(self.blocks, raw.size), 0, raw)
        return entries

    def read_spares(self, spare: Spare, lost: list[int]) -> Iterator[int]:
        """Fill the spare areas (pages,) of all superblocks ever written; lost ones are restored from their copies.

        Args:
            spare: Output, (pages,) SPARE.
            lost: Output: pages whose spare area was lost are appended.

        Yields:
            Superblocks, each after its spare areas are filled.
        """
        pages, size = self.geometry.superblock_pages, self.geometry.superblock_pages * SPARE.itemsize
        copy = np.zeros(pages, SPARE)
        written = [(file, _written(file, self.geometry.pages * SPARE.itemsize)) for file in (self.spares, self.copy)]
        for superblock in touched_parts([written_range for _, ranges in written for written_range in ranges], size):
            spares = spare[superblock * pages : (superblock + 1) * pages]
            rows(copy)[:] = 0
            for (file, ranges), into in zip(written, (spares, copy), strict=True):
                _read(file, clip_ranges(ranges, superblock * size, size), superblock * size, into.view(np.uint8))
            lost += (superblock * pages + restore_from_copies(spares, copy)).tolist()
            yield superblock

    def read_content(self, content: U8, ppns: U32) -> None:
        """Fill the ascending pages `ppns` of `content` (pages, page_bytes)."""
        page = self.geometry.page_bytes
        for run in runs(ppns.astype(np.int64)):
            first, end = int(ppns[run][0]), int(ppns[run][-1]) + 1
            self.content.read(first * page, content[first:end].reshape(-1).data)

    def write_spares(self, ppns: U32, spare: Spare) -> None:
        """Write only the spare areas (N,) and their copies."""
        raw = rows(spare)
        for file in (self.spares, self.copy):
            for run in runs(ppns.astype(np.int64)):
                file.write(int(ppns[run][0]) * SPARE.itemsize, raw[run].reshape(-1).data)

    def write_pages(self, ppns: U32, pages: U8, spare: Spare) -> None:
        """Write spare areas (N,) and content (N, page_bytes)."""
        size, raw = self.geometry.page_bytes, rows(spare)
        slices = runs(ppns.astype(np.int64))
        for run in slices:
            self.spares.write(int(ppns[run][0]) * SPARE.itemsize, raw[run].reshape(-1).data)
        for run in slices:
            self.content.write(int(ppns[run][0]) * size, np.ascontiguousarray(pages[run]).reshape(-1).data)
        for run in slices:
            self.copy.write(int(ppns[run][0]) * SPARE.itemsize, raw[run].reshape(-1).data)

    def write_block(self, block: int, erases: int, bad: int) -> None:
        """Write a block's entry."""
        self.blocks.write(block * BLOCK.itemsize, entry(erases, bad).tobytes())

    def discard(self, first: int, count: int) -> None:
        """Punch holes for pages of erased blocks."""
        size = self.geometry.page_bytes
        self.content.discard(first * size, count * size)


def read_generations(files: Mapping[str, File], geometry: Geometry) -> dict[str, int | None]:
    """Generations by file name; None if both copies of a footer are damaged."""
    return {name: _read_generation(file, data_sizes(geometry)[name]) for name, file in files.items()}


def _read_generation(file: File, offset: int) -> int | None:
    footer = bytearray(FOOTER_BYTES)
    file.read(offset, memoryview(footer))
    copies = [bytes(footer[at : at + 12]) for at in _COPIES]
    numbers = [
        (copy[:8], 0) if not any(copy) else correct_single_bit(copy[:8], int.from_bytes(copy[8:], "little"))
        for copy in copies
    ]
    return max((int.from_bytes(corrected[0], "little") for corrected in numbers if corrected), default=None)


def write_generation(file: File, size: int, generation: int) -> None:
    """Write the footer of a file of `size` bytes."""
    number = generation.to_bytes(8, "little")
    copy = number + crc32(number).to_bytes(4, "little")
    file.write(size - FOOTER_BYTES, (copy.ljust(_COPIES[1], b"\0") + copy).ljust(FOOTER_BYTES, b"\0"))


def older_files(generations: Mapping[str, int | None]) -> dict[str, str]:
    """Files that are older than the newest one, by name, with a message."""
    readable = {name: generation for name, generation in generations.items() if generation is not None}
    newest = max(readable, key=lambda name: readable[name], default="")
    return {
        name: f"is older (generation {own}) than {newest} (generation {readable[newest]})"
        for name, own in readable.items()
        if own < readable[newest] - 1
    }


def entry(erases: int, bad: int) -> NDArray[Any]:
    """Encode a block's entry."""
    encoded = np.zeros(1, BLOCK)
    encoded["erases"], encoded["bad"] = erases, bad
    encoded["seal"] = crc32(encoded.tobytes()[:8])
    return encoded


def correct_entries(entries: NDArray[Any]) -> tuple[list[int], list[int]]:
    """Correct single-bit errors in block entries; returns the blocks corrected, and those that are unreadable."""
    fixed, lost = list[int](), list[int]()
    raw = entries.view(np.uint8).reshape(-1, BLOCK.itemsize)
    for i in np.flatnonzero(entries["erases"] | entries["bad"] | entries["seal"]).tolist():  # all zeros: never erased
        seal = int(entries["seal"][i])
        corrected = correct_single_bit(raw[i, :8].tobytes(), seal)
        if has_single_bit_set(raw[i]):
            raw[i] = 0
            fixed.append(i)
        elif corrected is None:
            lost.append(i)
        elif corrected != (raw[i, :8].tobytes(), seal):
            raw[i, :8], entries["seal"][i] = np.frombuffer(corrected[0], np.uint8), corrected[1]
            fixed.append(i)
    return fixed, lost
