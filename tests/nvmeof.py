"""An NVMe/TCP target over blocks in memory, and raw connections to it, for tests."""

import socket
from contextlib import contextmanager

from csd_link.nvmeof.commands import Admin, Cqe, Fabrics, Sqe
from csd_link.nvmeof.controllers import ConnectData
from csd_link.nvmeof.identify import Limits
from csd_link.nvmeof.nvm import NvmNamespace
from csd_link.nvmeof.pdu import COMMON, FROM_CONTROLLER, Digests, IcReq, PduType, pack, pack_ic
from csd_link.nvmeof.stream import PduStream
from csd_link.nvmeof.subsystem import Record, Smart, Subsystem
from csd_link.nvmeof.target import Target

NQN = "nqn.2026-11.dev.vcsd:test"
HOST = "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-0000-0000-000000000001"
PATIENCE_S = 30.0  # a guard: no test waits this long


class MemoryBlocks:
    """Blocks in memory."""

    size_bytes, page_bytes, used_bytes = 16 << 20, 8192, 12288

    def __init__(self):
        self.memory, self.flushes = bytearray(self.size_bytes), 0

    def read(self, offset, size):
        return bytes(self.memory[offset : offset + size])

    def write(self, offset, data):
        self.memory[offset : offset + len(data)] = data

    def discard(self, offset, size):
        self.memory[offset : offset + size] = bytes(size)

    def flush(self):
        self.flushes += 1


def subsystem_of(blocks, **fields):
    """A subsystem with one namespace of blocks."""
    values = {"smart": Smart, "discovers": (Record(NQN, 4420), Record(f"{NQN}2", 4421))}
    values |= {"nqn": NQN, "serial": "test", "model": "vcsd test", "firmware": "1", "capacity_bytes": 1 << 30}
    return Subsystem(**values | {"namespaces": {1: NvmNamespace(blocks, bytes(range(16)))}} | fields)


@contextmanager
def target_of(subsystem, limits=Limits()):
    """A target on a free port of this machine."""
    target = Target(subsystem, "127.0.0.1", 0, limits)
    target.start()
    try:
        yield target
    finally:
        target.stop()


class RawHost:
    """A host that sends what it is told to."""

    def __init__(self, target):
        line = socket.create_connection(("127.0.0.1", target.port))
        line.settimeout(None)
        self.stream = PduStream(line, FROM_CONTROLLER, PATIENCE_S)
        self.stream.max_data_bytes = 1 << 26

    def initialize(self, digests=Digests()):
        self.send(pack_ic(IcReq(digests=digests)))
        _, answer = self.stream.receive()
        self.stream.digests = digests
        return answer

    def send(self, *parts):
        self.stream.send(list(parts))

    def command(self, sqe, data=b"", **options):
        """Send a capsule; returns the completion."""
        self.capsule(sqe, data, **options)
        return self.completion()

    def capsule(self, sqe, data=b"", sgl_type=1, sgl_bytes=None):
        size = len(data) if sgl_bytes is None else sgl_bytes
        sqe = sqe._replace(sgl_bytes=size, sgl_type=sgl_type)
        self.send(*pack(PduType.CAPSULE_CMD, sqe.pack(), [data] if data else [], self.stream.digests))

    def completion(self):
        """The next completion; data before it is read and dropped."""
        while True:
            head, pdu = self.stream.receive()
            if head.kind is PduType.CAPSULE_RESP:
                return Cqe.parse(pdu)
            self.stream.read(memoryview(bytearray(head.data_bytes)))

    def connect(self, queue=0, cntlid=0xFFFF, subnqn=NQN, entries=32, host=HOST, **more):
        data = ConnectData(bytes(16), cntlid, subnqn, host).pack()
        fields = {"nsid": Fabrics.CONNECT, "cdw10": queue << 16, "cdw11": entries - 1} | more
        return self.command(Sqe(Admin.FABRICS, **fields), data)

    def enable(self, value=1):
        return self.command(Sqe(Admin.FABRICS, nsid=Fabrics.PROPERTY_SET, cdw11=0x14, cdw12=value))

    def ended(self):
        """The termination request that the controller sends, or None, once it has closed the connection."""
        found = None
        try:
            while True:
                head, pdu = self.stream.receive()
                if head.kind is PduType.C2H_TERM:
                    found = pdu
                else:
                    self.stream.read(memoryview(bytearray(head.data_bytes)))
        except ConnectionError:
            return found

    def close(self):
        self.stream.close()


@contextmanager
def raw(target):
    """A raw connection for the time of a block."""
    host = RawHost(target)
    try:
        yield host
    finally:
        host.close()


@contextmanager
def raw_queues(target, **options):
    """An admin queue that is enabled and an I/O queue, raw."""
    with raw(target) as admin, raw(target) as io:
        admin.initialize()
        cntlid = admin.connect(**options).result & 0xFFFF
        admin.enable()
        io.initialize()
        assert io.connect(queue=1, cntlid=cntlid, **options).status == 0
        yield admin, io


def head_of(kind, flags=0, header=24, offset=0, total=24):
    """A common header as bytes, whatever it says."""
    return COMMON.pack(kind, flags, header, offset, total)
