"""Administration of drives by name or folder: logs, copies, namespace size, raw commands."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from csd_firmware import InProcessDrive
from csd_firmware.folder import FolderLock
from csd_link.connect import connect, find_server
from csd_link.host_end import WindowDrive
from csd_link.run_dir import window_path
from csd_link.served_drive import ADMIN, DEFAULT
from csd_link.wire import ENTRY, PARAMETERS, WireError, WireRequest, decode
from csd_spec import Drive, DriveError, DriveSpec, Flush, GetLog, LogPage, Status
from host_driver.prefixes.manifest import read_manifests


class Created(Protocol):
    """Returns the folder of a created drive; raises ValueError for an unknown name."""

    def __call__(self, name: str) -> Path: ...


def folder_of(drive: str, created: Created) -> Path:
    """Folder of an offline drive: a path, or the name of a created drive."""
    if find_server(drive):
        raise ValueError(f"drive {drive} is served: stop vcsd drive serve first")
    return Path(drive) if "/" in drive or Path(drive).is_dir() else created(drive)


@contextmanager
def opened(drive: str, created: Created) -> Iterator[Drive]:
    """Open a served drive through its admin window, or a private copy of an offline drive, which is not changed."""
    if find_server(drive):
        with closing(admin_window(drive)) as window:
            yield window
    else:
        with closing(InProcessDrive.reopen(folder_of(drive, created), private=True)) as device:
            yield device


def copy_drive(source: Path, target: Path) -> int:
    """Copy a drive's data and mapping as of its last flush to a new folder.

    Returns:
        Number of sequences.

    Raises:
        ValueError: A process has the drive open, or the new folder would be inside the drive's own.
    """
    if target.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"{target}: must be outside of {source}")
    with closing(FolderLock(source, shared=True)), closing(InProcessDrive.reopen(source, private=True)) as device:
        return device.snapshot(target)


def size_namespace(folder: Path, nbytes: int) -> None:
    """Set the size of a drive's block namespace, in whole pages; raises ValueError if it is out of range."""
    with closing(InProcessDrive.reopen(folder)) as device:
        geometry, blocks = device.spec.geometry, device.firmware.ftl.blocks
        pages = nbytes // geometry.page_bytes
        if not blocks.pages <= pages <= geometry.pages // 2:
            least, most = blocks.pages * geometry.page_bytes, geometry.capacity_bytes // 2
            raise ValueError(f"a namespace of {nbytes:,} bytes: must be {least:,} to {most:,} bytes on this drive")
        blocks.resize(pages)
        done = device.submit(Flush(), 0).result()
        if done.status is not Status.SUCCESS:
            raise DriveError(device.name, done.status, done.reason)


def delete_drive(folder: Path) -> None:
    """Delete a drive and all its data; raises ValueError if a process has it open."""
    with closing(FolderLock(folder)):
        shutil.rmtree(folder)


def admin_window(drive: str) -> WindowDrive:
    """Connect to the admin window of a served drive."""
    return connect(window_path(drive, ADMIN))


def read_prefixes(drive: str, created: Created, tenant: str = DEFAULT) -> list[dict[str, Any]]:
    """Models whose prefixes a tenant stores in a drive (`host_driver.prefixes.manifest.read_manifests`).

    Raises:
        ValueError: The drive is served without such a tenant, or it is offline and the tenant is not the default.
        DriveLostError: Another host uses the tenant's window.
    """
    if find_server(drive):
        window = window_path(drive, tenant)
        if not window.exists():
            raise ValueError(f"drive {drive} has no window of tenant {tenant} in shared memory")
        with closing(connect(window)) as served:
            return read_manifests(served)
    folder = folder_of(drive, created)
    if tenant != DEFAULT:
        raise ValueError(
            f"drive {drive} is not served: only tenant {DEFAULT} can be read, vcsd drive serve gives the others"
        )
    with closing(InProcessDrive.reopen(folder, private=True)) as device:
        return read_manifests(device)


def read_log(device: Drive, page: LogPage) -> dict[str, Any]:
    """Read a log page."""
    done = device.submit(GetLog(page), 0).result()
    if done.status is not Status.SUCCESS:
        raise DriveError(device.name, done.status, done.reason)
    values: dict[str, Any] = json.loads(bytes(done.data[0]))
    return values


def identify_controller(spec: DriveSpec, name: str) -> dict[str, Any]:
    """Identify Controller data with nvme-cli's keys; fields without meaning for a virtual drive are omitted."""
    return {
        "sn": name[:20],
        "mn": f"vcsd {spec.name}"[:40],
        "fr": version("vcsd")[:8],
        "ver": 0x20000,
        "nn": 1,
        "tnvmcap": spec.geometry.capacity_bytes,
    }


def parse_request(opcode: int, parameters: list[int], payload: bytes) -> WireRequest:
    """Build a raw command; raises ValueError for numbers that do not fit in an entry."""
    if not 0 <= opcode <= 0xFF:
        raise ValueError(f"opcode = {opcode:#x}: must be 0 to 0xff")
    if len(parameters) > PARAMETERS or not all(0 <= value < 1 << 32 for value in parameters):
        raise ValueError(f"parameters: at most {PARAMETERS}, each a 32-bit number")
    return WireRequest(opcode, tuple(parameters), payload)


def describe_request(request: WireRequest, submit_ns: int) -> dict[str, Any]:
    """The 64-byte entry of a request, and the command that a drive would decode from it; nothing is sent."""
    values = (*request.parameters, *(0,) * PARAMETERS)[:PARAMETERS]
    entry = ENTRY.pack(request.opcode, 0, 0, 1, submit_ns, len(request.payload), 0, *values)
    try:
        reads = type(decode(request)).__name__
    except WireError as error:
        reads = f"refused: {error}"
    return {"entry": entry.hex(" ", 4), "payload_bytes": len(request.payload), "reads_as": reads}
