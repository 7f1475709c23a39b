"""Drives reached through a simulated network: adds the transfer time to commands and completions."""

from __future__ import annotations

from bisect import insort
from concurrent.futures import Future
from dataclasses import replace
from threading import Lock

from csd_link.splitting import Deferred, max_bytes_of, payload_bytes
from csd_spec import Command, Completion, Drive, DriveSpec, Status
from csd_spec.network import Network

COMMAND_BYTES, COMPLETION_BYTES = 72, 48  # NVMe/TCP command capsule; headers of data and response
MAX_KEPT = 64  # recorded transfers per direction; gaps before them are not used


class Port:
    """Network port of a host, shared by its drives; each direction carries one transfer at a time."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._busy: dict[str, list[tuple[int, int]]] = {"out": [], "in": []}  # begin and end of transfers, ns
        self._from_ns = {"out": 0, "in": 0}  # end of the last transfer that is no longer recorded
        self._lock = Lock()

    def send(self, nbytes: int, at_ns: int) -> int:
        """Simulated time at which a drive receives a message that the host sends at `at_ns`."""
        return self._move("out", nbytes, at_ns) + self.network.message_ns

    def receive(self, nbytes: int, at_ns: int) -> int:
        """Simulated time at which the host receives a message that a drive sends at `at_ns`."""
        return self._move("in", nbytes, at_ns + self.network.message_ns)

    def _move(self, direction: str, nbytes: int, at_ns: int) -> int:
        """Book a transfer in the first sufficient gap from `at_ns` on; returns its end."""
        span_ns = self.network.transfer_ns(nbytes)
        with self._lock:
            busy, at_ns = self._busy[direction], max(at_ns, self._from_ns[direction])
            for begin_ns, end_ns in busy:
                if at_ns + span_ns <= begin_ns:
                    break
                at_ns = max(at_ns, end_ns)
            insort(busy, (at_ns, at_ns + span_ns))
            if len(busy) > MAX_KEPT:
                self._from_ns[direction] = busy.pop(0)[1]
        return at_ns + span_ns


class NetworkDrive:
    """A drive reached through a port. Breakdowns of completions include both messages, as unit `network`."""

    def __init__(self, device: Drive, port: Port) -> None:
        self._device, self._port = device, port
        self.name, self.spec, self.max_bytes = device.name, device.spec, max_bytes_of(device)
        self.node: str = getattr(device, "node", "")

    spec: DriveSpec

    def submit(self, command: Command, submit_ns: int) -> Future[Completion]:
        arrived_ns = self._port.send(COMMAND_BYTES + payload_bytes(command), submit_ns)
        future = self._device.submit(command, arrived_ns)
        return Deferred(lambda: self._received(future.result(), submit_ns))

    def _received(self, done: Completion, submit_ns: int) -> Completion:
        if done.status is Status.PATH_LOST:
            return done
        nbytes = COMPLETION_BYTES + sum(array.nbytes for array in done.data)
        finish_ns = self._port.receive(nbytes, done.finish_ns)
        network_ns = finish_ns - submit_ns - done.latency_ns
        breakdown_ns = {**done.breakdown_ns, "network": network_ns}
        return replace(done, submit_ns=submit_ns, finish_ns=finish_ns, breakdown_ns=breakdown_ns)

    def reconnect(self) -> Drive | None:
        """See `csd_link.plain_device.PlainDrive.reconnect`."""
        reconnect = getattr(self._device, "reconnect", None)
        again = reconnect() if reconnect else None
        return NetworkDrive(again, self._port) if again else None

    def close(self) -> None:
        self._device.close()
