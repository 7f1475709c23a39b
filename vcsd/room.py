"""Whether K and V of a run have room where they are to be kept, asked before anything is made.

What counts are the sequences that are planned: a drive's own capacity is only taken as it is filled.
"""

from __future__ import annotations

import shutil

from csd_io.cgroup import available_bytes, cgroup_of
from csd_link.driveset import DriveSet
from csd_spec import Attention, DriveSpec, ModelShape
from ftl import maps_of
from ftl.flash.spare import SPARE

OURS = ("inproc", "process", "fuse")  # transports whose drives are made for the run, and lie in this machine
MIB = 1 << 20


def flash_bytes(spec: DriveSpec, what: Attention, shape: ModelShape, rows: int, tokens: int) -> int:
    """Bytes of pages and their spare areas that so many sequences of so many tokens take in all drives together; where
    every drive has all of a latent stream, in each of them."""
    page_bytes = spec.geometry.page_bytes
    form = what.kv_layout.form(page_bytes, shape.head_dim, tokens)
    stored = (mapped for mapped in maps_of(form, 1, 1).values() if mapped.programmed)
    pages = sum(mapped.streams * -(-tokens // mapped.per_group) for mapped in stored)
    return rows * shape.layers * shape.kv_heads * pages * (page_bytes + SPARE.itemsize)


def check_drives(drives: DriveSet, what: Attention, shape: ModelShape, rows: int, tokens: int, copies: int = 1) -> None:
    """Raise ValueError if drives that are made for a run have too little room in memory or on their disk.

    copies: Drives that store each KV head.
    """
    if drives.kind not in OURS:
        return
    needed = copies * flash_bytes(drives.spec, what, shape, rows, tokens) * (drives.count if shape.latent else 1)
    if drives.medium.kind == "memory":
        _check(needed, _of(rows, tokens), "in drives in memory", "--keep FOLDER --medium direct leaves them in files")
    if drives.keep:
        path = next(path for path in (drives.keep, *drives.keep.absolute().parents) if path.exists())
        free = shutil.disk_usage(path).free
        if needed > free:
            raise ValueError(
                f"{_of(rows, tokens)} take {_mib(needed)} on the disk of {drives.keep}, and there are {_mib(free)}: "
                f"free some, or name a folder on another disk (--keep)"
            )


def check_cache(shape: ModelShape, value_bytes: int, rows: int, tokens: int) -> None:
    """Raise ValueError where a model's own cache has too little room in memory. value_bytes: of a number in it."""
    needed = 2 * shape.layers * shape.kv_heads * shape.head_dim * value_bytes * rows * tokens
    _check(needed, _of(rows, tokens), "in the model's own cache, to compare with", "--no-compare leaves that out")


def _check(needed: int, what: str, where: str, remedy: str) -> None:
    free = available_bytes(cgroup_of())
    if needed > free:
        raise ValueError(f"{what} take {_mib(needed)} {where}, and there are {_mib(free)}: {remedy}")


def _of(rows: int, tokens: int) -> str:
    return f"K and V of {rows:,} x {tokens:,} tokens"


def _mib(nbytes: int) -> str:
    return f"{nbytes // MIB:,} MiB"
