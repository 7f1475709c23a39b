"""Transfers of a connection without a host at its other end: which are asked for, and until when."""

import socket
import threading
from contextlib import closing

import pytest

from csd_link.nvmeof import connection as connection_module
from csd_link.nvmeof import controllers as controllers_module
from csd_link.nvmeof.commands import DO_NOT_RETRY, Answer, Code, CommandError, Cqe, Sqe
from csd_link.nvmeof.connection import Connection, _in_capsule
from csd_link.nvmeof.controllers import ConnectData, Controllers
from csd_link.nvmeof.identify import Limits
from csd_link.nvmeof.pdu import FROM_CONTROLLER, R2T, Data, Flag
from csd_link.nvmeof.stream import ConnectionClosedError, PduStream
from tests.nvmeof import HOST, NQN, PATIENCE_S, MemoryBlocks, subsystem_of

MIB = 1 << 20


class Clock:
    """The time that a test sets."""

    now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    simulated = Clock()
    monkeypatch.setattr(connection_module, "time", simulated)
    monkeypatch.setattr(controllers_module, "ROOM_S", 0.0)
    return simulated


@pytest.fixture
def ends(clock):
    """A connection of an I/O queue, and the stream of its host."""
    limits = Limits(queue_entries=3, in_flight_bytes=4 * MIB, host_in_flight_bytes=4 * MIB, pdu_s=10.0)
    controllers = Controllers(subsystem_of(MemoryBlocks()), limits)
    near, far = socket.socketpair()
    connection = Connection(near, controllers)
    connection._controller = controllers.create(ConnectData(bytes(16), 0xFFFF, NQN, HOST), "", lambda: None)
    connection._queue = 1
    host = PduStream(far, FROM_CONTROLLER, PATIENCE_S)
    with closing(near), closing(far):
        yield connection, host


def asked(host):
    """The next PDU for the host."""
    pdu = host.receive()[1]
    return Cqe.parse(pdu) if isinstance(pdu, bytes) else pdu


def test_data_is_due_after_the_time_of_a_pdu_and_a_second_for_each_mebibyte(ends, clock):
    connection, host = ends
    connection._ask(Sqe(1, cid=5), 3 * MIB)
    connection._send()
    assert asked(host) == R2T(5, 1, 0, 3 * MIB)
    clock.now += 13.0
    connection._check_transfer()
    clock.now += 0.1
    with pytest.raises(ConnectionClosedError):
        connection._check_transfer()
    connection._transfers.clear()
    connection._check_transfer()


def test_only_the_first_transfer_is_asked_for_and_a_queue_has_as_many_as_entries(ends):
    connection, host = ends
    for cid in range(3):
        connection._ask(Sqe(1, cid=cid), MIB)
    connection._send()
    assert asked(host) == R2T(0, 1, 0, MIB)
    assert (connection._out, [transfer.tag for transfer in connection._transfers]) == ([], [1, 2, 3])
    with pytest.raises(CommandError) as refused:
        connection._ask(Sqe(1, cid=3), MIB)
    assert refused.value.status == Code.INTERRUPTED


def test_transfers_that_find_no_memory_are_refused_and_the_next_is_asked_for(ends):
    connection, host = ends
    connection._controllers.acquire_bytes(connection._owner, MIB)
    connection._tags = 0xFFFF
    for cid, size in enumerate((4 * MIB, 3 * MIB)):
        connection._ask(Sqe(1, cid=cid), size)
    connection._send()
    refused, wanted = asked(host), asked(host)
    assert (refused.cid, refused.status, refused.sq_id) == (0, Code.INTERRUPTED, 1)
    assert wanted == R2T(1, 1, 0, 3 * MIB), "tags begin again after the last one"


def test_part_of_a_capsule_is_what_the_descriptor_selects():
    data = memoryview(b"0123456789")
    for at, size in ((0, 10), (3, 7), (10, 0), (2, 3)):
        assert bytes(_in_capsule(Sqe(1, sgl_type=1, sgl_address=at, sgl_bytes=size), data)) == data[at : at + size]
    for sqe, status in (
        (Sqe(1, sgl_type=1, sgl_address=3, sgl_bytes=8), Code.SGL_OFFSET),
        (Sqe(1, sgl_type=1, sgl_address=11), Code.SGL_OFFSET),
        (Sqe(1, sgl_type=0, sgl_bytes=4), Code.SGL_TYPE),
    ):
        with pytest.raises(CommandError) as refused:
            _in_capsule(sqe, data)
        assert refused.value.status == status


def answered(host):
    """Flags, the PDU and the data of the next response."""
    head, pdu = host.receive()
    data = bytearray(head.data_bytes)
    assert host.read(memoryview(data))
    return head.flags, Cqe.parse(pdu) if isinstance(pdu, bytes) else pdu, bytes(data)


@pytest.mark.parametrize("flow_control", [True, False])
@pytest.mark.parametrize("result", [0, 9])
@pytest.mark.parametrize(("sgl_bytes", "sent"), [(9, b"abcdefgh"), (8, b"abcdefgh"), (5, b"abcde"), (0, b"")])
def test_response_has_the_data_that_the_host_has_room_for(ends, flow_control, result, sgl_bytes, sent):
    """Data alone completes the command of a host without flow control, if there is no result."""
    connection, host = ends
    host.max_data_bytes = MIB
    connection._flow_control, connection._entries = flow_control, 3
    for head in (1, 2, 0):
        connection._complete(Sqe(2, cid=5, sgl_bytes=sgl_bytes), Answer((b"abc", b"defgh"), result))
        connection._send()
        is_alone = bool(sent) and not flow_control and not result
        if sent:
            flags, data, content = answered(host)
            assert (data, content) == (Data(5, 0, 0, len(sent)), sent)
            assert flags == Flag.LAST | Flag.SUCCESS * is_alone
        if not is_alone:
            assert answered(host)[1] == Cqe(result, head, 1, 5, 0)


def test_responses_are_sent_together_up_to_a_mebibyte(ends):
    connection, host = ends
    host.max_data_bytes = 2 * MIB
    connection._complete(Sqe(2, sgl_bytes=MIB), Answer((bytes(MIB // 2),)))
    connection._complete(Sqe(2, sgl_bytes=MIB), Answer((bytes(MIB // 2),)))
    assert connection._out and connection._out_bytes == MIB
    sending = threading.Thread(target=connection._complete, args=(Sqe(2, sgl_bytes=MIB), Answer((b"x",))))
    sending.start()
    assert [len(answered(host)[2]) for _ in range(6)] == [MIB // 2, 0, MIB // 2, 0, 1, 0]
    sending.join()
    assert (connection._out, connection._out_bytes) == ([], 0)


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (Code.INVALID_FIELD, Code.INVALID_FIELD | DO_NOT_RETRY),
        (Code.INTERRUPTED, Code.INTERRUPTED),
        (Code.TRANSIENT, Code.TRANSIENT),
    ],
)
def test_refusal_says_whether_to_retry_and_is_in_the_error_log(ends, status, answer):
    connection, host = ends
    connection._entries = 2
    for head in (1, 0):
        connection._refuse(Sqe(1, cid=6, nsid=4), CommandError(status, 77))
        connection._send()
        assert answered(host)[1] == Cqe(77, head, 1, 6, answer)
    newest = connection._controllers.subsystem.errors[0]
    assert (newest.number, newest.sq_id, newest.cid, newest.status, newest.nsid) == (2, 1, 6, answer, 4)
