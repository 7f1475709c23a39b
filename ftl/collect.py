"""Garbage collection and wear levelling: valid pages move together, the blocks they leave are erased."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ftl.errors import OutOfSpace
from ftl.groups import KIND_SHIFT, KINDS, MAX_OWNERS, Kind
from ftl.placement import Writer

if TYPE_CHECKING:
    from ftl.kv import Ftl

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]

SPREAD = 2  # erases between the most and least worn block, beyond which cold data moves
LEVELLING = 22  # pages of the host's data for each page that moves to even wear out


def collect(ftl: Ftl, start_ns: int) -> bool:
    """Empty the blocks with the most garbage, as many as give one block back per channel; False where none do."""
    per_block, channels = ftl.spec.geometry.pages_per_block, ftl.spec.geometry.channels
    victims, gained = [], 0
    for block in ftl.placement.victims(4 * channels):
        victims.append(block)
        gained += per_block - int(ftl.placement.valid[block])
        if gained >= channels * per_block:
            break
    if gained < per_block:
        return False
    before = ftl.placement.free_blocks
    # Everything that the victims held and was given up must be known as gone before they are erased
    ftl.journal.commit(start_ns, everything=False)
    try:
        for block in victims:
            move_block(ftl, block, ftl.mover, start_ns)
    except OutOfSpace:
        pass
    for block in victims:
        if ftl.placement.valid[block] == 0:
            ftl.erase(block, start_ns)
    return ftl.placement.free_blocks > before


def level_wear(ftl: Ftl, start_ns: int) -> None:
    """Where wear has drifted apart, move the data out of the least worn blocks, so that they are used again.

    How much moves follows what the host has written, so that levelling costs a known share.
    """
    counts, c = ftl.nand.erase_count, ftl.counters
    due = (c.data // LEVELLING - c.levelled) // ftl.spec.geometry.pages_per_block
    if due <= 0 or ftl.placement.free_blocks < 2 * ftl.reserve + ftl.spec.geometry.channels:
        return  # moving takes room, and another time will do
    cold = np.flatnonzero((counts < int(counts.max()) - SPREAD) & (ftl.nand.bad == 0) & (ftl.nand.next_page > 0))
    for block in cold[np.argsort(counts[cold], kind="stable")][:due].tolist():
        for writer in (ftl.journal.writer, ftl.mover, ftl.leveller):
            if block in writer.blocks:
                ftl.placement.close(writer)
        if block not in ftl.placement.open:
            ftl.placement.turn(ftl.leveller, block % ftl.spec.geometry.channels)
            try:
                c.levelled += move_block(ftl, block, ftl.leveller, start_ns)
            except OutOfSpace:
                return


def move_block(ftl: Ftl, block: int, writer: Writer, start_ns: int) -> int:
    """Move a block's valid pages elsewhere and leave it empty; returns how many.

    Raises OutOfSpace before anything moves.
    """
    pages = ftl.nand.pages_of(block)[: ftl.nand.next_page[block]]
    valid = pages[_valid(ftl, pages)]
    if valid.size:
        lanes = valid.astype(np.int64) % ftl.spec.geometry.lanes
        (targets,) = ftl.placement.allocate([(writer, lanes)], 0)
        data = ftl.nand.content[valid] if ftl.nand.payload else None
        numbers = ftl.nand.write_numbers[valid] if ftl.nand.payload else None
        tags = ftl.nand.tags[valid].copy()
        read_ns = ftl.calendar.read(valid, np.full(valid.size, ftl.spec.geometry.page_bytes), start_ns)
        ftl.program(writer, targets, data, tags, read_ns, numbers)
        _remap(ftl, valid, targets, tags)
        ftl.placement.invalidate(valid)
        ftl.counters.moved += valid.size
    return valid.size


def _fields(tags: U64) -> tuple[NDArray[np.int64], ...]:
    """Kind, owner, layer, stream and group of tags; see `GroupMap.tags`."""
    wide = tags.astype(np.uint64)
    widths = ((KIND_SHIFT, KINDS - 1), (42, MAX_OWNERS - 1), (34, 0xFF), (20, 0x3FFF), (0, 0xFFFFF))
    return tuple((wide >> np.uint64(shift) & np.uint64(mask)).astype(np.int64) for shift, mask in widths)


def _mappings(ftl: Ftl, tags: U64):  # type: ignore[no-untyped-def]
    """For each table that may hold pages with these tags: the table's array, which tags, and their places in it."""
    kinds, owners, layers, streams, groups = _fields(tags)
    for owner in np.unique(owners[(kinds != Kind.JOURNAL) & (kinds != Kind.BLOCK)]):
        for handle in ftl.family.get(int(owner), ()):
            for mapped in ftl.sequences[handle].maps:
                slots = mapped.slots
                which = np.flatnonzero((owners == owner) & (kinds == mapped.kind) & (groups < slots.shape[2]))
                yield slots, which, (layers[which], streams[which], groups[which])
    which = np.flatnonzero(kinds == Kind.BLOCK)
    if which.size:
        yield ftl.blocks.map, which, (tags[which] & np.uint64(0xFFFFFFFF)).astype(np.int64)
    which = np.flatnonzero(kinds == Kind.JOURNAL)
    if which.size:
        yield ftl.journal.pages, which, None


def _valid(ftl: Ftl, pages: U32) -> NDArray[np.bool_]:
    """Which pages some mapping points to."""
    valid = np.zeros(pages.size, bool)
    for table, which, place in _mappings(ftl, ftl.nand.tags[pages]):
        valid[which] |= np.isin(pages[which], table) if place is None else table[place] == pages[which]
    return valid


def _remap(ftl: Ftl, old: U32, new: U32, tags: U64) -> None:
    """Let every mapping that points to an old page point to its new place."""
    for table, which, place in _mappings(ftl, tags):
        if place is None:
            for i in which:
                table[table == old[i]] = new[i]
        else:
            table[place] = np.where(table[place] == old[which], new[which], table[place])
