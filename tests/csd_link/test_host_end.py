"""Both ends of a window over blocks in memory, either one killed before any write of a block.

partner of: csd_link/drive_end.py
"""

import signal
import subprocess
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csd_firmware import Firmware
from csd_firmware.tenants import Tenant
from csd_link.drive_end import WindowController
from csd_link.host_end import (
    HEARTBEAT_TIMEOUT_S,
    LOST_TIMEOUT_S,
    DriveLostError,
    HeartbeatTimeoutError,
    WindowDrive,
    WindowHost,
)
from csd_link.run_dir import drive_dir, pid_path
from csd_link.window import BLOCK_BYTES, DRIVE_HEADER, HOST_HEADER, Identity, WindowLayout
from csd_link.wire import ENTRY, WireRequest, encode
from csd_spec import Flush, Geometry, KvAppend, KvFree, KvRead, SeqCreate, Status
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from tests.properties import examples

GEOMETRY = Geometry(
    channels=2, dies_per_channel=2, planes_per_die=1, blocks_per_plane=16, pages_per_block=8, page_bytes=512
)
DRIVE = replace(INSTCSD_ZYNQ7045_8CH, name="small", geometry=GEOMETRY, dram_bytes=1 << 20)
IDENTITY = Identity("small", DRIVE, WindowLayout(depth=2, slot_blocks=2))


class PowerCut(Exception):
    """This end is dead."""


class Blocks:
    """A medium in memory; one end's view of it dies before its write number `left`."""

    def __init__(self, data=None, left=None):
        self.data = bytearray(IDENTITY.layout.blocks * BLOCK_BYTES) if data is None else data
        self.blocks, self.left = IDENTITY.layout.blocks, left

    def dying(self, left):
        return Blocks(self.data, left)

    def read(self, block, count=1):
        return self.data[block * BLOCK_BYTES : (block + count) * BLOCK_BYTES]

    def write(self, block, data):
        for at in range(0, len(data), BLOCK_BYTES):
            if self.left is not None:
                if self.left == 0:
                    raise PowerCut
                self.left -= 1
            part, first = data[at : at + BLOCK_BYTES], block * BLOCK_BYTES + at
            self.data[first : first + len(part)] = part


def attached(medium, service):
    drive, host = WindowController(medium, IDENTITY, service), WindowHost(medium)
    assert not host.attach()
    assert drive.accept_host()
    assert host.attach()
    return drive, host


def tenant():
    return Tenant(Firmware(DRIVE), bytes(range(32)))


def ask(drive, host, command):
    host.submit(encode(command), 0)
    assert drive.serve()
    return host.poll()


def test_commands_and_completions_pass_the_window():
    drive, host = attached(Blocks(), tenant())
    (handle,) = ask(drive, host, SeqCreate(1, 1, 2, 16, 64)).data[0].tolist()
    small, large = (np.full((tokens, 2, 16), tokens, np.float16) for tokens in (3, 60))
    for rows in (small, large):  # within their block, and in a slot
        done = ask(drive, host, KvAppend((handle,), 0, np.array([len(rows)]), rows, -rows))
        assert done.status is Status.SUCCESS, done.reason
        assert done.link_bytes == 64 + 8 + 2 * rows.nbytes
    k, v = ask(drive, host, KvRead((handle,), 0)).data
    np.testing.assert_array_equal(k, np.concatenate([small, large]))
    np.testing.assert_array_equal(v, -k)


def test_requests_wait_in_the_ring_and_end_in_order():
    drive, host = attached(Blocks(), tenant())
    for _ in range(3):
        while host.has_free_slot:
            host.submit(encode(SeqCreate(1, 1, 1, 8, 64)), 0)
        assert drive.serve()
        assert drive.serve()
        assert not drive.serve()
        assert all(host.poll().status is Status.SUCCESS for _ in range(2))
        assert host.poll() is None


def test_command_larger_than_slot_is_refused():
    drive, host = attached(Blocks(), tenant())
    rows = np.zeros((400, 2, 16), np.float16)
    with pytest.raises(ValueError, match="slots hold 8,192"):
        host.submit(encode(KvAppend((1,), 0, np.array([400]), rows, rows)), 0)
    (handle,) = ask(drive, host, SeqCreate(1, 1, 2, 16, 512)).data[0].tolist()
    for _ in range(3):
        part = rows[:60]
        assert ask(drive, host, KvAppend((handle,), 0, np.array([60]), part, part)).status is Status.SUCCESS
    done = ask(drive, host, KvRead((handle,), 0))
    assert done.status is Status.INVALID_FIELD
    assert "slots hold 8,192" in done.reason


@pytest.mark.parametrize("where", ["entry", "payload"])
def test_damaged_request_is_transfer_error_or_ignored(where):
    medium = Blocks()
    drive, host = attached(medium, tenant())
    rows = np.zeros((60, 2, 16), np.float16)
    host.submit(encode(KvAppend((1,), 0, np.array([60]), rows, rows)), 0)
    layout = IDENTITY.layout
    first = (layout.request(0) if where == "entry" else layout.to_drive(0)) * BLOCK_BYTES
    medium.data[first + 50] ^= 1
    assert drive.serve() == (where == "payload")
    if where == "payload":
        assert host.poll().status is Status.TRANSFER_ERROR


def test_damaged_completion_is_transfer_error():
    medium = Blocks()
    drive, host = attached(medium, tenant())
    (handle,) = ask(drive, host, SeqCreate(1, 1, 2, 16, 64)).data[0].tolist()
    rows = np.ones((60, 2, 16), np.float16)
    ask(drive, host, KvAppend((handle,), 0, np.array([60]), rows, rows))
    sequence = host.submit(encode(KvRead((handle,), 0)), 0)
    assert drive.serve()
    medium.data[IDENTITY.layout.to_host(sequence) * BLOCK_BYTES + 50] ^= 1
    assert host.poll().status is Status.TRANSFER_ERROR


def test_simulated_time_restarts_for_new_host():
    medium, rows = Blocks(), np.ones((60, 2, 16), np.float16)
    drive, host = attached(medium, tenant())
    (handle,) = ask(drive, host, SeqCreate(1, 1, 2, 16, 64)).data[0].tolist()
    programmed = ask(drive, host, KvAppend((handle,), 0, np.array([60]), rows, rows))
    other = WindowHost(medium)
    other.attach()
    assert drive.accept_host() and other.attach()
    read = ask(drive, other, KvRead((handle,), 0))
    assert 0 < read.finish_ns < programmed.finish_ns


def test_host_with_damaged_header_counts_as_earlier():
    """The next host takes a generation that the drive has not seen, and is attached once the drive confirms it."""
    medium = Blocks()
    drive, _ = attached(medium, tenant())
    drive.host = 1 << 50  # above any that is drawn
    drive.beat()
    medium.data[HOST_HEADER * BLOCK_BYTES + 20] ^= 0xFF
    other = WindowHost(medium)
    assert not other.attach() and other.host > drive.host
    assert drive.accept_host() and other.attach()


def test_firmware_exception_is_a_status():
    class Broken(Tenant):
        def step(self, command, submit_ns, max_bytes):
            raise MemoryError("no more")

    drive, host = attached(Blocks(), Broken(Firmware(DRIVE), b"k"))
    done = ask(drive, host, Flush())
    assert (done.status, done.reason) == (Status.INTERNAL_ERROR, "firmware: MemoryError: no more")


def test_unknown_opcode_is_refused():
    drive, host = attached(Blocks(), tenant())
    host.submit(WireRequest(0x77, (1, 2, 3), b"x" * ENTRY.size), 0)
    assert drive.serve()
    assert host.poll().status is Status.INVALID_OPCODE


def test_restarted_drive_is_lost_without_old_requests():
    medium = Blocks()
    drive, host = attached(medium, tenant())
    host.submit(encode(Flush()), 0)
    again = WindowController(medium, IDENTITY, tenant())
    assert again.drive == drive.drive + 1
    assert not again.serve()
    assert not again.accept_host()
    with pytest.raises(DriveLostError, match="restarted"):
        host.check_heartbeat()
    other = WindowHost(medium)
    assert not other.attach()
    assert again.accept_host()
    assert other.attach()
    assert ask(again, other, Flush()).status is Status.SUCCESS


def test_second_host_takes_over_window():
    medium = Blocks()
    drive, host = attached(medium, tenant())
    second = WindowHost(medium)
    second.attach()
    drive.accept_host()
    assert second.attach()
    with pytest.raises(DriveLostError, match="another host"):
        host.check_heartbeat()
    assert ask(drive, second, Flush()).status is Status.SUCCESS
    assert host.poll() is None


class World:
    """A drive that counts what it carried out, hosts that use it, and deaths of either."""

    def __init__(self):
        self.medium = Blocks()
        self.runs, self.asked, self.ended, self.lost = [], 0, {}, []
        self.drive = self.host = None

    def attach(self):
        pass

    def step(self, command, submit_ns, max_bytes):
        self.runs.append(submit_ns)
        return Tenant(Firmware(DRIVE), b"k" * 16).step(KvFree((submit_ns,)), submit_ns)

    def act(self, who, left):
        """One step of an end that dies at its write number `left`."""
        try:
            self.act_drive(left) if who == "drive" else self.act_host(left)
        except PowerCut:
            if who == "drive":
                self.drive = None
            else:
                self.lose_host()

    def act_drive(self, left):
        if self.drive is None:
            self.drive = WindowController(self.medium.dying(left), IDENTITY, self)
        self.drive.medium.left = left
        if not self.drive.accept_host():
            self.drive.serve()

    def lose_host(self):
        if self.host:
            self.lost += range(self.first + self.host.ended, self.asked)
        self.host = None

    def act_host(self, left):
        if self.host is None:
            self.host, self.first = WindowHost(self.medium.dying(left)), self.asked
        self.host.medium.left = left
        if not self.host.attached:
            self.host.attach()
        elif (done := self.host.poll()) is not None:
            self.ended[self.first + self.host.ended - 1] = done
        else:
            try:
                self.host.check_heartbeat()
            except DriveLostError:
                return self.lose_host()
            if self.host.has_free_slot:
                self.asked += 1  # counted before it is sent: a host that dies here does not know
                self.host.submit(encode(KvFree((1,))), self.asked - 1)


deaths = st.one_of(st.just(None), st.just(None), st.just(None), st.integers(0, 2))


@settings(max_examples=examples(150))
@given(st.lists(st.tuples(st.sampled_from(["drive", "host", "host"]), deaths), max_size=60))
def test_either_end_may_die_before_any_block_is_written(steps):
    world = World()
    for who, left in steps:
        world.act(who, left)
    assert len(set(world.runs)) == len(world.runs), "a request was carried out twice"
    for number, done in world.ended.items():
        assert done.submit_ns == number, "a completion of another request"
        assert number in world.runs
    for _ in range(20):  # both ends live from here on
        world.act("drive", None)
        world.act("host", None)
    assert world.host.attached
    before = len(world.ended)
    for _ in range(4):
        world.act("drive", None)
        world.act("host", None)
        world.act("host", None)
    assert len(world.ended) > before
    numbers = set(world.ended) | set(world.lost) | set(range(world.first + world.host.ended, world.asked))
    assert numbers == set(range(world.asked)), "a request without an end"


def test_torn_header_is_not_a_lost_drive():
    medium = Blocks()
    _, host = attached(medium, tenant())
    beat = host.check_heartbeat()
    medium.data[DRIVE_HEADER * BLOCK_BYTES + 20] ^= 0xFF
    assert host.check_heartbeat() == beat


class Clock:
    """Time passes only while a host waits at the doorbell; a drive answers during that time, if it may."""

    def __init__(self, monkeypatch):
        self.now, self.drive = 0.0, None
        for name in ("perf_counter", "monotonic"):
            monkeypatch.setattr(f"csd_link.host_end.time.{name}", self.tick)

    def tick(self):
        self.now += 1e-5
        return self.now

    def ring(self):
        pass

    def wait(self, timeout_s):
        self.now += timeout_s
        if self.drive:
            self.drive.beat()
            self.drive.accept_host()
            self.drive.serve()


def test_silent_unknown_drive_lost_after_long_timeout(monkeypatch):
    clock, medium = Clock(monkeypatch), Blocks()
    drive = clock.drive = WindowController(medium, IDENTITY, tenant())
    device = WindowDrive(medium, clock)
    assert device.submit(Flush(), 0).result().status is Status.SUCCESS
    clock.drive, began = None, clock.now
    done = device.submit(Flush(), 0).result()
    assert (done.status, f"{LOST_TIMEOUT_S:g} s" in done.reason) == (Status.PATH_LOST, True)
    assert LOST_TIMEOUT_S < clock.now - began < LOST_TIMEOUT_S + 1 and isinstance(device.lost, HeartbeatTimeoutError)
    clock.drive = drive
    assert device.submit(Flush(), 0).result().status is Status.PATH_LOST


@pytest.mark.usefixtures("own_run_dir")
@pytest.mark.parametrize(("state", "within"), [("ended", 1), ("stopped", LOST_TIMEOUT_S + 1)])
def test_dead_process_lost_within_1s_stopped_one_kept(monkeypatch, state, within):
    clock, medium = Clock(monkeypatch), Blocks()
    process = subprocess.Popen(["sleep", "60"])
    drive_dir(IDENTITY.name).mkdir()
    pid_path(IDENTITY.name).write_text(str(process.pid))
    clock.drive = WindowController(medium, IDENTITY, tenant())
    device = WindowDrive(medium, clock)
    process.send_signal(signal.SIGSTOP if state == "stopped" else signal.SIGKILL)
    if state == "ended":
        process.wait()
    clock.drive, began = None, clock.now
    assert device.submit(Flush(), 0).result().status is Status.PATH_LOST
    assert within - 1 <= clock.now - began <= within and isinstance(device.lost, HeartbeatTimeoutError) == (
        state == "stopped"
    )
    process.kill()
    process.wait()


def test_slow_drive_with_heartbeat_is_waited_for(monkeypatch):
    clock, medium = Clock(monkeypatch), Blocks()
    clock.drive = drive = WindowController(medium, IDENTITY, tenant())
    device = WindowDrive(medium, clock)
    serve = drive.serve
    drive.serve = lambda: serve() if clock.now > 10 * HEARTBEAT_TIMEOUT_S else False
    assert device.submit(Flush(), 0).result().status is Status.SUCCESS
    assert clock.now > 10 * HEARTBEAT_TIMEOUT_S


def test_attach_without_drive_is_lost(monkeypatch):
    clock = Clock(monkeypatch)
    with pytest.raises(DriveLostError, match="no drive answers"):
        WindowDrive(Blocks(), clock)
    assert HEARTBEAT_TIMEOUT_S < clock.now < 1


def test_slot_is_reused_only_after_its_data_is_read():
    medium = Blocks()
    drive, host = attached(medium, tenant())
    (handle,) = ask(drive, host, SeqCreate(1, 1, 2, 16, 64)).data[0].tolist()
    rows, read, free = np.ones((60, 2, 16), np.float16), medium.read, []
    ask(drive, host, KvAppend((handle,), 0, np.array([60]), rows, rows))
    while host.has_free_slot:
        host.submit(encode(KvRead((handle,), 0)), 0)
        assert drive.serve()

    def noticed(block, count=1):
        free.append(host.has_free_slot)
        return read(block, count)

    host.medium.read = noticed
    np.testing.assert_array_equal(host.poll().data[0], rows)
    assert free == [False, False], "the completion and its data"
    assert host.has_free_slot


def test_loss_during_completion_ends_commands_once(monkeypatch):
    """One thread reads a completion while another one detects in `submit` that the drive is lost."""
    clock, medium = Clock(monkeypatch), Blocks()
    clock.drive = WindowController(medium, IDENTITY, tenant())
    device = WindowDrive(medium, clock)
    poll, gone = device._end.poll, DriveLostError("its process has exited")
    futures = [device.submit(Flush(), 0) for _ in range(2)]

    def poll_while_it_fails():
        done = poll()
        if done is not None:
            device._fail(gone)
        return done

    device._end.poll = poll_while_it_fails
    assert [future.result().status for future in futures] == [Status.PATH_LOST] * 2
    assert device.submit(Flush(), 0).result().status is Status.PATH_LOST


def test_ring_may_empty_while_waiting_for_a_slot(monkeypatch):
    """Another thread completes all commands between the check for free slots and the search for the oldest command."""
    clock, medium = Clock(monkeypatch), Blocks()
    clock.drive = WindowController(medium, IDENTITY, tenant())
    device = WindowDrive(medium, clock)
    futures, room = [device.submit(Flush(), 0) for _ in range(2)], WindowHost.has_free_slot

    def looked(end):
        there = room.fget(end)
        for future in futures:
            future.result()
        return there

    monkeypatch.setattr(WindowHost, "has_free_slot", property(looked))
    assert device.submit(Flush(), 0).result().status is Status.SUCCESS


class Impatient:
    """A doorbell that ends an unlimited wait."""

    def __init__(self, waits):
        self.waits = waits

    def ring(self): ...

    def wait(self, timeout_s):
        time.sleep(1e-4)
        self.waits -= 1
        assert self.waits, "still waiting"

    def close(self): ...


def test_silent_drive_without_process_lost_soon(own_run_dir, monkeypatch):
    monkeypatch.setattr("csd_link.host_end.HEARTBEAT_TIMEOUT_S", 0.01)
    medium = Blocks()
    WindowController(medium, IDENTITY, tenant())
    with pytest.raises(DriveLostError, match="no drive answers at its window"):
        WindowDrive(medium, Impatient(20_000))


def test_both_ends_poll_without_doorbell(own_run_dir):
    medium, stop = Blocks(), threading.Event()
    drive = WindowController(medium, IDENTITY, tenant())

    def serve():
        while not stop.is_set():
            drive.accept_host() or drive.serve()
            time.sleep(1e-4)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        device = WindowDrive(medium)
        assert device.submit(Flush(), 0).result().status is Status.SUCCESS
        device.close()
    finally:
        stop.set()
        thread.join()
