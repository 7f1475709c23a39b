"""A target with well-behaved hosts, and with hosts that send false data, stall and flood.

partner of: csd_link/nvmeof/target.py, csd_link/nvmeof/connection.py, csd_link/nvmeof/stream.py,
csd_link/nvmeof/host_queue.py, csd_link/nvmeof/host.py
"""

import random
import threading
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csd_link.nvmeof.commands import DISCOVERY_NQN, DO_NOT_RETRY, Code, Sqe
from csd_link.nvmeof.connection import MAX_H2C_BYTES
from csd_link.nvmeof.controllers import ConnectData
from csd_link.nvmeof.host import NvmeHost, discover
from csd_link.nvmeof.host_queue import HostQueue, StatusError
from csd_link.nvmeof.identify import Limits
from csd_link.nvmeof.pdu import (
    COMMON,
    R2T,
    Data,
    Digests,
    Fes,
    Flag,
    IcReq,
    PduType,
    pack,
    pack_data,
    pack_ic,
)
from csd_link.nvmeof.subsystem import DiscoveryRecord
from csd_link.nvmeof.target import is_loopback
from tests.nvmeof import HOST, NQN, MemoryBlocks, head_of, raw, raw_queues, subsystem_of, target_of
from tests.properties import examples
from tests.served import until

WRITE, READ = 0x01, 0x02
SMALL = Limits(in_capsule_bytes=8192, transfer_bytes=1 << 20, in_flight_bytes=1 << 20)


@pytest.fixture
def blocks():
    return MemoryBlocks()


@pytest.fixture
def target(blocks):
    """A target that tests leave without connections and without data in flight."""
    with target_of(subsystem_of(blocks), SMALL) as target:
        yield target
        until(lambda: not target.connections)
        assert (len(target.controllers), target.controllers.in_flight_bytes) == (0, 0)


def works(target):
    """Whether a host that behaves is served."""
    host = NvmeHost("127.0.0.1", target.port, NQN)
    data = random.randbytes(4096)
    host.io.command(Sqe(WRITE, nsid=1, cdw10=9), [data])
    content = host.io.command(Sqe(READ, nsid=1, cdw10=9), (), 4096).data
    host.close()
    return content == data


def write(lba, count):
    return Sqe(WRITE, nsid=1, cdw10=lba, cdw12=count - 1)


@pytest.mark.parametrize("digests", [Digests(), Digests(True), Digests(False, True), Digests(True, True)])
@pytest.mark.parametrize("count", [1, 2, 3, 256])
def test_blocks_round_trip_in_capsules_and_by_r2t(target, digests, count):
    host = NvmeHost("127.0.0.1", target.port, NQN, digests=digests)
    data = random.randbytes(4096 * count)
    host.io.command(write(5, count), [data[:1000], data[1000:]])
    assert host.io.command(Sqe(READ, nsid=1, cdw10=5, cdw12=count - 1), (), len(data)).data == data
    host.close()


def test_commands_in_flight_on_queues_of_several_hosts(target, blocks):
    def work(number):
        host = NvmeHost("127.0.0.1", target.port, NQN)
        data = {lba: bytes([number, lba]) * (4 << 10) for lba in range(0, 32, 2)}
        for lba, content in data.items():
            host.io.begin(write(100 * number + lba, 2), [content])
        for _ in data:
            assert host.io.next().status == 0
        cids = {host.io.begin(Sqe(READ, nsid=1, cdw10=100 * number + lba, cdw12=1), (), 8192): lba for lba in data}
        for _ in data:
            reply = host.io.next()
            right.append(reply.data == data[cids[reply.cid]])
        host.close()

    right = []
    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 96


def test_a_discovery_controller_lists_the_drives_of_the_server(target):
    assert discover("127.0.0.1", target.port) == [DiscoveryRecord(NQN, 4420), DiscoveryRecord(f"{NQN}2", 4421)]
    with raw(target) as host:
        host.initialize()
        cntlid = host.connect(subnqn=DISCOVERY_NQN).result
        host.enable()
        assert host.command(Sqe(0x06, cdw10=2, sgl_bytes=4096)).status == Code.INVALID_FIELD | DO_NOT_RETRY
        with raw(target) as io:
            io.initialize()
            assert io.connect(queue=1, cntlid=cntlid, subnqn=DISCOVERY_NQN).status & 0x7FF == Code.CONNECT_PARAMETERS


@pytest.mark.parametrize(
    ("options", "status", "result"),
    [
        ({"subnqn": f"{NQN}x"}, Code.CONNECT_PARAMETERS, 0x10000 | 256),
        ({"subnqn": ""}, Code.CONNECT_PARAMETERS, 0x10000 | 256),
        ({"host": ""}, Code.CONNECT_PARAMETERS, 0x10000 | 512),
        ({"cntlid": 1}, Code.CONNECT_PARAMETERS, 0x10000 | 16),
        ({"entries": 1}, Code.CONNECT_PARAMETERS, 44),
        ({"entries": 129}, Code.CONNECT_PARAMETERS, 44),
        ({"queue": 1, "cntlid": 9}, Code.CONNECT_PARAMETERS, 0x10000 | 16),
        ({"cdw10": 1}, Code.CONNECT_FORMAT, 0),
        ({"host": HOST[:-1] + "2"}, Code.INVALID_HOST, 0),
    ],
)
def test_invalid_connect_is_refused_with_field(target, options, status, result):
    target.controllers.subsystem.hosts = frozenset({HOST})
    with raw(target) as host:
        host.initialize()
        done = host.connect(**options)
        assert (done.status, done.result) == (status | DO_NOT_RETRY, result)
        assert host.connect().status == 0


def test_io_queue_refused_for_other_host(target):
    with raw(target) as admin, raw(target) as io:
        admin.initialize()
        cntlid = admin.connect().result
        io.initialize()
        assert io.connect(queue=1, cntlid=cntlid).status & 0x7FF == Code.SEQUENCE_ERROR, "it is not enabled"
        admin.enable()
        other = HOST[:-1] + "2"
        assert io.connect(queue=1, cntlid=cntlid, host=other).status & 0x7FF == Code.CONNECT_PARAMETERS
        assert io.connect(queue=9, cntlid=cntlid).status & 0x7FF == Code.CONNECT_PARAMETERS
        assert io.connect(queue=1, cntlid=cntlid).status == 0
        assert io.connect(queue=1, cntlid=cntlid).status & 0x7FF == Code.SEQUENCE_ERROR
        with raw(target) as again:
            again.initialize()
            assert again.connect(queue=1, cntlid=cntlid).status & 0x7FF == Code.CONNECT_PARAMETERS
        admin.close()
        assert io.ended() is None, "with the admin queue the others go"


def test_commands_before_connect_are_sequence_errors(target):
    with raw(target) as host:
        host.initialize()
        assert host.command(Sqe(0x06, cdw10=1)).status & 0x7FF == Code.SEQUENCE_ERROR
        host.connect()
        assert host.command(Sqe(0x06, cdw10=1)).status & 0x7FF == Code.SEQUENCE_ERROR
    with raw_queues(target) as (admin, io):
        admin.enable(0)
        assert io.command(Sqe(READ, nsid=1), sgl_type=0x5A, sgl_bytes=4096).status & 0x7FF == Code.SEQUENCE_ERROR


def test_capsules_may_be_larger_than_data_pdus(blocks):
    """The limit of a target for data in capsules holds, whatever the limit for data that it asks for."""
    with (
        target_of(subsystem_of(blocks), Limits(in_capsule_bytes=MAX_H2C_BYTES + 4096)) as target,
        raw_queues(target) as (_, io),
    ):
        content = random.randbytes(MAX_H2C_BYTES + 4096)
        assert io.command(write(0, len(content) // 4096), content).status == 0
        assert blocks.read(0, len(content)) == content


def test_mismatched_sgl_descriptors_are_refused(target):
    with raw_queues(target) as (_, io):
        for status, options in (
            (Code.SGL_LENGTH, {"data": bytes(4095)}),
            (Code.SGL_OFFSET, {"data": bytes(4096), "sgl_bytes": 8192}),
            (Code.SGL_TYPE, {"data": bytes(4096), "sgl_type": 0}),
        ):
            assert io.command(write(0, 1), **options).status == status | DO_NOT_RETRY
        assert io.command(Sqe(READ, nsid=1), sgl_type=0x5A, sgl_bytes=4095).status & 0x7FF == Code.SGL_LENGTH
        too_much = write(0, SMALL.transfer_bytes // 4096 + 1)
        assert io.command(too_much, sgl_type=0x5A, sgl_bytes=1 << 30).status & 0x7FF == Code.INVALID_FIELD
        assert io.command(write(0, 1), bytes(4096)).status == 0


def test_data_above_in_flight_limit_refused_retryable(target):
    with raw_queues(target) as (_, first), raw_queues(target) as (_, second):
        first.capsule(write(0, 256), sgl_type=0x5A, sgl_bytes=1 << 20)
        head, _ = first.stream.receive()
        assert head.kind is PduType.R2T
        assert second.command(write(0, 3), sgl_type=0x5A, sgl_bytes=12288).status == Code.INTERRUPTED
        big = Sqe(READ, nsid=1, cdw12=3)
        assert second.command(big, sgl_type=0x5A, sgl_bytes=16384).status == Code.INTERRUPTED, "data to the host too"
        first.close()
        until(lambda: target.controllers.in_flight_bytes == 0)
        second.capsule(write(0, 3), sgl_type=0x5A, sgl_bytes=12288)
        head, transfer = second.stream.receive()
        assert transfer.length == 12288


@pytest.mark.parametrize("wrong", [0, 1, 2, None])
def test_the_digest_of_each_data_pdu_counts(target, blocks, wrong):
    """Data arrives in three PDUs; if the digest of any is wrong, nothing is written."""
    digests, content = Digests(data=True), bytes(range(256)) * 48
    with raw(target) as admin, raw(target) as io:
        for queue in (admin, io):
            queue.initialize(digests)
        cntlid = admin.connect().result & 0xFFFF
        admin.enable()
        assert io.connect(queue=1, cntlid=cntlid).status == 0
        io.capsule(Sqe(WRITE, nsid=1, cdw12=2), sgl_type=0x5A, sgl_bytes=len(content))
        _, transfer = io.stream.receive()
        for number in range(3):
            part = content[4096 * number : 4096 * (number + 1)]
            data = Data(transfer.cid, transfer.tag, 4096 * number, 4096)
            *parts, digest = pack(PduType.H2C_DATA, pack_data(data), [part], digests, Flag.LAST * (number == 2))
            io.send(*parts, b"bad!" if number == wrong else digest)
        assert io.completion().status == (0 if wrong is None else Code.TRANSIENT)
        assert blocks.read(0, len(content)) == (content if wrong is None else bytes(len(content)))


def test_wrong_data_digest_fails_only_its_command(target, blocks):
    with raw_queues(target) as (_, io):
        io.close()
    digests = Digests(data=True)
    with raw(target) as admin:
        admin.initialize(digests)
        assert admin.connect().status == 0
        data = bytes(1024)
        sqe = Sqe(0x7F, nsid=1, sgl_bytes=1024, sgl_type=1)
        *parts, _ = pack(PduType.CAPSULE_CMD, sqe.pack(), [data], digests)
        admin.send(*parts, b"bad!")
        assert admin.completion().status == Code.TRANSIENT
        assert admin.enable().status == 0


@pytest.mark.parametrize(
    ("parts", "fes"),
    [
        ([pack_ic(IcReq(version=1))], Fes.UNSUPPORTED_PARAMETER),
        ([pack_ic(IcReq(align=32))], Fes.INVALID_HEADER_FIELD),
        ([head_of(PduType.CAPSULE_CMD, header=72, total=72)], Fes.SEQUENCE_ERROR),
        ([b"GET / HTTP/1.1\r\n\r\n"], Fes.INVALID_HEADER_FIELD),
        ([pack_ic(IcReq()), pack_ic(IcReq())], Fes.SEQUENCE_ERROR),
        ([pack_ic(IcReq()), head_of(PduType.C2H_DATA)], Fes.SEQUENCE_ERROR),
        ([pack_ic(IcReq()), *pack(PduType.H2C_DATA, pack_data(Data(0, 0, 0, 4)), [b"1234"], Digests())], 1),
        ([pack_ic(IcReq()), head_of(PduType.CAPSULE_CMD, 0, 72, 72, 72 + 8193)], Fes.DATA_LIMIT_EXCEEDED),
    ],
)
def test_protocol_error_is_reported_and_connection_closed(target, parts, fes):
    with raw(target) as host:
        host.send(*parts)
        assert host.ended().fes == fes
    assert works(target)


@pytest.mark.parametrize(
    ("data", "flags", "length", "fes"),
    [
        (Data(0, 9, 0, 4096), Flag.LAST, 4096, Fes.INVALID_HEADER_FIELD),
        (Data(1, 1, 0, 4096), Flag.LAST, 4096, Fes.INVALID_HEADER_FIELD),
        (Data(0, 1, 4096, 4096), 0, 4096, Fes.DATA_OUT_OF_RANGE),
        (Data(0, 1, 0, 16384), Flag.LAST, 16384, Fes.DATA_OUT_OF_RANGE),
        (Data(0, 1, 0, 8192), 0, 4096, Fes.INVALID_HEADER_FIELD),
        (Data(0, 1, 0, 4096), Flag.LAST, 4096, Fes.INVALID_HEADER_FIELD),
        (Data(0, 1, 0, 12288), 0, 12288, Fes.INVALID_HEADER_FIELD),
        (Data(0, 1, 0, 0), 0, 0, Fes.DATA_OUT_OF_RANGE),
    ],
)
def test_inconsistent_h2c_data_changes_no_block(target, blocks, data, flags, length, fes):
    with raw_queues(target) as (_, io):
        io.capsule(write(0, 3), sgl_type=0x5A, sgl_bytes=12288)
        assert io.stream.receive()[1] == R2T(0, 1, 0, 12288)
        io.send(*pack(PduType.H2C_DATA, pack_data(data), [b"x" * length] if length else [], Digests(), flags))
        assert io.ended().fes == fes
    assert not any(blocks.memory)


def test_stalled_host_is_dropped_and_delays_no_other(blocks):
    limits = replace(SMALL, handshake_s=0.2, pdu_s=0.2)
    with target_of(subsystem_of(blocks), limits) as target:
        with raw(target) as silent, raw(target) as slow, raw(target) as no_connect:
            slow.send(pack_ic(IcReq())[:100])
            no_connect.initialize()
            assert works(target)
            assert [host.ended() for host in (silent, slow, no_connect)] == [None] * 3
        with raw_queues(target) as (_, io):
            io.capsule(write(0, 3), sgl_type=0x5A, sgl_bytes=12288)
            assert io.stream.receive()[0].kind is PduType.R2T
            # it sends no data; other commands do not keep its buffer alive
            assert works(target)
            io.send(*pack(PduType.H2C_DATA, pack_data(Data(0, 1, 0, 12288)), [bytes(12288)], Digests(), 4)[:1])
            assert io.ended() is None
        until(lambda: not target.connections)
        assert target.controllers.in_flight_bytes == 0


def test_host_that_never_reads_is_dropped(blocks):
    limits = replace(SMALL, pdu_s=0.2)
    with target_of(subsystem_of(blocks), limits) as target, raw_queues(target) as (_, io):
        for _ in range(100):
            io.capsule(Sqe(READ, nsid=1, cdw12=255), sgl_type=0x5A, sgl_bytes=1 << 20)
        until(lambda: target.connections == 1)
        assert works(target)


def test_a_keep_alive_timeout_ends_the_association(blocks):
    with target_of(subsystem_of(blocks)) as target:
        host = NvmeHost("127.0.0.1", target.port, NQN, keep_alive_ms=50)
        until(lambda: not target.connections)
        with pytest.raises(ConnectionError):
            host.io.command(Sqe(READ, nsid=1), (), 4096)
        host.close()
        assert len(target.controllers) == 0


def test_connections_above_limit_are_refused(blocks):
    limits = replace(SMALL, connections=4, unnamed_connections=2, controllers=1)
    with target_of(subsystem_of(blocks), limits) as target:
        with raw_queues(target) as (admin, _), raw(target) as third:
            third.initialize()
            assert third.connect().status == Code.CONTROLLER_BUSY
            with raw(target), raw(target) as fifth:
                assert fifth.ended() is None
            admin.close()
        until(lambda: not target.connections)
        assert works(target)


def test_address_without_controller_is_named_in_error(target):
    with pytest.raises(OSError, match=r"127\.0\.0\.1:1: "):
        HostQueue("127.0.0.1", 1)
    with pytest.raises(OSError, match="nowhere"):
        HostQueue("nowhere.invalid", 4420)
    with pytest.raises(StatusError, match="0x182"):
        NvmeHost("127.0.0.1", target.port, f"{NQN}x")
    assert is_loopback("127.0.0.1") and is_loopback("::1") and not is_loopback("0.0.0.0")


def session():
    """Bytes of a host that connects, enables, and writes, cut where PDUs begin."""
    data = ConnectData(bytes(16), 0xFFFF, NQN, HOST).pack()
    connect = Sqe(0x7F, nsid=1, sgl_bytes=1024, sgl_type=1, cdw11=31)
    enable = Sqe(0x7F, nsid=0, cdw11=0x14, cdw12=1)
    more = [
        Sqe(0x06, cdw10=1, sgl_bytes=4096),
        Sqe(0x02, cdw10=0x70_0002, sgl_bytes=512),
        Sqe(0x0C),
        Sqe(0x09, cdw10=11),
    ]
    capsules = [(connect, [data]), (enable, []), *((sqe, []) for sqe in more)]
    packed = [b"".join(pack(PduType.CAPSULE_CMD, sqe.pack(), data, Digests())) for sqe, data in capsules]
    return [pack_ic(IcReq()), *packed]


@settings(max_examples=examples(150), deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 4))
def test_mutated_pdus_in_every_state_change_nothing(random, changes):
    blocks = MemoryBlocks()
    with target_of(subsystem_of(blocks), SMALL) as target:
        sent = [bytearray(pdu) for pdu in session()]
        for _ in range(changes):
            victim = random.choice(sent)
            at = random.randrange(len(victim)) if random.random() < 0.3 else random.randrange(COMMON.size + 64)
            victim[at] = random.choice((0, 1, 2, 0x7F, 0xFF, random.randrange(256)))
        with raw(target) as host:
            for pdu in sent:
                try:
                    host.send(bytes(pdu))
                except OSError:
                    break
            host.stream.shut()
        until(lambda: not target.connections)
        assert (len(target.controllers), target.controllers.in_flight_bytes) == (0, 0)
        assert works(target)
