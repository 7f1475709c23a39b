"""Child process that reads tensors cyclically, with buffered or direct I/O.

A job arrives as JSON on standard input after this process has reported that it is ready; the figures are printed to
standard output. Only numpy and `csd_io` are imported, since all memory of the process counts.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import tempfile
import time
import zlib
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from csd_io.cgroup import available_bytes, cgroup_of
from csd_io.direct import open_queue
from csd_io.extents import Extents
from csd_io.folder import allocate
from csd_io.queue import aligned, carry_out, pieces

KEYS = "kv"
LRU_BYTES = 1 << 18  # unit of loading and eviction in the user-space cache


@dataclass(frozen=True, slots=True, kw_only=True)
class CyclicRead:
    """KV data of all layers as one tensor each, read in order `rounds` times after a warm-up round.

    Attributes:
        folder: Directory of the files; selects the disk.
        direct: Whether tensors that do not fit into the budget are read with direct I/O.
        lru_bytes: Size of a user-space LRU cache that replaces the kernel's page cache; None uses the page cache.
    """

    folder: str
    layers: int
    tensor_bytes: int
    rounds: int
    direct: bool
    lru_bytes: int | None = None


class TensorStore(Protocol):
    """Storage of the tensors."""

    def write(self, key: Hashable, data: memoryview) -> None: ...

    def read(self, key: Hashable, into: memoryview) -> None: ...

    def close(self) -> None: ...


class Mapped:
    """One unnamed memory-mapped file per tensor."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._maps: dict[Hashable, mmap.mmap] = {}

    def write(self, key: Hashable, data: memoryview) -> None:
        with tempfile.TemporaryFile(dir=self._folder) as file:
            allocate(file.fileno(), 0, data.nbytes, self._folder)
            os.pwrite(file.fileno(), data, 0)
            os.fsync(file.fileno())
            self._maps[key] = mmap.mmap(file.fileno(), data.nbytes, prot=mmap.PROT_READ)

    def read(self, key: Hashable, into: memoryview) -> None:
        into[:] = memoryview(self._maps[key])

    def close(self) -> None:
        for each in self._maps.values():
            each.close()


class Direct:
    """Extents of one file, direct I/O."""

    def __init__(self, folder: str, size_bytes: int) -> None:
        self.queue = open_queue(Path(folder), size_bytes)
        self._extents = Extents(self.queue)

    def write(self, key: Hashable, data: memoryview) -> None:
        self._extents.bind(key, data.nbytes)
        self._move("write", key, 0, data)

    def read(self, key: Hashable, into: memoryview) -> None:
        self._move("read", key, 0, into)

    def read_part(self, key: Hashable, at_bytes: int, into: memoryview) -> None:
        """Read from byte `at_bytes` of a tensor on."""
        self._move("read", key, at_bytes, into)

    def _move(self, op: Any, key: Hashable, at_bytes: int, buffer: memoryview) -> None:
        carry_out(self.queue, self._extents.requests(op, key, at_bytes, buffer))

    def close(self) -> None:
        self.queue.close()


class Capped(Direct):
    """Direct I/O through a user-space LRU cache."""

    def __init__(self, folder: str, size_bytes: int, cap_bytes: int) -> None:
        super().__init__(folder, size_bytes)
        self._room = cap_bytes // LRU_BYTES
        self._kept: OrderedDict[Hashable, memoryview] = OrderedDict()

    def read(self, key: Hashable, into: memoryview) -> None:
        for number, part in enumerate(pieces(into, LRU_BYTES)):
            place = key, number
            found = self._kept.pop(place, None)
            if found is None:
                found = self._kept.popitem(last=False)[1] if len(self._kept) >= self._room else aligned(LRU_BYTES)
                self.read_part(key, number * LRU_BYTES, found[: part.nbytes])
            self._kept[place] = found
            part[:] = found[: part.nbytes]


def kernel_bytes() -> int:
    """Bytes read from disks for this process, by the kernel's count."""
    lines = Path("/proc/self/io").read_text().splitlines()
    (found,) = (int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))
    return found


def disk_bytes(folder: str) -> int | None:
    """Bytes read by all processes from the disk under a folder; None if it is not a block device."""
    device = os.stat(folder).st_dev
    stat = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
    return 512 * int(stat.read_text().split()[2]) if stat.exists() else None


def cached_layers(job: CyclicRead) -> int:
    """Layers to keep in the page cache: all if direct I/O is off, else the number that fits into the budget.

    Half a layer of the kernel's cache is left free for the kernel's own pages.
    """
    if not job.direct:
        return job.layers
    layer, budget = 2 * job.tensor_bytes, job.lru_bytes
    if budget is None:
        budget = available_bytes(cgroup_of()) - job.tensor_bytes
    return min(job.layers, max(0, budget) // layer)


def run(job: CyclicRead) -> dict[str, Any]:
    """Write all tensors, read them cyclically, and compare each with its expected content; excludes the warm-up."""
    buffer = aligned(job.tensor_bytes)
    words = np.frombuffer(buffer, np.uint64)
    words[:] = 1  # touch the memory before the budget is computed
    n1 = cached_layers(job)
    size = 2 * job.tensor_bytes * job.layers
    cached: TensorStore = Mapped(job.folder) if job.lru_bytes is None else Capped(job.folder, size, job.lru_bytes)
    past = Direct(job.folder, 2 * job.tensor_bytes * (job.layers - n1)) if n1 < job.layers else None
    tensors = {(layer, kind): past if past and layer >= n1 else cached for layer in range(job.layers) for kind in KEYS}
    sums, wrong, before = {}, 0, (0, 0, 0.0)
    for number, (key, store) in enumerate(tensors.items()):
        words[:] = 1
        np.add.accumulate(words, out=words)  # in place: freed temporaries would still count
        words += np.uint64(number << 40)
        store.write(key, buffer)
        sums[key] = zlib.crc32(buffer)
    for number in range(job.rounds + 1):
        if number == 1:
            before = kernel_bytes(), disk_bytes(job.folder) or 0, time.monotonic()
        for key, store in tensors.items():
            store.read(key, buffer)
            wrong += zlib.crc32(buffer) != sums[key]
    kernel, disk = kernel_bytes() - before[0], disk_bytes(job.folder)
    wall_s = time.monotonic() - before[2]
    cached.close()
    if past:
        past.close()
    asked = size * job.rounds
    return {
        "n1": n1,
        "layers": job.layers,
        "hit_ratio": max(0.0, 1 - kernel / asked),
        "asked_bytes": asked,
        "kernel_bytes": kernel,
        "device_bytes": None if disk is None else disk - before[1],
        "direct_io_engine": past.queue.how if past else None,
        "wrong": wrong,
        "wall_s": wall_s,
    }


def main() -> None:
    """Report that this process is ready, read a job, and print the figures."""
    print("ready", flush=True)
    print(json.dumps(run(CyclicRead(**json.loads(sys.stdin.readline())))))


def as_text(job: CyclicRead) -> str:
    """Serialize a job for `main`."""
    return json.dumps(asdict(job)) + "\n"


if __name__ == "__main__":
    main()
