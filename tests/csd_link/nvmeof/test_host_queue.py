"""Our initiator with a controller that sends exactly what a test wants."""

import socket
import threading
from contextlib import closing
from types import SimpleNamespace

import pytest

from csd_link.nvmeof import host_queue
from csd_link.nvmeof.commands import DO_NOT_RETRY, SGL_IN_CAPSULE, SGL_TRANSPORT, Code, Cqe, Sqe
from csd_link.nvmeof.host_queue import CONTROLLER_TIMEOUT_S, ControllerTimeoutError, HostQueue, StatusError
from csd_link.nvmeof.pdu import (
    FROM_HOST,
    R2T,
    Data,
    Digests,
    Fes,
    Flag,
    IcReq,
    IcResp,
    PduType,
    Term,
    pack,
    pack_data,
    pack_ic,
    pack_term,
)
from csd_link.nvmeof.stream import ConnectionClosedError, PduStream
from tests.nvmeof import PATIENCE_S

READ, WRITE = Sqe(0x02), Sqe(0x01)
SUCCESS = Flag.LAST | Flag.SUCCESS


class FakeController:
    """The other end of a queue. It speaks only when a test says so."""

    def __init__(self, answer=IcResp()):
        self.answer, self.stream = answer, None

    def queue(self, digests=Digests()):
        """A queue that is connected to it."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            accepting = threading.Thread(target=self._accept, args=(server,))
            accepting.start()
            try:
                return HostQueue(*server.getsockname(), digests)
            finally:
                accepting.join()

    def _accept(self, server):
        line, _ = server.accept()
        self.stream = PduStream(line, FROM_HOST, PATIENCE_S)
        self.stream.max_data_bytes = 1 << 20
        _, request = self.stream.receive()
        assert isinstance(request, IcReq)
        digests = self.answer.digests if any(self.answer.digests) else request.digests
        self.stream.send([pack_ic(self.answer._replace(digests=digests))])
        self.stream.digests = request.digests

    def receive(self):
        """The next PDU of the host: its flags, the PDU and its data."""
        head, pdu = self.stream.receive()
        data = bytearray(head.data_bytes)
        assert self.stream.read(memoryview(data))
        return head.flags, Sqe.parse(pdu) if isinstance(pdu, bytes) else pdu, bytes(data)

    def data(self, cid, offset, data, flags=0, length=None):
        header = pack_data(Data(cid, 0, offset, len(data) if length is None else length))
        self.stream.send(pack(PduType.C2H_DATA, header, [data] if data else [], self.stream.digests, flags))

    def ask(self, cid, offset, length):
        self.stream.send(pack(PduType.R2T, pack_data(R2T(cid, 9, offset, length)), [], self.stream.digests))

    def complete(self, cid, status=0, result=0):
        self.stream.send(pack(PduType.CAPSULE_RESP, Cqe(result, 0, 1, cid, status).pack(), [], self.stream.digests))

    def close(self):
        self.stream.close()


@pytest.fixture
def controller():
    made = FakeController(IcResp(max_h2c_bytes=4096))
    yield made
    made.close()


@pytest.fixture
def queue(controller):
    with closing(controller.queue()) as made:
        yield made


@pytest.mark.parametrize(
    ("answer", "accepted"),
    [
        (IcResp(align=31, max_h2c_bytes=4096), True),
        (IcResp(version=1), False),
        (IcResp(align=32), False),
        (IcResp(max_h2c_bytes=4095), False),
        (IcResp(digests=Digests(header=True)), False),
    ],
)
def test_answers_of_a_controller_that_cannot_be_used_are_refused(answer, accepted):
    controller = FakeController(answer)
    if accepted:
        controller.queue().close()
    else:
        with pytest.raises(ConnectionClosedError):
            controller.queue()
    controller.close()


@pytest.mark.parametrize("digests", [Digests(), Digests(True, True)])
def test_data_arrives_in_parts_and_completes_with_the_last_or_with_a_capsule(controller, digests):
    with closing(controller.queue(digests)) as queue:
        for ends, flags in ((True, SUCCESS), (False, Flag.LAST), (False, 0)):
            cid = queue.begin(READ, receive_bytes=10, context="mine")
            controller.data(cid, 0, b"abc")
            controller.data(cid, 3, b"de", flags)
            if not ends:
                controller.complete(cid, result=7)
            reply = queue.next()
            assert (reply.cid, reply.status, bytes(reply.data), reply.context) == (cid, 0, b"abcde", "mine")
            assert reply.result == (0 if ends else 7)
        cid = queue.begin(READ, receive_bytes=10)
        controller.data(cid, 0, b"0123456789", Flag.LAST)
        controller.complete(cid, Code.INTERNAL_ERROR | DO_NOT_RETRY)
        reply = queue.next()
        assert (reply.status, bytes(reply.data)) == (Code.INTERNAL_ERROR, b"0123456789")
        memory = bytearray(b"-" * 6)
        cid = queue.begin(READ, receive_bytes=6, into=memoryview(memory))
        controller.data(cid, 0, b"xyz", SUCCESS)
        assert bytes(queue.next().data) == bytes(memory) == b"xyz---"
        controller.complete(queue.begin(READ, receive_bytes=6))
        assert bytes(queue.next().data) == b""


@pytest.mark.parametrize(
    ("send", "fes", "information"),
    [
        (lambda it, cid: it.data(cid + 1, 0, b"abc"), Fes.INVALID_HEADER_FIELD, 8),
        (lambda it, cid: it.complete(cid + 1), Fes.INVALID_HEADER_FIELD, 8),
        (lambda it, cid: it.ask(cid + 1, 0, 4), Fes.INVALID_HEADER_FIELD, 8),
        (lambda it, cid: it.data(cid, 1, b"abc"), Fes.DATA_OUT_OF_RANGE, 12),
        (lambda it, cid: it.data(cid, 0, b"12345678901"), Fes.DATA_OUT_OF_RANGE, 12),
        (lambda it, cid: it.data(cid, 0, b"abc", length=2), Fes.DATA_OUT_OF_RANGE, 12),
        (lambda it, cid: (it.data(cid, 0, b"abc"), it.data(cid, 0, b"abc")), Fes.DATA_OUT_OF_RANGE, 12),
        (lambda it, cid: it.ask(cid, 0, 1), Fes.DATA_OUT_OF_RANGE, 12),
        (lambda it, cid: it.stream.send([pack_ic(IcResp())]), Fes.SEQUENCE_ERROR, 0),
    ],
)
def test_controller_that_breaks_the_protocol_is_told_and_left(controller, queue, send, fes, information):
    cid = queue.begin(READ, receive_bytes=10)
    send(controller, cid)
    with pytest.raises(ConnectionClosedError):
        queue.next()
    assert controller.receive()[1].cid == cid
    _, term, _ = controller.receive()
    assert (term.fes, term.information) == (fes, information)


def test_connection_ends_with_a_termination_request_and_with_a_wrong_digest(controller):
    with closing(controller.queue()) as queue:
        controller.stream.send([pack_term(PduType.C2H_TERM, Term(2, 0))])
        with pytest.raises(ConnectionClosedError):
            queue.next()
    controller.close()
    digests = Digests(data=True)
    with closing(controller.queue(digests)) as queue:
        cid = queue.begin(READ, receive_bytes=4)
        *parts, _ = pack(PduType.C2H_DATA, pack_data(Data(cid, 0, 0, 4)), [b"data"], digests, SUCCESS)
        controller.stream.send([*parts, b"bad!"])
        with pytest.raises(ConnectionClosedError):
            queue.next()


@pytest.mark.parametrize("size", [8191, 8192, 8193])
def test_data_that_fits_goes_in_the_capsule(controller, queue, size):
    content = bytes(range(251)) * 33
    cid = queue.begin(WRITE, [content[:100], content[100:size]])
    queue.flush()
    _, sqe, data = controller.receive()
    fits = size <= 8192
    assert (sqe.cid, sqe.sgl_bytes, sqe.sgl_type) == (cid, size, SGL_IN_CAPSULE if fits else SGL_TRANSPORT)
    assert data == (content[:size] if fits else b"")
    queue.begin(Sqe(0x00))
    queue.flush()
    _, sqe, _ = controller.receive()
    assert (sqe.sgl_bytes, sqe.sgl_type) == (0, SGL_TRANSPORT), "no data at all"


@pytest.mark.parametrize("digests", [Digests(), Digests(True, True)])
@pytest.mark.parametrize(("at", "length"), [(0, 10_000), (0, 8192), (5, 4096), (5, 4097), (9_999, 1)])
def test_requested_data_is_sent_in_parts_that_the_controller_takes(controller, digests, at, length):
    content = bytes(range(250)) * 40
    with closing(controller.queue(digests)) as queue:
        cid = queue.begin(WRITE, [content[:70], content[70:]])
        controller.ask(cid, at, length)
        controller.complete(cid)
        assert queue.next().status == 0
        assert controller.receive()[1].sgl_type == SGL_TRANSPORT
        for begin in range(at, at + length, 4096):
            flags, data, part = controller.receive()
            size = min(4096, at + length - begin)
            assert data == Data(cid, 9, begin, size) and part == content[begin : begin + size]
            assert bool(flags & Flag.LAST) == (begin + size == at + length)


def test_numbers_of_commands_in_flight_are_not_taken_again(queue):
    queue._cids = 0xFFFF
    assert [queue.begin(READ) for _ in range(3)] == [0xFFFF, 0, 1]
    queue._cids = 0xFFFF
    assert queue.begin(READ) == 2


def test_refused_command_raises_its_status(controller, queue):
    controller.complete(0, Code.INVALID_FIELD | DO_NOT_RETRY, 44)
    with pytest.raises(StatusError) as refused:
        queue.command(READ)
    assert (refused.value.status, refused.value.result) == (Code.INVALID_FIELD, 44)


@pytest.mark.parametrize(("since", "heard"), [(100.0, 150.0), (150.0, 100.0), (150.0, 150.0)])
def test_controller_is_silent_since_the_last_command_or_byte(queue, monkeypatch, since, heard):
    queue._since, queue._stream.heard = since, heard
    now = SimpleNamespace(perf_counter=lambda: 150.0 + CONTROLLER_TIMEOUT_S)
    monkeypatch.setattr(host_queue, "time", now)
    queue._check_alive()
    now.perf_counter = lambda: 150.1 + CONTROLLER_TIMEOUT_S
    with pytest.raises(ControllerTimeoutError):
        queue._check_alive()
