"""Child process that attends over a KV cache larger than memory, with one variant.

A job arrives as JSON on standard input after this process has reported that it is ready; the figures are printed to
standard output. Memory of modules imported and code compiled before the job is not limited.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from csd_firmware import InProcessDrive
from csd_io.direct import open_queue
from csd_io.queue import IoRequest, aligned, carry_out
from csd_spec import Attend, AttentionConfig, Status
from csd_spec.arrays import F16
from ftl import Medium
from vcsd_eval.bench.cyclic import kernel_bytes

SPARSE = {"sparf-8": ("sparf", 8.0), "sparf-32": ("sparf", 32.0)}
RAW = "kv.bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceShape:
    """Shape of a sequence's KV cache."""

    layers: int
    kv_heads: int
    queries: int
    head_dim: int
    tokens: int

    @property
    def layer_bytes(self) -> int:
        """Size of the KV data of a layer, bytes."""
        return 4 * self.kv_heads * self.tokens * self.head_dim

    def q(self, step: int, layer: int) -> F16:
        """Queries (H, G, d) of a layer in a step, the same for all variants."""
        draw = np.random.default_rng((step, layer))
        return draw.standard_normal((self.kv_heads, self.queries, self.head_dim), np.float32).astype(np.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadJob:
    """One measurement.

    Attributes:
        way: `mmap` or `prefetch` (`RIVALS`), or a medium and a method joined by a hyphen.
        folder: Folder of the drive, or of the raw file.
        cache_bytes: Cache limit of a drive.
        steps: Measured steps, after `warm` others.
        drop: Whether the file is dropped from the page cache after each layer, if no other limit applies.
    """

    way: str
    folder: str
    shape: SequenceShape
    cache_bytes: int
    steps: int
    warm: int
    drop: bool


class OffloadVariant(Protocol):
    """Attends layer by layer. planned: bytes of pages requested so far; None if the variant has no plan."""

    @property
    def planned(self) -> int | None: ...

    def attend(self, step: int, layer: int) -> None: ...

    def close(self) -> None: ...


def _sdpa(shape: SequenceShape, kv: torch.Tensor, q: F16) -> None:
    """Dense attention of a layer's queries over K and V (2, H, S, d).

    Queries that share a head are its rows, which takes a quarter of the time of `enable_gqa`.
    """
    torch.nn.functional.scaled_dot_product_attention(torch.from_numpy(q)[None], kv[None, 0], kv[None, 1])


class Mmap:
    """A cache in a mapped file, and dense attention over it."""

    def __init__(self, job: OffloadJob) -> None:
        self.shape, self.planned, self._drop = job.shape, None, job.drop
        shape = job.shape
        self._fd = os.open(Path(job.folder) / RAW, os.O_RDONLY)
        size = shape.layers * shape.layer_bytes
        self._map = mmap.mmap(
            self._fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
        )  # writable private mapping, as torch requires
        kv = torch.frombuffer(self._map, dtype=torch.float16)
        self._kv = kv.view(shape.layers, 2, shape.kv_heads, shape.tokens, shape.head_dim)

    def attend(self, step: int, layer: int) -> None:
        _sdpa(self.shape, self._kv[layer], self.shape.q(step, layer))
        if self._drop:
            self._map.madvise(mmap.MADV_DONTNEED)
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._fd)


class Prefetch:
    """FlexGen's pattern: a layer is read whole with direct I/O while the previous one is attended."""

    def __init__(self, job: OffloadJob) -> None:
        self.shape, self.planned = job.shape, None
        self._queue = open_queue(Path(job.folder) / RAW, force=True)
        self._buffers = [aligned(job.shape.layer_bytes) for _ in range(2)]
        self._reader = ThreadPoolExecutor(1, "reader")
        self._next = self._reader.submit(self._read, 0)

    def _read(self, layer: int) -> None:
        size, most = self.shape.layer_bytes, self._queue.max_bytes
        into = self._buffers[layer % 2]
        parts = range(0, size, most)
        carry_out(self._queue, [IoRequest("read", layer * size + at, into[at : at + most]) for at in parts])

    def attend(self, step: int, layer: int) -> None:
        shape = self.shape
        self._next.result()
        self._next = self._reader.submit(self._read, (layer + 1) % shape.layers)
        kv = torch.frombuffer(self._buffers[layer % 2], dtype=torch.float16)
        _sdpa(shape, kv.view(2, shape.kv_heads, shape.tokens, shape.head_dim), shape.q(step, layer))

    def close(self) -> None:
        self._reader.shutdown()
        self._queue.close()


class FileBackedDrive:
    """A drive whose pages are stored in its files."""

    def __init__(self, job: OffloadJob) -> None:
        kind, _, name = job.way.partition("-")
        method, compression = SPARSE.get(name, (name, None))
        self.shape, self.planned, self._what = job.shape, 0, AttentionConfig.named(method, compression)
        self._draw = np.random.default_rng(0)
        began = time.perf_counter(), kernel_bytes()
        medium = Medium("mapped" if kind == "mapped" else "direct", job.cache_bytes)
        self.device = InProcessDrive.reopen(Path(job.folder), medium=medium)
        self.opened = {"open_s": time.perf_counter() - began[0], "open_bytes": kernel_bytes() - began[1]}
        (self._handle,) = self.device.firmware.ftl.sequences

    def attend(self, step: int, layer: int) -> None:
        shape = self.shape
        stored = int(self.device.firmware.ftl.sequence(self._handle).lengths[layer]) + 1
        params = self._what.at(stored, shape.head_dim)
        k, v = (self._draw.standard_normal((1, shape.kv_heads, shape.head_dim)).astype(np.float16) for _ in range(2))
        command = Attend(
            seqs=(self._handle,),
            layer=layer,
            q=shape.q(step, layer)[None],
            k=k,
            v=v,
            method=self._what.method,
            r=params.r,
            top_k=np.array([params.k]),
            recent=np.array([params.l]),
        )
        done = self.device.submit(command, self.device.firmware.free_ns).result()
        if done.status is not Status.SUCCESS:
            raise OSError(f"{self.device.name}: {done.reason}")
        assert self.planned is not None
        self.planned += done.flash.pages_read * self.device.spec.geometry.page_bytes

    def close(self) -> None:
        self.device.close()


RIVALS: dict[str, type[Mmap] | type[Prefetch]] = {"mmap": Mmap, "prefetch": Prefetch}


def run(job: OffloadJob) -> dict[str, Any]:
    """Attend all layers in some steps; figures cover the measured steps."""
    torch.set_num_threads(1)
    way: OffloadVariant = RIVALS.get(job.way, FileBackedDrive)(job)
    figures: dict[str, Any] = dict(way.opened) if isinstance(way, FileBackedDrive) else {}
    times = list[float]()
    before = 0, 0
    for step in range(job.warm + job.steps):
        if step == job.warm:
            before = kernel_bytes(), way.planned or 0
        began = time.perf_counter()
        for layer in range(job.shape.layers):
            way.attend(step, layer)
        times.append(time.perf_counter() - began)
    figures |= {
        "step_s": times[job.warm :],
        "device_bytes": (kernel_bytes() - before[0]) / job.steps,
        "planned_bytes": None if way.planned is None else (way.planned - before[1]) / job.steps,
    }
    if isinstance(way, FileBackedDrive):
        figures["counts"] = asdict(way.device.firmware.ftl.nand.page_store.counts)
    way.close()
    return figures


def rows_of(shape: SequenceShape, layer: int, drift: float) -> Iterator[F16]:
    """Rows of K and V (tokens, H, d) of a layer; neighbouring tokens have the given correlation."""
    draw = np.random.default_rng(layer)
    for _ in "kv":
        rows = draw.standard_normal((shape.tokens, shape.kv_heads, shape.head_dim), np.float32)
        for t in range(1, shape.tokens):
            rows[t] = drift * rows[t - 1] + (1 - drift**2) ** 0.5 * rows[t]
        yield rows.astype(np.float16)


def main() -> None:
    """Report that this process is ready, read a job, and print the figures."""
    print("ready", flush=True)
    values = json.loads(sys.stdin.readline())
    print(json.dumps(run(OffloadJob(**values | {"shape": SequenceShape(**values["shape"])}))))


if __name__ == "__main__":
    main()
