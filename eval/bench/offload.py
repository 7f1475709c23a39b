"""KV cache larger than memory, measured: drives whose pages are stored in files, compared with baselines.

The baselines attend over all tokens: a mapped cache, and layers that are read whole one layer ahead (FlexGen, arXiv
2303.06865). The KV data are random and drift from token to token, so that selections cluster: SparF at 1/8 reads two
fifths of the bytes; recorded attention of the shipped model reads three quarters (`vcsd eval methods`).
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from csd_firmware import InProcessDrive
from csd_io.cgroup import Cgroup, temporary_cgroup
from csd_spec import Flush, KvAppend, SeqCreate, Status
from csd_spec.attention import NAMED, AttentionConfig
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from ftl import Medium
from vcsd.progress import Tick, no_tick, progress
from vcsd.tables import table
from vcsd_eval.bench import child
from vcsd_eval.bench.offload_child import RAW, RIVALS, SPARSE, OffloadJob, SequenceShape, rows_of
from vcsd_eval.experiment import Outcome

MIB = 1 << 20
LAYOUTS = {"fp16": AttentionConfig().kv_layout.code, "ours": NAMED["ours"].kv_layout.code}
METHODS = ("dense", *SPARSE, "ours")
CHUNK = 4096  # tokens of an append
BESIDE_CACHE = 400 * MIB  # part of the limit reserved for the drive's tables and command buffers
CHILD_S = 300.0


@dataclass(frozen=True, slots=True)
class OffloadLoad:
    """Size of the KV cache, memory limit, and implementations to compare."""

    kv_mib: Annotated[int, typer.Option(min=16, max=1 << 16, help="size of the KV cache, MiB")] = 1536
    limit_mib: Annotated[
        int, typer.Option("--memory-limit-mib", min=16, max=1 << 20, help="memory limit of a process, MiB")
    ] = 1331
    layers: Annotated[int, typer.Option(min=2, max=256, help="number of layers")] = 16
    kv_heads: Annotated[int, typer.Option(min=1, max=64, help="KV heads per layer, 128 channels each")] = 8
    queries: Annotated[int, typer.Option("--q-heads-per-kv-head", min=1, max=16, help="query heads per KV head")] = 4
    steps: Annotated[int, typer.Option(min=1, max=1000, help="measured decode steps per turn")] = 2
    warm: Annotated[
        int, typer.Option("--warmup-steps", min=0, max=1000, help="decode steps before the measurement, to fill caches")
    ] = 4
    rounds: Annotated[int, typer.Option("--repeats", min=1, max=100, help="turns per variant")] = 2
    drift: Annotated[
        float, typer.Option("--token-correlation", min=0, max=0.999, help="correlation of neighbouring tokens")
    ] = 0.97
    ways: Annotated[str, typer.Option("--variants", help="comma-separated baselines and MEDIUM-METHOD pairs")] = (
        "mmap,prefetch,mapped-dense,direct-dense,direct-sparf-8,direct-sparf-32,mapped-ours,direct-ours"
    )
    folder: Annotated[Path | None, typer.Option(help="folder of the files (default: that of temporary files)")] = None

    @property
    def shape(self) -> SequenceShape:
        """Shape of the KV cache, rounded to whole chunks of tokens."""
        tokens = self.kv_mib * MIB // (self.layers * 4 * self.kv_heads * 128)
        return SequenceShape(
            layers=self.layers, kv_heads=self.kv_heads, queries=self.queries, head_dim=128, tokens=tokens // 64 * 64
        )

    def names(self) -> list[str]:
        """Names of the variants; raises ValueError for an unknown one."""
        known = {*RIVALS} | {f"{medium}-{name}" for medium in ("mapped", "direct") for name in METHODS}
        names = self.ways.split(",")
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"ways = {unknown[0]!r}: must be one of {', '.join(sorted(known))}")
        return names


def bench_offload(load: OffloadLoad, tick: Tick = no_tick) -> dict[str, Any]:
    """Run every variant in turn, `rounds` times, each time in a new process under the limit.

    Columns:
        how: Memory limit: a control group or, if this user may not create one (`why`), a page cache that drops a
            baseline's file after each layer; mapped drives are left out then.
        tokens_per_s: Decode rate of the median step.
        over_rivals: Ratio to the better baseline.
        device_mib: MiB read by the kernel for this process per step.
        planned_mib: MiB of pages that the drive's commands named.
        open_s, open_share: Time to reopen a drive, and bytes read over the size of the KV data.
    """
    names, shape = load.names(), load.shape
    taken: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="offload-", dir=load.folder) as place, ExitStack() as undo:
        folders = _fill(shape, load, Path(place), tick)
        group, why = group_of_limit(load.limit_mib * MIB, undo)
        names = [name for name in names if group or not name.startswith("mapped")]
        for _ in range(load.rounds):
            for name in names:
                folder = folders[RAW if name in RIVALS else "ours" if name.endswith("ours") else "fp16"]
                forget(folder)
                job = OffloadJob(
                    way=name,
                    folder=str(folder),
                    shape=shape,
                    cache_bytes=max(16 * MIB, load.limit_mib * MIB - BESIDE_CACHE),
                    steps=load.steps,
                    warm=load.warm,
                    drop=group is None,
                )
                taken[name].append(_child(job, group))
                tick(None)
    how = group.how if group else "what is forgotten after each layer"
    rows = [_row(name, runs, shape) for name, runs in taken.items()]
    rivals = [row["tokens_per_s"] for row in rows if row["way"] in RIVALS]
    for row in rows if rivals else []:
        row["over_rivals"] = row["tokens_per_s"] / max(rivals)
    return asdict(load) | {"folder": str(load.folder), "how": how, "why": why, "tokens": shape.tokens, "rows": rows}


def group_of_limit(limit_bytes: int, undo: ExitStack) -> tuple[Cgroup | None, str | None]:
    """Control group with a memory limit, or the reason why it cannot be created."""
    try:
        return undo.enter_context(temporary_cgroup(limit_bytes)), None
    except OSError as error:
        return None, str(error)


def _row(name: str, runs: list[dict[str, Any]], shape: SequenceShape) -> dict[str, Any]:
    row: dict[str, Any] = {"way": name}
    row["step_s"] = statistics.median(each for run in runs for each in run["step_s"])
    row["tokens_per_s"] = 1 / row["step_s"]
    row["device_mib"] = statistics.median(run["device_bytes"] for run in runs) / MIB
    if runs[0]["planned_bytes"] is not None:
        row["planned_mib"] = statistics.median(run["planned_bytes"] for run in runs) / MIB
        row["open_s"] = statistics.median(run["open_s"] for run in runs)
        row["open_share"] = statistics.median(run["open_bytes"] for run in runs) / (shape.layers * shape.layer_bytes)
        row["counts"] = runs[-1]["counts"]
    return row


def _fill(shape: SequenceShape, load: OffloadLoad, place: Path, tick: Tick) -> dict[str, Path]:
    """Write the raw file and a drive of each layout with the same KV data."""
    needed = shape.layers * shape.layer_bytes * 7 // 2
    if shutil.disk_usage(place).free < needed:
        raise OSError(f"{place}: {needed // MIB} MiB are needed: choose another --folder or reduce --kv-mib")
    folders = {name: place / name for name in (RAW, *LAYOUTS)}
    folders[RAW].mkdir()
    with (folders[RAW] / RAW).open("wb") as raw, ExitStack() as undo:
        drives = [undo.enter_context(_made(folders[name], shape, code)) for name, code in LAYOUTS.items()]
        for layer in range(shape.layers):
            k, v = rows_of(shape, layer, load.drift)
            for rows in (k, v):
                raw.write(np.ascontiguousarray(rows.transpose(1, 0, 2)).data)
            for device in drives:
                for at in range(0, shape.tokens, CHUNK):
                    part = k[at : at + CHUNK], v[at : at + CHUNK]
                    lengths = np.array([part[0].shape[0]])
                    _done(device, KvAppend(seqs=(1,), layer=layer, lengths=lengths, k=part[0], v=part[1]))
            tick(None)
    return folders


@contextmanager
def _made(folder: Path, shape: SequenceShape, code: int) -> Iterator[InProcessDrive]:
    """A drive with an empty sequence; it is flushed at the end."""
    device = InProcessDrive(INSTCSD_ZYNQ7045_8CH, folder, medium=Medium("mapped"))
    shaped = {"layers": shape.layers, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    _done(device, SeqCreate(count=1, **shaped, max_tokens=shape.tokens + 4096, layout=code))
    yield device
    _done(device, Flush())
    device.close()


def _done(device: InProcessDrive, command: Any) -> None:
    done = device.submit(command, device.firmware.free_ns).result()
    if done.status is not Status.SUCCESS:
        raise OSError(f"{device.name}: {done.reason}")


def forget(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _child(job: OffloadJob, group: Cgroup | None) -> dict[str, Any]:
    """Run a job in a process of a group; raises OSError if it exits without figures."""
    try:
        return child.done("vcsd_eval.bench.offload_child", json.dumps(asdict(job)) + "\n", group, CHILD_S)
    except OSError as error:
        raise OSError(f"{job.way}: {error}") from error


def experiment(load: OffloadLoad) -> Outcome:
    """KV cache larger than memory: drives whose pages are files, compared with a mapped cache and layer prefetch."""
    with progress("layers filled and turns taken", load.layers + load.rounds * len(load.names())) as tick:
        result = bench_offload(load, tick)
    columns = (
        "way",
        "tokens/s",
        "of a rival's",
        "MiB read a step",
        "MiB of its plan",
        "opened in s",
        "reading, of K and V",
    )
    shown = [
        (
            row["way"],
            f"{row['tokens_per_s']:.2f}",
            f"{row['over_rivals']:.2f}x" if "over_rivals" in row else "",
            f"{row['device_mib']:,.0f}",
            f"{row['planned_mib']:,.0f}" if "planned_mib" in row else "",
            f"{row['open_s']:.2f}" if "open_s" in row else "",
            f"{row['open_share']:.1%}" if "open_share" in row else "",
        )
        for row in result["rows"]
    ]
    title = f"{load.kv_mib} MiB of K and V, {load.limit_mib} MiB of memory, limited by {result['how']}"
    notes = [f"no control group ({result['why']}): drives in mapped files are left out"] if result["why"] else []
    return Outcome(result, [table(title, columns, shown)], notes)
