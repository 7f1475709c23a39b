"""Values: byte strings under a key, each stored as a sequence of one layer whose rows are whole pages.

Row t of K holds page 2t and row t of V holds page 2t + 1. A value therefore has no unfinished group: it takes no
buffer in drive DRAM and no rows in the journal. Its name records its size in bytes.

A value is never changed. An overwrite stores a new one, moves the key to it and frees the old one; the journal records
both changes together. A value without a key was being stored at power loss, and recovery drops it.
"""

from __future__ import annotations

import numpy as np

from csd_spec import LAYOUTS, PageFormat
from csd_spec.arrays import F16
from ftl.errors import FtlError
from ftl.kv import fork_crop
from ftl.kv.append import append
from ftl.kv.map import KvMap

VALUES = 1 << 56  # label bit of values: their keys are not prefix names


def is_value(label: int) -> bool:
    """Whether sequences with this label are values."""
    return bool(label & VALUES)


def form_of_values(page_bytes: int) -> PageFormat:
    """Page format of all values of a drive: a row is a page."""
    return LAYOUTS["opaque"].form(page_bytes, page_bytes // 2, 1)


def rows_of(size_bytes: int, page_bytes: int) -> int:
    """Rows of K (and of V) that hold the first `size_bytes` of a value."""
    return -(-size_bytes // (2 * page_bytes))


def store(kv: KvMap, label: int, value: bytes | bytearray | memoryview, start_ns: int) -> tuple[int, int]:
    """Write a value as a new sequence without a name.

    Args:
        label: Label of the tenant, with the bit `VALUES`.
        value: Content.
        start_ns: Simulated time of the command, ns.

    Returns:
        Handle of the sequence, and the simulated time at which its last program ends, ns.

    Raises:
        FtlError: Flash or drive DRAM is full, or the drive cannot be written; no sequence was created.
    """
    page_bytes = kv.store.geometry.page_bytes
    (handle,) = kv.create(1, 1, 1, form_of_values(page_bytes), label)
    count = rows_of(len(value), page_bytes)
    if not count:
        return handle, start_ns
    padded = np.zeros(2 * count * page_bytes, np.uint8)
    padded[: len(value)] = np.frombuffer(value, np.uint8)
    rows: F16 = padded.view(np.float16).reshape(count, 2, 1, page_bytes // 2)
    k, v = (np.ascontiguousarray(rows[:, part]) for part in range(2))
    try:
        _, finish_ns = append(kv, [handle], 0, np.array([count]), k, v, start_ns)
    except FtlError:
        fork_crop.free(kv, [handle])
        raise
    return handle, finish_ns


def join_rows(k: F16, v: F16, size_bytes: int) -> bytes:
    """First `size_bytes` of a value from its rows k, v (rows, 1, d)."""
    return np.stack((k, v), axis=1).tobytes()[:size_bytes]
