"""Disks that are full, fail or are cut short: the caller gets one line, no signal is raised, and flushed data is
readable afterwards, on every medium of a drive's pages.

partner of: csd_io/folder.py, ftl/flash/content.py
"""

import errno
import os
import subprocess
from dataclasses import replace

import numpy as np
import pytest

from csd_firmware import InProcessDrive
from csd_io import folder as disk
from csd_io.medium import BLOCK
from csd_spec import Flush, KvAppend, KvRead, SeqCreate, Status
from ftl import Medium
from ftl.flash.files import CONTENT

MEDIA = [Medium(), Medium("direct", 4 * BLOCK)]
HEADS, DIM, TOKENS = 2, 32, 200


@pytest.fixture
def drive(small_drive):
    geometry = replace(small_drive.geometry, page_bytes=BLOCK, blocks_per_plane=256)
    return replace(small_drive, geometry=geometry, dram_bytes=8 << 20)


def ask(device, command):
    return device.submit(command, device.firmware.free_ns).result()


def given(device, command):
    done = ask(device, command)
    assert done.status is Status.SUCCESS, done.reason
    return done


def rows(seed, tokens=TOKENS):
    return np.random.default_rng(seed).standard_normal((tokens, HEADS, DIM)).astype(np.float16)


def append(handle, seed, tokens=TOKENS):
    part = rows(seed, tokens)
    return KvAppend((handle,), 0, np.array([tokens]), part, -part)


def filled(device):
    """A handle with flushed rows."""
    handle = int(given(device, SeqCreate(1, 1, HEADS, DIM, 1 << 14)).data[0][0])
    given(device, append(handle, 0))
    given(device, Flush())
    return handle


def until_refused(device, handle):
    """Append until the drive refuses it; returns the completion of the refusal."""
    for seed in range(1, 2000):
        done = ask(device, append(handle, seed))
        if done.status is not Status.SUCCESS:
            return done
    raise AssertionError("the disk was never full")


def assert_as_flushed(drive, path, medium, handle):
    device = InProcessDrive(drive, path, medium=medium)
    k, v = given(device, KvRead((handle,), 0)).data
    np.testing.assert_array_equal(k, rows(0))
    np.testing.assert_array_equal(v, -rows(0))
    device.close()


@pytest.mark.parametrize(
    ("code", "what"),
    [
        (errno.ENOSPC, "No space left on device; flushed data is safe: free space on that disk, then open"),
        (errno.EIO, "Input/output error; flushed data is safe: check that disk, then open the drive again"),
    ],
)
@pytest.mark.parametrize("medium", MEDIA)
def test_failed_write_one_line_error_keeps_flushed_data(drive, tmp_path, monkeypatch, medium, code, what):
    """The disk fails in the middle of a write, at one write after the other."""
    for writes in range(8):
        path, pwrite, left = tmp_path / str(writes), os.pwrite, [writes]
        handle = filled(device := InProcessDrive(drive, path, medium=medium))

        def failing(fd, data, offset, pwrite=pwrite, left=left):
            left[0] -= 1
            if left[0] > 0:
                return pwrite(fd, data, offset)
            if left[0] == 0:
                return pwrite(fd, data[: len(data) // 2], offset)  # the rest is tried again
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patched:
            patched.setattr(disk.os, "pwrite", failing)
            done = until_refused(device, handle)
        assert (done.status, len(done.reason.splitlines())) == (Status.WRITE_FAULT, 1)
        assert what in done.reason and str(path) in done.reason
        assert ask(device, append(handle, 1)).status is Status.WRITE_FAULT  # also when the disk works again
        device.close()
        assert_as_flushed(drive, path, medium, handle)


@pytest.mark.parametrize("medium", MEDIA)
def test_full_disk_refused_before_any_write(drive, tmp_path, monkeypatch, medium):
    handle = filled(device := InProcessDrive(drive, tmp_path, medium=medium))
    with monkeypatch.context() as patched:
        patched.setattr(disk.DiskFolder, "free_bytes", lambda self: 1 << 20)
        done = ask(device, append(handle, 1))
        assert done.status is Status.CAPACITY_EXCEEDED
        assert f"the disk under {tmp_path} has no room for them" in done.reason
        given(device, Flush())
    given(device, append(handle, 1))  # as soon as there is room
    device.close()


@pytest.mark.parametrize("medium", MEDIA[1:])
def test_truncated_file_is_a_read_error(drive, tmp_path, medium):
    """Like a device that cannot read."""
    handle = filled(device := InProcessDrive(drive, tmp_path, medium=medium))
    device.close()
    device = InProcessDrive(drive, tmp_path, medium=medium)
    os.truncate(tmp_path / CONTENT, 0)
    done = ask(device, KvRead((handle,), 0))
    assert (done.status, len(done.reason.splitlines())) == (Status.UNRECOVERED_READ_ERROR, 1)
    assert f"{tmp_path / CONTENT}: Input/output error" in done.reason
    device.close()


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request, tmp_path):
    """A file system of 48 MiB."""
    image, mount = tmp_path / "image", tmp_path / "mount"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(48 << 20)
    ways = {
        "tmpfs": [["mount", "-t", "tmpfs", "-o", "size=48m", "none", str(mount)]],
        "ext4": [["mkfs.ext4", "-q", "-m", "0", str(image)], ["mount", "-o", "loop", str(image), str(mount)]],
    }
    for command in ways[request.param]:
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no small {request.param} can be mounted here: {error}")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)  # a map may live until it is collected


@pytest.mark.parametrize("medium", MEDIA)
@pytest.mark.parametrize("asked", [True, False])
def test_full_file_system_error_keeps_flushed_data(drive, small_disk, monkeypatch, medium, asked):
    """asked: whether the drive learns in time that the disk is full; other processes may fill it meanwhile."""
    geometry = replace(drive.geometry, blocks_per_plane=2048)
    drive, path = replace(drive, geometry=geometry), small_disk / "drive0"
    handle = filled(device := InProcessDrive(drive, path, medium=medium))
    if not asked:
        monkeypatch.setattr(disk.DiskFolder, "free_bytes", lambda self: 1 << 40)
    done = until_refused(device, handle)
    status, what = (
        (Status.CAPACITY_EXCEEDED, "has no room for them: free some")
        if asked
        else (Status.WRITE_FAULT, "No space left on device; flushed data is safe: free space on that disk")
    )
    assert (done.status, what in done.reason) == (status, True), done.reason
    device.close()
    assert_as_flushed(drive, path, medium, handle)
