"""Honest NVMe/TCP hosts of one drive, alone and beside hostile ones; wall-clock time."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from csd_link.nvmeof.device import Endpoint, NvmeDrive
from csd_link.nvmeof.listen import Listen, nqn_of
from csd_link.private_server import ServerEndpoint, own_server
from csd_link.run_dir import port_path, private_dir, run_dir
from csd_link.served_drive import ServedDrive
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from vcsd.options import MAX_SEED
from vcsd.progress import progress
from vcsd.transport import FACTORY
from vcsd_eval.bench import child
from vcsd_eval.bench.hosts_child import HOSTILE
from vcsd_eval.experiment import Outcome, flat

MODULE, LOOPBACK = "vcsd_eval.bench.hosts_child", "127.0.0.1"


@dataclass(frozen=True, slots=True)
class HostsLoad:
    """Hosts, and for how long they work."""

    honest: Annotated[int, typer.Option(min=1, max=64, help="number of honest hosts")] = 8
    hostile: Annotated[
        int, typer.Option(min=1, max=64, help="number of hostile hosts: silent, slow, resetting and flooding, in turn")
    ] = 4
    seconds: Annotated[float, typer.Option(min=1, max=86400, help="time of all measurements, seconds")] = 270.0
    rounds: Annotated[
        int, typer.Option("--repeats", min=1, max=1000, help="number of measurements, each alone and beside them")
    ] = 3
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="random seed of the honest hosts")] = 0


def measured(load: HostsLoad) -> tuple[dict[str, Any], list[str]]:
    """Figures, and the first reason of each honest host for which something went wrong."""
    alone, beside = list[list[dict[str, Any]]](), list[list[dict[str, Any]]]()
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir=private_dir(run_dir()))))
        name = f"{folder.name}-0"
        drive = ServedDrive(name=name, spec=INSTCSD_ZYNQ7045_8CH, listen=Listen(LOOPBACK, 0, (name,)), restarts=False)
        undo.enter_context(
            own_server([ServerEndpoint(drive, partial(NvmeDrive, partial(_place, drive)))], folder, FACTORY.server)
        )
        place = _place(drive)
        job = {"host": place.host, "port": place.port, "nqn": place.nqn, "seed": load.seed, "honest": load.honest}
        kinds = list(islice(cycle(HOSTILE), load.hostile))
        honest, hostile = (
            undo.enter_context(child.started(MODULE, json.dumps(job | {"hostile": behaviour}) + "\n"))
            for behaviour in ([], kinds)
        )
        seconds = load.seconds / load.rounds / 2
        tick = undo.enter_context(progress("measurements", 2 * load.rounds))
        counts = Counter[str]()
        for _ in range(load.rounds):
            child.tell(honest, f"{seconds}\n")
            alone.append(json.loads(child.answer(honest)))
            tick(None)
            for process in (hostile, honest):
                child.tell(process, f"{seconds}\n")
            beside.append(json.loads(child.answer(honest)))
            counts = sum((Counter(host) for host in json.loads(child.answer(hostile))), Counter())
            tick(None)
    last = beside[-1]
    figures = {kind: sum(host[kind] for host in last) for kind in ("lost", "wrong", "refused")}
    figures["refused_within_share"] = figures.pop("refused")
    reasons = [host["first"] for host in last if host["first"]]
    return figures | _times(alone, beside) | {f"hostile_{kind}": counts[kind] for kind in sorted(counts)}, reasons


def _place(drive: ServedDrive) -> Endpoint:
    return Endpoint(LOOPBACK, int(port_path(drive.name).read_text()), nqn_of(drive.name))


def _times(alone: list[list[dict[str, Any]]], beside: list[list[dict[str, Any]]]) -> dict[str, float]:
    """Percentiles over all honest hosts, ms, and the ratios of rounds: their median, and the largest."""
    times = [
        [list(chain.from_iterable(host["took_ms"] for host in hosts)) for hosts in rounds] for rounds in (alone, beside)
    ]
    ratios = [np.percentile(b, 99) / np.percentile(a, 99) for a, b in zip(*times, strict=True)]
    found = {"p99_over_alone": float(np.median(ratios)), "p99_over_alone_worst": float(max(ratios))}
    for name, rounds in zip(("_alone", ""), times, strict=True):
        every = list(chain.from_iterable(rounds))
        found |= {f"p50_ms{name}": float(np.percentile(every, 50)), f"p99_ms{name}": float(np.percentile(every, 99))}
        found |= {f"longest_ms{name}": max(every), f"commands{name}": len(every)}
    return found


def experiment(load: HostsLoad) -> Outcome:
    """Commands of honest hosts over NVMe/TCP beside hostile hosts: their times over those alone, and every answer."""
    result, reasons = measured(load)
    found = flat("hosts", result, failed=bool(reasons))
    return Outcome(found.result, found.shown, tuple(dict.fromkeys(reasons)), found.failed)
