"""Step times of a tenant that decodes on a drive, alone and next to a hostile tenant; wall-clock time."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from csd_link.connect import connect
from csd_link.host_end import WindowDrive
from csd_link.private_server import ServerEndpoint, own_server
from csd_link.run_dir import private_dir, run_dir, window_path
from csd_link.served_drive import SHARED, ServedDrive
from csd_spec import Attend, Command, Completion, KvAppend, KvCrop, KvFree, SeqCreate, SeqFork, Status
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from vcsd.progress import progress
from vcsd.transport import FACTORY
from vcsd_eval.bench import child
from vcsd_eval.experiment import Outcome, flat

VICTIM, HOSTILE = "victim", "hostile"
HEADS, HEAD_DIM, CHUNK = 8, 128, 256  # tokens of an append
COME_AND_GO = 16  # steps between two short-lived requests
WARM = 4  # warm-up steps of each round


@dataclass(frozen=True, slots=True)
class TenantLoad:
    """Duration, and the victim's decode workload."""

    seconds: Annotated[float, typer.Option(min=0.1, max=86400, help="time with the hostile tenant, seconds")] = 180.0
    rounds: Annotated[
        int,
        typer.Option(
            "--repeats", min=1, max=1000, help="number of measurements, each alone and with the hostile tenant"
        ),
    ] = 6
    tokens: Annotated[int, typer.Option(min=1, max=1 << 18, help="length of the victim's sequence, tokens")] = 16384
    layers: Annotated[int, typer.Option(min=1, max=256, help="number of layers of the victim's model")] = 4


@dataclass(slots=True)
class Victim:
    """A tenant within its quota. refused: reasons of its refused commands."""

    device: WindowDrive
    load: TenantLoad
    refused: list[str] = field(default_factory=list)
    seqs: tuple[int, ...] = ()

    def fill(self) -> None:
        """Store the prompt in all layers."""
        generator = np.random.default_rng(0)
        self.seqs = self._handles(SeqCreate(1, self.load.layers, HEADS, HEAD_DIM, 2 * self.load.tokens + 4096))
        for layer in range(self.load.layers):
            for first in range(0, self.load.tokens, CHUNK):
                shape = min(CHUNK, self.load.tokens - first), HEADS, HEAD_DIM
                k, v = (generator.standard_normal(shape).astype(np.float16) for _ in "kv")
                self.do(KvAppend(self.seqs, layer, np.array([shape[0]]), k, v))

    def decode(self, seconds: float) -> list[float]:
        """Step times in milliseconds, for `seconds`; short-lived requests run in between and are not counted."""
        rows, one = np.ones((1, HEADS, HEAD_DIM), np.float16), np.ones(1, np.int64)
        taken, ends = list[float](), time.monotonic() + seconds
        while time.monotonic() < ends or len(taken) <= WARM:
            began = time.perf_counter()
            for layer in range(self.load.layers):
                self.do(Attend(self.seqs, layer, rows[:, :, None], rows, rows, "dense", 1, one, one))
            taken.append((time.perf_counter() - began) * 1e3)
            if len(taken) % COME_AND_GO == 0:
                self._come_and_go(rows)
        for layer in range(self.load.layers):  # every round starts at the same length
            self.do(KvCrop(self.seqs, layer, np.array([self.load.tokens])))
        return taken[WARM:]

    def _come_and_go(self, row: Any) -> None:
        made = self._handles(SeqCreate(2, self.load.layers, HEADS, HEAD_DIM, 64))
        for layer in range(self.load.layers if made else 0):
            rows = np.concatenate([row, row])
            self.do(KvAppend(made, layer, np.array([1, 1]), rows, rows))
        made += self._handles(SeqFork(made, np.ones(len(made), np.int64))) if made else ()
        if made:
            self.do(KvFree(made))

    def _handles(self, command: Command) -> tuple[int, ...]:
        done = self.do(command)
        return tuple(done.data[0].tolist()) if done.status is Status.SUCCESS else ()

    def do(self, command: Command) -> Completion:
        """Execute a command that must not be refused; raises OSError if the drive has exited."""
        done = self.device.submit(command, 0).result()
        if done.status is Status.PATH_LOST:
            raise OSError(done.reason)
        if done.status is not Status.SUCCESS:
            self.refused.append(f"{type(command).__name__}: {done.reason}")
        return done


def measured(load: TenantLoad) -> tuple[dict[str, Any], list[str]]:
    """Figures, and the reasons of the victim's refused commands."""
    alone, beside = list[list[float]](), list[list[float]]()
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir=private_dir(run_dir()))))
        drive = ServedDrive(
            name=f"{folder.name}-0",
            spec=INSTCSD_ZYNQ7045_8CH,
            tenants=(VICTIM, HOSTILE),
            layout=SHARED,
            threads=1,
            restarts=False,
        )
        attach = partial(connect, window_path(drive.name, VICTIM))
        undo.enter_context(own_server([ServerEndpoint(drive, attach)], folder, FACTORY.server))
        victim = Victim(undo.enter_context(closing(attach())), load)
        victim.fill()
        job = json.dumps({"window": str(window_path(drive.name, HOSTILE))}) + "\n"
        hostile = undo.enter_context(child.started("vcsd_eval.bench.tenants_child", job, None))
        child.answer(hostile)
        tick = undo.enter_context(progress("rounds", 2 * load.rounds))
        for _ in range(load.rounds):
            alone.append(victim.decode(load.seconds / load.rounds / 2))
            tick(None)
            child.tell(hostile, "g")
            beside.append(victim.decode(load.seconds / load.rounds))
            child.tell(hostile, "p")
            child.answer(hostile)
            tick(None)
        counts = json.loads(child.check(hostile))
    return _figures(alone, beside, counts) | {"refused_within_quota": len(victim.refused)}, victim.refused


def _figures(alone: list[list[float]], beside: list[list[float]], counts: dict[str, int]) -> dict[str, Any]:
    """Medians over rounds, milliseconds; the hostile tenant's commands by kind."""

    def median(percent: float, rounds: list[list[float]]) -> float:
        return float(np.median([np.percentile(each, percent) for each in rounds]))

    ratios = [np.percentile(b, 99) / np.percentile(a, 99) for a, b in zip(alone, beside, strict=True)]
    return {
        "p99_over_alone": float(np.median(ratios)),
        "p50_ms_alone": median(50, alone),
        "p99_ms_alone": median(99, alone),
        "p50_ms": median(50, beside),
        "p99_ms": median(99, beside),
        "longest_ms": max(map(max, beside)),
        "steps_alone": sum(map(len, alone)),
        "steps": sum(map(len, beside)),
        **{f"hostile_{kind}": count for kind, count in sorted(counts.items())},
    }


def _shown(reasons: list[str]) -> Iterator[str]:
    if reasons:
        yield f"refused within its quota: {reasons[0]}"


def experiment(load: TenantLoad) -> Outcome:
    """Decode steps of a tenant with a hostile tenant, over those alone; commands refused within its quota."""
    result, reasons = measured(load)
    found = flat("tenants", result, failed=bool(reasons))
    return Outcome(found.result, found.shown, tuple(_shown(reasons)), found.failed)
