"""Serves one drive in this process: its firmware, and a window per tenant, until it is stopped."""

from __future__ import annotations

import gc
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from attention_engine import load_methods
from csd_firmware.folder import DriveFolder, secret_of
from csd_firmware.namespace import Namespace
from csd_firmware.process.events import emit
from csd_firmware.process.fifo_lock import FifoLock
from csd_firmware.process.listen import serve_nvme_tcp, subsystem_of
from csd_firmware.step import Firmware
from csd_firmware.tenants import Tenant
from csd_link.doorbell import ListeningDoorbell
from csd_link.drive_end import WindowController, WindowServer
from csd_link.medium import MappedMedium
from csd_link.run_dir import doorbell_path, drive_dir, pid_path, private_dir, window_path
from csd_link.served_drive import ADMIN, ServedDrive
from csd_link.window import BLOCK_BYTES, Identity, WindowLayout
from csd_spec import load_layouts
from ftl import Nand

Ready = Callable[[], object]
FrontEnd = Callable[[ServedDrive, Firmware, Namespace, FifoLock, Ready], None]  # additional interface


ADMIN_LAYOUT = WindowLayout(depth=2, slot_blocks=64)
NEVER = 1 << 30  # threshold that disables full garbage collections
SWITCH_S = 5e-4  # maximum time a tenant's thread runs Python while another one waits for the interpreter


def open_firmware(drive: ServedDrive, folder: DriveFolder | None) -> Firmware:
    """Create the drive's firmware in the state of its last flush."""
    load_layouts(drive.layouts_file)
    nand = Nand(drive.spec.geometry, folder=folder.files if folder else None, medium=drive.storage)
    firmware = Firmware(drive.spec, nand, load_methods(drive.methods_file), drive.threads or 1)
    if folder:
        folder.count_power_on(firmware.ftl.counters)
    return firmware


def window_medium(drive: ServedDrive, tenant: str) -> MappedMedium:
    """Map a tenant's window; shared memory is created if it does not exist."""
    size = layout_of(drive, tenant).blocks * BLOCK_BYTES
    if drive.device and tenant != ADMIN:
        at = drive.offset_bytes + drive.tenants.index(tenant) * size
        return MappedMedium(drive.device, at, drive.layout.blocks)
    path = window_path(drive.name, tenant)
    if path.exists() and path.stat().st_size != size:
        path.unlink()
    if not path.exists():
        MappedMedium.create(path, size)
    return MappedMedium(path)


def layout_of(drive: ServedDrive, tenant: str) -> WindowLayout:
    """Window layout of a tenant; the administrator's window is small, since log pages are."""
    return ADMIN_LAYOUT if tenant == ADMIN else drive.layout


@contextmanager
def open_windows(drive: ServedDrive, firmware: Firmware, turns: FifoLock, secret: bytes) -> Iterator[None]:
    """Serve the windows of all tenants; `secret` is the key of their handles."""
    run = private_dir(drive_dir(drive.name))
    pid_path(drive.name).write_text(str(os.getpid()))

    def remove() -> None:
        if not restarts(drive, firmware):  # otherwise hosts find the next process in the same windows
            shutil.rmtree(run, ignore_errors=True)

    with ExitStack() as undo:
        undo.callback(remove)
        for name in (*drive.tenants, ADMIN):
            tenant = Tenant(firmware, secret, name, drive.share_of(name), turns)
            identity = Identity(drive.name, drive.spec, layout_of(drive, name), drive.restarts)
            end = WindowController(window_medium(drive, name), identity, tenant)
            server = WindowServer(end, ListeningDoorbell(doorbell_path(window_path(drive.name, name))))
            server.start()
            undo.callback(server.stop)
        yield


def _flush(namespace: Namespace, firmware: Firmware) -> None:
    """Make blocks written by hosts durable before the drive stops."""
    if not firmware.ftl.nand.failed:
        namespace.flush()


def restarts(drive: ServedDrive, firmware: Firmware) -> bool:
    """Whether the drive has failed by a firmware error and will be restarted in another process."""
    return drive.restarts and bool(firmware.failure)


def serve(drive: ServedDrive, front: FrontEnd | None = None, ready: Ready = lambda: None) -> None:
    """Serve a drive until SIGTERM or SIGINT; then flush it.

    A drive whose firmware fails completes the failing command and aborts, so that its supervisor restarts it from its
    last flush. A drive without restart continues with reads and logs.

    Args:
        drive: Configuration.
        front: Additional interface; it returns when it is asked to stop.
        ready: Called when the drive answers, also through its front end.
    """
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    private_dir(drive_dir(drive.name).parent)  # mkdir would give it another mode than the folder in it
    private_dir(drive_dir(drive.name))
    with ExitStack() as undo:
        folder = None
        if drive.path:
            folder = DriveFolder(drive.spec, private_dir(drive.path), durability=drive.durability or "process")
            undo.callback(folder.close)
        firmware, turns = open_firmware(drive, folder), FifoLock()
        if len(drive.tenants) > 1:
            sys.setswitchinterval(SWITCH_S)
            gc.set_threshold(*gc.get_threshold()[:2], NEVER)  # a full collection takes 0.3 s at 32,768 sequences
        if drive.restarts:
            firmware.remedy = "the drive restarts from there"
            firmware.on_failure = partial(os.kill, os.getpid(), signal.SIGTERM)
        secret = secret_of(drive.path)
        with ExitStack() as blocks:
            if front or drive.listen:
                namespace = Namespace(firmware, turns)
                blocks.callback(_flush, namespace, firmware)
            if drive.listen:
                subsystem = subsystem_of(drive, firmware, namespace, turns, secret)
                blocks.enter_context(serve_nvme_tcp(drive, subsystem, firmware.state.history))
            # After the port: hosts take a drive whose windows answer for one that has started
            blocks.enter_context(open_windows(drive, firmware, turns, secret))
            if front:
                front(drive, firmware, namespace, turns, ready)
            else:
                ready()
                signal.sigwait(signals)
        if restarts(drive, firmware):
            said = f"vcsd: drive {drive.name}: {firmware.ftl.nand.failed}\n{firmware.failure}"
            emit("firmware_failed", said, "error", drive.name)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the traceback is more useful than a core file
            os.abort()
        if firmware.ftl.nand.failed:
            raise OSError(firmware.ftl.nand.failed)
        if drive.path:
            firmware.ftl.flush(firmware.now_ns)
