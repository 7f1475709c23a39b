"""Round trips and bandwidth of the links to a drive that does no work: shared-memory window, NVMe/TCP, plain TCP
socket.

`python -m vcsd_eval.bench.links FOLDER PARENT` is the process at the other end of all three.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from csd_io.parent_death import end_with_parent
from csd_link.connect import connect
from csd_link.doorbell import ListeningDoorbell
from csd_link.drive_end import WindowController, WindowServer
from csd_link.host_end import AttachedDrive, DriveLostError
from csd_link.medium import MappedMedium
from csd_link.nvmeof.device import Endpoint, NvmeDrive
from csd_link.nvmeof.sequences import SequenceNamespace
from csd_link.nvmeof.subsystem import Smart, Subsystem
from csd_link.nvmeof.target import Target
from csd_link.run_dir import doorbell_path, private_dir, run_dir
from csd_link.window import BLOCK_BYTES, Identity, WindowLayout
from csd_spec import Command, Completion, KvAppend, Status
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH

OUT_BYTES, BACK_BYTES = 13 << 10, 8 << 10  # of a decode step: q, k, v to the drive; output to the host
LARGE_BYTES = 8 << 20
ROUNDS, MOVES = 10, 5  # links take turns, so that a busy machine is busy for all of them
START_S = 30.0
_NQN = "nqn.2026-11.dev.vcsd:links"


class NoWork:
    """A drive that answers every command at once."""

    def __init__(self) -> None:
        self._done = Completion(status=Status.SUCCESS, data=(np.zeros(BACK_BYTES, np.uint8),))

    def attach(self) -> None: ...

    def refuse(self, command: str, status: Status, reason: str, submit_ns: int) -> Completion:
        return Completion(status=status, reason=reason)

    def step(self, command: Command, submit_ns: int, max_bytes: int) -> Completion:
        return self._done


def measure_links(trips: int) -> dict[str, float]:
    """Round-trip time (us) with 13 KiB out and 8 KiB back, and 10^6 bytes per second of commands with 8 MiB out.

    nvme_tcp_over_window: ratio of round trips. nvme_tcp_over_socket: ratio of bandwidths.
    """
    with tempfile.TemporaryDirectory(prefix="links-", dir=private_dir(run_dir())) as scratch:
        folder = Path(scratch)
        server = subprocess.Popen([sys.executable, "-m", "vcsd_eval.bench.links", scratch, str(os.getpid())])
        try:
            window = _awaited(partial(connect, folder / "window"))
            ports = (int((folder / name).read_text()) for name in ("nvme", "socket"))
            nvme_port, socket_port = ports
            nvme = NvmeDrive(lambda: Endpoint("127.0.0.1", nvme_port, _NQN))
            line = socket.create_connection(("127.0.0.1", socket_port))
            with line:
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                figures = _measured(window, nvme, line, trips)
            nvme.close()
            window.close()
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()
    return figures


def _measured(window: AttachedDrive, nvme: NvmeDrive, line: socket.socket, trips: int) -> dict[str, float]:
    """Figures of all links."""
    small, large = _command(OUT_BYTES), _command(LARGE_BYTES)
    echoes = {size: partial(_echo, line, bytearray(size), bytearray(BACK_BYTES)) for size in (OUT_BYTES, LARGE_BYTES)}
    links: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "window": (lambda: window.submit(small, 0).result(), lambda: window.submit(large, 0).result()),
        "nvme_tcp": (lambda: nvme.submit(small, 0).result(), lambda: nvme.submit(large, 0).result()),
        "socket": (echoes[OUT_BYTES], echoes[LARGE_BYTES]),
    }
    trip_us: dict[str, list[float]] = {name: [] for name in links}
    large_us: dict[str, list[float]] = {name: [] for name in links}
    for _ in range(ROUNDS):
        for name, (trip, move) in links.items():
            trip_us[name] += _times(trip, max(1, trips // ROUNDS))
            large_us[name] += _times(move, MOVES)
    figures = {f"{name}_rtt_us_median": float(np.median(times)) for name, times in trip_us.items()}
    figures |= {f"{name}_mbps": LARGE_BYTES / float(np.median(times)) for name, times in large_us.items()}
    return figures | {
        "nvme_tcp_over_window": figures["nvme_tcp_rtt_us_median"] / figures["window_rtt_us_median"],
        "nvme_tcp_over_socket": figures["nvme_tcp_mbps"] / figures["socket_mbps"],
    }


def _command(nbytes: int) -> KvAppend:
    rows = np.zeros((nbytes // 4 // 64, 1, 64), np.float16)
    return KvAppend((1,), 0, np.array([len(rows)]), rows, rows)


def _times(action: Callable[[], object], count: int) -> list[float]:
    """Microseconds of each call."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        action()
        times.append((time.perf_counter() - began) * 1e6)
    return times


def _echo(line: socket.socket, out: bytearray, back: bytearray) -> None:
    body = memoryview(out)[4:]
    sent = line.sendmsg([len(out).to_bytes(4, "little"), body])
    line.sendall(body[sent - 4 :])
    _fill(line, back)


def _fill(line: socket.socket, into: bytearray) -> None:
    view, got = memoryview(into), 0
    while got < len(into):
        more = line.recv_into(view[got:])
        if not more:
            raise ConnectionResetError("the peer closed the connection")
        got += more


def _awaited(connected: Callable[[], AttachedDrive]) -> AttachedDrive:
    deadline = time.monotonic() + START_S
    while True:
        try:
            return connected()
        except DriveLostError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _answer(listener: socket.socket) -> None:
    """Answer every message of a plain socket; its first four bytes are its size."""
    line, _ = listener.accept()
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    head, back = bytearray(4), bytes(BACK_BYTES)
    bodies = {size: bytearray(size - 4) for size in (OUT_BYTES, LARGE_BYTES)}
    with suppress(OSError):
        while True:
            _fill(line, head)
            _fill(line, bodies[int.from_bytes(head, "little")])
            line.sendall(back)


def main() -> None:
    """Serve all three links until SIGTERM."""
    folder = Path(sys.argv[1])
    end_with_parent(int(sys.argv[2]))
    identity, service = Identity("links", INSTCSD_ZYNQ7045_8CH, WindowLayout()), NoWork()
    namespace = SequenceNamespace(lambda host: NoWork(), identity, bytes(16))
    target = Target(Subsystem(_NQN, "links", "links", "1", 0, {3: namespace}, Smart), "127.0.0.1", 0)
    target.start()
    (folder / "nvme").write_text(str(target.port))
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_answer, args=(listener,), daemon=True).start()
    (folder / "socket").write_text(str(listener.getsockname()[1]))
    window = folder / "window"
    MappedMedium.create(window, identity.layout.blocks * BLOCK_BYTES)
    server = WindowServer(
        WindowController(MappedMedium(window), identity, service), ListeningDoorbell(doorbell_path(window))
    )
    server.start()
    signal.sigwait({signal.SIGTERM})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    main()
