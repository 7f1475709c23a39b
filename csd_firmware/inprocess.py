"""A drive in this process: a queue and one thread, as a controller has one."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from csd_firmware.step import Firmware
from csd_spec import Command, Completion, DriveSpec


class InProcessDevice:
    """The `Device` that needs no set-up. Kernels release the interpreter lock, so drives work side by side."""

    def __init__(self, spec: DriveSpec) -> None:
        self.firmware = Firmware(spec)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix=spec.name)

    @property
    def spec(self) -> DriveSpec:
        return self.firmware.spec

    def submit(self, command: Command, submit_ns: int) -> Future[Completion]:
        return self._worker.submit(self.firmware.step, command, submit_ns)

    def close(self) -> None:
        self._worker.shutdown()
