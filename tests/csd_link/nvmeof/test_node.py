"""Drives attached through nodes of Linux's NVMe driver: commands run once and in order, while paths are lost and come
back.

partner of: csd_link/nvmeof/node.py, csd_link/transports/nvme_node.py
"""

import random
from pathlib import Path

import numpy as np
import pytest

from csd_io.passthrough import VendorCommand
from csd_link.driveset import DriveSetConfig
from csd_link.host_end import DriveLostError
from csd_link.nvmeof import node as node_module
from csd_link.nvmeof.commands import DO_NOT_RETRY, RETRIED, Code, CommandError, Sqe
from csd_link.nvmeof.node import NodeDrive
from csd_link.nvmeof.sequences import FIELDS_BYTES, LOST_SESSION, SequenceNamespace
from csd_link.transports import transport_of
from csd_link.window import Identity, WindowLayout
from csd_spec import Completion, KvAppend, KvFree, Status
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH

NODE = Path("/dev/ng7n3")
HOST_PATH_ERROR, HOST_ABORTED = 0x370, 0x371
LINE_BYTES = 1 << 17


class Kernel:
    """Linux's driver before a namespace. faults: statuses of the next commands, and whether they are executed."""

    max_bytes, how = LINE_BYTES, "test"

    def __init__(self, namespace):
        self.namespace, self.faults, self.begun, self.is_closed = namespace, [], [], False

    def begin(self, commands: list[VendorCommand]):
        assert not self.begun
        self.begun = [self._carry_out(command) for command in commands]

    def _carry_out(self, command):
        fault, is_executed = self.faults.pop() if self.faults else (0, True)
        if not is_executed:
            return fault
        dwords = dict(zip(("cdw10", "cdw11", "cdw12", "cdw13", "cdw14", "cdw15"), command.dwords, strict=False))
        sqe = Sqe(command.opcode, **dwords)
        assert self.namespace.data_bytes(sqe) == len(command.buffer)
        to_drive = bytes(command.buffer) if command.opcode & 3 == 1 else b""
        try:
            data = b"".join(self.namespace.execute(sqe, to_drive, "host").data)
        except CommandError as error:
            return fault or error.status | DO_NOT_RETRY * (error.status not in RETRIED)
        command.buffer[: len(data)] = data
        return fault

    def wait(self):
        ended, self.begun = self.begun, []
        return ended

    def close(self):
        self.is_closed = True


class Drive:
    """A service that says how much it was given, and how often."""

    def __init__(self):
        self.seen = []

    def attach(self): ...

    def refuse(self, command, status, reason, submit_ns):
        return Completion(status=status, reason=reason)

    def step(self, command, submit_ns, max_bytes):
        self.seen.append(submit_ns)
        size = command.seqs[0] if isinstance(command, KvFree) else len(command.k)
        return Completion(status=Status.SUCCESS, data=(np.full(size, submit_ns % 251, np.uint8),))


@pytest.fixture
def drive():
    return Drive()


@pytest.fixture
def kernel(drive):
    identity = Identity("csd0", INSTCSD_ZYNQ7045_8CH, WindowLayout(depth=4, slot_blocks=256))
    return Kernel(SequenceNamespace(lambda host: drive, identity, bytes(16)))


@pytest.fixture
def device(kernel):
    made = NodeDrive(NODE, lambda path: kernel)
    yield made
    made.close()
    assert kernel.is_closed


def test_node_size_matches_drive_and_kernel_limits(device):
    assert (device.name, device.spec, device.lost) == ("csd0", INSTCSD_ZYNQ7045_8CH, None)
    assert device.max_bytes == LINE_BYTES - FIELDS_BYTES


def test_commands_in_flight_complete_in_order(device, drive):
    futures = [device.submit(KvFree((100 + number,)), number) for number in range(5)]
    assert [len(future.result().data[0]) for future in futures] == [100, 101, 102, 103, 104]
    assert drive.seen == [0, 1, 2, 3, 4]


def test_large_append_and_completion_are_split(device, drive):
    rows = np.zeros((3000, 1, 64), np.float16)
    assert device.submit(KvAppend((1,), 0, np.array([3000]), rows, rows), 7).result().status is Status.SUCCESS
    assert len(drive.seen) > 5
    large = device.submit(KvFree((5 * LINE_BYTES // 2,)), 9).result()
    assert large.data[0].tobytes() == bytes([9]) * (5 * LINE_BYTES // 2)


def test_reconnected_path_loses_and_repeats_nothing(device, drive, kernel, monkeypatch):
    monkeypatch.setattr(node_module, "_DELAY_S", 0)
    draw = random.Random(1)
    for number in range(200):
        kernel.faults = [
            (draw.choice([HOST_PATH_ERROR, HOST_ABORTED, Code.INTERRUPTED]), draw.random() < 0.5)
            for _ in range(draw.randrange(6))
        ]
        done = device.submit(KvFree((20 + number,)), number).result()
        assert done.status is Status.SUCCESS and done.data[0].tolist() == [number % 251] * (20 + number)
    assert drive.seen == list(range(200))


def test_restarted_drive_and_dead_path_are_lost(device, drive, kernel, monkeypatch):
    monkeypatch.setattr(node_module, "RETRY_S", 0)
    kernel.faults = [(HOST_PATH_ERROR, False)] * 9
    done = device.submit(KvFree((20,)), 0).result()
    assert done.status is Status.PATH_LOST and "status 0x370" in str(device.lost) and not drive.seen
    assert device.submit(KvFree((20,)), 1).result().status is Status.PATH_LOST
    kernel.faults = []
    other = NodeDrive(NODE, lambda path: kernel)
    kernel.namespace._sessions.clear()
    assert other.submit(KvFree((20,)), 0).result().status is Status.PATH_LOST
    assert str(other.lost) == LOST_SESSION


def test_namespace_without_sequences_is_lost(kernel, tmp_path):
    kernel.faults = [(0x4001, False)]
    with pytest.raises(DriveLostError, match="not a namespace of sequences: NVMe status 0x4001"):
        NodeDrive(NODE, lambda path: kernel)
    (tmp_path / "file").touch()
    for path in (tmp_path / "none", tmp_path / "file", Path("/dev/null")):
        with pytest.raises(DriveLostError, match=f"no drive at {path}: "):
            NodeDrive(path)


@pytest.mark.parametrize("where", ["", "/dev/ng0n3,", "/dev/ng0n3,/dev/ng0n3"])
def test_nodes_that_do_not_match_drives_are_refused(where):
    with pytest.raises(ValueError, match="needs a device for each drive"):
        transport_of(DriveSetConfig(transport=f"nvme:{where}"))
    two = DriveSetConfig(count=2, transport="nvme:/dev/ng0n3")
    with pytest.raises(ValueError, match="1 devices for 2 drives"):
        transport_of(two).served(two)
