"""Transports to a drive in wall-clock time: a mounted drive under fio, window round trips, Attend of a decode step."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from csd_firmware import InProcessDrive
from csd_link.connect import connect
from csd_link.host_end import WindowDrive
from csd_link.private_server import ServerEndpoint, own_server
from csd_link.run_dir import private_dir, run_dir, window_path
from csd_link.served_drive import ServedDrive
from csd_spec import Attend, Command, Drive, KvAppend, KvCrop, KvFree, KvRead, SeqCreate, Status
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from ftl.flash.memory import reserve_zeros
from vcsd.progress import status
from vcsd.transport import FACTORY
from vcsd_eval.bench.links import measure_links
from vcsd_eval.experiment import Outcome, flat

TOKENS, KV_HEADS, GROUP, CHANNELS = 1024, 8, 4, 128  # shape of an Attend command
TURNS = 10  # drives take turns, so that a busy machine is busy for both

WORKLOADS = {
    "fuse_seq_write_mbps": ("write", "1M", 1),
    "fuse_seq_mbps": ("read", "1M", 1),
    "fuse_rand_iops": ("randread", "4k", 16),
    "fuse_rand_write_iops": ("randwrite", "4k", 16),
}


def bench_transport(seconds: int, size_mb: int, trips: int) -> dict[str, Any]:
    """Measure the FUSE mount, command round trips and Attend through each transport.

    Columns:
        fuse_*: Block namespace, direct I/O, no kernel caching; 10^6 bytes per second, or requests per second. Blocks
            are written before they are read.
        first_touch_mbps: Rate at which this machine supplies memory that was never used, as is the emulated flash; it
            bounds fuse_seq_write_mbps.
        rtt: Round trip of a command that the drive refuses (KvFree of an unknown sequence, 72 bytes), and of one that
            reads a token back; from `submit` until the caller has the completion.
        attend_*: One layer of a decode step on a drive in its own process, through its window, and on a drive in this
            process: 1,024 tokens, 32 query heads on 8 KV heads of 128 channels, dense.
        process_over_inproc: Ratio of these two.
        window_*, nvme_tcp_*, socket_*: See `measure_links`.

    Raises:
        FileNotFoundError: fio is not installed.
    """
    if not shutil.which("fio"):
        raise FileNotFoundError("fio is not installed: apt-get install fio")
    with tempfile.TemporaryDirectory(prefix="bench-", dir=private_dir(run_dir())) as scratch:
        folder = Path(scratch)
        name, mount = f"{folder.name}-0", folder / "mount"
        drive, attach = ServedDrive(name=name, spec=INSTCSD_ZYNQ7045_8CH), partial(connect, window_path(name))
        with own_server([ServerEndpoint(replace(drive, mount=mount), attach)], folder, FACTORY.server):
            figures = {"first_touch_mbps": _first_touch(size_mb << 20)}
            figures |= {key: _fio(mount / "namespace", *load, seconds, size_mb) for key, load in WORKLOADS.items()}
        with own_server([ServerEndpoint(drive, attach)], folder, FACTORY.server):
            device = attach()
            figures |= _round_trips(device, trips) | measure_attends(device, trips)
            device.close()
    return figures | measure_links(trips)


def _first_touch(size: int) -> float:
    """Rate of the first write to new memory, MB/s."""
    memory = reserve_zeros((size,), np.uint8)
    began = time.perf_counter()
    memory[:] = 1
    return size / (time.perf_counter() - began) / 1e6


def _fio(file: Path, load: str, block: str, depth: int, seconds: int, size_mb: int) -> float:
    """Rate of a sequential workload in MB/s, of a random one in requests per second."""
    command = [
        *("fio", "--name=bench", f"--filename={file}", f"--rw={load}", f"--bs={block}", f"--size={size_mb}M"),
        *("--direct=1", "--ioengine=libaio", f"--iodepth={depth}", "--output-format=json"),
    ]
    if load.startswith("rand"):
        command += ["--time_based", f"--runtime={seconds}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"fio {load}: {done.stderr.strip() or done.stdout.strip()}")
    result = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["write" if "write" in load else "read"]
    return float(result["iops"] if load.startswith("rand") else result["bw_bytes"] / 1e6)


def _round_trips(device: WindowDrive, trips: int) -> dict[str, float]:
    created = device.submit(SeqCreate(1, 1, 1, 64, 1024), 0).result()
    seqs, row = tuple(created.data[0].tolist()), np.ones((1, 1, 64), np.float16)
    device.submit(KvAppend(seqs, 0, np.array([1]), row, row), 0).result()
    refused = _times(device, KvFree((1,)), Status.UNKNOWN_SEQUENCE, trips)
    read = _times(device, KvRead(seqs, 0), Status.SUCCESS, trips)
    return {
        "rtt_us_median": float(np.median(refused)),
        "rtt_us_p99": float(np.percentile(refused, 99)),
        "rtt_read_us_median": float(np.median(read)),
    }


def measure_attends(process: Drive, trips: int) -> dict[str, float]:
    """Microseconds of an Attend through a link and in this process, in turns, and their ratio."""
    inproc, generator = InProcessDrive(INSTCSD_ZYNQ7045_8CH), np.random.default_rng(0)
    rows = generator.standard_normal((TOKENS, KV_HEADS, CHANNELS)).astype(np.float16)
    q = generator.standard_normal((1, KV_HEADS, GROUP, CHANNELS)).astype(np.float16)
    budget, recent, length = np.array([TOKENS // 8]), np.zeros(1, np.int64), np.array([TOKENS])
    times = dict[str, list[float]]()
    commands = dict[str, tuple[Drive, Attend]]()
    for name, device in (("process", process), ("inproc", inproc)):
        create = SeqCreate(1, 1, KV_HEADS, CHANNELS, TOKENS + trips)
        seqs = tuple(device.submit(create, 0).result().data[0].tolist())
        device.submit(KvAppend(seqs, 0, length, rows, rows), 0).result()
        attend = Attend(seqs, 0, q, rows[:1], rows[:1], "dense", CHANNELS // 8, budget, recent)
        commands[name], times[name] = (device, attend), []
    for _ in range(TURNS):
        for name, (device, attend) in commands.items():
            times[name] += _times(device, attend, Status.SUCCESS, -(-trips // TURNS))
            device.submit(KvCrop(attend.seqs, 0, length), 0).result()  # each adds a token
    inproc.close()
    medians = {name: float(np.median(samples)) for name, samples in times.items()}
    return {f"attend_{name}_us_median": us for name, us in medians.items()} | {
        "process_over_inproc": medians["process"] / medians["inproc"]
    }


def _times(device: Drive, command: Command, status: Status, trips: int) -> list[float]:
    """Microseconds of each round trip."""
    times = []
    for _ in range(trips):
        began = time.perf_counter()
        done = device.submit(command, 0).result()
        times.append((time.perf_counter() - began) * 1e6)
        assert done.status is status, done.reason
    return times


def experiment(
    seconds: Annotated[int, typer.Option(min=1, max=60, help="duration of each random workload, seconds")] = 5,
    size_mb: Annotated[
        int, typer.Option("--size-mib", min=16, max=4096, help="size of the namespace region used, MiB")
    ] = 512,
    trips: Annotated[
        int, typer.Option("--round-trips", min=10, max=10**7, help="number of round trips through the window")
    ] = 5000,
) -> Outcome:
    """A mounted drive under fio, and round trips through a window in shared memory."""
    with status("fio, then round trips"):
        return flat("transport", bench_transport(seconds, size_mb, trips))
