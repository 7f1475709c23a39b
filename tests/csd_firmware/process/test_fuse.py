"""A mounted drive as its user sees it: files, dd, mkfs, and an unmount during all of this."""

import contextlib
import errno
import itertools
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import threading

import pytest

from csd_firmware import InProcessDrive
from csd_firmware.namespace import Namespace
from csd_io.direct import open_queue
from csd_io.queue import IoRequest, aligned, carry_out, pieces
from csd_link.liveness import is_running
from csd_link.run_dir import drive_dir
from tests.conftest import missing
from tests.served import HANG_S, kill, pid, serving, until

pytestmark = pytest.mark.usefixtures("fuse", "own_run_dir")


@pytest.fixture
def mount(tmp_path):
    """A served drive's mount; it is unmounted when its process ends."""
    folder = tmp_path / "mount"
    with serving(tmp_path, "csd0", mount=folder, flash=tmp_path / "flash"):
        until((folder / "namespace").exists)
        yield folder
    assert not os.path.ismount(folder)


def test_mount_lists_files_and_identify_data(mount):
    assert sorted(path.name for path in mount.iterdir()) == [
        "identify.json",
        "latency.json",
        "namespace",
        "smart.json",
        "window",
    ]
    assert json.loads((mount / "identify.json").read_text())["spec"]["name"] == "instcsd-zynq7045-8ch"
    assert json.loads((mount / "smart.json").read_text())["media_errors"] == 0
    assert json.loads((mount / "latency.json").read_text())["write"]["requests"] == 0
    for path in (mount, *mount.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    with pytest.raises(FileNotFoundError):
        (mount / "other").read_bytes()


def test_a_namespace_has_many_requests_in_flight(mount):
    data, back = aligned(4 << 20), aligned(4 << 20)
    data[:] = random.Random(0).randbytes(len(data))
    queue = open_queue(mount / "namespace", 8 << 20)
    with contextlib.closing(queue):
        for op, buffer in (("write", data), ("read", back)):
            carry_out(queue, [IoRequest(op, n << 18, part) for n, part in enumerate(pieces(buffer, 1 << 18))])
            queue.sync()
        assert back == data
        with pytest.raises(OSError) as raised:
            queue.discard(0, 1 << 20)
        assert raised.value.errno == errno.EOPNOTSUPP
    assert json.loads((mount / "latency.json").read_text())["write"]["bytes"] == len(data)
    with pytest.raises(OSError, match="allow_overwrite"):
        open_queue(mount / "namespace")


def test_files_in_mount_cannot_be_created_or_removed(mount):
    file, new = mount / "namespace", mount / "new"
    for action in (
        lambda: new.write_bytes(b"x"),
        lambda: new.mkdir(),
        lambda: new.symlink_to(file),
        lambda: new.hardlink_to(file),
        lambda: os.mkfifo(new),
        lambda: file.rename(new),
        lambda: file.unlink(),
    ):
        with pytest.raises(PermissionError):
            action()
    with pytest.raises(NotADirectoryError):
        file.rmdir()


def test_namespace_cannot_be_resized(mount):
    file = mount / "namespace"
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.write(b"kept")
    for path, sizes in ((file, (0, 1, size - 4096, size + 4096)), (mount / "window", (0, 4096))):
        for wanted in sizes:
            with pytest.raises(OSError, match="Invalid argument"):
                os.truncate(path, wanted)
            with path.open("r+b") as opened, pytest.raises(OSError, match="Invalid argument"):
                opened.truncate(wanted)
    os.truncate(file, size)
    file.open("wb").close()  # O_TRUNC, which `> namespace`, cp and dd use, is ignored as for a block device
    with file.open("rb") as opened:
        assert (file.stat().st_size, opened.read(4)) == (size, b"kept")


def test_attributes_cannot_be_changed(mount):
    for name in ("namespace", "window", "smart.json"):
        file = mount / name
        before = file.stat()
        for change in (lambda path: path.chmod(0o644), lambda path: os.utime(path, (1, 1)), os.utime):
            with pytest.raises(PermissionError):
                change(file)
        assert (file.stat().st_mode, file.stat().st_mtime) == (before.st_mode, before.st_mtime)


def test_dd_and_cp_write_blocks(mount, tmp_path):
    (tmp_path / "image").write_bytes(random.Random(1).randbytes(1 << 20))
    file = str(mount / "namespace")
    load = [f"if={tmp_path / 'image'}", f"of={file}", "bs=64K"]
    for command in (["dd", *load], ["dd", *load, "seek=16", "conv=notrunc"], ["cp", str(tmp_path / "image"), file]):
        subprocess.run(command, check=True, capture_output=True)
    with open(file, "rb") as opened:
        assert opened.read(2 << 20) == (tmp_path / "image").read_bytes() * 2


def test_statfs_reports_unwritten_space(mount):
    empty = shutil.disk_usage(mount)
    assert (empty.used, empty.free, empty.total) == (0, empty.total, (mount / "namespace").stat().st_size)
    with (mount / "namespace").open("r+b", buffering=0) as file:
        os.pwrite(file.fileno(), bytes(1 << 20), 0)
        os.fsync(file.fileno())
    assert shutil.disk_usage(mount).used == 1 << 20


def test_unaligned_writes_read_back(mount):
    draw, model = random.Random(2), bytearray(1 << 20)
    with (mount / "namespace").open("r+b", buffering=0) as file:
        for _ in range(100):
            offset, size = draw.randrange(len(model)), draw.choice((1, 512, 4096, 10_000, 131_072))
            data = draw.randbytes(min(size, len(model) - offset))
            model[offset : offset + len(data)] = data
            assert os.pwrite(file.fileno(), data, offset) == len(data)
        os.fsync(file.fileno())
        assert os.pread(file.fileno(), len(model), 0) == model
        end = file.seek(0, os.SEEK_END)
        assert os.pread(file.fileno(), 10, end) == b""
        with pytest.raises(OSError, match="space"):
            os.pwrite(file.fileno(), b"beyond", end)
    times = json.loads((mount / "latency.json").read_text())
    assert times["write"]["requests"] >= 100
    assert times["read"]["mean_ns"] > 5000


def test_ext4_on_mounted_namespace_is_clean(mount):
    """mkfs and fsck work on the file itself, so no loop device is needed."""
    if not shutil.which("mkfs.ext4"):
        missing("fuse", "mkfs.ext4 is not installed: apt-get install e2fsprogs")
    file = str(mount / "namespace")
    for command in (["mkfs.ext4", "-q", "-F", file, "64M"], ["fsck.ext4", "-f", "-n", file]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_fio_random_writes_verify(mount):
    if not shutil.which("fio"):
        missing("fuse", "fio is not installed: apt-get install fio")
    load = ["--rw=randwrite", "--bs=4k", "--size=8M", "--ioengine=libaio", "--iodepth=16", "--direct=1"]
    command = ["fio", "--name=verify", f"--filename={mount / 'namespace'}", *load, "--verify=crc32c"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=mount.parent)
    assert done.returncode == 0, done.stderr


GONE = {errno.ENOTCONN, errno.ECONNABORTED, errno.ENODEV, errno.EIO}


def test_an_unmount_under_load_is_clean(mount):
    """Writers get an error, none hangs, and data written before the unmount is readable afterwards."""
    failures, written, writing = [], [0] * 4, threading.Barrier(5)

    def load(number):
        try:
            with (mount / "namespace").open("r+b", buffering=0) as file:
                for count in itertools.count(1):
                    os.pwrite(file.fileno(), number.to_bytes() + count.to_bytes(4095), number * 4096)
                    written[number] = count
                    if count == 20:
                        writing.wait(HANG_S)
        except OSError as error:
            failures.append(error.errno)

    threads = [threading.Thread(target=load, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    writing.wait(HANG_S)
    process = pid("csd0")
    os.kill(process, signal.SIGTERM)
    for thread in threads:
        thread.join(HANG_S)
    assert not any(thread.is_alive() for thread in threads)
    assert len(failures) == 4
    assert set(failures) <= GONE
    until(lambda: not is_running(process))  # it unmounts, flushes, and closes its folder
    assert not drive_dir("csd0").exists() and not os.path.ismount(mount)
    device = InProcessDrive.reopen(mount.parent / "flash" / "csd0")
    namespace = Namespace(device.firmware, threading.Lock())
    for number, count in enumerate(written):
        block = namespace.read(number * 4096, 4096)[0]
        assert block[0] == number
        assert int.from_bytes(block[1:]) in (count, count + 1)  # the last may have been written and not acknowledged
    device.close()


def test_mount_returns_after_drive_is_killed(mount):
    with (mount / "namespace").open("r+b", buffering=0) as file:
        os.pwrite(file.fileno(), b"kept" * 1024, 0)
        os.fsync(file.fileno())
    kill("csd0")
    begins = []

    def back():
        with contextlib.suppress(OSError), (mount / "namespace").open("rb", buffering=0) as file:
            begins.append(file.read(4096))
        return bool(begins)

    until(back)
    assert begins == [b"kept" * 1024]
