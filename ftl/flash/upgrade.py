"""Converts the files of an array in format version 1 to the current format."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csd_io.crc import crc32
from csd_io.folder import Folder
from csd_spec import Geometry
from csd_spec.arrays import U8
from ftl.flash.files import BLOCK, BLOCKS, CONTENT, COPY, SPARES, check_sizes, data_sizes, entry, touched_parts
from ftl.flash.spare import SPARE, build_spares, rows

_PER_PAGE = {"tags.bin": np.uint64, "write_numbers.bin": np.uint64, "checksums.bin": np.uint32}
_PER_BLOCK = {"erase_count.bin": np.int32, "bad_blocks.bin": np.uint8}


def is_old(folder: Folder) -> bool:
    """Whether a folder holds an array of version 1."""
    found = folder.sizes()
    return "tags.bin" in found and SPARES not in found


def upgrade(folder: Folder, geometry: Geometry) -> None:
    """Write the current files; the old ones are removed once the new ones are complete.

    A page whose content did not match its checksum stays damaged.

    Raises:
        ValueError: A file has a wrong size.
    """
    pages, blocks = geometry.pages, geometry.blocks
    old = {name: pages * np.dtype(dtype).itemsize for name, dtype in _PER_PAGE.items()}
    old |= {name: blocks * np.dtype(dtype).itemsize for name, dtype in _PER_BLOCK.items()}
    check_sizes(folder, old | {CONTENT: data_sizes(geometry)[CONTENT]})
    files = {name: folder.open(name, size) for name, size in old.items()}
    content = folder.open(CONTENT, data_sizes(geometry)[CONTENT])

    def read(name: str, first: int, count: int) -> NDArray[Any]:
        dtype = np.dtype((_PER_PAGE | _PER_BLOCK)[name])
        raw = np.zeros(count * dtype.itemsize, np.uint8)
        files[name].read(first * dtype.itemsize, raw.data)
        return raw.view(dtype)

    for name in (SPARES, COPY, BLOCKS):
        folder.remove(f"{name}.new")
    erases, bad = read("erase_count.bin", 0, blocks), read("bad_blocks.bin", 0, blocks)
    entries = folder.open(f"{BLOCKS}.new", blocks * BLOCK.itemsize)
    for block in np.flatnonzero((erases != 0) | (bad != 0)).tolist():
        entries.write(block * BLOCK.itemsize, entry(int(erases[block]), int(bad[block])).tobytes())
    spares = [folder.open(f"{name}.new", pages * SPARE.itemsize) for name in (SPARES, COPY)]
    size = geometry.superblock_pages
    for superblock in touched_parts(files["write_numbers.bin"].written(), 8 * size):
        numbers = read("write_numbers.bin", superblock * size, size)
        which = np.flatnonzero(numbers)
        if which.size:
            data: U8 = np.zeros((size, geometry.page_bytes), np.uint8)
            content.read(superblock * size * geometry.page_bytes, data.reshape(-1).data)
            lives = erases[superblock * geometry.lanes + which % geometry.lanes]
            all_spares = np.zeros(size, SPARE)
            spare = build_spares(data[which], read("tags.bin", superblock * size, size)[which], numbers[which], lives)
            sums = read("checksums.bin", superblock * size, size)[which]
            for i in np.flatnonzero(sums != spare["crc"]).tolist():
                spare["crc"][i] = sums[i]
                spare["seal"][i] = crc32(rows(spare)[i, :-4].data)
            all_spares[which] = spare
            for file in spares:
                file.write(superblock * size * SPARE.itemsize, all_spares.tobytes())
    folder.sync()
    folder.rename(f"{BLOCKS}.new", BLOCKS)
    folder.rename(f"{COPY}.new", COPY)
    folder.rename(f"{SPARES}.new", SPARES)
    for name in old:
        folder.remove(name)
