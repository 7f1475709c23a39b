"""An NVMe/TCP target over blocks in memory, and raw connections to it, for tests."""

import re
import socket
import struct
from contextlib import contextmanager
from pathlib import Path

from csd_link.nvmeof.commands import Admin, Code, CommandError, Cqe, Fabrics, Sqe
from csd_link.nvmeof.controllers import ConnectData
from csd_link.nvmeof.identify import Limits
from csd_link.nvmeof.key_value import KeyValue
from csd_link.nvmeof.nvm import NvmNamespace
from csd_link.nvmeof.pdu import COMMON, FROM_CONTROLLER, Digests, IcReq, PduType, pack, pack_ic
from csd_link.nvmeof.stream import PduStream
from csd_link.nvmeof.subsystem import DiscoveryRecord, Smart, Subsystem
from csd_link.nvmeof.target import Target

NQN = "nqn.2026-11.dev.vcsd:test"
HOST = "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-0000-0000-000000000001"
DOCS = Path(__file__).parents[1] / "docs" / "nvme.md"
PATIENCE_S = 400.0  # a guard: no test waits this long, however loaded the machine is


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


class MemoryValues:
    """Values of one tenant in memory."""

    size_bytes, granularity_bytes, max_value_bytes, max_keys = 1 << 30, 8192, 1 << 20, 100

    def __init__(self):
        self.memory, self.flushes = {}, 0

    @property
    def used_bytes(self):
        return sum(map(len, self.memory.values()))

    def _check(self, key):
        if key not in self.memory:
            raise CommandError(Code.UNKNOWN_KEY)

    def store(self, key, value, must_exist, must_be_new):
        if must_exist:
            self._check(key)
        if must_be_new and key in self.memory:
            raise CommandError(Code.KEY_EXISTS)
        self.memory[key] = bytes(value)

    def retrieve(self, key, size_bytes):
        self._check(key)
        return self.memory[key][:size_bytes], len(self.memory[key])

    def exist(self, key):
        self._check(key)
        return len(self.memory[key])

    def delete(self, key):
        self._check(key)
        del self.memory[key]

    def keys(self, first, count):
        return [key for key in sorted(self.memory) if key >= first][:count]

    def flush(self):
        self.flushes += 1


class KeyValueHost:
    """Key Value commands of our initiator to a namespace."""

    def __init__(self, host, nsid=2):
        self.host, self.nsid = host, nsid

    def _command(self, opcode, key, length=None, option=0, data=(), **more):
        length = len(key) if length is None else length
        words = dict(zip(("cdw2", "cdw3", "cdw14", "cdw15"), struct.unpack("<4I", key.ljust(16, b"\0")), strict=True))
        sqe = Sqe(opcode, nsid=self.nsid, cdw11=length | option << 8, **words | more)
        return self.host.io.command(sqe, data, 0 if data else more.get("cdw10", 0))

    def store(self, key, value, option=0, **more):
        self._command(KeyValue.STORE, key, option=option, data=[value] if value else (), cdw10=len(value), **more)

    def retrieve(self, key, size=1 << 20, **more):
        """Data of a Retrieve command, and the size of the value."""
        done = self._command(KeyValue.RETRIEVE, key, cdw10=size, **more)
        return bytes(done.data), done.result

    def exist(self, key, **more):
        return self._command(KeyValue.EXIST, key, **more).result

    def delete(self, key, **more):
        self._command(KeyValue.DELETE, key, **more)

    def listed(self, first=b"", size=4096, **more):
        """The keys of a list, which is as it has to be."""
        data = bytes(self._command(KeyValue.LIST, first, cdw10=size, **more).data)
        (count,), at, result = struct.unpack_from("<I", data), 4, []
        for _ in range(count):
            (length,) = struct.unpack_from("<H", data, at)
            result.append(data[at + 2 : at + 2 + length])
            at += -(-(2 + length) // 4) * 4
        assert at == len(data) <= size
        return result

    def flush(self):
        self.host.io.command(Sqe(KeyValue.FLUSH, nsid=self.nsid))


def docs_table(title):
    """Numbers of a table in docs/nvme.md, and whether each is supported."""
    text = DOCS.read_text().partition(f"### {title}\n")[2].partition("\n### ")[0]
    return {
        int(number, 16): yes == "yes" for number, yes in re.findall(r"^\| ([0-9A-F]{2})h [^|]*\| (yes|no) ", text, re.M)
    }


def subsystem_of(blocks, **fields):
    """A subsystem with one namespace of blocks."""
    values = {"smart": Smart, "discovers": (DiscoveryRecord(NQN, 4420), DiscoveryRecord(f"{NQN}2", 4421))}
    values |= {"nqn": NQN, "serial": "test", "model": "vcsd test", "firmware": "1", "capacity_bytes": 1 << 30}
    return Subsystem(**values | {"namespaces": {1: NvmNamespace(blocks, bytes(range(16)))}} | fields)


@contextmanager
def target_of(subsystem, limits=Limits(), port=0):
    """A target on a port of this machine; 0: a free one."""
    target = Target(subsystem, "127.0.0.1", port, limits)
    target.start()
    try:
        yield target
    finally:
        target.stop()


class RawHost:
    """A host that sends exactly the requested bytes."""

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
        result = None
        try:
            while True:
                head, pdu = self.stream.receive()
                if head.kind is PduType.C2H_TERM:
                    result = pdu
                else:
                    self.stream.read(memoryview(bytearray(head.data_bytes)))
        except ConnectionError:
            return result

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
    """A common header as bytes, valid or not."""
    return COMMON.pack(kind, flags, header, offset, total)
