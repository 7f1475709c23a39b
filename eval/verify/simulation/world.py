"""One seeded run: drives, hosts, and the faults injected into them."""

from __future__ import annotations

import errno
import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from csd_io.folder import DURABILITIES
from csd_link.host_end import DriveLostError, WindowDrive
from csd_spec import DriveError, Status
from vcsd_eval.verify.simulation.drive import LAYOUT, TENANTS, SimDrive
from vcsd_eval.verify.simulation.host import Inline, SimHost, Wrong
from vcsd_eval.verify.simulation.link import Clock, HostDied, Side, SimulatedLink
from vcsd_eval.verify.simulation.prefixes import PrefixHost

STEPS = 40
OWNERS = 160  # few, so that owner numbers are reused
WAIT_S = 0.02  # virtual: polling interval of a waiting host
PATIENCE_S = 600.0  # virtual: longer than any operation
FAULTS = (
    "drive killed in a disk write",
    "drive killed in a window write",
    "power lost",
    "write lost",
    "write torn",
    "bit flipped",
    "record rotten",
    "disk full",
    "disk failed",
    "message late",
    "message doubled",
    "message lost",
    "host died in a write",
    "host left",
    "folder served twice",
    "payload torn",
    "window taken",
    "drive killed after a flush",
    "drive killed after a crop",
    "exception in a command",
    "files mixed",
)
REFUSALS = {  # which fault explains a refusal
    Status.CAPACITY_EXCEEDED: (),  # a full drive is not a fault
    Status.WRITE_FAULT: ("disk full", "disk failed"),
    Status.UNRECOVERED_READ_ERROR: ("record rotten",),
    Status.UNKNOWN_SEQUENCE: ("record rotten",),
    Status.TRANSFER_ERROR: ("payload torn",),
    # It restarted and has lost data
    Status.PATH_LOST: ("record rotten", "disk full", "disk failed", "payload torn", "window taken"),
}


@dataclass(slots=True)
class Verdict:
    """Result of a run. faults: number of hits of each. what: the first failure."""

    seed: int
    steps: int = 0
    lost: int = 0
    wrong: int = 0
    hangs: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    what: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.lost or self.wrong or self.hangs)


class StalledWorldError(BaseException):
    """No progress is possible."""


class SimulatedDoorbell:
    """Waits by running the world. A socket's doorbell detects at once that its drive has exited."""

    def __init__(self, world: World, drive: SimDrive, socket: bool) -> None:
        self._world, self._drive, self._socket, self._life = world, drive, socket, drive.lives

    def ring(self) -> None: ...

    def wait(self, timeout_s: float) -> None:
        if self._socket and not (self._drive.alive and self._drive.lives == self._life):
            raise ConnectionResetError("the other end of the window closed")
        self._world.clock.sleep(WAIT_S)

    def close(self) -> None: ...


class World:
    """Drives and hosts of one seed. allowed: faults that may be injected."""

    def __init__(self, seed: int, folder: Path, allowed: frozenset[str]) -> None:
        self.draw, self.allowed, self.verdict = random.Random(seed), allowed, Verdict(seed)
        self.clock = Clock(self.pump)
        self._began = 0.0
        self.drives: list[SimDrive] = []
        kinds = {"message late": 0.03, "message doubled": 0.03, "message lost": 0.03, "payload torn": 0.01}
        self.rates = {name.split()[1]: rate * (name in allowed) for name, rate in kinds.items()}
        durability = self.draw.choice(DURABILITIES)
        for number in range(self.draw.choice((1, 1, 2))):
            (folder / f"drive{number}").mkdir()
            links = {
                name: SimulatedLink(self.clock, self.draw, self.rates, self.verdict.faults, LAYOUT.to_drive(0))
                for name in TENANTS
            }
            place = folder / f"drive{number}"
            self.drives.append(SimDrive(f"drive{number}", place, self.clock, self.draw, durability, links))
        self.hosts: dict[str, SimHost | PrefixHost] = {}
        self._kinds = {tenant: self.draw.choice((SimHost, SimHost, PrefixHost)) for tenant in TENANTS}
        of_links = "message", "write", "payload"
        self.faults = [name for name in FAULTS if name in allowed and not name.startswith(of_links)]
        self.faults += 3 * [name for name in self.faults if name == "drive killed after a flush"]

    def pump(self) -> None:
        """Run every component except the waiting host once."""
        if self.clock.now - self._began > PATIENCE_S:
            raise StalledWorldError
        for drive in self.drives:
            drive.pump()

    def _host(self, tenant: str) -> SimHost | PrefixHost:
        connects = [self._connect(drive, tenant) for drive in self.drives]
        while tenant not in self.hosts:
            try:
                self.hosts[tenant] = self._kinds[tenant](connects, self.draw)
            except DriveLostError:
                self.clock.sleep(0.05)
        return self.hosts[tenant]

    def _connect(self, drive: SimDrive, tenant: str) -> Callable[[], WindowDrive]:
        def connect() -> WindowDrive:
            bell = SimulatedDoorbell(self, drive, self.draw.random() < 0.7)
            return WindowDrive(Side(drive.links[tenant], "host"), bell)

        return connect

    def step(self) -> None:
        """Inject a fault with some probability, then run one host operation."""
        self._began = self.clock.now
        tenant = self.draw.choice(TENANTS)
        try:
            if self.faults and self.draw.random() < 0.4:
                self._befall(self.draw.choice(self.faults), self.draw.choice(self.drives), tenant)
            self._host(tenant).work()
        except HostDied:
            self._gone(tenant)
        except DriveError as error:
            self._explain(error, tenant)

    def _befall(self, fault: str, drive: SimDrive, tenant: str) -> None:
        hits, draw = self.verdict.faults, self.draw
        match fault:
            case "drive killed in a disk write":
                drive.disk.deaths = draw.randrange(1, 30)
            case "drive killed in a window write":
                drive.links[tenant].deaths["drive"] = draw.randrange(1, 8)
            case "host died in a write":
                drive.links[tenant].deaths["host"] = draw.randrange(1, 8)
            case "power lost" if drive.disk.durability == "host" and drive.alive:
                lost, torn = drive.lose_power()
                hits.update({"write lost": lost, "write torn": torn})
            case "bit flipped":
                name = draw.choice(sorted(drive.disk.files))
                drive.disk.flip(name, draw.randrange(8 * len(drive.disk.files[name])))
                drive.die()
            case "record rotten" if drive.alive and drive.rot_record():
                drive.die()
            case "disk full":
                drive.disk.fault = errno.ENOSPC
            case "disk failed":
                drive.disk.fault = errno.EIO
            case "host left" if tenant in self.hosts:
                self._leave(tenant)
            case "folder served twice" if drive.alive:
                self.verdict.wrong += not drive.serve_twice()
            case "window taken" if tenant in self.hosts:
                self._take_window(tenant)
            case "exception in a command" if drive.alive and not drive.injector:
                drive.interrupt_next()
                return  # counted where it comes: a short command is over before
            case "files mixed" if drive.is_mixable:
                drive.die()
                if wrong := drive.mix_files():
                    raise Wrong(wrong)
            case "drive killed after a flush" if tenant in self.hosts:
                self._flush_and_die(tenant, drive)
            case "drive killed after a crop" if isinstance(host := self.hosts.get(tenant), SimHost) and host.held:
                host.rewrite()
                drive.die()
            case _:
                return
        hits[fault] += 1

    def _take_window(self, tenant: str) -> None:
        """Attach another host to a window; the previous host receives no further answers.

        A host that reconnects, for example to a restarted drive, takes the window back; leases prevent that in
        practice.
        """
        before = self.hosts.pop(tenant)
        self._host(tenant)
        connected = before.connected()
        if not before.held:
            return
        try:
            before.check()
        except (DriveError, HostDied):
            return
        if before.connected() == connected:
            raise Wrong("a host whose window was taken got answers")

    def _flush_and_die(self, tenant: str, drive: SimDrive) -> None:
        """Kill a drive right after a flush, and the host of a prefix store with it, which has no other record."""
        host = self.hosts[tenant]
        if isinstance(host, SimHost):
            if host.held:
                host.work_and_flush()
                drive.die()
            return
        keys = host.work_and_flush()
        drive.die()
        self._gone(tenant)
        after = self._host(tenant)
        if isinstance(after, PrefixHost) and not self.verdict.faults["record rotten"]:
            after.check_flushed(keys)

    def _leave(self, tenant: str) -> None:
        try:
            self.hosts[tenant].leave()
        except HostDied:
            pass
        except DriveError as error:
            self._explain(error, tenant)
        self._gone(tenant)

    def _gone(self, tenant: str) -> None:
        """Drop the state of a host that has exited."""
        self.hosts.pop(tenant, None)
        for drive in self.drives:
            drive.links[tenant].deaths["host"] = -1

    def _explain(self, error: DriveError, tenant: str) -> None:
        """Check that a refusal has a known reason, and remove its cause. Raises Wrong if it has none."""
        if error.status is Status.PATH_LOST and self._kinds[tenant] is PrefixHost:
            self._gone(tenant)  # a store ends with its connection
            return
        causes = REFUSALS.get(error.status)
        if causes is None or (causes and not any(self.verdict.faults[cause] for cause in causes)):
            raise Wrong(str(error)) from error
        if "heard of" in str(error):
            raise StalledWorldError
        for drive in self.drives:
            if drive.disk.fault:
                drive.disk.fault = 0
                drive.die()
        if error.status is not Status.CAPACITY_EXCEEDED:
            self._gone(tenant)

    def end(self) -> None:
        """Kill all drives once more; then hosts read all their data, and disconnect."""
        self._began = self.clock.now
        for drive in self.drives:
            drive.disk.fault = 0
            drive.die()
        while not all(drive.alive for drive in self.drives):
            self.clock.sleep(0.05)
        for tenant in sorted(self.hosts):
            try:
                self.hosts[tenant].check()
            except HostDied:
                self._gone(tenant)
            except DriveError as error:
                self._explain(error, tenant)
            if tenant in self.hosts:
                self._leave(tenant)


@contextmanager
def virtual(world: World) -> Iterator[None]:
    """Replace threads, the clock and the source of randomness by those of the world."""
    with ExitStack() as undo:
        for place in ("csd_link.recovery.ThreadPoolExecutor", "host_driver.driver.ThreadPoolExecutor"):
            undo.enter_context(patch(place, Inline))
        for place in ("csd_link.host_end.time", "csd_link.recovery.time"):
            undo.enter_context(patch(place, world.clock))
        undo.enter_context(patch.object(os, "urandom", world.draw.randbytes))
        undo.enter_context(patch("ftl.kv.owners.MAX_OWNERS", OWNERS))
        undo.enter_context(patch.object(os, "sched_yield", world.pump))
        yield


def simulate(seed: int, steps: int = STEPS, allowed: frozenset[str] = frozenset(FAULTS)) -> Verdict:
    """Run one seed. Raises nothing: every failure is in the verdict."""
    with tempfile.TemporaryDirectory(prefix="vcsd-simulate-") as folder:
        world = World(seed, Path(folder), allowed)
        verdict = world.verdict
        try:
            with virtual(world):
                while verdict.steps < steps:
                    verdict.steps += 1
                    world.step()
                world.end()
        except StalledWorldError:
            verdict.hangs += 1
            verdict.what = "nothing came any more"
        except Wrong as wrong:
            verdict.wrong += 1
            verdict.what = str(wrong)
        except Exception as error:  # noqa: BLE001 - counted as wrong
            verdict.wrong += 1
            verdict.what = f"{type(error).__name__}: {error}"
        for drive in world.drives:
            drive.close()
            verdict.faults["exception in a command"] += drive.interrupted
            verdict.lost += drive.lost
            verdict.wrong += drive.wrong
            if (drive.lost or drive.wrong) and not verdict.what:
                verdict.what = f"{drive.name} came back with {drive.lost} sequences lost and {drive.wrong} wrong"
        return verdict
