"""A served drive as an NVMe subsystem for NVMe/TCP hosts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from hashlib import blake2s
from importlib.metadata import version

from csd_firmware.logs import CommandStats, smart
from csd_firmware.namespace import Namespace
from csd_firmware.process.fifo_lock import FifoLock
from csd_firmware.step import STATUS_OF, Firmware
from csd_firmware.tenants import Tenant
from csd_firmware.values import Values
from csd_link.nvmeof.commands import Code, CommandError
from csd_link.nvmeof.key_value import KeyValueNamespace
from csd_link.nvmeof.listen import nqn_of
from csd_link.nvmeof.nvm import NvmNamespace
from csd_link.nvmeof.pdu import Buffer
from csd_link.nvmeof.sequences import SequenceNamespace
from csd_link.nvmeof.subsystem import Smart, Subsystem
from csd_link.nvmeof.target import Target
from csd_link.run_dir import port_path
from csd_link.served_drive import ServedDrive
from csd_link.window import Identity
from ftl import FtlError, KeyExistsError, UncorrectableReadError, UnknownKeyError

BLOCKS_NSID, VALUES_NSID, SEQUENCES_NSID = 1, 2, 3
_KEY_STATUS = (
    (UnknownKeyError, Code.UNKNOWN_KEY),
    (KeyExistsError, Code.KEY_EXISTS),
    (UncorrectableReadError, Code.UNRECOVERED_ERROR),
)


class SharedBlocks:
    """Block namespace of a drive, with firmware errors mapped to NVMe status codes."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self.size_bytes, self.page_bytes = namespace.size_bytes, namespace.page_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of pages that are mapped to flash."""
        return self._namespace.size_bytes - self._namespace.free_bytes

    def read(self, offset: int, size: int) -> bytes:
        with _as_status():
            return self._namespace.read(offset, size)[0]

    def write(self, offset: int, data: Buffer) -> None:
        with _as_status():
            self._namespace.write(offset, bytes(data))

    def discard(self, offset: int, size: int) -> None:
        with _as_status():
            self._namespace.discard(offset, size)

    def flush(self) -> None:
        with _as_status():
            self._namespace.flush()


class TenantValues:
    """Values of a tenant, with firmware errors mapped to NVMe status codes."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self.granularity_bytes, self.max_keys = values.granularity_bytes, values.max_keys

    @property
    def size_bytes(self) -> int:
        return self._values.size_bytes

    @property
    def used_bytes(self) -> int:
        return self._values.used_bytes

    @property
    def max_value_bytes(self) -> int:
        return self._values.max_value_bytes

    def store(self, key: bytes, value: Buffer, must_exist: bool, must_be_new: bool) -> None:
        with _as_status(_KEY_STATUS):
            self._values.store(key, value, must_exist, must_be_new)

    def retrieve(self, key: bytes, size_bytes: int) -> tuple[bytes, int]:
        with _as_status(_KEY_STATUS):
            return self._values.retrieve(key, size_bytes)

    def exist(self, key: bytes) -> int:
        with _as_status(_KEY_STATUS):
            return self._values.exist(key)

    def delete(self, key: bytes) -> None:
        with _as_status(_KEY_STATUS):
            self._values.delete(key)

    def keys(self, first: bytes, count: int) -> list[bytes]:
        return self._values.keys(first, count)

    def flush(self) -> None:
        with _as_status():
            self._values.flush()


@contextmanager
def _as_status(more: tuple[tuple[type[Exception], int], ...] = ()) -> Iterator[None]:
    """Convert a firmware error to a command status; `more` has the mappings of the command set, which come first."""
    statuses: tuple[tuple[type[Exception], int], ...] = (*more, *STATUS_OF)
    try:
        yield
    except FtlError as error:
        raise CommandError(next(status for kind, status in statuses if isinstance(error, kind))) from error


def subsystem_of(
    drive: ServedDrive, firmware: Firmware, namespace: Namespace, turns: FifoLock, secret: bytes
) -> Subsystem:
    """Describe a drive as a subsystem; UUIDs are derived from the drive's secret."""
    listen = drive.listen
    assert listen is not None

    def health() -> Smart:
        with turns:
            log = smart(firmware.ftl)
        return Smart(**{field.name: log[field.name] for field in fields(Smart)})

    def tenant_of(host: str) -> str:
        return listen.tenant_of(host) or drive.tenants[0]

    def tenant(host: str) -> Tenant:
        """Return a host's tenant, in a session with its own time base."""
        name = tenant_of(host)
        return Tenant(firmware, secret, name, drive.share_of(name), turns)

    def refuse_host(reason: str) -> None:
        with turns:
            firmware.state.history.refuse_host(reason)

    values = {name: TenantValues(Values(firmware, name, turns)) for name in drive.tenants}
    identity = Identity(drive.name, drive.spec, drive.layout, drive.restarts)
    return Subsystem(
        nqn=nqn_of(drive.name),
        serial=drive.name,
        model=f"vcsd {drive.spec.name}",
        firmware=version("vcsd"),
        capacity_bytes=drive.spec.geometry.capacity_bytes,
        namespaces={
            BLOCKS_NSID: NvmNamespace(SharedBlocks(namespace), uuid_of(secret, BLOCKS_NSID)),
            VALUES_NSID: KeyValueNamespace(lambda host: values[tenant_of(host)], uuid_of(secret, VALUES_NSID)),
            SEQUENCES_NSID: SequenceNamespace(tenant, identity, uuid_of(secret, SEQUENCES_NSID)),
        },
        smart=health,
        discovers=listen.records,
        hosts=None if listen.hosts is None else frozenset(host.nqn for host in listen.hosts),
        refuse_host=refuse_host,
        needs_tls=listen.tls is not None,
    )


def uuid_of(secret: bytes, nsid: int) -> bytes:
    """UUID (version 8) of a namespace, constant for the drive."""
    drawn = bytearray(blake2s(b"uuid" + bytes([nsid]), key=secret, digest_size=16).digest())
    drawn[6], drawn[8] = drawn[6] & 0x0F | 0x80, drawn[8] & 0x3F | 0x80
    return bytes(drawn)


@contextmanager
def serve_nvme_tcp(drive: ServedDrive, subsystem: Subsystem, history: CommandStats) -> Iterator[None]:
    """Serve a subsystem at the drive's address for the duration of a block; its port is written to the run folder.

    Args:
        history: Statistics that get the number of connections.
    """
    assert drive.listen is not None
    target = Target(subsystem, drive.listen.host, drive.listen.port_of(drive.name), tls=drive.listen.tls)
    target.start()
    history.connections = lambda: target.connections
    try:
        file = port_path(drive.name)
        aside = file.with_suffix(".new")
        aside.write_text(str(target.port))
        aside.replace(file)
        yield
    finally:
        target.stop()
