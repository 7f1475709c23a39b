"""Files of a folder: written data is present, discarded data is not, and a full disk is an error of the call."""

import errno
import os
import resource
import signal

import pytest

from csd_io.folder import DiskFolder, allocate, check_written_back


@pytest.fixture
def folder(tmp_path):
    return DiskFolder(tmp_path, "host")


def content(file, offset, size):
    into = bytearray(size)
    file.read(offset, memoryview(into))
    return bytes(into)


def test_written_bytes_read_back_rest_is_zero(folder, tmp_path):
    file = folder.open("a", 1 << 30)
    file.write(5000, b"abc")
    folder.sync()
    again = DiskFolder(tmp_path, writable=False).open("a", 1 << 30)
    assert content(again, 4999, 5) == b"\0abc\0"
    ((first, end),) = again.written()
    assert first <= 5000 < end and end - first < 1 << 20
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


def test_discarded_range_reads_zero_and_frees_space(folder, tmp_path):
    file = folder.open("a", 1 << 20)
    file.write(0, b"x" * (1 << 20))
    before = (tmp_path / "a").stat().st_blocks
    file.discard(8192, 1 << 19)
    assert content(file, 8191, 3) == b"x\0\0"
    assert (tmp_path / "a").stat().st_blocks < before


def test_put_replaces_file_atomically(folder, tmp_path, monkeypatch):
    folder.put("small", b"old")

    def killed(*_):
        raise OSError("killed before the last step")

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(OSError, match="killed"):
        folder.put("small", b"new")
    monkeypatch.undo()
    assert folder.read("small") == b"old"
    folder.put("small", b"new")
    assert folder.read("small") == b"new"
    folder.rename("small", "other")
    folder.remove("small")
    assert folder.sizes().keys() == {"other"}


@pytest.fixture
def full_disk():
    """Limit the largest file of this process, to imitate a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_failed_write_names_its_file(folder, tmp_path, full_disk):
    file = folder.open("a", 1 << 10)
    with pytest.raises(OSError) as raised:
        file.write(1 << 16, b"x")
    assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, str(tmp_path / "a"))


def test_space_is_reserved_or_refused(tmp_path):
    fd = os.open(tmp_path / "a", os.O_RDWR | os.O_CREAT)
    allocate(fd, 0, 1 << 20, "a")
    assert os.fstat(fd).st_blocks * 512 >= 1 << 20
    with pytest.raises(OSError):
        allocate(fd, 0, os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize * 2, "a")
    os.close(fd)


@pytest.mark.parametrize("code", [errno.EDQUOT, errno.EIO, errno.EOPNOTSUPP, errno.ENODEV])
def test_only_file_systems_that_cannot_reserve_are_left_alone(tmp_path, monkeypatch, code):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    fd = os.open(tmp_path / "a", os.O_RDWR | os.O_CREAT)
    if code in (errno.EDQUOT, errno.EIO):
        with pytest.raises(OSError, match="'a'") as raised:
            allocate(fd, 0, 4096, "a")
        assert raised.value.errno == code
    else:
        allocate(fd, 0, 4096, "a")
    os.close(fd)


def test_write_back_check_passes_without_error(tmp_path):
    fd = os.open(tmp_path, os.O_RDWR | os.O_TMPFILE)
    os.write(fd, bytes(10_000))
    check_written_back(fd, "a")
    os.fsync(fd)
    check_written_back(fd, "a")
    os.close(fd)
    with pytest.raises(OSError, match="'a'"):
        check_written_back(fd, "a")
