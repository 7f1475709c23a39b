"""Doorbells: heard at once, kept until a process listens, and a peer that exits silently is noticed."""

import os
import socket
import threading

import pytest

from csd_link.doorbell import ListeningDoorbell, Polling, SocketDoorbell, call
from tests.served import HANG_S


def connected(tmp_path):
    path = tmp_path / ("long " * 30) / "doorbell"
    path.parent.mkdir()
    drive = ListeningDoorbell(path)
    host = SocketDoorbell(call(path))
    drive.wait(HANG_S)
    return drive, host


def rung(waiting, ringing):
    """Whether an end that waits wakes when the other rings, well before it would by itself."""
    woken = threading.Event()
    thread = threading.Thread(target=lambda: (waiting.wait(2 * HANG_S), woken.set()), daemon=True)
    thread.start()
    ringing.ring()
    return woken.wait(HANG_S)


def test_a_doorbell_wakes_the_other_end(tmp_path):
    drive, host = connected(tmp_path)
    assert rung(drive, host)
    assert rung(host, drive)
    host.close()
    drive.wait(HANG_S)
    drive.ring()  # no process listens, which is not an error
    drive.close()


def test_closed_doorbell_peer_is_detected(tmp_path):
    drive, host = connected(tmp_path)
    drive.close()
    with pytest.raises(ConnectionError):
        host.wait(HANG_S)
    host.close()


def test_full_doorbell_socket_does_not_block():
    one, other = socket.socketpair()
    doorbell = SocketDoorbell(one)
    for _ in range(100_000):
        doorbell.ring()
    doorbell.close(), other.close()


def test_polling_interval_grows(monkeypatch):
    times = []
    monkeypatch.setattr("csd_link.doorbell.time.sleep", times.append)
    polling = Polling(min_s=1e-3, max_s=4e-3)
    for timeout_s in (1, 1, 1, 1, 2e-3):
        polling.wait(timeout_s)
    assert times == [1e-3, 2e-3, 4e-3, 4e-3, 2e-3]
    polling.ring()
    polling.wait(1)
    assert times[-1] == 1e-3


def test_doorbell_connect_leaks_no_descriptor(tmp_path):
    drive, host = connected(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        call(tmp_path / ("long " * 30) / "doorbell").close()
    assert len(os.listdir("/proc/self/fd")) == before
    host.close()
    drive.close()
