"""Capacity check: whether the KV cache of a run fits in memory and on disk, before anything is allocated.

It counts the planned sequences, not the drives' capacity, which is allocated only as it is used.
"""

from __future__ import annotations

import shutil

from csd_io.cgroup import available_bytes, cgroup_of
from csd_link.driveset import DriveSetConfig
from csd_link.replication import COPIES
from csd_spec import AttentionConfig, DriveSpec, ModelShape
from ftl import maps_of
from ftl.flash.spare import SPARE
from host_driver.sharding import assign_heads
from vcsd.config import AttachConfig
from vcsd.redundancy import check_count

OURS = ("inproc", "process", "fuse")  # transports whose drives are created for the run on this machine
MIB = 1 << 20


def flash_bytes(spec: DriveSpec, what: AttentionConfig, shape: ModelShape, rows: int, tokens: int) -> int:
    """Bytes of pages and spare areas that `rows` sequences of `tokens` tokens take in all drives together.

    With latent attention, where every drive stores all rows: in each drive.
    """
    page_bytes = spec.geometry.page_bytes
    form = what.kv_layout.form(page_bytes, shape.head_dim, tokens)
    stored = (mapped for mapped in maps_of(form, 1, 1).values() if mapped.programmed)
    pages = sum(mapped.streams * -(-tokens // mapped.per_group) for mapped in stored)
    return rows * shape.layers * shape.kv_heads * pages * (page_bytes + SPARE.itemsize)


def check_drives(
    drives: DriveSetConfig, what: AttentionConfig, shape: ModelShape, rows: int, tokens: int, copies: int = 1
) -> None:
    """Raise ValueError if drives created for a run do not fit in memory or on their disk.

    Args:
        drives: The drives.
        what: Method and layout.
        shape: Shape of the model.
        rows: Number of sequences.
        tokens: Tokens per sequence.
        copies: Drives that store each KV head.
    """
    if drives.kind not in OURS:
        return
    needed = copies * flash_bytes(drives.spec, what, shape, rows, tokens) * (drives.count if shape.latent else 1)
    if drives.storage.kind == "memory":
        _check(
            needed, _of(rows, tokens), "in drives in memory", "--data-dir FOLDER --medium direct leaves them in files"
        )
    if drives.data_dir:
        path = next(path for path in (drives.data_dir, *drives.data_dir.absolute().parents) if path.exists())
        free = shutil.disk_usage(path).free
        if needed > free:
            raise ValueError(
                f"{_of(rows, tokens)} take {_mib(needed)} on the disk of {drives.data_dir}, and there are "
                f"{_mib(free)}: free some, or name a folder on another disk (--data-dir)"
            )


def check_attached(config: AttachConfig, attention: AttentionConfig, shape: ModelShape, rows: int, tokens: int) -> None:
    """Raise ValueError if a run's drives do not support a model, or have no room for `rows` sequences of `tokens`.

    Args:
        config: Configuration of the run.
        attention: Its method and layout for this model.
        shape: Shape of the model.
        rows: Number of sequences.
        tokens: Tokens per sequence.
    """
    drives = config.drive_set()
    count = drives.count if isinstance(drives, DriveSetConfig) else len(drives)
    check_count(config.redundancy, count)
    assign_heads(shape, count)
    attention.at(1, shape.head_dim)
    if isinstance(drives, DriveSetConfig):
        check_drives(drives, attention, shape, rows, tokens, COPIES[config.redundancy])


def check_cache(shape: ModelShape, value_bytes: int, rows: int, tokens: int) -> None:
    """Raise ValueError if a model's own cache does not fit in memory. `value_bytes`: bytes per value."""
    needed = 2 * shape.layers * shape.kv_heads * shape.head_dim * value_bytes * rows * tokens
    _check(needed, _of(rows, tokens), "in the model's own cache, to compare with", "--no-compare leaves that out")


def _check(needed: int, what: str, where: str, remedy: str) -> None:
    free = available_bytes(cgroup_of())
    if needed > free:
        raise ValueError(f"{what} take {_mib(needed)} {where}, and there are {_mib(free)}: {remedy}")


def _of(rows: int, tokens: int) -> str:
    return f"keys and values of {rows:,} x {tokens:,} tokens"


def _mib(nbytes: int) -> str:
    return f"{nbytes // MIB:,} MiB"
