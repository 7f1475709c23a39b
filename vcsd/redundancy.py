"""Protection against lost drives: `mirror` stores KV heads on two drives, `recompute` recomputes lost ones."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from threading import Event, Thread

from csd_firmware import InProcessDrive
from csd_link.driveset import DriveSetConfig
from csd_link.network import NetworkDrive, Port
from csd_link.private_server import open_devices
from csd_link.replication import COPIES, Redundancy, ReplicatedDrive
from csd_link.spares import Spares
from csd_link.transports import transport_of
from csd_spec import Drive
from csd_spec.network import Network
from host_driver.hf.replay import Replay
from vcsd.transport import FACTORY, open_drives

DRAIN_LOOK_S = 30.0  # interval of polling for draining drives: a poll takes 0.5 s of CPU time
RECOVERY_S: dict[Redundancy, float] = {"mirror": 0, "recompute": 5.0}  # wait for a lost drive to return, seconds


def _mirror_partner(drives: Sequence[Drive], number: int) -> Drive:
    """The next drive on another machine, or the next one; it stores the same heads as drive `number`."""
    later = [*drives[number + 1 :], *drives[:number], drives[number]]
    node = getattr(drives[number], "node", None)
    return next((drive for drive in later if node and getattr(drive, "node", None) != node), later[0])


def check_count(redundancy: Redundancy, count: int) -> None:
    """Raise ValueError for too few drives."""
    if redundancy == "mirror" and count < 2:
        raise ValueError("redundancy = 'mirror': at least 2 drives are needed")


def _identity(device: Drive) -> Drive:
    return device


@contextmanager
def _drain_watcher(drives: DriveSetConfig, groups: Sequence[ReplicatedDrive]) -> Iterator[None]:
    """Move heads away from draining drives while the block runs."""
    ended, transport = Event(), transport_of(drives)

    def watch() -> None:
        while not ended.wait(DRAIN_LOOK_S):
            names: Collection[str] = ()
            with suppress(OSError, ValueError):  # no answer: retried at the next poll
                names = transport.draining(drives) or ()
            for group in groups:
                for drive in group.drives:
                    if drive.name in names:
                        group.hand_over(drive)

    watcher = Thread(target=watch, name="draining drives", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


@contextmanager
def open_redundant(
    drives: DriveSetConfig | Sequence[Drive], redundancy: Redundancy, network: Network | None = None
) -> Iterator[tuple[Sequence[Drive], Replay | None]]:
    """Open drives, behind a simulated network if one is given, and tolerate their loss until the block ends.

    Yields:
        A device for each group of KV heads, and the log from which lost groups are recomputed (`recompute` only).
    """
    with ExitStack() as undo:
        count = drives.count if isinstance(drives, DriveSetConfig) else len(drives)
        check_count(redundancy, count)
        if isinstance(drives, DriveSetConfig):
            recovery_s = RECOVERY_S.get(redundancy, drives.recovery_s)
            drives = replace(drives, recovery_s=recovery_s)
            opened: Sequence[Drive] = undo.enter_context(open_drives(drives))
        else:
            opened = drives
        over = partial(NetworkDrive, port=Port(network)) if network else _identity
        opened = [over(device) for device in opened]
        if redundancy == "none":
            yield opened, None
            return
        added = undo.enter_context(ExitStack())  # closed after the groups that use these drives
        active = opened[:count]

        def more(names: Collection[str]) -> Drive | None:
            if not isinstance(drives, DriveSetConfig) or not (connect := transport_of(drives).more(drives, names)):
                return None
            return over(added.enter_context(open_devices([connect], recovery_s))[0])

        spares = Spares(active, opened[count:], more)
        groups = [
            ReplicatedDrive([device, _mirror_partner(active, number)][: COPIES[redundancy]], spares)
            for number, device in enumerate(active)
        ]
        for group in groups:
            undo.callback(group.close)
        if isinstance(drives, DriveSetConfig) and transport_of(drives).draining(drives) is not None:
            undo.enter_context(_drain_watcher(drives, groups))
        if redundancy == "mirror":
            yield groups, None
            return
        make = FACTORY.in_process(drives) if isinstance(drives, DriveSetConfig) else None
        first = opened[0].spec
        replay = Replay(groups, partial(make, None) if make else partial(InProcessDrive, first))
        with closing(replay):
            yield groups, replay
