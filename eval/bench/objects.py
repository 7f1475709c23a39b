"""KV data as objects in one drive: reads of many layers in one command; forks and frees of related sequences."""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from csd_firmware import Firmware, InProcessDrive
from csd_io.medium import Medium
from csd_spec import LAYOUTS, Command, Completion, Flush, KvAppend, KvFree, KvGather, SeqCreate, SeqFork, Status
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from vcsd.progress import Tick, progress
from vcsd_eval.bench.offload import forget
from vcsd_eval.experiment import Outcome, flat

MIB = 1 << 20
HEADS, HEAD_DIM, BLOCK_TOKENS = 8, 128, 64  # 128 KiB of K
CACHE_BYTES = 1 << 20  # page cache of the medium
TURNS = 7  # the median is reported


@dataclass(frozen=True, slots=True)
class ForkLoad:
    """Stored objects, and number of sequences that share a prefix."""

    objects: Annotated[
        int, typer.Option(min=2, max=1 << 20, help="number of objects of 128 KiB (K or V of a block)")
    ] = 1000
    layers: Annotated[int, typer.Option(min=1, max=256, help="number of layers of a prefix")] = 32
    relatives: Annotated[int, typer.Option("--forks", min=1, max=4096, help="sequences forked from one")] = 500
    folder: Annotated[
        Path | None, typer.Option(help="folder of the drive's files (default: that of temporary files)")
    ] = None

    @property
    def tokens(self) -> int:
        """Tokens of each layer."""
        return -(-self.objects // (2 * self.layers)) * BLOCK_TOKENS


def experiment(load: ForkLoad) -> Outcome:
    """Read objects with direct I/O, and fork and free related sequences: bytes, queue depth, time."""
    with progress("layers and relatives", load.layers + 2) as tick:
        result = gathered(load, tick) | among_relatives(load, tick)
    return flat("objects", result)


def gathered(load: ForkLoad, tick: Tick) -> dict[str, Any]:
    """Read one prefix of all layers with direct I/O from a drive that has just been opened.

    device_over_asked: bytes read from the device over those that the host receives.
    """
    with tempfile.TemporaryDirectory(dir=load.folder) as scratch:
        folder = Path(scratch, "drive")
        with closing(InProcessDrive(INSTCSD_ZYNQ7045_8CH, folder, medium=Medium("mapped"))) as device:
            seq = _stored(device.firmware, load, tick)
            _carried_out(device.firmware, Flush())
        forget(folder)
        with closing(InProcessDrive.reopen(folder, medium=Medium("direct", CACHE_BYTES))) as device:
            counts = device.firmware.ftl.nand.page_store.counts
            before, began_s = counts.asked, time.perf_counter()
            gather = KvGather((seq,), np.zeros(1, np.int64), np.array([load.tokens]), 0, load.layers)
            done = _carried_out(device.firmware, gather)
            took_s = time.perf_counter() - began_s
            asked = sum(array.nbytes for array in done.data)
    return {
        "objects": 2 * load.layers * load.tokens // BLOCK_TOKENS,
        "commands": 1,
        "asked_bytes": asked,
        "device_bytes": counts.asked - before,
        "device_over_asked": (counts.asked - before) / asked,
        "queue_depth": counts.depth,
        "requests": counts.requests,
        "wall_mib_per_s": asked / MIB / took_s,
        "simulated_ms": done.latency_ns / 1e6,
    }


def among_relatives(load: ForkLoad, tick: Tick) -> dict[str, Any]:
    """CPU time of a fork and a free, alone and with related sequences; turns of both kinds are interleaved."""
    few, many = (_family(load, count, tick) for count in (1, load.relatives))
    taken: dict[str, list[float]] = {f"{what}_us{who}": [] for what in ("fork", "free") for who in ("", "_alone")}
    for _ in range(TURNS):
        for (drive, seq), who in ((few, "_alone"), (many, "")):
            began_s = time.thread_time()
            child = int(_carried_out(drive, SeqFork((seq,), np.array([load.tokens]))).data[0][0])
            forked_s = time.thread_time()
            _carried_out(drive, KvFree((child,)))
            taken[f"fork_us{who}"].append(1e6 * (forked_s - began_s))
            taken[f"free_us{who}"].append(1e6 * (time.thread_time() - forked_s))
    medians = {name: statistics.median(each) for name, each in taken.items()}
    return medians | {
        "relatives": load.relatives,
        "fork_slowdown_with_many_forks": medians["fork_us"] / medians["fork_us_alone"],
        "free_slowdown_with_many_forks": medians["free_us"] / medians["free_us_alone"],
    }


def _family(load: ForkLoad, relatives: int, tick: Tick) -> tuple[Firmware, int]:
    """A drive with a sequence, and others forked from it."""
    drive = Firmware(INSTCSD_ZYNQ7045_8CH)
    seq = _stored(drive, load, lambda _: None)
    for _ in range(relatives - 1):
        _carried_out(drive, SeqFork((seq,), np.array([load.tokens])))
    tick(None)
    return drive, seq


def _stored(drive: Firmware, load: ForkLoad, tick: Tick) -> int:
    """Create a sequence with KV data in all layers; returns its handle."""
    created = SeqCreate(1, load.layers, HEADS, HEAD_DIM, load.tokens, LAYOUTS["opaque"].code)
    seq = int(_carried_out(drive, created).data[0][0])
    rows = np.random.default_rng(0).standard_normal((load.tokens, HEADS, HEAD_DIM)).astype(np.float16)
    for layer in range(load.layers):
        _carried_out(drive, KvAppend((seq,), layer, np.array([load.tokens]), rows, rows))
        tick(None)
    return seq


def _carried_out(drive: Firmware, command: Command) -> Completion:
    done = drive.step(command, drive.free_ns)
    if done.status is not Status.SUCCESS:
        raise OSError(done.reason)
    return done
