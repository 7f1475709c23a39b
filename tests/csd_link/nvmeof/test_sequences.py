"""Sessions execute every command once and in order, however often it is sent; devices over connections that are cut.

partner of: csd_link/nvmeof/sequences.py, csd_link/nvmeof/device.py
"""

import random
import threading
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csd_io.crc import crc32
from csd_link.host_end import DriveLostError
from csd_link.nvmeof import device as device_module
from csd_link.nvmeof import sequences as sequences_module
from csd_link.nvmeof.commands import Code, CommandError, Sqe
from csd_link.nvmeof.device import Endpoint, NvmeDrive
from csd_link.nvmeof.host import NvmeHost
from csd_link.nvmeof.host_queue import StatusError
from csd_link.nvmeof.identify import Limits
from csd_link.nvmeof.pdu import Digests
from csd_link.nvmeof.sequences import (
    FRAME,
    LOST_SESSION,
    UNKNOWN_SESSION,
    Op,
    SequenceNamespace,
    Session,
    decode_frame,
)
from csd_link.nvmeof.tls import TlsError
from csd_link.window import Identity, WindowLayout
from csd_link.wire import pack_entry
from csd_spec import Completion, Flush, KvAppend, KvExist, KvFree, Status
from csd_spec.arrays import KEY
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from tests.nvmeof import HOST, NQN, MemoryBlocks, subsystem_of, target_of
from tests.properties import examples
from tests.served import until
from vcsd_eval.verify.faulty_proxy import FaultyProxy

IDENTITY = Identity("csd0", INSTCSD_ZYNQ7045_8CH, WindowLayout(depth=4, slot_blocks=2048))
SMALL = Limits(in_capsule_bytes=65536)


class Counting:
    """A service that returns the number of executed commands, and a payload whose length is the command's handle."""

    def __init__(self):
        self.seen, self.attached = [], 0

    def attach(self):
        self.attached += 1

    def refuse(self, command, status, reason, submit_ns):
        return Completion(status=status, reason=reason, submit_ns=submit_ns)

    def step(self, command, submit_ns, max_bytes):
        self.seen.append(submit_ns)
        (size,) = command.seqs if isinstance(command, KvFree) else (0,)
        return Completion(
            status=Status.SUCCESS, data=(np.full(size, len(self.seen) % 251, np.uint8),), reason="x" * (size % 7)
        )


def flush_entry(number):
    return pack_entry(0x00, (), number, number, 0, crc32(b""))


@pytest.fixture
def service():
    return Counting()


@pytest.fixture
def namespace(service):
    return SequenceNamespace(lambda host: service, IDENTITY, bytes(16), sessions=2)


def attach(namespace, host=HOST):
    answer = namespace.execute(Sqe(Op.ATTACH, cdw10=1 << 16), b"", host)
    return int.from_bytes(answer.data[0][:8], "little")


def sqe(op, number, session, size=4096, cdw11=0):
    low = 0xFFFFFFFF
    return Sqe(op, cdw10=size, cdw11=cdw11, cdw12=number, cdw14=session & low, cdw15=session >> 32)


def refused(action, *args):
    with pytest.raises(CommandError) as error:
        action(*args)
    return error.value.status


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5)), max_size=60))
def test_sequence_numbers_execute_once_in_order(submitted):
    service = Counting()
    session = Session(service, HOST, depth=4, slot_bytes=1 << 20)
    executed, answers = 0, set()
    for number, wanted in submitted:
        if number > executed or (number == executed and wanted >= 4):
            assert refused(session.submit, number, wanted, flush_entry(number)) == Code.SEQUENCE_ERROR
            continue
        session.submit(number, wanted, flush_entry(number))
        if number == executed:
            executed += 1
            answers = {earlier for earlier in answers if earlier >= number - wanted} | {number}
        assert service.seen == list(range(executed))
        for earlier in range(14):
            if earlier in answers:
                assert decode_frame(bytearray(b"".join(session.fetch(earlier)))).status is Status.SUCCESS
            else:
                assert refused(session.fetch, earlier) == Code.SEQUENCE_ERROR
    assert session.kept_bytes == sum(len(part) for earlier in answers for part in session.fetch(earlier))


def test_session_belongs_to_host_and_ends_with_firmware(namespace, service):
    first = attach(namespace)
    assert (service.attached, first & 1) == (1, 1)
    for number, host in ((first, HOST + "x"), (first ^ 2, HOST), (0, HOST)):
        assert refused(namespace.execute, sqe(Op.SUBMIT, 0, number), flush_entry(0), host) == UNKNOWN_SESSION
    assert not service.seen
    second = attach(namespace)
    namespace.execute(sqe(Op.SUBMIT, 0, first), flush_entry(0), HOST)
    attach(namespace)
    namespace.execute(sqe(Op.FETCH, 0, first), b"", HOST)
    assert refused(namespace.execute, sqe(Op.FETCH, 0, second), b"", HOST) == UNKNOWN_SESSION, "not used for longest"


HOSTS = [f"{HOST}{number}" for number in range(3)]
STEPS = "attach", "use", "detach", "leave", "wait"


@settings(max_examples=examples(60))
@given(
    st.lists(st.tuples(st.sampled_from(["attach", "use", "detach", "leave", "wait"]), st.integers(0, 9)), max_size=40)
)
def test_sessions_end_as_their_hosts_share_them(steps):
    """Against a list of them, least recently used first; any command ends those of hosts that are gone for too long."""
    now, most, own, kept_s = 100.0, 4, 3, 5
    sessions, left = list[tuple[int, str]](), dict[str, float]()

    def expire(host):
        left.pop(host, None)
        gone = {owner for owner, since in left.items() if now - since >= kept_s}
        sessions[:] = [session for session in sessions if session[1] not in gone]
        for owner in gone:
            del left[owner]

    with (
        mock.patch.object(sequences_module, "LEFT_S", kept_s),
        mock.patch.object(sequences_module, "MAX_HOST_SESSIONS", own),
        mock.patch.object(sequences_module.time, "monotonic", lambda: now),
    ):
        namespace = SequenceNamespace(lambda host: Counting(), IDENTITY, bytes(16), sessions=most)
        for step, number in steps:
            host = HOSTS[number % 3]
            if step == "attach":
                made = attach(namespace, host)
                expire(host)
                sessions.append((made, host))
                while True:
                    counts = Counter(owner for _, owner in sessions)
                    largest = max(counts, key=lambda count: (counts[count], count in left))
                    if counts[largest] <= own and len(sessions) <= most:
                        break
                    sessions.remove(next(session for session in sessions if session[1] == largest))
            elif step == "leave":
                namespace.host_left(host)
                if host in {owner for _, owner in sessions}:
                    left[host] = now
            elif step == "wait":
                now += number
            elif sessions:
                used = sessions[number % len(sessions)]
                expire(used[1])
                sessions.remove(used)
                if step == "use":
                    assert refused(namespace.execute, sqe(Op.FETCH, 7, used[0]), b"", used[1]) == Code.SEQUENCE_ERROR
                    sessions.append(used)
                else:
                    namespace.execute(sqe(Op.DETACH, 0, used[0]), b"", used[1])
            assert list(namespace._sessions) == [owner for owner, _ in sessions]
            assert len(namespace) == len(sessions)


def test_completion_is_fetched_whole_or_in_parts(namespace):
    session = attach(namespace)
    body = KvFree((9000,))
    entry = pack_entry(0xC8, (1,), 0, 5, 8, crc32(np.array(body.seqs, np.uint64).tobytes()))
    namespace.execute(sqe(Op.SUBMIT, 0, session), entry + np.array(body.seqs, np.uint64).tobytes(), HOST)
    answer = namespace.execute(sqe(Op.FETCH, 0, session, 4096), b"", HOST)
    assert sum(map(len, answer.data)) == 4096 and answer.result > 9000, "it does not fit: what fits, and its size"
    (whole, data) = namespace.execute(sqe(Op.FETCH, 0, session, answer.result), b"", HOST).data
    frame = whole + data
    parts = [b"".join(namespace.execute(sqe(Op.FETCH, 0, session, 4096, at), b"", HOST).data) for at in (4096, 8192)]
    assert frame == b"".join([*answer.data, *parts])
    done = decode_frame(bytearray(frame))
    assert done.data[0].tolist() == [1] * 9000 and done.data[0].ctypes.data % 16 == 0
    for broken in (b"", frame[:-1], frame[: FRAME.size], FRAME.pack(2**60, 3) + frame[16:], frame[:-1] + b"\0"):
        assert decode_frame(bytearray(broken)).status is Status.TRANSFER_ERROR


def test_invalid_entry_answered_and_counted(namespace, service):
    session = attach(namespace)
    for number, bad in enumerate((b"", bytes(10), b"\xff" * 64, flush_entry(0) + b"x", flush_entry(1 << 60))):
        namespace.execute(sqe(Op.SUBMIT, number, session), bad, HOST)
        done = decode_frame(bytearray(b"".join(namespace.execute(sqe(Op.FETCH, number, session), b"", HOST).data)))
        assert done.status in (Status.INVALID_FIELD, Status.TRANSFER_ERROR, Status.INVALID_OPCODE)
    assert not service.seen
    for size in (63, 64 + IDENTITY.layout.slot_bytes + 1):
        assert refused(namespace.data_bytes, sqe(Op.SUBMIT, 9, session, size)) == Code.INVALID_FIELD


def device_of(port, **options):
    return NvmeDrive(lambda: Endpoint("127.0.0.1", port, NQN), **options)


def target_with(namespace, port=0, **limits):
    return target_of(subsystem_of(MemoryBlocks(), namespaces={3: namespace}), replace(SMALL, **limits), port)


@pytest.mark.parametrize("digests", [Digests(), Digests(True, True)])
def test_a_device_has_several_commands_in_flight_of_any_size(namespace, service, digests):
    rows = np.arange(3 << 20, dtype=np.float16).reshape(-1, 1, 64)  # 6 MiB: by R2T
    append = KvAppend((1,), 0, np.array([len(rows)]), rows, rows[:, :, :0])
    with target_with(namespace) as target:
        device = device_of(target.port, digests=digests)
        assert (device.name, device.spec) == ("csd0", INSTCSD_ZYNQ7045_8CH)
        commands = [KvFree((9,)), append, Flush(), KvFree((3 << 20,)), append, append, Flush()] * 2
        futures = [device.submit(command, number) for number, command in enumerate(commands)]
        sizes = [future.result().data[0].size for future in futures]
        assert sizes == [9, 0, 0, 3 << 20, 0, 0, 0] * 2
        assert service.seen == list(range(len(commands)))
        threads = [threading.Thread(target=lambda: device.submit(KvFree((5,)), 0).result()) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(service.seen) == len(commands) + 8
        with pytest.raises(ValueError, match="this drive takes"):
            device.submit(KvExist(np.zeros(1 << 22, KEY)), 0)
        device.close()


@settings(max_examples=examples(8), deadline=None)
@given(st.integers(0, 2**32))
def test_cut_connections_lose_and_repeat_nothing(seed):
    service, draw = Counting(), random.Random(seed)
    namespace = SequenceNamespace(lambda host: service, IDENTITY, bytes(16))
    with target_with(namespace) as target:
        proxy = FaultyProxy(target.port, random.Random(seed), 200_000, ("cut",))
        device = device_of(proxy.port)
        proxy.is_active = True
        sizes = [draw.choice((0, 10, 5000, 100_000)) for _ in range(120)]
        futures = [device.submit(KvFree((size,)), number) for number, size in enumerate(sizes)]
        completions = [future.result() for future in futures]
        assert [done.data[0].size for done in completions] == sizes, [done.reason for done in completions]
        assert [done.data[0][0] for done in completions if done.data[0].size] == [
            (number + 1) % 251 for number, size in enumerate(sizes) if size
        ]
        assert service.seen == list(range(len(sizes)))
        assert proxy.count and device.lost is None
        proxy.is_active = False
        device.close()
        proxy.close()


def test_restarted_or_closed_drive_is_lost(namespace, monkeypatch):
    monkeypatch.setattr(device_module, "REFUSED_S", 0.1)
    with target_with(namespace) as target:
        device = device_of(target.port)
        port = target.port
        namespace._sessions.clear()
        done = device.submit(Flush(), 0).result()
        assert (done.status, done.reason) == (Status.PATH_LOST, LOST_SESSION)
        assert device.submit(Flush(), 0).result().status is Status.PATH_LOST
        device.close()
        device = device_of(target.port)
    done = device.submit(Flush(), 0).result()
    assert done.status is Status.PATH_LOST and f"it takes no other: [Errno 111] 127.0.0.1:{port}" in done.reason
    device.close()
    with pytest.raises(DriveLostError, match="Connection refused"):
        device_of(port)


def test_closed_drive_has_completed_its_commands_and_leaves_no_session(namespace, service):
    with target_with(namespace) as target:
        device = device_of(target.port)
        sent = [device.submit(KvFree((size,)), 0) for size in (9, 2_000_000, 0)]
        device.close()
        assert [future.done() and future.result().status for future in sent] == [Status.SUCCESS] * 3
        until(lambda: len(namespace) == 0)


def test_unreachable_drive_is_waited_for(namespace, service):
    """A proxy takes connections and closes them, as long as no target listens."""
    located, again = [], ExitStack()

    def locate():
        located.append(target.port)
        if len(located) == 4:
            again.enter_context(target_with(namespace, port=target.port))
        return Endpoint("127.0.0.1", proxy.port, NQN)

    with target_with(namespace) as target:
        proxy = FaultyProxy(target.port, random.Random(0), 10)
        device, hasty = NvmeDrive(locate), device_of(proxy.port, ctrl_loss_s=0.0)
    with again:
        done = hasty.submit(Flush(), 0).result()
        assert done.status is Status.PATH_LOST and "it takes no other: " in done.reason
        assert device.submit(KvFree((9,)), 0).result().data[0].size == 9
        assert (device.lost, len(located)) == (None, 4)
        device.close()
    hasty.close()
    proxy.close()


class Clock:
    """Time that passes in sleeps only, which it notes."""

    def __init__(self, monkeypatch):
        self.now, self.slept = 50.0, list[float]()
        monkeypatch.setattr(device_module, "time", self)

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def device(namespace):
    with target_with(namespace) as target:
        attached = device_of(target.port, ctrl_loss_s=10.0)
        yield attached
        attached.close()


def doubling(first, most, total):
    """Delays that double up to a largest one, until their sum is at least `total`."""
    delays = list[float]()
    while sum(delays) < total:
        delays.append(min(first * 2 ** len(delays), most))
    return delays


@pytest.mark.parametrize(
    ("error", "waits_s"),
    [
        (TimeoutError(), 10.0),
        (StatusError(Code.CONTROLLER_BUSY, 0), 10.0),
        (ConnectionRefusedError(), device_module.REFUSED_S),
        (FileNotFoundError(), device_module.REFUSED_S),
        (TlsError(), device_module.REFUSED_S),
        (StatusError(Code.INVALID_HOST, 0), device_module.REFUSED_S),
    ],
)
def test_a_connection_is_tried_again_less_and_less_often(device, monkeypatch, error, waits_s):
    clock = Clock(monkeypatch)

    def fail(name):
        raise error

    monkeypatch.setattr(device, "_connect", fail)
    with pytest.raises(DriveLostError):
        device._reconnect(OSError("cut"))
    assert clock.slept == pytest.approx(doubling(0.01, device_module.MAX_DELAY_S, waits_s))


def test_refusals_count_from_the_last_other_failure(device, monkeypatch):
    clock, attempts = Clock(monkeypatch), list[float]()

    def fail(name):
        attempts.append(clock.now)
        raise TimeoutError if clock.now < 53 else ConnectionRefusedError

    monkeypatch.setattr(device, "_connect", fail)
    with pytest.raises(DriveLostError):
        device._reconnect(OSError("cut"))
    last_other = max(attempt for attempt in attempts if attempt < 53)
    assert 0 <= clock.now - last_other - device_module.REFUSED_S <= device_module.MAX_DELAY_S


def test_a_command_is_repeated_less_and_less_often_while_memory_is_short(device, monkeypatch):
    clock = Clock(monkeypatch)
    with pytest.raises(DriveLostError):
        for _ in range(1000):
            device._wait_to_retry()
    expected = doubling(0.01, 0.25, device_module.RETRY_S)
    assert clock.slept == pytest.approx(expected, abs=1e-9)


def test_the_first_connection_waits_for_a_busy_drive_alone(device, monkeypatch):
    for status, delays in ((Code.CONTROLLER_BUSY, [0.25] * 9), (Code.INVALID_HOST, [])):
        clock = Clock(monkeypatch)

        def fail(name, status=status):
            raise StatusError(status, 0)

        monkeypatch.setattr(device, "_connect", fail)
        with pytest.raises(StatusError):
            device._connect_first("")
        assert clock.slept == delays


def test_subsystem_without_sequences_is_refused(namespace):
    with target_of(subsystem_of(MemoryBlocks())) as target:
        with pytest.raises(DriveLostError, match=r"status 0x002"):
            device_of(target.port)
        host = NvmeHost("127.0.0.1", target.port, NQN)
        with pytest.raises(StatusError, match="0x00b"):
            host.io.command(Sqe(Op.ATTACH, nsid=3, cdw10=4096), (), 4096)
        host.close()


def test_repeatedly_cut_connection_is_lost(namespace, service, monkeypatch):
    monkeypatch.setattr(device_module, "MAX_RESUMES", 3)
    with target_with(namespace) as target:
        proxy = FaultyProxy(target.port, random.Random(0), 60_000, ("cut",))
        device = device_of(proxy.port)
        proxy.is_active = True
        done = device.submit(KvFree((2_000_000,)), 0).result()
        assert done.reason.startswith("3 connections were lost before a command ended")
        assert service.seen == [0]
        device.close()
        proxy.close()


@pytest.mark.parametrize("op", [Op.SUBMIT, Op.FETCH])
def test_command_without_memory_is_repeated_for_a_while(namespace, service, monkeypatch, op):
    """Whichever of the two NVMe commands the drive asks to retry, also for the second part of a completion."""
    execute, left = namespace.execute, 7

    def busy(sqe, data, host):
        nonlocal left
        if sqe.opcode == op and left:
            left -= 1
            raise CommandError(Code.INTERRUPTED)
        return execute(sqe, data, host)

    monkeypatch.setattr(namespace, "execute", busy)
    with target_with(namespace) as target:
        device = device_of(target.port)
        rows = np.zeros((100_000,), KEY)  # more than fits a capsule
        for number, command in enumerate((KvExist(rows), KvFree((3 << 20,)), KvExist(rows))):
            left = 7
            done = device.submit(command, number).result()
            assert done.status is Status.SUCCESS and (left == 0 or op is Op.SUBMIT)
        assert service.seen == [0, 1, 2]
        monkeypatch.setattr(device_module, "RETRY_S", 0.0)
        left = 1 << 30
        done = device.submit(KvExist(rows), 3).result()
        assert (done.status, "no memory for this host's data" in done.reason) == (Status.PATH_LOST, True)
        device.close()


def test_damaged_data_is_sent_again(namespace, service, monkeypatch):
    execute, damaged = SequenceNamespace.execute, [True, True]

    def execute_undamaged(self, sqe, data, host):
        if sqe.opcode == Op.SUBMIT and damaged:
            damaged.pop()
            raise CommandError(Code.TRANSIENT)
        return execute(self, sqe, data, host)

    monkeypatch.setattr(SequenceNamespace, "execute", execute_undamaged)
    with target_with(namespace) as target:
        device = device_of(target.port)
        assert device.submit(KvFree((9,)), 0).result().data[0].size == 9
        assert (service.seen, damaged, device.lost) == ([0], [], None)
        device.close()
