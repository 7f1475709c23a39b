"""A stream of PDUs over a line that brings and takes as many bytes at a time as a test says, at the times it says."""

import socket
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csd_link.nvmeof import stream as stream_module
from csd_link.nvmeof.pdu import FROM_HOST, Data, Digests, PduType, Term, pack, pack_data, pack_term
from csd_link.nvmeof.stream import MIN_BYTES_PER_S, SPIN_S, ConnectionClosedError, PduStream, _after
from tests.properties import examples

PDU_S = 3.0


class Line:
    """A line whose bytes arrive in pieces; None for a wait in which nothing comes. Each call takes `step_s`."""

    family = socket.AF_UNIX

    def __init__(self, pieces=(), takes=1 << 30, step_s=1e-6):
        self.pieces, self.takes, self.step_s, self.now = list(pieces), takes, step_s, 100.0
        self.sent, self.options, self.is_polled = bytearray(), {}, list[bool]()

    def monotonic(self):
        return self.now

    perf_counter = monotonic

    def setsockopt(self, level, option, value):
        self.options[option] = value

    def recv_into(self, view, nbytes, flags):
        self.now += self.step_s
        self.is_polled.append(flags == socket.MSG_DONTWAIT)
        if not self.pieces:
            return 0
        if self.is_polled[-1] or self.pieces[0] is None:
            if not self.is_polled[-1]:
                self.pieces.pop(0)
            raise BlockingIOError
        piece = self.pieces.pop(0)
        count = min(len(piece), len(view))
        view[:count] = piece[:count]
        if piece[count:]:
            self.pieces.insert(0, piece[count:])
        return count

    def sendmsg(self, parts, ancillary, flags):
        assert flags == socket.MSG_NOSIGNAL and not ancillary
        self.now += self.step_s
        if not self.takes:
            raise BlockingIOError
        taken = b"".join(parts)[: self.takes]
        self.sent += taken
        return len(taken)


@pytest.fixture
def stream_over(monkeypatch):
    def made(line):
        monkeypatch.setattr(stream_module, "time", line)
        stream = PduStream(line, FROM_HOST, PDU_S)
        stream.max_data_bytes = 1 << 20
        return stream

    return made


def data_pdu(content, digests=Digests(), cid=7):
    return b"".join(pack(PduType.H2C_DATA, pack_data(Data(cid, 1, 0, len(content))), [content], digests))


@settings(max_examples=examples(60))
@given(
    st.lists(st.binary(min_size=1, max_size=90), max_size=5),
    st.lists(st.integers(1, 60), min_size=1, max_size=8),
    st.booleans(),
    st.booleans(),
)
def test_pdus_are_the_same_in_whatever_pieces_they_arrive(contents, sizes, header, data):
    digests = Digests(header, data)
    raw = b"".join(data_pdu(each, digests, cid) for cid, each in enumerate(contents))
    raw += pack_term(PduType.H2C_TERM, Term(1, 2, b"the header"))
    pieces, at = list[bytes | None](), 0
    while at < len(raw):
        size = sizes[len(pieces) % len(sizes)]
        pieces += [raw[at : at + size], None]
        at += size
    stream = PduStream(Line(pieces), FROM_HOST, PDU_S)
    stream.max_data_bytes, stream.digests = 1 << 20, digests
    for cid, content in enumerate(contents):
        head, pdu = stream.receive()
        assert pdu == Data(cid, 1, 0, len(content)) and head.data_bytes == len(content)
        into = bytearray(len(content))
        assert stream.read(memoryview(into)) and into == content
    assert stream.receive()[1] == Term(1, 2, b"the header"), "without digests"
    with pytest.raises(ConnectionClosedError):
        stream.receive()


def test_data_that_does_not_match_its_digest_is_reported(stream_over):
    digests = Digests(data=True)
    stream = stream_over(Line([data_pdu(b"data", digests)[:-1] + b"x", data_pdu(b"next", digests)]))
    stream.digests = digests
    for matches in (False, True):
        stream.receive()
        assert stream.read(memoryview(bytearray(4))) == matches
    assert stream.read(memoryview(b""))


def test_next_pdu_is_pending_once_its_header_has_come(stream_over):
    raw = data_pdu(b"data")
    for more, pending in ((0, False), (7, False), (8, True), (28, True)):
        stream = stream_over(Line([raw + raw[:more]]))
        stream.receive()
        stream.read(memoryview(bytearray(4)))
        assert stream.pending == pending


def test_first_byte_is_waited_for_without_limit_and_the_rest_is_not(stream_over):
    raw, calls = data_pdu(b"data"), list[float]()
    line = Line([*[None] * 50, raw[:1], None, raw[1:]], step_s=0.9)
    stream = stream_over(line)
    stream.on_idle = lambda: calls.append(line.now)
    assert stream.receive()[1].cid == 7
    assert len(calls) == 52, "after each wait, and the first byte"
    stream = stream_over(Line([raw[:9], *[None] * 9], step_s=0.9))
    with pytest.raises(ConnectionClosedError, match=f"{PDU_S:g} s"):
        stream.receive()


def test_idle_check_is_called_at_its_interval(stream_over):
    line, calls = Line([*[None] * 100, data_pdu(b"data")], step_s=0.1), list[float]()
    stream = stream_over(line)
    stream.on_idle = lambda: calls.append(line.now)
    stream.receive()
    assert len(calls) == 33, "of a quarter of a second, in steps of a tenth"


@pytest.mark.parametrize(("step_s", "in_time"), [(1.24, True), (1.26, False)])
def test_data_is_due_in_the_time_of_a_pdu_and_at_a_least_rate(stream_over, step_s, in_time):
    """Two MiB within 5 seconds: of five pieces the fourth has to come before."""
    size = 2 * MIN_BYTES_PER_S
    stream, into = stream_over(Line([bytes(size // 5 + 1)] * 5, step_s=step_s)), memoryview(bytearray(size))
    if in_time:
        assert stream.read(into)
    else:
        with pytest.raises(ConnectionClosedError):
            stream.read(into)


def test_buffers_are_sent_whole_however_little_is_taken(stream_over):
    for takes in (1, 3, 1 << 30):
        line = Line(takes=takes)
        parts = [bytes([number % 256]) for number in range(1200)] + [b"", b"the last one"]
        stream_over(line).send(parts)
        assert bytes(line.sent) == b"".join(parts)


@pytest.mark.parametrize(("step_s", "in_time"), [(1.08, True), (1.09, False)])
def test_peer_takes_data_at_a_least_rate(stream_over, step_s, in_time):
    """Of eight pieces the seventh has to go 6.5 seconds after the first."""
    line = Line(takes=MIN_BYTES_PER_S // 2, step_s=step_s)
    if in_time:
        stream_over(line).send([bytes(4 * MIN_BYTES_PER_S)])
        assert len(line.sent) == 4 * MIN_BYTES_PER_S
    else:
        with pytest.raises(ConnectionClosedError):
            stream_over(line).send([bytes(4 * MIN_BYTES_PER_S)])


def test_peer_that_takes_nothing_is_left(stream_over):
    with pytest.raises(ConnectionClosedError):
        stream_over(Line(takes=0)).send([b"x"])


def test_line_is_polled_for_a_moment_after_it_was_used(stream_over):
    raw = data_pdu(b"data")
    line = Line([raw, None, raw])
    stream = stream_over(line)
    stream.receive()
    assert line.is_polled == [False]
    stream.read(memoryview(bytearray(4)))
    began, line.step_s = line.now, SPIN_S / 10
    stream.receive()
    assert line.is_polled[1:-2] and all(line.is_polled[1:-2]) and line.is_polled[-2:] == [False, False]
    assert line.now - began == pytest.approx(SPIN_S, rel=0.5)


def test_waits_of_the_line_are_those_of_the_stream(stream_over):
    line = Line()
    stream = stream_over(line)
    for pdu_s, send_s, received, sent in ((3.0, 3.0, (0, 250_000), (3, 1)), (0.1, 2.5, (0, 100_000), (2, 500_000))):
        stream.set_patience(pdu_s, send_s)
        assert struct.unpack("@ll", line.options[socket.SO_RCVTIMEO]) == received
        assert struct.unpack("@ll", line.options[socket.SO_SNDTIMEO]) == sent, "a timeout of 0 would be none"


@settings(max_examples=examples(100))
@given(st.lists(st.binary(max_size=5), max_size=6), st.integers(0, 30))
def test_rest_of_buffers_is_the_rest_of_their_bytes(parts, sent):
    assert b"".join(_after(parts, sent)) == b"".join(parts)[sent:]
