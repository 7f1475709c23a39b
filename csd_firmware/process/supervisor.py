"""Supervisor: one process per drive, restarted when it dies."""

from __future__ import annotations

import os
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numba.core import event

from csd_firmware.process.events import emit
from csd_firmware.process.mounts import unmount
from csd_firmware.process.serve import FrontEnd, serve
from csd_firmware.step import Firmware
from csd_io.parent_death import end_with_parent
from csd_link.liveness import is_running
from csd_link.private_server import COMPILES
from csd_link.run_dir import drive_dir
from csd_link.served_drive import ServedDrive, ServedDrives
from csd_spec import Attend, Flush, KvAppend, SeqCreate
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH

CRASH_LOOP_S, MAX_CRASH_LOOP = 0.5, 20  # crash loop: a drive dies this soon after its start, this often in a row
_SIGNALS = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}
_LOOK_S, _READY_LOOK_S = 0.5, 0.02  # poll intervals: of the owner; of starting drives
_GRACE_S = 3.0  # grace period for drives whose run has exited

LogLine = Callable[[str], None]
Started = Callable[[ServedDrive | None], None]


def _nothing(_: ServedDrive | None) -> None: ...


class _Announcement(event.Listener):
    """Prints once that kernels are being compiled."""

    def __init__(self, say: LogLine) -> None:
        self._say: LogLine | None = say

    def on_start(self, event: Any) -> None:
        if self._say:
            self._say(COMPILES)
        self._say = None

    def on_end(self, event: Any) -> None: ...


class Supervisor:
    """Runs drives as children of this process, which loads the kernels once, so that restarts are fast.

    It has no threads, so that it can fork.
    """

    def __init__(
        self, config: ServedDrives, say: LogLine, owner: int | None = None, started: Started = _nothing
    ) -> None:
        """Args:
        config: The drives.
        say: Called with a line of text for each event.
        owner: PID of the run that the drives belong to; None for independent drives.
        started: Called with each drive when it answers for the first time, and with None when all do.
        """
        self._drives, self._say, self._owner = config.drives, say, owner
        self._started_hook, self._starting = started, {drive.name: drive for drive in config.drives}
        self._ready_fds: dict[int, str] = {}  # read end of a pipe -> drive that writes to it when it answers
        self.orphaned = False
        self._children: dict[int, ServedDrive] = {}
        self._started: dict[str, float] = {}  # time of the last start
        self._crash_loop: dict[str, int] = {}  # consecutive deaths right after the start

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT, or until no drive is left; returns an exit code."""
        with event.install_listener("numba:compile", _Announcement(self._say)):
            warm_up()
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        for drive in self._drives:
            self._start(drive)
        failed = False
        while self._children:
            got = signal.sigtimedwait(_SIGNALS, _READY_LOOK_S if self._ready_fds else _LOOK_S)
            self._look_for_started()
            if self._owner and not is_running(self._owner):
                self.orphaned = True
                self._stop_orphans()
                break
            if got and got.si_signo != signal.SIGCHLD:
                self._stop()
                break
            failed |= self._reap()
        return int(failed)

    def _start(self, drive: ServedDrive) -> None:
        parent, (told, tells) = os.getpid(), os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        pid = os.fork()
        if not pid:
            os._exit(_child(drive, parent, partial(os.write, tells, b"1")))
        os.close(tells)
        self._ready_fds[told] = drive.name
        self._children[pid] = drive
        self._started[drive.name] = time.monotonic()

    def _look_for_started(self) -> None:
        """Report drives that have started to answer."""
        for fd, name in list(self._ready_fds.items()):
            try:
                answers = os.read(fd, 1)
            except BlockingIOError:
                continue
            os.close(fd)
            del self._ready_fds[fd]
            if answers and (drive := self._starting.pop(name, None)):
                self._started_hook(drive)
                if not self._starting:
                    self._started_hook(None)

    def _reap(self) -> bool:
        """Restart killed drives; returns whether one has exited with an error, or is not restarted."""
        failed = False
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            drive = self._children.pop(pid, None)
            if drive is None:
                continue
            if os.WIFSIGNALED(status):
                again = drive.restarts and not self._in_crash_loop(drive)
                name = signal.Signals(os.WTERMSIG(status)).name
                self._say(f"drive {drive.name} was killed ({name}); it is {'' if again else 'not '}restarted")
                if again:
                    self._start(drive)
                else:
                    failed = True
            else:
                failed |= os.WEXITSTATUS(status) != 0  # it has printed the reason
        return failed

    def _in_crash_loop(self, drive: ServedDrive) -> bool:
        """Whether a drive has died right after its start MAX_CRASH_LOOP times in a row."""
        at_once = time.monotonic() - self._started[drive.name] < CRASH_LOOP_S
        self._crash_loop[drive.name] = self._crash_loop.get(drive.name, 0) + 1 if at_once else 0
        return self._crash_loop[drive.name] >= MAX_CRASH_LOOP

    def _stop_orphans(self) -> None:
        """Stop all drives, including stopped processes, and remove their mounts."""
        for pid in self._children:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGCONT)
        deadline = time.monotonic() + _GRACE_S
        for pid, drive in self._children.items():
            while not (ended := os.waitpid(pid, os.WNOHANG)[0]) and time.monotonic() < deadline:
                time.sleep(0.02)
            if not ended:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            if drive.mount:
                unmount(drive.mount)
            shutil.rmtree(drive_dir(drive.name), ignore_errors=True)

    def _stop(self) -> None:
        for pid in self._children:
            os.kill(pid, signal.SIGTERM)
        for pid, drive in self._children.items():
            os.waitpid(pid, 0)
            if drive.mount:
                unmount(drive.mount)  # left by a drive that was just killed


def print_to_stderr(text: str) -> None:
    """Print a line to stderr."""
    emit("supervisor", f"vcsd: {text}", "warning")


def warm_up() -> None:
    """Load the kernels, so that every child inherits them."""
    firmware = Firmware(INSTCSD_ZYNQ7045_8CH)
    done = firmware.step(SeqCreate(1, 1, 1, 64, 1024), 0)
    seqs, rows = tuple(done.data[0].tolist()), np.zeros((100, 1, 64), np.float16)
    firmware.step(KvAppend(seqs, 0, np.array([100]), rows, rows), 0)
    q, one = rows[:1, None], np.array([1])
    for method in ("dense", "sparf"):
        firmware.step(Attend(seqs, 0, np.ascontiguousarray(q), rows[:1], rows[:1], method, 8, one, one), 0)
    firmware.step(Flush(), 0)


def _child(drive: ServedDrive, parent: int, ready: Callable[[], object]) -> int:
    try:
        end_with_parent(parent, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        serve(drive, _front(drive), ready)
        return 0
    except (ValueError, OSError) as error:
        emit("drive_error", f"vcsd: drive {drive.name}: {error}", "error", drive.name)
    except BaseException:  # noqa: BLE001 - the log has it, whatever it is
        emit("drive_error", traceback.format_exc().rstrip(), "error", drive.name)
    return 1


def _front(drive: ServedDrive) -> FrontEnd | None:
    """Return the FUSE front end if a mount is configured; its libraries are optional otherwise."""
    if not drive.mount:
        return None
    try:
        from csd_firmware.process.fuse import serve_mount
    except ImportError as error:
        fix = "apt-get install fuse3 libfuse3-dev, then pip install 'vcsd[fuse]'"
        raise OSError(f"mounting a drive needs pyfuse3 ({error}): {fix}") from error
    return serve_mount
