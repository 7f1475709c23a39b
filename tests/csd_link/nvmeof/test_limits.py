"""Each row of the limits in docs/nvme.md: its figures are those of the code, and at the limit happens what it says.

partner of: csd_link/nvmeof/controllers.py, csd_link/nvmeof/target.py, csd_link/nvmeof/identify.py
"""

import re
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace

import pytest

from csd_link.nvmeof import controllers as controllers_module
from csd_link.nvmeof.commands import Code, Sqe
from csd_link.nvmeof.identify import Limits
from csd_link.nvmeof.nvm import NvmNamespace
from csd_link.nvmeof.pdu import Data, Digests, Flag, PduType, pack, pack_data
from csd_link.nvmeof.sequences import KEPT_BYTES, MAX_HOST_SESSIONS, MAX_SESSIONS, Op, SequenceNamespace
from csd_link.window import WindowLayout
from tests.csd_link.nvmeof.test_sequences import IDENTITY, Counting
from tests.nvmeof import DOCS, HOST, MemoryBlocks, RawHost, head_of, raw, raw_queues, subsystem_of, target_of
from tests.served import until

WRITE, READ = 0x01, 0x02
OTHER, THIRD = f"{HOST[:-1]}2", f"{HOST[:-1]}3"
PAGE = DOCS.read_text(encoding="utf-8")
MIB = 1 << 20


def row(resource):
    """Cells of a row, after its resource."""
    (cells,) = re.findall(rf"^\| {re.escape(resource)} \|(.*)\|$", PAGE, re.MULTILINE)
    return [cell.strip() for cell in cells.split("|")]


def target(**limits):
    blocks = NvmNamespace(MemoryBlocks(), bytes(16))
    return target_of(subsystem_of(MemoryBlocks(), namespaces={1: blocks}), Limits(**limits))


@pytest.fixture
def hosts():
    """Raw connections of a target, closed at the end."""
    with ExitStack() as undo:

        def connected(busy, host=HOST):
            made = RawHost(busy)
            undo.callback(made.close)
            made.initialize()
            return made, made.connect(host=host).status

        yield connected


def test_figures_are_those_of_the_code():
    limits = Limits()
    named = limits.connections - limits.unnamed_connections
    assert row("controllers")[:2] == [str(limits.host_controllers), str(limits.controllers)]
    assert row("connections of known hosts")[:2] == [str(limits.host_connections), str(named)]
    assert row("connections before Connect")[:2] == ["", str(limits.unnamed_connections)]
    in_flight = [f"{nbytes // MIB} MiB" for nbytes in (limits.host_in_flight_bytes, limits.in_flight_bytes)]
    assert row("data in flight outside capsules")[:2] == in_flight
    assert f"waiting for {controllers_module.ROOM_S} s" in row("data in flight outside capsules")[2]
    own, every, _ = row("sessions")
    assert own == str(MAX_HOST_SESSIONS) and every.startswith(f"{MAX_SESSIONS}, ") and KEPT_BYTES == 1 << 30
    assert row("data of a command (MDTS)") == [f"{limits.transfer_bytes // MIB} MiB"]
    assert row("I/O queues of a controller, entries of a queue") == [f"{limits.io_queues}, {limits.queue_entries}"]
    assert row("Connect command after the connection") == [f"within {limits.handshake_s:.0f} s"]
    assert row("rest of a PDU, requested data")[0].startswith(f"within {limits.pdu_s:.0f} s, and 1 s more for each MiB")


def test_controllers_of_a_host_and_of_all(hosts):
    with target(controllers=3, host_controllers=2) as busy:
        (_, first), (newest, second), (_, above) = (hosts(busy) for _ in range(3))
        assert (first, second, above) == (0, 0, Code.CONTROLLER_BUSY)
        assert [hosts(busy, name)[1] for name in (OTHER, THIRD)] == [0, 0]
        assert newest.ended() is None and len(busy.controllers) == 3
        assert hosts(busy)[1] == Code.CONTROLLER_BUSY  # all hold the same: nobody gives way


def test_connections_of_a_host_and_of_all(hosts):
    with target(connections=8, unnamed_connections=2, host_connections=4) as busy:
        own = [hosts(busy) for _ in range(5)]
        assert [status for _, status in own] == [0, 0, 0, 0, Code.CONTROLLER_BUSY]
        own[4][0].close()
        assert [hosts(busy, OTHER)[1] for _ in range(2)] == [0, 0]
        assert hosts(busy, THIRD)[1] == 0  # that is one more than all may have
        assert own[3][0].ended() is None
        assert own[0][0].enable().status == 0


def test_connections_before_connect_make_room_for_new_ones():
    with target(unnamed_connections=2) as busy, raw(busy) as spoke:
        spoke.initialize()
        with raw(busy) as silent:
            until(lambda: busy.connections == 2)
            with raw(busy) as new:
                assert new.initialize()
                assert silent.ended() is None
                assert (spoke.connect().status, new.connect(host=OTHER).status) == (0, 0)


@pytest.fixture
def waiting(monkeypatch):
    monkeypatch.setattr(controllers_module, "ROOM_S", 0.05)
    with target(in_flight_bytes=4 * MIB, host_in_flight_bytes=2 * MIB, in_capsule_bytes=8192, pdu_s=30.0) as busy:
        yield busy


def write(io, mib, cid=0):
    io.capsule(Sqe(WRITE, cid=cid, nsid=1, cdw12=256 * mib - 1), sgl_type=0x5A, sgl_bytes=mib * MIB)


def asked(io):
    head, pdu = io.stream.receive()
    return pdu if head.kind is PduType.R2T else pdu.status


def test_data_in_flight_of_a_host_and_of_all(waiting):
    with (
        raw_queues(waiting) as (_, one),
        raw_queues(waiting) as (_, two),
        raw_queues(waiting, host=OTHER) as (_, other),
        raw_queues(waiting, host=THIRD) as (_, third),
    ):
        write(one, 2)
        assert asked(one).length == 2 * MIB
        two.capsule(Sqe(READ, nsid=1, cdw12=255), sgl_type=0x5A, sgl_bytes=MIB)
        assert two.completion().status == Code.INTERRUPTED  # above the host's own limit; it may be repeated
        for io in (other, third):  # hosts without any data are admitted, though together that is more than all may have
            write(io, 2)
            assert asked(io).length == 2 * MIB


def test_a_command_waits_for_the_bytes_of_its_host(waiting, monkeypatch):
    """A host sees the end of a command before its bytes are released."""
    monkeypatch.setattr(controllers_module, "ROOM_S", 30.0)
    with raw_queues(waiting) as (_, one), raw_queues(waiting) as (_, two):
        write(one, 2)
        request = asked(one)
        two.capsule(Sqe(READ, nsid=1, cdw12=255), sgl_type=0x5A, sgl_bytes=MIB)
        answered = threading.Event()
        waits = threading.Thread(target=lambda: (two.completion(), answered.set()))
        waits.start()
        time.sleep(0.2)
        assert not answered.is_set()
        data = Data(request.cid, request.tag, 0, request.length)
        one.send(*pack(PduType.H2C_DATA, pack_data(data), [bytes(request.length)], Digests(), Flag.LAST))
        assert one.completion().status == 0
        waits.join()
        assert answered.is_set()


def test_host_loses_own_sessions_above_its_limit():
    namespace = SequenceNamespace(lambda host: Counting(), IDENTITY, bytes(16))
    for _ in range(MAX_HOST_SESSIONS + 5):
        namespace.execute(Sqe(Op.ATTACH, cdw10=1 << 14), b"", HOST)
    assert len(namespace) == MAX_HOST_SESSIONS
    for number in range(namespace.most_sessions - MAX_HOST_SESSIONS):
        namespace.execute(Sqe(Op.ATTACH, cdw10=1 << 14), b"", f"{HOST}{number}")
    assert len(namespace) == namespace.most_sessions
    namespace.execute(Sqe(Op.ATTACH, cdw10=1 << 14), b"", f"{HOST}x")  # the host with most makes room
    held = Counter(session.host for session in namespace._sessions.values())
    assert (held[HOST], held[f"{HOST}x"], held[f"{HOST}0"]) == (MAX_HOST_SESSIONS - 1, 1, 1)


def test_sessions_are_fewer_where_each_may_keep_more():
    layout = WindowLayout(depth=8, slot_blocks=1 << 14)  # 64 MiB
    namespace = SequenceNamespace(lambda host: Counting(), replace(IDENTITY, layout=layout), bytes(16))
    assert (namespace.most_sessions, namespace.most_kept_bytes >> 30) == (8, 4)


@pytest.mark.parametrize("silent", ["handshake", "header"])
def test_deadlines_pass_while_nothing_arrives(silent):
    with target(handshake_s=0.3, pdu_s=0.3) as busy:
        if silent == "handshake":
            with raw(busy) as host:
                assert host.ended() is None
        else:
            with raw_queues(busy) as (_, io):
                io.send(head_of(PduType.CAPSULE_CMD, header=72, total=72))
                assert io.ended() is None


def test_an_association_ends_after_two_timeouts_without_keep_alive():
    with target() as busy, raw(busy) as admin:
        admin.initialize()
        assert admin.connect(cdw12=100).status == 0
        began = time.monotonic()
        assert admin.ended() is None
        assert time.monotonic() - began >= 0.15
