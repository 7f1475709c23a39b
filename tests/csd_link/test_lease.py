"""A window's lock: one host at a time, identified by name, free when that host has exited."""

import errno
import fcntl
import gc
import os

import pytest

from csd_link.lease import HeldError, Lease, close_both, describe_process, holder
from csd_link.window import BLOCK_BYTES, HOST_HEADER, BlockKind, ControlBlock

MINE = ControlBlock(BlockKind.HOST, 1, 1, 0, describe_process()).pack()


@pytest.fixture
def window(tmp_path):
    """A file with room for two windows of four blocks."""
    path = tmp_path / "window"
    path.write_bytes(bytes(8 * BLOCK_BYTES))
    return path


def test_second_lease_of_a_window_is_refused_with_the_holder(window):
    first = Lease(window)
    with pytest.raises(HeldError, match="window is in use by another host: end it, or use another tenant's window"):
        Lease(window, patience_s=0)
    with window.open("r+b") as file:
        file.seek(HOST_HEADER * BLOCK_BYTES)
        file.write(MINE)
    with pytest.raises(HeldError, match=rf"is in use by process {os.getpid()} \(.+\): end it"):
        Lease(window, patience_s=0)
    other = Lease(window, 4 * BLOCK_BYTES, patience_s=0)
    other.close()
    window.open().close()  # closing a descriptor of the file does not drop its lock
    with pytest.raises(HeldError):
        Lease(window, patience_s=0)
    first.close()
    first.close()
    Lease(window, patience_s=0).close()


def test_lock_of_unclosed_connection_is_released(window):
    lease = Lease(window)
    del lease
    gc.collect()
    Lease(window, patience_s=0).close()


def test_lock_is_dropped_after_the_connection_even_if_that_fails(window):
    lease = Lease(window)

    def close():
        with pytest.raises(HeldError):
            Lease(window, patience_s=0)
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        close_both(lease, close)()
    Lease(window, patience_s=0).close()


def test_file_without_locks_is_not_refused(window, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "fcntl", none)
    Lease(window).close()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "another host"),
        (b"[]", "another host"),
        (b'{"pid": "x", "machine": "m", "command": "c"}', "another host"),
        (b'{"pid": 7, "machine": "m", "command": "vllm\\nserve"}', "process 7 on m (vllm serve)"),
    ],
)
def test_lease_holder_is_decoded_from_any_header(body, words):
    assert holder(ControlBlock(BlockKind.HOST, 1, 1, 0, body).pack().ljust(BLOCK_BYTES, b"\0")) == words
    assert holder(ControlBlock(BlockKind.DRIVE, 1, 1, 0, body).pack().ljust(BLOCK_BYTES, b"\0")) == "another host"
    assert holder(bytes(BLOCK_BYTES)) == "another host"
