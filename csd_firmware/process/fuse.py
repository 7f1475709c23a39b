"""FUSE mount of a drive: the block namespace, the window and JSON descriptions as files.

The kernel caches nothing: every read and write reaches the drive.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import stat
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pyfuse3
import trio

from csd_firmware.logs import smart
from csd_firmware.namespace import Namespace
from csd_firmware.process.fifo_lock import FifoLock
from csd_firmware.process.mounts import unmount
from csd_firmware.process.serve import Ready, window_medium
from csd_firmware.step import Firmware
from csd_link.doorbell import call
from csd_link.medium import MappedMedium
from csd_link.run_dir import doorbell_path, window_path
from csd_link.served_drive import ServedDrive
from csd_link.window import BLOCK_BYTES
from ftl import FtlError, OutOfSpaceError, ReadOnlyError

ERRNO = ((OutOfSpaceError, errno.ENOSPC), (ReadOnlyError, errno.EROFS), (FtlError, errno.EIO))
NAMES = ("namespace", "window", "identify.json", "smart.json", "latency.json")
_FIRST = pyfuse3.ROOT_INODE + 1
NAMESPACE, WINDOW = _FIRST, _FIRST + 1

T = TypeVar("T")


class Mount(pyfuse3.Operations):
    """Files of one drive in one folder, accessible only to their owner."""

    def __init__(self, drive: ServedDrive, firmware: Firmware, namespace: Namespace, turns: FifoLock) -> None:
        super().__init__()
        self.namespace = namespace
        self._window: MappedMedium = window_medium(drive, drive.tenants[0])
        self._window_bytes = self._window.blocks * BLOCK_BYTES
        self._doorbell = call(doorbell_path(window_path(drive.name, drive.tenants[0])))
        self._doorbell.setblocking(False)
        self._texts: list[Callable[[], dict[str, Any]]] = [
            lambda: (
                {"name": drive.name, "tenants": drive.tenants, "namespace_bytes": self.namespace.size_bytes}
                | {"window_bytes": self._window_bytes, "spec": asdict(drive.spec)}
            ),
            lambda: _locked(turns, lambda: smart(firmware.ftl)),
            lambda: _locked(turns, self._latency),
        ]

    def _latency(self) -> dict[str, Any]:
        return {
            kind: {"requests": latency.requests, "bytes": latency.nbytes} | latency.to_dict()
            for kind, latency in self.namespace.latency.items()
        }

    def _text(self, inode: int) -> bytes:
        return json.dumps(self._texts[inode - WINDOW - 1](), indent=1).encode() + b"\n"

    async def getattr(self, inode: int, ctx: Any = None) -> pyfuse3.EntryAttributes:
        if not pyfuse3.ROOT_INODE <= inode < _FIRST + len(NAMES):
            raise pyfuse3.FUSEError(errno.ENOENT)
        entry = pyfuse3.EntryAttributes()
        entry.st_ino, entry.st_uid, entry.st_gid, entry.st_nlink = inode, os.getuid(), os.getgid(), 1
        entry.st_blksize = BLOCK_BYTES
        if inode == pyfuse3.ROOT_INODE:
            entry.st_mode = stat.S_IFDIR | 0o700
        elif inode in (NAMESPACE, WINDOW):
            entry.st_mode = stat.S_IFREG | 0o600
            entry.st_size = self.namespace.size_bytes if inode == NAMESPACE else self._window_bytes
        else:
            entry.attr_timeout = 0  # its size changes
            entry.st_mode = stat.S_IFREG | 0o400
            entry.st_size = len(self._text(inode))
        entry.st_blocks = -(-entry.st_size // 512)
        return entry

    async def lookup(self, parent_inode: int, name: bytes, ctx: Any = None) -> pyfuse3.EntryAttributes:
        try:
            inode = _FIRST + NAMES.index(name.decode("utf-8", "replace"))
        except ValueError:
            raise pyfuse3.FUSEError(errno.ENOENT) from None
        return await self.getattr(inode)

    async def opendir(self, inode: int, ctx: Any) -> int:
        return inode

    async def readdir(self, fh: int, start_id: int, token: Any) -> None:
        for number, name in enumerate(NAMES[start_id:], start_id):
            if not pyfuse3.readdir_reply(token, name.encode(), await self.getattr(_FIRST + number), number + 1):
                break

    async def open(self, inode: int, flags: int, ctx: Any) -> pyfuse3.FileInfo:
        if inode not in (NAMESPACE, WINDOW) and flags & os.O_ACCMODE != os.O_RDONLY:
            raise pyfuse3.FUSEError(errno.EACCES)
        return pyfuse3.FileInfo(fh=inode, direct_io=True)

    async def read(self, fh: int, off: int, size: int) -> bytes:
        if fh == NAMESPACE:
            return _checked(lambda: self.namespace.read(off, size)[0])
        if fh == WINDOW:
            return bytes(self._window.view[off : min(off + size, self._window_bytes)])
        return self._text(fh)[off : off + size]

    async def write(self, fh: int, off: int, buf: bytes) -> int:
        if fh == NAMESPACE:
            done, _ = _checked(lambda: self.namespace.write(off, buf))
            if not done and buf:
                raise pyfuse3.FUSEError(errno.ENOSPC)
            return done
        part = buf[: max(0, self._window_bytes - off)]
        if not part:
            raise pyfuse3.FUSEError(errno.ENOSPC)
        self._window.view[off : off + len(part)] = part
        with contextlib.suppress(OSError):
            self._doorbell.send(b"!")
        return len(part)

    async def setattr(self, inode: int, attr: Any, fields: Any, fh: int | None, ctx: Any) -> pyfuse3.EntryAttributes:
        """Nothing can be changed: size, owner, mode and times are fixed.

        As for a block device, O_TRUNC is ignored; it arrives as a flag of `open`, never here.
        """
        if fields.update_size and attr.st_size != (await self.getattr(inode)).st_size:
            raise pyfuse3.FUSEError(errno.EINVAL)
        if any((fields.update_mode, fields.update_uid, fields.update_gid, fields.update_atime, fields.update_mtime)):
            raise pyfuse3.FUSEError(errno.EPERM)
        return await self.getattr(inode)

    async def fsync(self, fh: int, datasync: bool) -> None:
        if fh == NAMESPACE:
            _checked(self.namespace.flush)

    async def flush(self, fh: int) -> None:
        """Closing a file makes nothing durable, as for a block device."""

    async def release(self, fh: int) -> None: ...

    async def releasedir(self, fh: int) -> None: ...

    async def statfs(self, ctx: Any) -> pyfuse3.StatvfsData:
        data = pyfuse3.StatvfsData()
        data.f_bsize = data.f_frsize = BLOCK_BYTES
        data.f_blocks = self.namespace.size_bytes // BLOCK_BYTES
        data.f_bfree = data.f_bavail = self.namespace.free_bytes // BLOCK_BYTES
        data.f_files, data.f_namemax = len(NAMES), 255
        return data

    async def _refuse(self, *args: Any) -> NoReturn:
        """The set of files is fixed."""
        raise pyfuse3.FUSEError(errno.EPERM)

    create = link = mkdir = mknod = rename = rmdir = symlink = unlink = _refuse  # type: ignore[assignment]


def _checked(action: Callable[[], T]) -> T:
    try:
        return action()
    except FtlError as error:
        raise pyfuse3.FUSEError(next(code for kind, code in ERRNO if isinstance(error, kind))) from error


def _locked(turns: FifoLock, action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    with turns:
        return action()


def serve_mount(drive: ServedDrive, firmware: Firmware, namespace: Namespace, turns: FifoLock, ready: Ready) -> None:
    """Mount a drive and serve it until SIGTERM, SIGINT or an unmount.

    Args:
        ready: Called when the mount is accessible.
    """
    assert drive.mount is not None
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
    _clear(drive.mount)
    mount = Mount(drive, firmware, namespace, turns)
    pyfuse3.init(mount, str(drive.mount), {f"fsname=vcsd:{drive.name}", "subtype=vcsd", "default_permissions"})
    try:
        trio.run(_serve, drive.mount, ready)
    finally:
        pyfuse3.close()


async def _serve(mount: Path, ready: Ready) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_stop_on_signal)
        nursery.start_soon(_tell, mount, ready)
        await pyfuse3.main()
        nursery.cancel_scope.cancel()


async def _tell(mount: Path, ready: Ready) -> None:
    """Call `ready` once a file of the mount is accessible."""
    await trio.to_thread.run_sync((mount / NAMES[0]).stat, abandon_on_cancel=True)
    ready()


async def _stop_on_signal() -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            pyfuse3.terminate()


def _clear(mount: Path) -> None:
    """Create the folder; remove a stale mount of a killed drive."""
    unmount(mount)
    mount.mkdir(mode=0o700, parents=True, exist_ok=True)
