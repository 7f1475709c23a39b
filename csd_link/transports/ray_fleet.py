"""Ray transport: drives of a fleet that Ray has placed on nodes; Ray provides addresses, data goes over NVMe/TCP."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager

from csd_link.connect import Connect
from csd_link.diagnosis import MissingDependency
from csd_link.driveset import DriveSetConfig
from csd_link.fleet_table import FleetTable, Member, find_cluster, missing_ray, read_table
from csd_link.host_end import AttachedDrive, DriveLostError
from csd_link.nvmeof.device import NvmeDrive
from csd_link.nvmeof.listen import nqn_of
from csd_link.private_server import open_devices
from csd_link.transports.transport import DriveFactory, Transport, check_served
from csd_spec import Drive

KEPT_S = 5.0  # how long a table is cached
ASK_EVERY_S = 2.0  # interval of table reads while a drive does not answer


class RayFleet(Transport):
    """The drives of a fleet (`vcsd fleet up`)."""

    name, form = "ray", "ray or ray://HOST:PORT"

    def __init__(self) -> None:
        self._kept: dict[str, tuple[float, FleetTable]] = {}

    def check(self, where: str) -> None:
        if where and not where.startswith("//"):
            raise ValueError(f"transport = ray:{where}: needs the address of a Ray cluster, as ray://10.0.0.1:6379")
        if where:
            find_cluster(where)

    def missing(self) -> MissingDependency | None:
        return missing_ray()

    def served(self, drives: DriveSetConfig) -> Sequence[Connect]:
        check_served(drives, drives.transport)
        if drives.spares:
            raise ValueError(f"spares = {drives.spares}: a fleet has its own, vcsd fleet up --spares {drives.spares}")
        table = self.table(drives.where)
        members = table.usable(spares=False)
        if len(members) < drives.count:
            others = ", ".join(f"{m.name} is {m.state}" for m in table.members if not m.is_spare and m.state != "up")
            raise DriveLostError(
                f"{len(members)} drives of the fleet are up and {drives.count} are asked for: {others or 'no more'}"
            )
        return [self._connect(drives, table, member) for member in members[: drives.count]]

    def more(self, drives: DriveSetConfig, names: Collection[str]) -> Connect | None:
        """Return a spare drive, or the empty successor of a lost one, from a fresh table."""
        table, used = self.table(drives.where, is_fresh=True), {nqn_of(name) for name in names}
        free = [
            member for member in (*table.usable(spares=True), *table.usable(spares=False)) if member.nqn not in used
        ]
        return self._connect(drives, table, free[0]) if free else None

    def count(self, where: str) -> int:
        """Number of drives that are up, without spares; raises DriveLostError if there is none."""
        if not (count := len(self.table(where, is_fresh=True).usable(spares=False))):
            raise DriveLostError("no drive of the fleet is up: vcsd fleet status shows why")
        return count

    def draining(self, drives: DriveSetConfig) -> Collection[str]:
        try:
            members = self.table(drives.where, is_fresh=True).members
        except DriveLostError:
            return ()
        return [member.nqn.rpartition(":")[2] for member in members if member.state == "draining"]

    def open(self, drives: DriveSetConfig, factory: DriveFactory) -> AbstractContextManager[list[Drive]]:
        return open_devices(self.served(drives), drives.recovery_s)

    def table(self, where: str, is_fresh: bool = False) -> FleetTable:
        """Return the fleet's table, at most `KEPT_S` old; raises DriveLostError if no fleet is up."""
        read_s, table = self._kept.get(where, (0.0, None))
        if table is None or is_fresh or time.monotonic() - read_s > KEPT_S:
            table = read_table(find_cluster(where))
            if table is None:
                raise DriveLostError("no fleet is up: vcsd fleet up starts one")
            self._kept[where] = time.monotonic(), table
        return table

    def _connect(self, drives: DriveSetConfig, table: FleetTable, member: Member) -> Connect:
        return _FleetDrive(self, drives, table.host_nqn, member)


class _FleetDrive:
    """A generation of a drive, whose endpoint never changes; the table shows whether it is lost."""

    def __init__(self, fleet: RayFleet, drives: DriveSetConfig, host_nqn: str, member: Member) -> None:
        self._fleet, self._drives, self._host_nqn, self._member = fleet, drives, host_nqn, member
        self._asked_s, self._reason = 0.0, ""
        self.node = member.node

    def __call__(self) -> AttachedDrive:
        """Attach; raises DriveLostError with the table's reason if the drive does not answer."""
        try:
            return NvmeDrive(lambda: self._member.endpoint, self._host_nqn, ctrl_loss_s=self._drives.ctrl_loss_s)
        except DriveLostError as error:
            if time.monotonic() - self._asked_s > ASK_EVERY_S:
                self._reason = self._ask()
                self._asked_s = time.monotonic()
            if self._reason:
                raise DriveLostError(self._reason) from error
            raise

    def _ask(self) -> str:
        """Reason why the table no longer has this generation; empty if it does."""
        try:
            now = self._fleet.table(self._drives.where, is_fresh=True).find(self._member.name)
        except (DriveLostError, ValueError) as error:
            return f"drive {self._member.name}: {error}"
        if now.nqn != self._member.nqn:
            return (
                f"drive {now.name} is lost with its node: an empty drive has its name now (generation {now.generation})"
            )
        return f"drive {now.name} is lost: {now.reason}" if now.state == "lost" else ""
