"""A drive in this process that a test can lose."""

from concurrent.futures import Future

from csd_firmware import InProcessDevice
from csd_spec import Command, Completion, DriveSpec, Status


class MortalDevice:
    """A drive whose commands end with a fault from a moment on.

    Attributes:
        left: Commands until then.
        status: Of commands from then on.
        applies: Whether it still executes them: a fault in the answer alone.
        faults: Commands that end so; later ones are executed.
    """

    def __init__(self, spec: DriveSpec, name: str, left: int = 1 << 30, status: Status = Status.PATH_LOST) -> None:
        self.device, self.name, self.spec = InProcessDevice(spec), name, spec
        self.max_bytes = self.device.max_bytes
        self.left, self.status, self.applies, self.faults = left, status, False, 1 << 30

    def submit(self, command: Command, submit_ns: int) -> Future[Completion]:
        self.left -= 1
        if self.left >= 0 or not self.faults:
            return self.device.submit(command, submit_ns)
        self.faults -= 1
        if self.applies:
            self.device.submit(command, submit_ns).result()
        future = Future[Completion]()
        future.set_result(Completion(status=self.status, reason="it is gone", submit_ns=submit_ns, finish_ns=submit_ns))
        return future

    def close(self) -> None:
        self.device.close()
