"""Hosts that trickle, stall, send false data and flood, while a good host on the same target completes all of its
commands.
"""

import random
import socket
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

from csd_link.nvmeof.commands import Sqe
from csd_link.nvmeof.host import NvmeHost
from csd_link.nvmeof.identify import Limits
from csd_link.nvmeof.nvm import NvmNamespace
from csd_link.nvmeof.pdu import COMMON, Data, Digests, Flag, IcReq, PduType, pack, pack_data, pack_ic
from csd_link.nvmeof.sequences import Op, SequenceNamespace
from csd_spec import KvFree
from tests.csd_link.nvmeof.test_sequences import IDENTITY, Counting, device_of
from tests.nvmeof import HOST, NQN, MemoryBlocks, head_of, raw, raw_queues, subsystem_of, target_of
from tests.served import until

WRITE, READ = 0x01, 0x02
COMMANDS = 60  # of the good host, of each kind
LIMITS = Limits(in_capsule_bytes=8192, in_flight_bytes=1 << 22, handshake_s=1.0, pdu_s=1.0)


@pytest.fixture
def target():
    """A target with blocks and sequences that tests leave without connections and without data in flight."""
    sequences = SequenceNamespace(lambda host: Counting(), IDENTITY, bytes(16), sessions=8)
    blocks = NvmNamespace(MemoryBlocks(), bytes(range(16)))
    with target_of(subsystem_of(MemoryBlocks(), namespaces={1: blocks, 3: sequences}), LIMITS) as target:
        yield target
        until(lambda: not target.connections)
        assert (len(target.controllers), target.controllers.in_flight_bytes) == (0, 0)


def trickle(target, stop):
    """Sends a byte at a time, of the first PDU, and of a command."""
    with socket.create_connection(("127.0.0.1", target.port)) as line, raw(target) as host:
        host.initialize()
        slow = host.stream.line
        for byte in pack_ic(IcReq()):
            line.send(bytes([byte]))
            slow.send(b"\x04" if byte == 0x80 else b"\0")
            if stop.wait(0.02):
                return


def stall(target, stop):
    """Begins PDUs that it never finishes, and asks for data of commands that it never sends."""
    with raw(target) as half, raw_queues(target) as (_, io):
        half.send(head_of(PduType.IC_REQ, header=128, total=128))
        io.capsule(Sqe(WRITE, nsid=1, cdw12=255), sgl_type=0x5A, sgl_bytes=1 << 20)
        io.stream.receive()
        stop.wait(0.5)


def lie(target, stop):
    """Sends lengths that are not true."""
    lies = [
        head_of(PduType.CAPSULE_CMD, 0, 72, 72, (1 << 32) - 1),
        head_of(PduType.CAPSULE_CMD, 0, 72, 255, 72 + 8192),
        head_of(PduType.H2C_DATA, 0, 24, 24, 24 + 4096) + bytes(4112),
        COMMON.pack(PduType.CAPSULE_CMD, 0, 255, 0, 4),
    ]
    with raw_queues(target) as (_, io):
        io.capsule(Sqe(WRITE, nsid=1, cdw12=2), sgl_type=0x5A, sgl_bytes=12288)
        lying = pack(PduType.H2C_DATA, pack_data(Data(0, 1, 0, 1 << 31)), [bytes(4096)], Digests(), Flag.LAST)
        io.send(random.choice([b"".join(lying), *lies]))
        io.ended()


def flood(target, stop):
    """Sends commands without end and reads no answer."""
    with raw_queues(target) as (_, io):
        io.stream.line.settimeout(0.1)
        capsule = b"".join(pack(PduType.CAPSULE_CMD, Sqe(READ, nsid=1, cdw12=1, sgl_bytes=8192).pack(), [], Digests()))
        while not stop.is_set():
            io.stream.line.sendall(capsule * 100)


def connect(target, stop):
    """Takes all connections that there are."""
    lines = []
    with suppress(OSError):
        for _ in range(2 * LIMITS.connections):
            lines.append(socket.create_connection(("127.0.0.1", target.port)))
    stop.wait(0.2)
    for line in lines:
        line.close()


def attach(target, stop):
    """Begins sessions without end, each with an answer that it never reads."""
    with raw_queues(target, host=f"{HOST[:-1]}2") as (_, io):
        while not stop.is_set():
            io.command(Sqe(Op.ATTACH, nsid=3, cdw10=1 << 14), sgl_type=0x5A, sgl_bytes=1 << 14)


@pytest.mark.parametrize("behave", [trickle, stall, lie, flood, connect, attach])
def test_correct_host_completes_all_beside_hostile_ones(target, behave):
    def misbehave():
        while not stop.is_set():
            with suppress(OSError):  # it was dropped
                behave(target, stop)

    stop, completed = threading.Event(), 0
    host, device = NvmeHost("127.0.0.1", target.port, NQN), device_of(target.port)
    threads = [threading.Thread(target=misbehave) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for number in range(COMMANDS):
            data = np.full(8192, number % 256, np.uint8).tobytes()
            host.io.command(Sqe(WRITE, nsid=1, cdw10=100, cdw12=1), [data])
            assert host.io.command(Sqe(READ, nsid=1, cdw10=100, cdw12=1), (), 8192).data == data
            assert device.submit(KvFree((number,)), number).result().data[0].size == number
            completed += 3
            stop.wait(0.01)  # others have time to misbehave
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert completed == 3 * COMMANDS
    device.close()
    host.close()


def test_silent_transfer_ends_and_others_go_on(target):
    """Nothing arrives after the R2T: only a timer ends it. Another host has memory all the time."""
    with raw_queues(target, host=f"{HOST[:-1]}2") as (_, io), raw_queues(target) as (_, honest):
        io.capsule(Sqe(WRITE, nsid=1, cdw12=1023), sgl_type=0x5A, sgl_bytes=1 << 22)  # all that there is
        head, _ = io.stream.receive()
        assert head.kind is PduType.R2T
        honest.capsule(Sqe(WRITE, nsid=1, cdw12=3), sgl_type=0x5A, sgl_bytes=16384)
        head, transfer = honest.stream.receive()
        assert head.kind is PduType.R2T
        data = Data(transfer.cid, transfer.tag, 0, 16384)
        honest.send(*pack(PduType.H2C_DATA, pack_data(data), [bytes(16384)], Digests(), Flag.LAST))
        assert honest.completion().status == 0
        assert io.ended() is None  # otherwise it would wait for ever


def test_trickled_handshake_has_the_deadline_of_a_silent_one(target):
    with raw(target) as host:
        sent = 0
        with suppress(OSError):
            for byte in pack_ic(IcReq())[:-1]:
                host.stream.line.send(bytes([byte]))
                sent += 1
                time.sleep(0.05)  # all of them would take six times LIMITS.handshake_s
        assert sent < 127 and host.ended() is None
