"""Sequential reads of the block namespace at increasing queue depth; simulated time."""

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
from vcsd.tables import table
from vcsd_eval.experiment import Outcome
from vcsd_eval.options import numbers

Read = Callable[[int, int], int]  # (offset, submission time) -> completion time


def bench_queue_depth(
    spec: DriveSpec, nbytes: int, request_bytes: int, depths: tuple[int, ...]
) -> list[dict[str, Any]]:
    """Bandwidth of a sequential read of `nbytes` that were written sequentially, for each depth.

    flash_gb_s: rate out of the flash (`ftl/block.py`). host_gb_s: rate across the link (`csd_firmware/namespace.py`).
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
        return namespace.read(at, request_bytes, submit_ns)[1]

    rows, now_ns = [], firmware.ftl.timing.idle_ns()
    for depth in depths:
        row: dict[str, Any] = {"depth": depth}
        for name, read in (("flash_gb_s", of_flash), ("host_gb_s", of_host)):
            end_ns = closed_loop(read, range(0, nbytes, request_bytes), depth, now_ns)
            row[name], now_ns = nbytes / (end_ns - now_ns), max(end_ns, firmware.ftl.timing.idle_ns())
        rows.append(row)
    return rows


def closed_loop(read: Read, offsets: range, depth: int, start_ns: int) -> int:
    """Read at the offsets, `depth` requests in flight at a time; returns the time of the last completion."""
    flying = [start_ns] * depth
    for at in offsets:
        heapq.heapreplace(flying, read(at, flying[0]))
    return max(flying)


def experiment(
    mib: Annotated[int, typer.Option("--total-mib", min=1, max=4096, help="amount of data read, MiB")] = 64,
    request_kib: Annotated[int, typer.Option(min=64, max=1024, help="request size, KiB, whole pages")] = 256,
    depths: Annotated[str, typer.Option("--iodepths", help="comma-separated numbers of requests in flight")] = "1,4,32",
) -> Outcome:
    """Simulated sequential reads of the block namespace, by queue depth."""
    spec, request_bytes = INSTCSD_ZYNQ7045_8CH, request_kib << 10
    if request_bytes % spec.geometry.page_bytes or (mib << 20) % request_bytes:
        raise ValueError(f"request_kib = {request_kib}: must be a multiple of the page size and a divisor of {mib} MiB")
    rows = bench_queue_depth(spec, mib << 20, request_bytes, tuple(numbers("depths", depths)))
    shown = [(str(row["depth"]), f"{row['flash_gb_s']:.2f}", f"{row['host_gb_s']:.2f}") for row in rows]
    title = f"Sequential reads of {request_kib} KiB, {spec.name}: GB/s"
    result = {"preset": spec.name, "request_kib": request_kib, "rows": rows}
    return Outcome(result, [table(title, ("depth", "flash", "host"), shown)])
