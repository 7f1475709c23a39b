"""PDUs: values survive encoding and decoding, and malformed PDUs are refused by name.

partner of: csd_link/nvmeof/pdu.py, csd_link/nvmeof/commands.py
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csd_io.crc32c import crc32c
from csd_link.nvmeof.commands import Admin, Cqe, Fabrics, Sqe
from csd_link.nvmeof.pdu import (
    COMMON,
    FROM_CONTROLLER,
    FROM_HOST,
    HEADER_BYTES,
    R2T,
    Data,
    Digests,
    Fes,
    Flag,
    IcReq,
    IcResp,
    PduError,
    PduType,
    Term,
    check_header_digest,
    pack,
    pack_data,
    pack_ic,
    pack_term,
    parse,
    parse_head,
    part_of,
)
from tests.nvmeof import head_of
from tests.properties import examples

ALL = FROM_HOST | FROM_CONTROLLER
some_digests = st.builds(Digests, st.booleans(), st.booleans())


def read(raw, digests=Digests(), most=1 << 20):
    """Head, value and data of a PDU's bytes, digests checked."""
    head = parse_head(raw[: COMMON.size], ALL, digests, most)
    at = COMMON.size + head.header_bytes
    if digests.header and head.kind in (PduType.CAPSULE_CMD, PduType.C2H_DATA, PduType.R2T):
        check_header_digest(head, raw[COMMON.size : at])
    is_term = head.kind in (PduType.H2C_TERM, PduType.C2H_TERM)
    value = parse(head, raw[COMMON.size : at + head.data_bytes * is_term])
    return head, value, raw[at : at + head.data_bytes]


@given(st.integers(0, 31), some_digests, st.integers(0, 2**32 - 1))
def test_initialize_connection_pdu_round_trips(align, digests, number):
    for value in (IcReq(0, align, digests, number), IcResp(0, align, digests, number)):
        raw = pack_ic(value)
        assert len(raw) == 128
        assert read(raw)[1] == value and type(read(raw)[1]) is type(value)
        assert raw[0] == (PduType.IC_REQ if isinstance(value, IcReq) else PduType.IC_RESP)


@given(st.sampled_from(Fes), st.integers(0, 2**32 - 1), st.binary(max_size=200))
def test_termination_pdu_round_trips(fes, information, header):
    for kind in (PduType.H2C_TERM, PduType.C2H_TERM):
        assert read(pack_term(kind, Term(fes, information, header)))[1] == Term(fes, information, header[:128])


@settings(max_examples=examples(100))
@given(st.binary(max_size=600), some_digests, st.integers(0, 31), st.integers(0, 2**16 - 1))
def test_data_pdu_round_trips_with_digests_and_alignment(data, digests, align, cid):
    value = Data(cid, 3, 16, len(data))
    parts = pack(PduType.C2H_DATA, pack_data(value), [data[:7], data[7:]], digests, Flag.LAST, align)
    raw = b"".join(parts)
    head, pdu, back = read(raw, digests)
    assert (pdu, back) == (value, data)
    assert head.flags & Flag.LAST and len(raw) == COMMON.unpack_from(raw)[4]
    if data:
        assert (COMMON.size + head.header_bytes) % (4 * (align + 1)) == 0
        assert not digests.data or raw[-4:] == crc32c(data).to_bytes(4, "little")


def test_queue_entries_round_trip():
    sqe = Sqe(
        2, cid=7, nsid=1, cdw2=2, cdw3=3, sgl_bytes=4096, cdw10=10, cdw11=11, cdw12=12, cdw13=13, cdw14=14, cdw15=15
    )
    assert Sqe.parse(sqe.pack()) == sqe
    assert Cqe.parse(Cqe(1 << 40, 2, 3, 4, 0x4182).pack()) == Cqe(1 << 40, 2, 3, 4, 0x4182)
    assert Sqe(1).to_controller and not Sqe(2).to_controller and not Sqe(Admin.IDENTIFY).to_controller
    assert Sqe(Admin.FABRICS, nsid=Fabrics.CONNECT).to_controller
    assert not Sqe(Admin.FABRICS, nsid=Fabrics.PROPERTY_GET).to_controller


@settings(max_examples=examples(100))
@given(st.lists(st.binary(max_size=6), max_size=5), st.integers(0, 20), st.integers(0, 20))
def test_part_of_buffers_is_the_part_of_their_bytes(buffers, at, length):
    parts = part_of(buffers, at, length)
    assert b"".join(parts) == b"".join(buffers)[at : at + length]
    assert all(parts), "none is empty"


@pytest.mark.parametrize(
    ("raw", "digests", "fes", "information"),
    [
        (head_of(0x0A), Digests(), Fes.INVALID_HEADER_FIELD, 0),
        (head_of(0x04, header=24), Digests(), Fes.INVALID_HEADER_FIELD, 2),
        (head_of(0x00, header=128, total=132), Digests(), Fes.INVALID_HEADER_FIELD, 4),
        (head_of(0x02, total=24 + 129), Digests(), Fes.INVALID_HEADER_FIELD, 4),
        (head_of(0x06, flags=1, total=28), Digests(), Fes.INVALID_HEADER_FIELD, 1),
        (head_of(0x06, total=24), Digests(header=True), Fes.INVALID_HEADER_FIELD, 1),
        (head_of(0x06, total=20), Digests(), Fes.INVALID_HEADER_FIELD, 4),
        (head_of(0x05, total=32, offset=24), Digests(), Fes.INVALID_HEADER_FIELD, 4),
        (head_of(0x06, offset=20, total=32), Digests(), Fes.INVALID_HEADER_FIELD, 3),
        (head_of(0x06, offset=26, total=32), Digests(), Fes.INVALID_HEADER_FIELD, 3),
        (head_of(0x06, offset=36, total=32), Digests(), Fes.INVALID_HEADER_FIELD, 3),
        (head_of(0x06, flags=2, offset=24, total=32), Digests(), Fes.INVALID_HEADER_FIELD, 1),
        (head_of(0x06, flags=2, offset=24, total=26), Digests(data=True), Fes.INVALID_HEADER_FIELD, 4),
        (head_of(0x06, offset=24, total=24 + 101), Digests(), Fes.DATA_LIMIT_EXCEEDED, 4),
        (head_of(0x06, offset=24, total=2**32 - 1), Digests(), Fes.DATA_LIMIT_EXCEEDED, 4),
    ],
)
def test_malformed_headers_are_refused_by_field(raw, digests, fes, information):
    with pytest.raises(PduError) as refused:
        parse_head(raw, ALL, digests, 100)
    assert (refused.value.fes, refused.value.information) == (fes, information)


def test_pdu_invalid_in_state_is_sequence_error():
    with pytest.raises(PduError, match="not valid in this state") as refused:
        parse_head(head_of(PduType.R2T), FROM_HOST, Digests(), 0)
    assert refused.value.fes is Fes.SEQUENCE_ERROR


def test_changed_header_fails_its_digest():
    raw = bytearray(b"".join(pack(PduType.R2T, pack_data(R2T(1, 2, 3, 4)), [], Digests(header=True))))
    assert read(bytes(raw), Digests(header=True))[1] == R2T(1, 2, 3, 4)
    raw[9] ^= 1
    with pytest.raises(PduError) as refused:
        read(bytes(raw), Digests(header=True))
    assert refused.value.fes is Fes.HEADER_DIGEST_ERROR


@settings(max_examples=examples(500))
@given(st.binary(min_size=8, max_size=8), some_digests, st.integers(0, 5000))
def test_any_header_is_refused_or_consistent(raw, digests, most):
    try:
        head = parse_head(raw, ALL, digests, most)
    except PduError:
        return
    total = COMMON.unpack(raw)[4]
    summed = digests.data and head.kind in (PduType.CAPSULE_CMD, PduType.H2C_DATA, PduType.C2H_DATA)
    assert COMMON.size + head.header_bytes >= HEADER_BYTES[head.kind]
    assert head.data_bytes <= max(most, 128)
    assert total - COMMON.size - head.header_bytes - head.data_bytes in ({0, 4} if summed else {0})
    parse(head, bytes(head.header_bytes + 128))


def test_queue_entries_have_their_fields_where_the_specification_has_them():
    """NVMe Base Specification 2.0, figures 87 and 90; the data block of an SGL descriptor, figure 115."""
    wide = 0x0A0B0C0D0E0F1011, 0x2122232425262728
    sqe = Sqe(0x02, 0x41, 0x1122, 0x33445566, 2, 3, *wide, 0x31323334, 0x5A, *range(10, 16))
    raw = sqe.pack()
    fields = [(0, 1, 0x02), (1, 1, 0x41), (2, 2, 0x1122), (4, 4, 0x33445566), (8, 4, 2), (12, 4, 3)]
    fields += [(16, 8, wide[0]), (24, 8, wide[1]), (32, 4, 0x31323334), (39, 1, 0x5A)]
    fields += [(4 * word, 4, word) for word in range(10, 16)]
    for at, size, value in fields:
        assert int.from_bytes(raw[at : at + size], "little") == value, at
    assert len(raw) == 64 and Sqe.parse(raw) == sqe
    assert sqe.pack_as(7, 8, 9) == sqe._replace(cid=7, sgl_bytes=8, sgl_type=9).pack()
    cqe = Cqe(0x0102030405060708, 0x090A, 0x0B0C, 0x0D0E, 0x0F10)
    fields = [(0, 8, cqe.result), (8, 2, cqe.sq_head), (10, 2, cqe.sq_id), (12, 2, cqe.cid), (14, 2, cqe.status << 1)]
    for at, size, value in fields:
        assert int.from_bytes(cqe.pack()[at : at + size], "little") == value, at
    assert Cqe.parse(cqe.pack()) == cqe
