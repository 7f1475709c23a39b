"""A drive with a KV cache larger than memory decodes, is killed, is reopened and continues."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from csd_io.cgroup import Cgroup
from vcsd.options import MAX_SEED
from vcsd.progress import Tick, no_tick, progress
from vcsd_eval.bench import child
from vcsd_eval.bench.offload import MIB, forget, group_of_limit
from vcsd_eval.bench.reopen_drive import HEAD_DIM, RecoveryJob
from vcsd_eval.experiment import Outcome, flat

MODULE = "vcsd_eval.bench.reopen_drive"
CACHE = 1 / 8  # page cache of a direct medium, as a fraction of the memory limit
FILES = 1.6  # size of a drive's files over that of the KV data, largest layout
GROUP_TOKENS = 64


@dataclass(frozen=True, slots=True)
class RecoveryLoad:
    """Size of the KV cache, memory limit, and kills of the drive."""

    kv_mib: Annotated[int, typer.Option(min=1, max=1 << 20, help="size of the KV cache, MiB")] = 1024
    limit_mib: Annotated[
        int, typer.Option("--memory-limit-mib", min=16, max=1 << 20, help="memory limit of the drive's process, MiB")
    ] = 512
    medium: Annotated[Literal["mapped", "direct"], typer.Option(help="medium that reads the drive's files")] = "direct"
    method: Annotated[Literal["dense", "sparf"], typer.Option(help="attention method, sparf at 1/8")] = "sparf"
    layers: Annotated[int, typer.Option(min=1, max=256, help="number of layers")] = 16
    kv_heads: Annotated[int, typer.Option(min=1, max=64, help="KV heads per layer, 128 channels each")] = 8
    queries: Annotated[int, typer.Option("--q-heads-per-kv-head", min=1, max=16, help="query heads per KV head")] = 4
    steps: Annotated[int, typer.Option(min=2, max=10_000, help="tokens to decode")] = 16
    flush_interval_steps: Annotated[int, typer.Option(min=1, max=10_000, help="decode steps between flushes")] = 3
    kills: Annotated[int, typer.Option(min=1, max=1000, help="number of kills of the drive (SIGKILL)")] = 1
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="random seed for the times of the kills")] = 0
    folder: Annotated[
        Path | None, typer.Option(help="folder of the drive's files (default: that of temporary files)")
    ] = None

    @property
    def tokens(self) -> int:
        """Tokens of the sequence before decoding."""
        of_token = 4 * self.layers * self.kv_heads * HEAD_DIM
        return max(GROUP_TOKENS, self.kv_mib * MIB // of_token // GROUP_TOKENS * GROUP_TOKENS)


def bench_reopen(load: RecoveryLoad, tick: Tick = no_tick) -> dict[str, Any]:
    """Fill a drive, decode a fork of the sequence undisturbed, then decode the sequence itself with `kills` kills.

    Columns:
        how: Memory limit of each of these processes; None if this user may not create a control group (`why`).
        reopen_s: Longest open after a kill, with none of the files in the page cache.
        peak_memory_mib: Peak memory of a process, including the interpreter and the drive's code (base_memory_mib).
        tokens_lost: Tokens since the last flush that were lost and sent to the drive again.
        tokens_equal: Whether all tokens match the undisturbed decode.
    """
    draw, taken = random.Random(load.seed), list[int]()
    found: dict[str, Any] = {"reopen_s": 0.0, "peak_memory_mib": 0.0, "tokens_lost": 0}
    with tempfile.TemporaryDirectory(prefix="reopen-", dir=load.folder) as place, ExitStack() as undo:
        if shutil.disk_usage(place).free < FILES * load.kv_mib * MIB:
            raise OSError(
                f"{place}: {FILES * load.kv_mib:.0f} MiB are needed: choose another --folder or reduce --kv-mib"
            )
        group, why = group_of_limit(load.limit_mib * MIB, undo)
        stops = sorted(draw.sample(range(1, load.steps), min(load.kills, load.steps - 1)))
        expected = list[int]()
        began = time.perf_counter()
        for number, stop in enumerate([*stops, None]):
            if number:
                forget(Path(place))
            for line in _life(_job(load, Path(place), not number, taken), group, stop and stop - len(taken), draw):
                if "expected" in line:
                    expected = line["expected"] or expected
                    found["fill_s"] = found.get("fill_s", time.perf_counter() - began)
                    if number:
                        found["reopen_s"] = max(found["reopen_s"], line["open_s"])
                        found["tokens_lost"] += len(taken) - line["begun"]
                        del taken[line["begun"] :]
                if "token" in line:
                    taken.append(line["token"])
                    tick(None)
                if "peak_mib" in line:
                    found["peak_memory_mib"] = max(found["peak_memory_mib"], line["peak_mib"])
                    found["base_memory_mib"] = line["base_mib"]
                found |= {name: line[name] for name in ("step_s",) if name in line}
    limit = {"how": group.how if group else None, "why": why, "tokens": load.tokens}
    return asdict(load) | {"folder": str(load.folder)} | limit | found | {"tokens_equal": taken == expected}


def _job(load: RecoveryLoad, place: Path, fill: bool, known: list[int]) -> RecoveryJob:
    return RecoveryJob(
        folder=str(place),
        medium=load.medium,
        cache_bytes=int(load.limit_mib * MIB * CACHE),
        method=load.method,
        layers=load.layers,
        kv_heads=load.kv_heads,
        queries=load.queries,
        tokens=load.tokens,
        steps=load.steps,
        flush_interval_steps=load.flush_interval_steps,
        fill=fill,
        known=list(known),
    )


def _life(job: RecoveryJob, group: Cgroup | None, stop: int | None, draw: random.Random) -> Iterator[dict[str, Any]]:
    """Output of a process until it exits, or until `stop` tokens are printed: then it is killed during the next one."""
    with child.started(MODULE, json.dumps(asdict(job)) + "\n", group) as process:
        assert process.stdout is not None
        last, said = time.perf_counter(), 0
        for text in process.stdout:
            line = json.loads(text)
            yield line
            now = time.perf_counter()
            took, last = now - last, now
            said += "token" in line
            if stop is not None and said >= stop:
                time.sleep(draw.random() * min(took, 10.0))
                return
        child.check(process)


def experiment(load: RecoveryLoad) -> Outcome:
    """Decode over a KV cache larger than memory in a drive that is killed, reopened, and continues."""
    with progress("tokens", load.steps) as tick:
        result = bench_reopen(load, tick)
    notes = [f"no control group ({result['why']}): nothing limits the memory"] if result["why"] else []
    outcome = flat("reopen", result, failed=not result["tokens_equal"])
    return Outcome(outcome.result, outcome.shown, notes, outcome.failed)
