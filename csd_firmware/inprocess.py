"""A drive in this process: a queue and one thread, as a controller has one."""

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
from csd_firmware.folder import DriveFolder, describe, described
from csd_firmware.step import Firmware
from csd_io.folder import DiskFolder, Durability
from csd_link.cutting import parts_of, submit_in_parts
from csd_link.window import WindowLayout
from csd_spec import Command, Completion, DeviceError, DriveSpec, Flush, Status
from ftl import IN_MEMORY, Medium, Nand

T = TypeVar("T")


class InProcessDevice:
    """The `Device` that needs no set-up. Kernels release the interpreter lock, so drives work side by side.

    path: a folder that holds the flash, and what a flush acknowledged, beyond this process; it is this device's alone
    until it is closed. private: the folder is only read, changes stay in memory. methods: what its firmware knows of
    attention. durability: what a flush outlives, see `csd_io.folder.DiskFolder`. threads: of its kernels; no bit
    depends on them. medium: where pages are while the drive has power (`csd_io.medium.Medium`): in memory, or in
    the folder's files. max_bytes: see `csd_spec.Device`; what a drive of its own process takes by default, so that
    modelled times are the same.
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
        self.max_bytes = WindowLayout().slot_bytes
        self._folder = None if path is None else DriveFolder(spec, path, private, durability)
        self.name = str(path or spec.name)
        try:
            files = self._folder.files if self._folder else None
            nand = Nand(spec.geometry, folder=files, private=private, medium=medium)
            self.firmware = Firmware(spec, nand, methods, threads)
        except BaseException:
            self._let_go()
            raise
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix=spec.name)
        self._works, self._order = Lock(), Lock()
        self._newest: Future[Any] = self._worker.submit(int)  # of what was queued

    @classmethod
    def reopen(cls, path: Path, private: bool = False, medium: Medium = IN_MEMORY) -> InProcessDevice:
        """The drive that a folder holds; raises ValueError where it holds none."""
        return cls(described(path), path, private, medium=medium)

    def snapshot(self, path: Path) -> int:
        """Flush, and write data and map to a new folder, from which `reopen` makes a drive in the same state.

        Returns how many sequences that are. Raises DeviceError where the flush fails, FileExistsError where the folder
        holds something.
        """
        done = self.submit(Flush(), self.firmware.free_ns).result()
        if done.status is not Status.SUCCESS:
            raise DeviceError(self.name, done.status, done.reason)
        if path.exists() and any(path.iterdir()):
            raise FileExistsError(f"{path} is not empty")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        target = DiskFolder(path, "host")
        self.firmware.ftl.nand.copy(target)
        target.close()
        describe(self.spec, path)
        return len(self.firmware.ftl.sequences)

    def format(self) -> tuple[int, int]:
        """Erase all sequences and blocks; wear and counters stay. How many sequences there were, modelled ns."""
        return self._queue(self.firmware.format).result()

    @property
    def spec(self) -> DriveSpec:
        return self.firmware.spec

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods that it knows."""
        return tuple(self.firmware.methods)

    def submit(self, command: Command, submit_ns: int) -> Future[Completion]:
        return submit_in_parts(self._submit, command, submit_ns, self.max_bytes)

    def _submit(self, command: Command, submit_ns: int) -> Future[Completion]:
        return self._queue(partial(self.firmware.step, command, submit_ns))

    def carry_out(self, command: Command, submit_ns: int) -> Completion:
        """`submit`, and its result.

        The calling thread does the work if nothing is queued before: to wake another one takes as long as a short
        command. A command that a signal's handler could interrupt goes to the queue, and so does one of a device that
        overrides `submit`.
        """
        own = getattr(self.submit, "__func__", None) is not InProcessDevice.submit
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
        self._newest = Future()  # never done: what comes now asks the queue, which takes no more
        self._worker.shutdown()
        with self._works:
            self.firmware.ftl.close()
            self._let_go()

    def _let_go(self) -> None:
        if self._folder:
            self._folder.close()


def _has_handlers() -> bool:
    """Whether a signal other than Ctrl-C's has a Python handler, which would run in this thread."""
    if current_thread() is not main_thread():
        return False
    return any(map(callable, map(_handler_of, _OTHERS)))


_OTHERS = sorted(map(int, signal.valid_signals() - {signal.SIGINT, signal.SIGKILL, signal.SIGSTOP}))
# The function behind signal.getsignal makes no enum of each result: 3 us for all signals, not 26
_handler_of: Callable[[int], Any] = import_module("_signal").getsignal


def _uninterrupted(act: Callable[[], T]) -> T:
    """Delay Ctrl-C until `act` has ended: a command is carried out as a whole, or not at all."""
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
