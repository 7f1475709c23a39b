"""Permanent losses of drives and nodes during a decode, by redundancy.

Every drive is a process that nothing restarts; a node is half of the drives. Tokens are compared with those of the same
decode without a loss.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import torch

from csd_link.replication import COPIES, Redundancy, ReplicatedDrive
from csd_link.run_dir import pid_path
from csd_spec import DriveError
from vcsd.generate import generate
from vcsd.progress import Tick
from vcsd.session import Session
from vcsd_eval.verify.decode import ReferenceDecode

Transport = Literal["process", "nvme+tcp"]
DRIVES, NODES = 4, 2
FILLED_S = 60.0  # within which a replacement is filled


@dataclass(slots=True)
class LossTally:
    """Findings for one redundancy. Times are wall-clock seconds after the loss.

    Attributes:
        degraded_s: Until the first command of a group that has lost a drive was served.
        redundant_s: Until all groups had their former number of drives.
        refused: Decodes that ended with the error of a lost drive.
        not_redundant: Losses after which a group was left with fewer drives than before.
    """

    kills: int = 0
    nodes: int = 0
    lost: int = 0
    wrong: int = 0
    refused: int = 0
    not_redundant: int = 0
    degraded_s: list[float] = field(default_factory=list)
    redundant_s: list[float] = field(default_factory=list)

    def to_dict(self, copies: int) -> dict[str, Any]:
        """For programs. copies: drives that store each head."""
        times = {
            "time_to_degraded_service_s": self.degraded_s or [],
            "time_to_full_redundancy_s": self.redundant_s or [],
        }
        spans = {
            f"{name}_{kind}": value
            for name, samples in times.items()
            for kind, value in (("median", median(samples) if samples else None), ("max", max(samples, default=None)))
        }
        counts = {"kills": self.kills, "nodes": self.nodes, "lost": self.lost, "wrong": self.wrong}
        counts |= {"refused": self.refused, "not_redundant": self.not_redundant}
        return counts | {"storage_overhead": copies - 1} | spans


class Loss(threading.Thread):
    """Kills drives at a moment of a decode."""

    def __init__(self, names: Sequence[str], delay_s: float) -> None:
        super().__init__(daemon=True)
        self._names, self._delay_s = names, delay_s
        self.at = 0.0

    def run(self) -> None:
        time.sleep(self._delay_s)
        self.at = time.monotonic()
        for name in self._names:
            os.kill(int(pid_path(name).read_text()), signal.SIGKILL)


@torch.inference_mode()
def bench_lost_drives(
    kills: int, seed: int, tick: Tick, tokens: int = 48, transport: Transport = "process"
) -> dict[str, Any]:
    """Lose drives and nodes in decodes with each redundancy; one loss with none. Every third loss is of a node."""
    decode = ReferenceDecode.of(tokens, seed, DRIVES)
    draw, result = random.Random(seed), dict[str, Any]()
    plan: dict[Redundancy, int] = {"none": 1, "mirror": kills, "recompute": kills}
    for redundancy, losses in plan.items():
        tally = LossTally()
        options = {"redundancy": redundancy, "transport": transport, "restart_drives": False}
        decode_s = _decode_s(decode, options)
        for number in range(losses):
            is_node = number % 3 == 2
            first = draw.randrange(DRIVES)
            killed = [
                drive for drive in range(DRIVES) if drive == first or (is_node and drive % NODES == first % NODES)
            ]
            spares = 0 if redundancy == "none" else len(killed)
            with decode.in_drives(**options, spares=spares) as csd:
                _lose(decode, csd, killed, draw.random() * decode_s, tally)
            tally.nodes += is_node
            tick(None)
        result[redundancy] = tally.to_dict(COPIES[redundancy])
    survived = [result[each] for each in ("mirror", "recompute")]
    return {
        **{name: sum(each[name] for each in survived) for name in ("kills", "lost", "wrong", "not_redundant")},
        "not_refused": int(not result["none"]["refused"]),
        "by_redundancy": result,
        "transport": transport,
        "seed": seed,
    }


def _decode_s(decode: ReferenceDecode, options: dict[str, Any]) -> float:
    """Wall-clock seconds of a decode without a loss."""
    with decode.in_drives(**options):
        generate(decode.model, decode.inputs, 2, None)
        began = time.perf_counter()
        decode.repeat()
        return time.perf_counter() - began


def _lose(decode: ReferenceDecode, csd: Session, killed: Sequence[int], delay_s: float, tally: LossTally) -> None:
    """One decode, in which drives are lost after `delay_s`."""
    groups = [device for device in csd.driver.devices if isinstance(device, ReplicatedDrive)]
    names = [device.name for device in csd.driver.devices]
    loss = Loss([names[number] for number in killed], delay_s)
    loss.start()
    tally.kills += 1
    try:
        broken = decode.repeat()
        loss.join()
        if not any(event.kind == "lost" for group in groups for event in group.events):
            broken = decode.repeat()  # the decode was over: this one notices
    except DriveError:
        loss.join()
        tally.refused += 1
        tally.lost += decode.tokens if groups else 0
        return
    tally.lost += broken["lost"]
    tally.wrong += broken["wrong"]
    filled = all(group.wait_filled(FILLED_S) for group in groups)
    events = [event for group in groups for event in group.events]
    tally.degraded_s += [event.at - loss.at for event in events if event.kind == "served"]
    refilled = [event.at - loss.at for event in events if event.kind == "redundant"]
    if filled and len(refilled) >= sum(event.kind == "lost" for event in events):
        tally.redundant_s.append(max(refilled))
    else:
        tally.not_redundant += 1
