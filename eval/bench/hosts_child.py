"""Honest hosts, or hostile ones, of one drive in a separate process.

A job arrives as JSON, a line on standard input, after this process has reported that it is ready. Each further line has
seconds for which all hosts work at once; then what went wrong until now and the times since the line before are printed
as JSON.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from csd_link.nvmeof.commands import Sqe
from csd_link.nvmeof.device import Endpoint
from csd_link.nvmeof.host import NvmeHost
from csd_link.nvmeof.host_queue import StatusError
from csd_link.nvmeof.nvm import LBA_BYTES, Nvm
from csd_link.nvmeof.pdu import Digests, PduType, pack
from vcsd_eval.verify.model_host import ModelHost

PAUSE_S = 0.02  # mean time between two commands of an honest host
WHOLE_S = 2.0  # that a hostile host behaves in one way before it begins again


def _commands(host: NvmeHost, opcode: int, count: int, blocks: int) -> None:
    """Send commands for blocks that no honest host has, and read nothing."""
    sqe = Sqe(opcode, nsid=1, cdw10=1 << 14, cdw12=blocks - 1, sgl_type=0x5A, sgl_bytes=blocks * LBA_BYTES)
    line = host.io.detach()
    line.settimeout(WHOLE_S)
    try:
        for cid in range(count):
            line.sendall(b"".join(pack(PduType.CAPSULE_CMD, sqe._replace(cid=cid).pack(), (), Digests())))
        time.sleep(WHOLE_S)
    finally:
        host.close()


def silent(place: Endpoint, name: str) -> None:
    """Announce writes of 8 MiB, and send no data."""
    _commands(NvmeHost(place.host, place.port, place.nqn, name), Nvm.WRITE, 16, 2048)


def slow(place: Endpoint, name: str) -> None:
    """Ask for 4 MiB again and again, and read nothing of it."""
    _commands(NvmeHost(place.host, place.port, place.nqn, name), Nvm.READ, 100, 1024)


def resets(place: Endpoint, name: str) -> None:
    """Connect, disable the controller and go, as fast as possible."""
    until = time.monotonic() + WHOLE_S
    while time.monotonic() < until:
        host = NvmeHost(place.host, place.port, place.nqn, name)
        host.set_property(0x14, 0)
        host.close()


def floods(place: Endpoint, name: str) -> None:
    """Take as many controllers as there are, and read single blocks on each as fast as possible."""
    hosts, until = list[NvmeHost](), time.monotonic() + WHOLE_S
    try:
        with suppress(StatusError):
            for _ in range(24):
                hosts.append(NvmeHost(place.host, place.port, place.nqn, name))
        while time.monotonic() < until:
            for host in hosts:
                host.io.command(Sqe(Nvm.READ, nsid=1, cdw10=1 << 14), (), LBA_BYTES)
    finally:
        for host in hosts:
            host.close()


HOSTILE: dict[str, Callable[[Endpoint, str], None]] = {
    "silent": silent,
    "slow": slow,
    "resets": resets,
    "floods": floods,
}


class Honest:
    """A host that keeps to all rules: one command after the other."""

    def __init__(self, place: Endpoint, number: int, seed: int) -> None:
        self._draw = random.Random(seed)
        self._host = ModelHost(lambda: place, number, self._draw)

    def work(self, until: float) -> None:
        """Work until a time."""
        while time.monotonic() < until:
            time.sleep(self._draw.expovariate(1 / PAUSE_S))
            self._host.act()

    def told(self) -> dict[str, Any]:
        """What went wrong until now, after all has been read back, and the times since the last call."""
        counts = self._host.counts
        took_ms, counts.took_ms = counts.took_ms, []
        self._host.check()
        return {
            "lost": counts.lost,
            "wrong": counts.wrong,
            "refused": counts.refused,
            "first": counts.first,
            "took_ms": took_ms,
        }


class Hostile:
    """A host that behaves in one way again and again; it is refused and cut off, which is right."""

    def __init__(self, place: Endpoint, number: int, kind: str) -> None:
        self._act = partial(HOSTILE[kind], place, f"nqn.2026-11.dev.vcsd:hostile-{number}")
        self._kind, self._counts = kind, Counter[str]()

    def work(self, until: float) -> None:
        """Work until a time."""
        while time.monotonic() < until:
            try:
                self._act()
                self._counts[self._kind] += 1
            except (OSError, StatusError):
                self._counts[f"{self._kind}_refused"] += 1
                time.sleep(0.01)

    def told(self) -> dict[str, Any]:
        """How often it behaved so."""
        return dict(self._counts)


def main() -> None:
    """Run the job."""
    print("ready", flush=True)
    job = json.loads(sys.stdin.readline())
    place = Endpoint(job["host"], job["port"], job["nqn"])
    hosts: list[Honest | Hostile]
    if kinds := job["hostile"]:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # measured is the drive, not this machine's CPUs
        hosts = [Hostile(place, number, kind) for number, kind in enumerate(kinds)]
    else:
        hosts = [Honest(place, number, job["seed"] + number) for number in range(job["honest"])]
    while line := sys.stdin.readline():
        until = time.monotonic() + float(line)
        with ThreadPoolExecutor(len(hosts)) as pool:
            list(pool.map(lambda host, end=until: host.work(end), hosts))  # an unexpected error ends the process
        print(json.dumps([host.told() for host in hosts]), flush=True)


if __name__ == "__main__":
    main()
