"""In-order programming within a block: compiled loops over the next page of each block.

Arrays: ppns (N,) uint32, physical page numbers; next_page (blocks,) int32, pages programmed since the last erase.
"""

from __future__ import annotations

from csd_io.compiled import njit


@njit(cache=True, nogil=True, error_model="numpy")
def claim_pages(ppns, next_page, lanes, pages_per_block):  # type: ignore[no-untyped-def]
    """Advance each block's program pointer; returns the index of the first page out of order, or -1."""
    for i in range(ppns.size):
        row, lane = divmod(ppns[i], lanes)
        superblock, page = divmod(row, pages_per_block)
        block = superblock * lanes + lane
        if next_page[block] != page:
            return i
        next_page[block] = page + 1
    return -1


@njit(cache=True, nogil=True, error_model="numpy")
def first_unwritten(ppns, next_page, lanes, pages_per_block):  # type: ignore[no-untyped-def]
    """Return the index of the first page that was not programmed since its last erase, or -1."""
    for i in range(ppns.size):
        row, lane = divmod(ppns[i], lanes)
        superblock, page = divmod(row, pages_per_block)
        if page >= next_page[superblock * lanes + lane]:
            return i
    return -1


@njit(cache=True, nogil=True, error_model="numpy")
def list_programmed(next_page, lanes, pages_per_block, out):  # type: ignore[no-untyped-def]
    """Fill `out` with all programmed pages, block by block."""
    count = 0
    for block in range(next_page.size):
        superblock, lane = divmod(block, lanes)
        for page in range(next_page[block]):
            out[count] = (superblock * pages_per_block + page) * lanes + lane
            count += 1
