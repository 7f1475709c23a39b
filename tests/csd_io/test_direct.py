"""Queues over files and devices of this machine.

partner of: csd_io/direct.py, csd_io/blocks.py, csd_io/signatures.py
"""

import errno
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from csd_io import blocks, direct
from csd_io.direct import open_queue
from csd_io.queue import IoRequest, aligned, carry_out, pieces
from csd_io.signatures import LOOK_BYTES, detect_signature
from tests.conftest import missing

MIB = 1 << 20


@pytest.fixture(params=["io_uring", "threads"])
def way(request, monkeypatch):
    """Both ways of having requests in flight."""
    if request.param == "threads":

        def none(*_):
            raise OSError(errno.ENOSYS, "no such thing")

        monkeypatch.setattr(blocks, "Ring", none)
    return request.param


@contextmanager
def opened(path, *args, **options):
    queue = open_queue(Path(path), *args, **options)
    try:
        yield queue
    finally:
        queue.close()


@contextmanager
def loop(file):
    """A loop device over a file, with direct I/O of its own."""
    if os.geteuid() or not Path("/dev/loop-control").exists():
        missing("loop", "loop devices are root's")
    done = subprocess.run(["losetup", "--find", "--show", file], capture_output=True, text=True, check=False)
    if done.returncode:
        missing("loop", done.stderr.strip())
    device = done.stdout.strip()
    try:
        yield device
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


def make(program, disk):
    """Format a disk with a program such as mkfs."""
    if not (path := shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")):
        missing("mkfs", f"there is no {program}")
    subprocess.run([path, disk], check=True, capture_output=True)


def there_and_back(queue, size=4 * MIB, request=MIB // 4):
    """Write all of it from some buffers and read it into others; whether they are equal."""
    sources, sinks = ([aligned(request) for _ in range(size // request)] for _ in range(2))
    queue.register((*sources, *sinks))
    for number, buffer in enumerate(sources):
        buffer[:] = np.random.default_rng(number).bytes(request)
    at = [number * request for number in range(size // request)]
    carry_out(queue, [IoRequest("write", *pair) for pair in zip(at, sources, strict=True)])
    queue.sync()
    carry_out(queue, [IoRequest("read", *pair) for pair in zip(at, sinks, strict=True)][::-1])
    return sinks == sources


def test_unnamed_file_in_folder_reads_back(tmp_path, way):
    with opened(tmp_path, 4 * MIB) as queue:
        assert queue.how.startswith(way) and queue.name == str(tmp_path)
        assert queue.size_bytes == 4 * MIB
        assert there_and_back(queue)
        assert list(tmp_path.iterdir()) == []


def test_unregistered_buffers_read_back(tmp_path):
    with opened(tmp_path, MIB) as queue:
        registered, other = aligned(8192), aligned(8192)
        queue.register((registered,))
        registered[:], other[:] = b"a" * 8192, b"b" * 8192
        part = registered[4096:]  # within one that is registered, but not its beginning
        carry_out(queue, [IoRequest("write", 0, part), IoRequest("write", 4096, other[:4096])])
        back = aligned(8192)
        carry_out(queue, [IoRequest("read", 0, back)])
        assert bytes(back) == b"a" * 4096 + b"b" * 4096


def test_interrupted_wait_keeps_completed_requests(tmp_path, monkeypatch):
    with opened(tmp_path, MIB) as queue:
        if queue.how != "io_uring":
            pytest.skip(f"requests are carried out by {queue.how}")
        ring, ready = queue._engine._ring, []
        completions, enter, waits = ring.completions, ring.enter, iter([False, True])

        def one_by_one():
            ready.extend(completions())
            return [ready.pop()] if ready else []

        def interrupted(wait):
            enter(1 if not ready else 0)
            if next(waits, False):
                raise KeyboardInterrupt

        queue.submit([IoRequest("read", 4096 * number, aligned(4096)) for number in range(4)])
        monkeypatch.setattr(ring, "completions", one_by_one)
        monkeypatch.setattr(ring, "enter", interrupted)
        with pytest.raises(KeyboardInterrupt):
            queue.reap(4)
        assert len(queue.reap(4)) == 4


def test_unreadable_device_is_closed(tmp_path, monkeypatch):
    file = tmp_path / "blocks"
    file.write_bytes(bytes(MIB))
    before = len(os.listdir("/proc/self/fd"))

    def fail(*_):
        raise OSError(errno.EIO, "cannot be read")

    monkeypatch.setattr(direct, "carry_out", fail)
    with pytest.raises(OSError, match="cannot be read"):
        open_queue(file)
    assert len(os.listdir("/proc/self/fd")) == before


def test_space_is_reserved_at_open_or_refused(tmp_path):
    before = os.statvfs(tmp_path)
    with opened(tmp_path, 64 * MIB):
        during = os.statvfs(tmp_path)
        assert (before.f_bfree - during.f_bfree) * before.f_frsize > 32 * MIB
    with pytest.raises(OSError) as raised:
        open_queue(tmp_path, 2 * before.f_blocks * before.f_frsize)
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(tmp_path))


def test_killed_process_leaves_no_file(tmp_path):
    program = (
        "import sys, time; from pathlib import Path; from csd_io.direct import open_queue\n"
        "queue = open_queue(Path(sys.argv[1]), 1 << 20); print('open', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "open\n"
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    child.stdout.close()
    assert list(tmp_path.iterdir()) == []


def test_no_tmpfile_support_leaves_no_name(tmp_path, monkeypatch):
    really = os.open

    def refuse(path, flags, *rest, **options):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not here", str(path))
        return really(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)
    with opened(tmp_path, 4 * MIB) as queue:
        assert list(tmp_path.iterdir()) == []
        assert there_and_back(queue)


def test_a_file_system_in_memory_is_refused():
    if not Path("/dev/shm").is_dir():
        missing("shm", "there is no /dev/shm")
    with pytest.raises(OSError, match="no direct I/O") as raised:
        open_queue(Path("/dev/shm"), MIB)
    assert raised.value.errno == errno.EINVAL


def test_file_with_data_needs_force(tmp_path, way):
    """A file that begins with zeros is used at once."""
    file = tmp_path / "blocks"
    file.write_bytes(bytes(4 * MIB))
    with opened(file) as queue:
        assert there_and_back(queue)
    before = file.read_bytes()
    with pytest.raises(OSError, match="allow_overwrite") as raised:
        open_queue(file)
    assert raised.value.errno == errno.EBUSY and file.read_bytes() == before
    with opened(file, allow_overwrite=True) as queue:
        assert there_and_back(queue)


def test_size_beyond_file_is_refused(tmp_path):
    file = tmp_path / "blocks"
    file.write_bytes(bytes(MIB))
    with pytest.raises(OSError) as raised:
        open_queue(file, 2 * MIB)
    assert raised.value.errno == errno.ENOSPC and file.stat().st_size == MIB
    with opened(file, MIB // 2) as queue, pytest.raises(ValueError):
        queue.submit([IoRequest("read", MIB // 2, aligned(4096))])


def test_short_read_is_an_error(tmp_path, way):
    file = tmp_path / "blocks"
    file.write_bytes(bytes(MIB))
    with opened(file) as queue:
        os.truncate(file, MIB // 2 + 4096)
        with pytest.raises(OSError, match="ended after 4096") as raised:
            carry_out(queue, [IoRequest("read", MIB // 2, aligned(8192))])
    assert raised.value.filename == str(file)


def test_discarded_range_frees_space(tmp_path):
    file = tmp_path / "blocks"
    file.write_bytes(bytes(4 * MIB))
    with opened(file) as queue:
        assert there_and_back(queue)
        queue.discard(MIB, 2 * MIB)
        back = aligned(4 * MIB)
        carry_out(queue, [IoRequest("read", at, back[at : at + MIB]) for at in range(0, 4 * MIB, MIB)])
        assert not any(back[MIB : 3 * MIB]) and any(back[:4096])
        assert file.stat().st_blocks * 512 < 3 * MIB
        with pytest.raises(ValueError):
            queue.discard(4 * MIB, 4096)
        with pytest.raises(ValueError):
            queue.discard(1, 4096)


def test_a_device_without_a_file_system_is_used(tmp_path, way):
    disk = tmp_path / "disk"
    disk.write_bytes(bytes(8 * MIB))
    with loop(disk) as device:
        with opened(device) as queue:
            assert there_and_back(queue)
            queue.discard(0, 4 * MIB)
            back = aligned(MIB)
            carry_out(queue, [IoRequest("read", 0, back)])
            assert not any(back)
        with opened(device) as queue:
            assert queue.size_bytes == 8 * MIB and queue.block_bytes in (512, 4096)


@pytest.mark.parametrize("maker", ["mkfs.ext4", "mkswap"])
def test_device_with_data_needs_force(tmp_path, maker):
    disk = tmp_path / "disk"
    disk.write_bytes(bytes(8 * MIB))
    make(maker, disk)
    with loop(disk) as device:
        with pytest.raises(OSError, match="allow_overwrite") as raised:
            open_queue(Path(device))
        assert (raised.value.errno, raised.value.filename) == (errno.EBUSY, device)
        with opened(device, allow_overwrite=True) as queue:
            assert there_and_back(queue)


def test_a_mounted_device_is_refused_even_by_force(tmp_path):
    disk, mount = tmp_path / "disk", tmp_path / "mount"
    disk.write_bytes(bytes(8 * MIB))
    mount.mkdir()
    make("mkfs.ext4", disk)
    with loop(disk) as device:
        subprocess.run(["mount", device, mount], check=True)
        try:
            with pytest.raises(OSError) as raised:
                open_queue(Path(device), allow_overwrite=True)
        finally:
            subprocess.run(["umount", mount], check=True)
    assert raised.value.errno == errno.EBUSY


def test_path_that_is_no_file_or_device_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="neither"):
        open_queue(tmp_path / "pipe")
    with pytest.raises(ValueError, match="how many bytes"):
        open_queue(tmp_path)


def test_known_signatures_are_named():
    begins = bytearray(LOOK_BYTES)
    assert detect_signature(memoryview(begins)) is None
    begins[1080:1082] = b"\x53\xef"
    assert detect_signature(memoryview(begins)) == "an ext2, ext3 or ext4 file system"
    assert detect_signature(memoryview(bytes(512))) is None  # one that ends before most of the places


def test_pieces_cover_whole_buffer():
    buffer = aligned(10 * 4096)
    assert [piece.nbytes for piece in pieces(buffer, 4 * 4096)] == [4 * 4096, 4 * 4096, 2 * 4096]
