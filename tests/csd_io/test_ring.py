"""The io_uring wrapper: more submissions than the ring has entries, and signals during a wait."""

import os
import signal

import pytest

from csd_io.queue import address, aligned
from csd_io.ring import READ, READ_FIXED, Ring


@pytest.fixture
def ring():
    try:
        ring = Ring(4)
    except OSError as error:
        pytest.skip(f"this kernel has no io_uring: {error}")
    yield ring
    ring.close()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 64)
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


def test_more_requests_than_ring_entries_complete(ring, file):
    buffers = [aligned(4096) for _ in range(8)]
    for number, buffer in enumerate(buffers):
        ring.move(READ, file, number * 512, (address(buffer), 512, 0), number)
    ring.enter(8)
    assert sorted(ring.completions()) == [(number, 512) for number in range(8)]
    assert all(bytes(buffer[:512]) == bytes(range(256)) * 2 for buffer in buffers)
    assert ring.completions() == []


def test_registered_buffer_is_read_by_index(ring, file):
    buffers = [aligned(4096) for _ in range(2)]
    ring.register(buffers)
    ring.move(READ_FIXED, file, 1, (address(buffers[1]), 4096, 1), 7)
    ring.enter(1)
    assert ring.completions() == [(7, 4096)]
    assert bytes(buffers[1][:3]) == b"\1\2\3" and not any(buffers[0])


def test_a_failure_is_a_negative_errno(ring):
    buffer = aligned(4096)
    ring.move(READ, 9999, 0, (address(buffer), 4096, 0), 1)
    ring.enter(1)
    ((user, result),) = ring.completions()
    assert user == 1 and result < 0


def test_a_signal_does_not_end_the_wait(ring):
    reads, writes = os.pipe()
    buffer, rung = aligned(4096), []

    def late(*_):
        rung.append(True)
        os.write(writes, b"late")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        ring.move(READ, reads, 0, (address(buffer), 4096, 0), 3)
        ring.enter(1)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert rung and ring.completions() == [(3, 4)]
    os.close(reads)
    os.close(writes)


def test_ring_without_entries_is_refused():
    with pytest.raises(OSError, match="io_uring"):
        Ring(0)
