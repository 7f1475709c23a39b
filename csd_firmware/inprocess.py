"""A drive in this process: a queue and one thread, like a controller."""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Lock, current_thread, main_thread
from typing import Any, TypeVar

from attention_engine import METHODS, Methods
from csd_firmware.folder import DriveFolder, describe, read_drive_spec
from csd_firmware.step import Firmware
from csd_io.folder import DiskFolder, Durability
from csd_link.splitting import parts_of, submit_in_parts
from csd_link.window import WindowLayout
from csd_spec import Command, Completion, DriveError, DriveSpec, Flush, Status
from ftl import IN_MEMORY, Medium, Nand

T = TypeVar("T")


class InProcessDrive:
    """A `Device` without setup. Kernels release the interpreter lock, so several drives run concurrently.

    Attributes:
        max_bytes: See `csd_spec.Drive`; the default of a drive process, so that simulated times are equal.
    """

    def __init__(
        self,
        spec: DriveSpec,
        path: Path | None = None,
        private: bool = False,
        methods: Methods = METHODS,
        durability: Durability = "process",
        threads: int = 1,
        medium: Medium = IN_MEMORY,
    ) -> None:
        """Open or create a drive.

        Args:
            spec: Description.
            path: Folder that holds the flash, locked until the device is closed; None keeps it in memory.
            private: Open the folder read-only; changes stay in memory.
            methods: Attention methods.
            durability: What a flush survives, see `csd_io.folder.DiskFolder`.
            threads: Kernel threads; results do not depend on them.
            medium: Storage of pages at run time (`csd_io.medium.Medium`).
        """
        self.max_bytes = WindowLayout().slot_bytes
        self._folder = None if path is None else DriveFolder(spec, path, private, durability)
        self.name = str(path or spec.name)
        try:
            files = self._folder.files if self._folder else None
            nand = Nand(spec.geometry, folder=files, private=private, medium=medium)
            self.firmware = Firmware(spec, nand, methods, threads)
            if self._folder:
                self._folder.count_power_on(self.firmware.ftl.counters)
        except BaseException:
            self._release_folder()
            raise
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix=spec.name)
        self._works, self._order = Lock(), Lock()
        self._newest: Future[Any] = self._worker.submit(int)  # most recently queued command

    @classmethod
    def reopen(cls, path: Path, private: bool = False, medium: Medium = IN_MEMORY) -> InProcessDrive:
        """Open the drive in a folder; raises ValueError if there is none."""
        return cls(read_drive_spec(path), path, private, medium=medium)

    def snapshot(self, path: Path) -> int:
        """Flush, and copy data and map to a new folder, which `reopen` opens in the same state.

        Returns:
            Number of sequences.

        Raises:
            DriveError: The flush failed.
            FileExistsError: The folder is not empty.
        """
        done = self.submit(Flush(), self.firmware.now_ns).result()
        if done.status is not Status.SUCCESS:
            raise DriveError(self.name, done.status, done.reason)
        if path.exists() and any(path.iterdir()):
            raise FileExistsError(f"{path} is not empty")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        target = DiskFolder(path, "host")
        self.firmware.ftl.nand.copy(target)
        target.close()
        describe(self.spec, path)
        return len(self.firmware.ftl.sequences)

    def format(self) -> tuple[int, int]:
        """Erase all sequences and blocks; keeps wear and counters. Returns number of sequences, simulated time (ns)."""
        return self._queue(self.firmware.format).result()

    @property
    def spec(self) -> DriveSpec:
        return self.firmware.spec

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of its methods."""
        return tuple(self.firmware.methods)

    def submit(self, command: Command, submit_ns: int) -> Future[Completion]:
        return submit_in_parts(self._submit, command, submit_ns, self.max_bytes)

    def _submit(self, command: Command, submit_ns: int) -> Future[Completion]:
        return self._queue(partial(self.firmware.step, command, submit_ns))

    def carry_out(self, command: Command, submit_ns: int) -> Completion:
        """Submit a command, and wait for its completion.

        The calling thread does the work if the queue is empty: waking another thread takes as long as a short command.
        Commands that a signal handler could interrupt are queued, and so are those of subclasses that override
        `submit`.
        """
        own = getattr(self.submit, "__func__", None) is not InProcessDrive.submit
        if own or not self._newest.done() or _has_handlers() or len(parts_of(command, self.max_bytes)) > 1:
            return self.submit(command, submit_ns).result()
        with self._works:
            return _uninterrupted(lambda: self.firmware.step(command, submit_ns))

    def _queue(self, act: Callable[[], T]) -> Future[T]:
        def run() -> T:
            with self._works:
                return act()

        with self._order:
            queued = self._worker.submit(run)
            self._newest = queued
        return queued

    def close(self) -> None:
        self._newest = Future()  # never done: later commands go to the queue, which rejects them
        self._worker.shutdown()
        with self._works:
            self.firmware.ftl.close()
            self._release_folder()

    def _release_folder(self) -> None:
        if self._folder:
            self._folder.close()


def _has_handlers() -> bool:
    """Whether a signal other than SIGINT has a Python handler, which would run in this thread."""
    if current_thread() is not main_thread():
        return False
    return any(map(callable, map(_handler_of, _OTHERS)))


_OTHERS = sorted(map(int, signal.valid_signals() - {signal.SIGINT, signal.SIGKILL, signal.SIGSTOP}))
# The C function behind signal.getsignal does not create an enum per result: 3 us for all signals instead of 26
_handler_of: Callable[[int], Any] = import_module("_signal").getsignal


def _uninterrupted(act: Callable[[], T]) -> T:
    """Delay SIGINT until `act` returns: a command is carried out completely or not at all."""
    before = signal.getsignal(signal.SIGINT) if current_thread() is main_thread() else None
    if not callable(before):
        return act()
    caught: list[Any] = []
    signal.signal(signal.SIGINT, lambda *what: caught.append(what))
    try:
        return act()
    finally:
        signal.signal(signal.SIGINT, before)
        if caught:
            before(*caught[0])
