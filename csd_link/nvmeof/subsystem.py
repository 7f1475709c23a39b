"""What a controller stands in front of: a subsystem and its namespaces."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from csd_link.nvmeof.commands import Answer, Sqe
from csd_link.nvmeof.pdu import Buffer

ERROR_ENTRIES = 64
SUPPORTED, _CHANGES_DATA = 1 << 0, 1 << 1  # of an entry in the log page of commands supported and effects


def effects_of(opcodes: Iterable[int], changing: Collection[int]) -> dict[int, int]:
    """Entries in the log page of commands supported and effects. changing: opcodes that change data."""
    return {int(each): SUPPORTED | _CHANGES_DATA * (each in changing) for each in opcodes}


class Namespace(Protocol):
    """A namespace of one command set. Methods may be called by several connections at once."""

    @property
    def csi(self) -> int:
        """The command set (`commands.Csi`)."""
        ...

    @property
    def uuid(self) -> bytes:
        """16 bytes that no other namespace has."""
        ...

    @property
    def effects(self) -> Mapping[int, int]:
        """Supported opcodes, and their entries in the log page of commands supported and effects."""
        ...

    def identify(self, host: str) -> bytes:
        """Identify Namespace of the command set, up to 4096 bytes, for a host's NQN; empty if it has none."""
        ...

    def data_bytes(self, sqe: Sqe) -> int:
        """Bytes that the command moves in either direction, as its dwords say; raises CommandError."""
        ...

    def execute(self, sqe: Sqe, data: Buffer, host: str) -> Answer:
        """Execute one of the supported opcodes; raises CommandError.

        data: `data_bytes` that the host has sent, or none. host: its NQN.
        """
        ...


@dataclass(frozen=True, slots=True)
class Smart:
    """Fields of the SMART / health log, as `csd_firmware.logs.smart` names them."""

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
    media_errors: int = 0
    num_err_log_entries: int = 0


class ErrorEntry(NamedTuple):
    """An entry of the error information log."""

    number: int
    sq_id: int
    cid: int
    status: int
    nsid: int


class Record(NamedTuple):
    """A subsystem of the discovery log, on the host that was asked."""

    nqn: str
    port: int


class Address(NamedTuple):
    """Where a host has connected to, as text."""

    host: str
    port: int
    is_ipv6: bool


@dataclass(slots=True)
class Subsystem:
    """One drive.

    nqn: its name, at most 223 bytes.
    serial, model, firmware: at most 20, 40 and 8 ASCII characters.
    capacity_bytes: of its flash.
    smart: its health at present.
    discovers: subsystems that its discovery controller lists.
    hosts: NQNs that may connect; None is any.
    refuse_host: told of each host that may not, by a line.
    needs_tls: whether connections have TLS.
    """

    nqn: str
    serial: str
    model: str
    firmware: str
    capacity_bytes: int
    namespaces: Mapping[int, Namespace]
    smart: Callable[[], Smart]
    discovers: tuple[Record, ...] = ()
    hosts: frozenset[str] | None = None
    refuse_host: Callable[[str], None] = lambda reason: None
    needs_tls: bool = False
    errors: deque[ErrorEntry] = field(default_factory=lambda: deque(maxlen=ERROR_ENTRIES))
    _count: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, sq_id: int, cid: int, status: int, nsid: int) -> None:
        """Record that a command has failed."""
        with self._lock:
            self._count += 1
            self.errors.appendleft(ErrorEntry(self._count, sq_id, cid, status, nsid))

    def with_set(self, csi: int) -> list[int]:
        """Numbers of the namespaces of a command set, ascending."""
        return sorted(nsid for nsid, each in self.namespaces.items() if each.csi == csi)
