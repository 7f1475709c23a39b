"""NVM subsystem and its namespaces, as a controller presents them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from csd_link.nvmeof.commands import Answer, Sqe
from csd_link.nvmeof.pdu import Buffer

ERROR_ENTRIES = 64
SUPPORTED, _CHANGES_DATA = 1 << 0, 1 << 1  # bits in the Commands Supported and Effects log page


def effects_of(opcodes: Iterable[int], changing: Collection[int]) -> dict[int, int]:
    """Entries of the Commands Supported and Effects log page; `changing` are the opcodes that change data."""
    return {int(opcode): SUPPORTED | _CHANGES_DATA * (opcode in changing) for opcode in opcodes}


class NvmeNamespace(Protocol):
    """A namespace of one command set. Methods may be called concurrently by several connections."""

    @property
    def csi(self) -> int:
        """Command set identifier (`commands.Csi`)."""
        ...

    @property
    def uuid(self) -> bytes:
        """Unique identifier, 16 bytes."""
        ...

    @property
    def effects(self) -> Mapping[int, int]:
        """Supported opcodes, with their entries of the Commands Supported and Effects log page."""
        ...

    def identify(self, host: str) -> bytes:
        """Identify Namespace of the command set for a host's NQN, up to 4096 bytes; empty if it has none."""
        ...

    def data_bytes(self, sqe: Sqe) -> int:
        """Bytes that the command transfers in either direction, by its dwords; raises CommandError."""
        ...

    def execute(self, sqe: Sqe, data: Buffer, host: str) -> Answer:
        """Execute a supported opcode; raises CommandError.

        Args:
            data: `data_bytes` sent by the host, or empty.
            host: NQN of the host.
        """
        ...

    def host_left(self, host: str) -> None:
        """A host, by its NQN, has no controller any more."""
        ...


@dataclass(frozen=True, slots=True)
class Smart:
    """Fields of the SMART / Health log, named as in `csd_firmware.logs.smart`."""

    critical_warning: int = 0
    avail_spare: int = 100
    spare_thresh: int = 10
    percent_used: int = 0
    data_units_read: int = 0
    data_units_written: int = 0
    host_read_commands: int = 0
    host_write_commands: int = 0
    controller_busy_time: int = 0
    power_cycles: int = 0
    unsafe_shutdowns: int = 0
    media_errors: int = 0


class ErrorEntry(NamedTuple):
    """An entry of the error information log."""

    number: int
    sq_id: int
    cid: int
    status: int
    nsid: int


class DiscoveryRecord(NamedTuple):
    """A subsystem in the discovery log."""

    nqn: str
    port: int


class Address(NamedTuple):
    """Local address of a host's connection."""

    host: str
    port: int
    is_ipv6: bool


@dataclass(slots=True)
class Subsystem:
    """One drive.

    Attributes:
        nqn: NQN, at most 223 bytes.
        serial, model, firmware: At most 20, 40 and 8 ASCII characters.
        capacity_bytes: Capacity of its flash.
        smart: Returns its current health.
        discovers: Subsystems that its discovery controller lists.
        hosts: NQNs that may connect; None allows any.
        refuse_host: Called with a message for each rejected host.
        needs_tls: Whether TLS is required.
    """

    nqn: str
    serial: str
    model: str
    firmware: str
    capacity_bytes: int
    namespaces: Mapping[int, NvmeNamespace]
    smart: Callable[[], Smart]
    discovers: tuple[DiscoveryRecord, ...] = ()
    hosts: frozenset[str] | None = None
    refuse_host: Callable[[str], None] = lambda reason: None
    needs_tls: bool = False
    errors: deque[ErrorEntry] = field(default_factory=lambda: deque(maxlen=ERROR_ENTRIES))
    _count: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, sq_id: int, cid: int, status: int, nsid: int) -> None:
        """Record a failed command."""
        with self._lock:
            self._count += 1
            self.errors.appendleft(ErrorEntry(self._count, sq_id, cid, status, nsid))

    @property
    def error_count(self) -> int:
        """Number of failed commands."""
        return self._count

    def with_set(self, csi: int) -> list[int]:
        """NSIDs of a command set, ascending."""
        return sorted(nsid for nsid, namespace in self.namespaces.items() if namespace.csi == csi)
