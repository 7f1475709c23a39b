"""One way of attending over K and V that are larger than memory: what a process of its own does.

A job comes as JSON on standard input after this process has said that it is ready, the figures go to standard output.
What is imported and compiled before is no part of the memory that is limited.
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

from csd_firmware import InProcessDevice
from csd_io.direct import open_queue
from csd_io.queue import Request, aligned, carry_out
from csd_spec import Attend, Attention, Status
from csd_spec.arrays import F16
from eval.bench.cyclic import kernel_bytes
from ftl import Medium

SPARSE = {"sparf-8": ("sparf", 8.0), "sparf-32": ("sparf", 32.0)}
RAW = "kv.bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """K and V of a sequence."""

    layers: int
    kv_heads: int
    queries: int
    head_dim: int
    tokens: int

    @property
    def layer_bytes(self) -> int:
        """K and V of a layer."""
        return 4 * self.kv_heads * self.tokens * self.head_dim

    def q(self, step: int, layer: int) -> F16:
        """Queries (H, G, d) of a layer's step, the same for all ways."""
        draw = np.random.default_rng((step, layer))
        return draw.standard_normal((self.kv_heads, self.queries, self.head_dim), np.float32).astype(np.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """way: `mmap` or `prefetch` (`RIVALS`), or a medium and a method with a hyphen between them. folder: of the drive,
    or of the raw file. cache_bytes: what a drive may keep. steps: those that count, after `warm` others. drop: whether
    the page cache forgets the file after each layer, where nothing else limits it."""

    way: str
    folder: str
    shape: Shape
    cache_bytes: int
    steps: int
    warm: int
    drop: bool


class Way(Protocol):
    """Attends layer by layer. planned: bytes of pages that this has asked for so far; None for who has no plan."""

    @property
    def planned(self) -> int | None: ...

    def attend(self, step: int, layer: int) -> None: ...

    def close(self) -> None: ...


def _sdpa(shape: Shape, kv: torch.Tensor, q: F16) -> None:
    """Dense attention of a layer's queries over K and V (2, H, S, d). Those that share a head are its rows, which takes
    a quarter of the time that `enable_gqa` does."""
    torch.nn.functional.scaled_dot_product_attention(torch.from_numpy(q)[None], kv[None, 0], kv[None, 1])


class Mmap:
    """A cache in a mapped file, and dense attention over it."""

    def __init__(self, job: Job) -> None:
        self.shape, self.planned, self._drop = job.shape, None, job.drop
        shape = job.shape
        self._fd = os.open(Path(job.folder) / RAW, os.O_RDONLY)
        size = shape.layers * shape.layer_bytes
        self._map = mmap.mmap(self._fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)  # as torch wants it
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
    """FlexGen's pattern: a layer is read whole past the page cache while the one before is attended."""

    def __init__(self, job: Job) -> None:
        self.shape, self.planned = job.shape, None
        self._queue = open_queue(Path(job.folder) / RAW, force=True)
        self._buffers = [aligned(job.shape.layer_bytes) for _ in range(2)]
        self._reader = ThreadPoolExecutor(1, "reader")
        self._next = self._reader.submit(self._read, 0)

    def _read(self, layer: int) -> None:
        size, most = self.shape.layer_bytes, self._queue.max_bytes
        into = self._buffers[layer % 2]
        parts = range(0, size, most)
        carry_out(self._queue, [Request("read", layer * size + at, into[at : at + most]) for at in parts])

    def attend(self, step: int, layer: int) -> None:
        shape = self.shape
        self._next.result()
        self._next = self._reader.submit(self._read, (layer + 1) % shape.layers)
        kv = torch.frombuffer(self._buffers[layer % 2], dtype=torch.float16)
        _sdpa(shape, kv.view(2, shape.kv_heads, shape.tokens, shape.head_dim), shape.q(step, layer))

    def close(self) -> None:
        self._reader.shutdown()
        self._queue.close()


class Drive:
    """A drive whose pages lie in its files."""

    def __init__(self, job: Job) -> None:
        kind, _, name = job.way.partition("-")
        method, compression = SPARSE.get(name, (name, None))
        self.shape, self.planned, self._what = job.shape, 0, Attention.named(method, compression)
        self._draw = np.random.default_rng(0)
        began = time.perf_counter(), kernel_bytes()
        medium = Medium("mapped" if kind == "mapped" else "direct", job.cache_bytes)
        self.device = InProcessDevice.reopen(Path(job.folder), medium=medium)
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


def run(job: Job) -> dict[str, Any]:
    """Attend all layers of some steps; figures are of the steps that count."""
    torch.set_num_threads(1)
    way: Way = RIVALS.get(job.way, Drive)(job)
    figures: dict[str, Any] = dict(way.opened) if isinstance(way, Drive) else {}
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
    if isinstance(way, Drive):
        figures["counts"] = asdict(way.device.firmware.ftl.nand.page_store.counts)
    way.close()
    return figures


def rows_of(shape: Shape, layer: int, drift: float) -> Iterator[F16]:
    """K and V (tokens, H, d) of a layer: each token resembles the one before, with this correlation."""
    draw = np.random.default_rng(layer)
    for _ in "kv":
        rows = draw.standard_normal((shape.tokens, shape.kv_heads, shape.head_dim), np.float32)
        for t in range(1, shape.tokens):
            rows[t] = drift * rows[t - 1] + (1 - drift**2) ** 0.5 * rows[t]
        yield rows.astype(np.float16)


def main() -> None:
    """Say that this process is ready, take a job, and print the figures."""
    print("ready", flush=True)
    values = json.loads(sys.stdin.readline())
    print(json.dumps(run(Job(**values | {"shape": Shape(**values["shape"])}))))


if __name__ == "__main__":
    main()
