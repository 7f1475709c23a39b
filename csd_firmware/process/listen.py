"""A served drive as an NVMe subsystem that hosts reach over TCP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from hashlib import blake2s
from importlib.metadata import version

from csd_firmware.logs import smart
from csd_firmware.namespace import Namespace
from csd_firmware.process.turns import Turns
from csd_firmware.step import STATUS_OF, Firmware
from csd_firmware.tenants import Tenant
from csd_link.nvmeof.commands import CommandError
from csd_link.nvmeof.listen import nqn_of
from csd_link.nvmeof.nvm import NvmNamespace
from csd_link.nvmeof.pdu import Buffer
from csd_link.nvmeof.sequences import SequenceNamespace
from csd_link.nvmeof.subsystem import Smart, Subsystem
from csd_link.nvmeof.target import Target
from csd_link.run_dir import port_path
from csd_link.served_drive import ServedDrive
from csd_link.window import Identity
from ftl import FtlError

BLOCKS_NSID, SEQUENCES_NSID = 1, 3


class SharedBlocks:
    """The block namespace of a drive, with errors of the firmware as NVMe status codes."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self.size_bytes, self.page_bytes = namespace.size_bytes, namespace.page_bytes

    @property
    def used_bytes(self) -> int:
        """Of pages that hold something in flash."""
        return self._namespace.size_bytes - self._namespace.free_bytes

    def read(self, offset: int, size: int) -> bytes:
        with _as_status():
            return self._namespace.read(offset, size)

    def write(self, offset: int, data: Buffer) -> None:
        with _as_status():
            self._namespace.write(offset, bytes(data))

    def discard(self, offset: int, size: int) -> None:
        with _as_status():
            self._namespace.discard(offset, size)

    def flush(self) -> None:
        with _as_status():
            self._namespace.flush()


@contextmanager
def _as_status() -> Iterator[None]:
    """Turn an error of the firmware into the status of a command."""
    try:
        yield
    except FtlError as error:
        raise CommandError(next(status for kind, status in STATUS_OF if isinstance(error, kind))) from error


def subsystem_of(
    drive: ServedDrive, firmware: Firmware, namespace: Namespace, turns: Turns, secret: bytes
) -> Subsystem:
    """A drive as its hosts see it. secret: the drive's; no other drive has the same UUIDs."""
    assert drive.listen is not None

    def health() -> Smart:
        with turns:
            found = smart(firmware.ftl)
        return Smart(**{each.name: found[each.name] for each in fields(Smart)})

    def tenant(host: str) -> Tenant:
        """Every host is the first tenant, each in a session with a time of its own."""
        name = drive.tenants[0]
        return Tenant(firmware, secret, name, drive.share_of(name), turns)

    identity = Identity(drive.name, drive.spec, drive.layout, drive.restarts)
    return Subsystem(
        nqn=nqn_of(drive.name),
        serial=drive.name,
        model=f"vcsd {drive.spec.name}",
        firmware=version("vcsd"),
        capacity_bytes=drive.spec.geometry.capacity_bytes,
        namespaces={
            BLOCKS_NSID: NvmNamespace(SharedBlocks(namespace), uuid_of(secret, BLOCKS_NSID)),
            SEQUENCES_NSID: SequenceNamespace(tenant, identity, uuid_of(secret, SEQUENCES_NSID)),
        },
        smart=health,
        discovers=drive.listen.records,
        hosts=None if drive.listen.hosts is None else frozenset(drive.listen.hosts),
    )


def uuid_of(secret: bytes, nsid: int) -> bytes:
    """UUID of a namespace, of version 8: the same whenever the drive is served."""
    drawn = bytearray(blake2s(b"uuid" + bytes([nsid]), key=secret, digest_size=16).digest())
    drawn[6], drawn[8] = drawn[6] & 0x0F | 0x80, drawn[8] & 0x3F | 0x80
    return bytes(drawn)


@contextmanager
def listening(drive: ServedDrive, subsystem: Subsystem) -> Iterator[None]:
    """Serve a subsystem at the drive's address for the time of a block; its port is in the drive's run folder."""
    assert drive.listen is not None
    target = Target(subsystem, drive.listen.host, drive.listen.port_of(drive.name))
    target.start()
    try:
        file = port_path(drive.name)
        aside = file.with_suffix(".new")
        aside.write_text(str(target.port))
        aside.replace(file)
        yield
    finally:
        target.stop()
