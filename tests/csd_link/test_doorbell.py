"""Doorbells: heard at once, kept until someone listens, and silent ends are noticed."""

import socket
import threading
import time

import pytest

from csd_link.doorbell import ListeningDoorbell, Polling, SocketDoorbell, call


def connected(tmp_path):
    path = tmp_path / ("long " * 30) / "doorbell"
    path.parent.mkdir()
    drive = ListeningDoorbell(path)
    host = SocketDoorbell(call(path))
    drive.wait(1)
    return drive, host


def test_a_bell_wakes_the_other_end(tmp_path):
    drive, host = connected(tmp_path)
    threading.Timer(0.1, host.ring).start()
    began = time.monotonic()
    drive.wait(5)
    assert 0.05 < time.monotonic() - began < 3
    drive.ring()
    began = time.monotonic()
    host.wait(5)
    assert time.monotonic() - began < 3
    host.close()
    drive.wait(1)
    drive.ring()  # nobody is there, which is no error
    drive.close()


def test_an_end_that_closes_is_noticed(tmp_path):
    drive, host = connected(tmp_path)
    drive.close()
    with pytest.raises(ConnectionError):
        host.wait(5)
    host.close()


def test_a_full_bell_does_not_block():
    one, other = socket.socketpair()
    doorbell = SocketDoorbell(one)
    for _ in range(100_000):
        doorbell.ring()
    doorbell.close(), other.close()


def test_polling_sleeps_longer_and_longer():
    doorbell, times = Polling(min_s=1e-3, max_s=4e-3), []
    for _ in range(5):
        began = time.monotonic()
        doorbell.wait(1)
        times.append(time.monotonic() - began)
    assert times[0] >= 1e-3
    assert times[-1] >= 4e-3
    doorbell.ring()
    assert doorbell._next_s == 1e-3
