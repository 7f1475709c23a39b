"""A decode whose drives are killed at random moments, compared with the same decode without kills."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from csd_io.medium import Kind
from csd_link.recovery import RecoveringDrive
from csd_link.run_dir import pid_path
from vcsd.progress import Tick
from vcsd_eval.verify.decode import ReferenceDecode

PAGE_BUFFER_MIB = 1  # small, so that pages are evicted and reloaded
DRIVES, TOKENS = 2, 128  # of a decode
MAX_PAUSE_S = 0.4  # between two kills


class Killer(threading.Thread):
    """Kills a random drive at random moments while active."""

    def __init__(self, names: Sequence[str], kills: int, seed: int, tick: Tick) -> None:
        super().__init__(daemon=True)
        self._names, self._kills, self._draw, self._tick = list(names), kills, random.Random(seed), tick
        self.running, self.over = threading.Event(), threading.Event()
        self.moments: dict[str, list[float]] = {name: [] for name in names}
        self._last: dict[str, int] = {}

    def run(self) -> None:
        while sum(map(len, self.moments.values())) < self._kills and not self.over.is_set():
            self.running.wait()
            time.sleep(self._draw.random() * MAX_PAUSE_S)
            if self.running.is_set():
                self._kill(self._draw.choice(self._names))
        self.over.set()

    def _kill(self, name: str) -> None:
        """Send SIGKILL, unless the process killed last has not been replaced yet."""
        with suppress(OSError, ValueError):
            pid = int(pid_path(name).read_text())
            if self._last.get(name) != pid:
                os.kill(pid, signal.SIGKILL)
                self._last[name] = pid
                self.moments[name].append(time.monotonic())
                self._tick(None)


@torch.inference_mode()
def bench_kills(
    kills: int, seed: int, tick: Tick, medium: Kind = "memory", tokens: int = TOKENS, flush_interval_steps: int = 8
) -> dict[str, Any]:
    """Repeat decodes of `tokens` tokens until drives with flash in files were killed `kills` times.

    Returns:
        lost: Tokens that a decode did not reach. wrong: Tokens that differ from the undisturbed run.
            recovery: Wall-clock time from a kill until the drive has its former state. notice: Time from a kill until
            the driver detects it, for kills with a command in flight or submitted within the next second.
    """
    decode = ReferenceDecode.of(tokens, seed, DRIVES, flush_interval_steps=flush_interval_steps)
    broken, runs = Counter[str](), 0
    with tempfile.TemporaryDirectory() as scratch:
        in_files = {"data_dir": Path(scratch), "medium": medium, "page_buffer_mib": PAGE_BUFFER_MIB}
        with decode.in_drives(transport="process", **in_files) as csd:
            devices = [device for device in csd.driver.devices if isinstance(device, RecoveringDrive)]
            killer = Killer([device.name for device in devices], kills, seed, tick)
            killer.start()
            while not killer.over.is_set():
                runs += 1
                killer.running.set()
                broken += decode.repeat()
                killer.running.clear()
        notices, recoveries = _delays(devices, killer.moments)
    return {
        "medium": medium,
        "kills": sum(map(len, killer.moments.values())),
        "lost": broken["lost"],
        "wrong": broken["wrong"],
        "mean_recovery_s": mean(recoveries or [0.0]),
        "max_recovery_s": max(recoveries, default=0.0),
        "max_notice_s": max(notices, default=0.0),
        "recoveries": len(recoveries),
        "decodes": runs,
        "tokens_of_each": tokens,
    }


def _delays(devices: Sequence[RecoveringDrive], moments: dict[str, list[float]]) -> tuple[list[float], list[float]]:
    """Seconds from the first kill to the start and to the end of each recovery."""
    notices, recoveries = [], []
    for device in devices:
        before = 0.0
        for began, ended in device.recoveries:
            kills = [moment for moment in moments[device.name] if before < moment < ended]
            if kills:
                notices.append(max(0.0, began - kills[0]))
                recoveries.append(ended - kills[0])
            before = ended
    return notices, recoveries
