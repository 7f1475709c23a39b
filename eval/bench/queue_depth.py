"""Sequential reads of the block namespace with more and more requests in flight; modelled time."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import typer

from csd_firmware import Firmware
from csd_firmware.namespace import Namespace
from csd_spec import DriveSpec
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from eval.experiment import Outcome
from eval.options import numbers
from vcsd.tables import table

Read = Callable[[int, int], int]  # of a request at an offset, submitted at a time: when it ends


def bench_queue_depth(
    spec: DriveSpec, nbytes: int, request_bytes: int, depths: tuple[int, ...]
) -> list[dict[str, Any]]:
    """Bytes a second of `nbytes` that were written in order and are read in order, for each depth.

    flash_gb_s: what leaves the flash (`ftl/block.py`). host_gb_s: what crosses the link (`csd_firmware/namespace.py`).
    """
    firmware = Firmware(spec)
    namespace, blocks = Namespace(firmware, threading.Lock()), firmware.ftl.blocks
    page, content = namespace.page_bytes, bytes(request_bytes)
    for at in range(0, nbytes, request_bytes):
        namespace.write(at, content)
    namespace.flush()

    def of_flash(at: int, submit_ns: int) -> int:
        return blocks.read(np.arange(at // page, (at + request_bytes) // page), submit_ns)[1]

    def of_host(at: int, submit_ns: int) -> int:
        return namespace.read_at(at, request_bytes, submit_ns)[1]

    rows, now_ns = [], firmware.ftl.timing.idle_ns()
    for depth in depths:
        row: dict[str, Any] = {"depth": depth}
        for name, read in (("flash_gb_s", of_flash), ("host_gb_s", of_host)):
            end_ns = closed_loop(read, range(0, nbytes, request_bytes), depth, now_ns)
            row[name], now_ns = nbytes / (end_ns - now_ns), max(end_ns, firmware.ftl.timing.idle_ns())
        rows.append(row)
    return rows


def closed_loop(read: Read, offsets: range, depth: int, start_ns: int) -> int:
    """Read at offsets, a request as soon as one has ended; returns when the last has."""
    flying = [start_ns] * depth
    for at in offsets:
        heapq.heapreplace(flying, read(at, flying[0]))
    return max(flying)


def experiment(
    mib: Annotated[int, typer.Option("--total-mib", min=1, max=4096, help="MiB that are read")] = 64,
    request_kib: Annotated[int, typer.Option(min=64, max=1024, help="KiB of a request, whole pages")] = 256,
    depths: Annotated[str, typer.Option("--iodepths", help="requests in flight, with commas")] = "1,4,32",
) -> Outcome:
    """Modelled sequential reads of the block namespace, by queue depth."""
    spec, request_bytes = INSTCSD_ZYNQ7045_8CH, request_kib << 10
    if request_bytes % spec.geometry.page_bytes or (mib << 20) % request_bytes:
        raise ValueError(f"request_kib = {request_kib}: must be whole pages, and divide {mib} MiB")
    rows = bench_queue_depth(spec, mib << 20, request_bytes, tuple(numbers("depths", depths)))
    shown = [(str(row["depth"]), f"{row['flash_gb_s']:.2f}", f"{row['host_gb_s']:.2f}") for row in rows]
    title = f"Sequential reads of {request_kib} KiB, {spec.name}: GB/s"
    result = {"preset": spec.name, "request_kib": request_kib, "rows": rows}
    return Outcome(result, [table(title, ("depth", "flash", "host"), shown)])
