"""A drive in this process that a test can fail."""

from concurrent.futures import Future

from csd_firmware import InProcessDrive
from csd_spec import Command, Completion, DriveSpec, Status


class FailingDevice:
    """A drive whose commands fail from a given moment on.

    Attributes:
        left: Number of commands until then.
        status: Status of failing commands.
        applies: Whether it still executes them, so that only the response fails.
        faults: Number of failing commands; later ones are executed.
    """

    def __init__(self, spec: DriveSpec, name: str, left: int = 1 << 30, status: Status = Status.PATH_LOST) -> None:
        self.device, self.name, self.spec = InProcessDrive(spec), name, spec
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
