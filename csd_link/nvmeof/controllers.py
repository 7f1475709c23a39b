"""Controllers of a target: connections of hosts, and their shares of what the target has."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count

from csd_link.nvmeof.commands import DISCOVERY_NQN, MAX_NQN_BYTES, Code, CommandError
from csd_link.nvmeof.controller import Controller
from csd_link.nvmeof.identify import Limits
from csd_link.nvmeof.subsystem import Subsystem

CONNECT_DATA_BYTES = 1024
_ANY_CONTROLLER = 0xFFFF
_IN_DATA = 1 << 16  # the invalid parameter is in the data, not in the queue entry
_CNTLID_AT, _SUBNQN_AT, _HOSTNQN_AT = 16, 256, 512
_MAX_CNTLID = 0xFFEF
ROOM_S = 0.5  # that a command waits for bytes that its host has in flight on other queues

Host = tuple[str, str]  # NQN of a host, and the address from which it connects


@dataclass(frozen=True, slots=True)
class ConnectData:
    """Data of a Connect command."""

    host_id: bytes
    cntlid: int
    subnqn: str
    hostnqn: str

    @classmethod
    def parse(cls, raw: bytes) -> ConnectData:
        """Decode the data; raises CommandError if it is invalid."""
        cntlid = int.from_bytes(raw[_CNTLID_AT : _CNTLID_AT + 2], "little")
        return cls(raw[:16], cntlid, _nqn(raw, _SUBNQN_AT), _nqn(raw, _HOSTNQN_AT))

    def pack(self) -> bytes:
        """Encode to 1024 bytes."""
        head = self.host_id + self.cntlid.to_bytes(2, "little")
        nqns = self.subnqn.encode().ljust(256, b"\0") + self.hostnqn.encode().ljust(256, b"\0")
        return (head.ljust(_SUBNQN_AT, b"\0") + nqns).ljust(CONNECT_DATA_BYTES, b"\0")


def _nqn(raw: bytes, at: int) -> str:
    text = raw[at : at + 256].partition(b"\0")[0]
    try:
        if 0 < len(text) <= MAX_NQN_BYTES:
            return text.decode()
    except UnicodeDecodeError:
        pass
    raise bad_data(at)


def bad_data(at: int) -> CommandError:
    """Error for Connect data that is invalid at byte `at`."""
    return CommandError(Code.CONNECT_PARAMETERS, _IN_DATA | at)


class Controllers:
    """Controllers of one subsystem and of its discovery service, by ID."""

    def __init__(self, subsystem: Subsystem, limits: Limits) -> None:
        self.subsystem, self.limits = subsystem, limits
        self._discovery = replace(subsystem, namespaces={})
        self._lock = threading.Lock()
        self._released = threading.Condition(self._lock)
        self._found: dict[int, Controller] = {}
        self._hang_ups: dict[int, dict[int, Callable[[], None]]] = {}  # by controller and queue
        self._numbers = count()
        self._in_flight = Counter[Host]()  # bytes

    def __len__(self) -> int:
        return len(self._found)

    def create(self, connect_data: ConnectData, address: str, hang_up: Callable[[], None]) -> Controller:
        """Create a controller for the host of an admin queue; raises CommandError.

        Args:
            connect_data: Data of the Connect command.
            address: Address of the host.
            hang_up: Closes the connection, from any thread.
        """
        if connect_data.subnqn not in (self.subsystem.nqn, DISCOVERY_NQN):
            raise bad_data(_SUBNQN_AT)
        if connect_data.cntlid != _ANY_CONTROLLER:
            raise bad_data(_CNTLID_AT)
        allowed = self.subsystem.hosts
        if allowed is not None and connect_data.hostnqn not in allowed:
            self.subsystem.refuse_host(
                f"host {connect_data.hostnqn!r} is not listed: add it to the file of --hosts-file"
            )
            raise CommandError(Code.INVALID_HOST)
        subsystem = self._discovery if connect_data.subnqn == DISCOVERY_NQN else self.subsystem
        with self._lock:
            controllers = Counter(controller.owner for controller in self._found.values())
            owner = connect_data.hostnqn, address
            self._admit(owner, controllers, self.limits.host_controllers, self.limits.controllers)
            self._admit_connection(owner)
            cntlid = next(
                candidate for number in self._numbers if (candidate := number % _MAX_CNTLID + 1) not in self._found
            )
            controller = Controller(subsystem, cntlid, (connect_data.host_id, connect_data.hostnqn), self.limits)
            controller.owner = owner
            self._found[cntlid], self._hang_ups[cntlid] = controller, {0: hang_up}
        return controller

    def join(self, connect_data: ConnectData, queue: int, hang_up: Callable[[], None]) -> Controller:
        """Return the controller to which an I/O queue connects; raises CommandError."""
        with self._lock:
            controller = self._found.get(connect_data.cntlid)
            if controller is None or controller.is_discovery:
                raise bad_data(_CNTLID_AT)
            if controller.host != (connect_data.host_id, connect_data.hostnqn):
                raise bad_data(_HOSTNQN_AT)
            if connect_data.subnqn != self.subsystem.nqn:
                raise bad_data(_SUBNQN_AT)
            if not controller.is_ready:
                raise CommandError(Code.SEQUENCE_ERROR)
            queues = self._hang_ups[connect_data.cntlid]
            if queue in queues or queue > self.limits.io_queues:
                raise CommandError(Code.CONNECT_PARAMETERS, 42)
            self._admit_connection(controller.owner)
            queues[queue] = hang_up
        return controller

    def _admit_connection(self, owner: Host) -> None:
        connections = Counter[Host]()
        for cntlid, queues in self._hang_ups.items():
            connections[self._found[cntlid].owner] += len(queues)
        named = self.limits.connections - self.limits.unnamed_connections
        self._admit(owner, connections, self.limits.host_connections, named)

    def _admit(self, owner: Host, held: Counter[Host], most_of_host: int, most: int) -> None:
        """Admit one more of what `held` counts, or raise CommandError.

        At the limit of all hosts, the host that holds most loses its newest controller, unless this host would then
        hold as much: a host within its equal share neither waits for others nor loses anything to them.
        """
        if held[owner] >= most_of_host:
            raise CommandError(Code.CONTROLLER_BUSY)
        if held.total() < most:
            return
        (largest, largest_held), *_ = held.most_common(1)
        if largest_held <= held[owner] + 1:
            raise CommandError(Code.CONTROLLER_BUSY)
        cntlid = next(number for number in reversed(self._found) if self._found[number].owner == largest)
        del self._found[cntlid]
        for hang_up in self._hang_ups.pop(cntlid).values():
            hang_up()

    def disconnect(self, controller: Controller, queue: int) -> None:
        """Remove a queue whose connection has closed; the admin queue removes the controller with all queues."""
        with self._lock:
            queues = self._hang_ups.get(controller.cntlid, {})
            queues.pop(queue, None)
            if queue == 0:
                self._found.pop(controller.cntlid, None)
                self._hang_ups.pop(controller.cntlid, None)
                for hang_up in queues.values():
                    hang_up()
            name = controller.host[1]
            has_left = queue == 0 and not any(other.host[1] == name for other in self._found.values())
        if has_left:
            for namespace in controller.subsystem.namespaces.values():
                namespace.host_left(name)

    def acquire_bytes(self, owner: Host, size: int) -> None:
        """Count bytes of a host as in flight; raises CommandError if a limit is exceeded for `ROOM_S`.

        A host sees the end of a command before its bytes are released: one that sends the next command then on another
        queue must not be refused.
        """
        with self._lock:
            if not self._released.wait_for(lambda: self._has_room(owner, size), ROOM_S):
                raise CommandError(Code.INTERRUPTED)
            self._in_flight[owner] += size

    def _has_room(self, owner: Host, size: int) -> bool:
        held, limits = self._in_flight[owner], self.limits
        is_full = self._in_flight.total() + size > limits.in_flight_bytes
        return not held or not (is_full or held + size > limits.host_in_flight_bytes)

    def release_bytes(self, owner: Host, size: int) -> None:
        """Count bytes as no longer in flight."""
        with self._lock:
            self._in_flight[owner] -= size
            assert self._in_flight[owner] >= 0, "data was released twice"
            if not self._in_flight[owner]:
                del self._in_flight[owner]
            self._released.notify_all()

    @property
    def in_flight_bytes(self) -> int:
        """Bytes in flight of all hosts."""
        return self._in_flight.total()

    @contextmanager
    def reserve_bytes(self, owner: Host, size: int) -> Iterator[None]:
        """Count bytes as in flight for the duration of a block."""
        self.acquire_bytes(owner, size)
        try:
            yield
        finally:
            self.release_bytes(owner, size)
