"""Drives in folders: data that outlives the process, snapshots, and restoring them."""

import signal
import time
from threading import Event, Thread, Timer, current_thread, main_thread

import numpy as np
import pytest

from csd_firmware import InProcessDrive
from csd_spec import Completion, DriveError, Flush, KvAppend, KvRead, SeqCreate, Status


def run(device, command):
    done = device.submit(command, 0).result()
    assert done.status is Status.SUCCESS, done.reason
    return done


def filled(device, tokens, seed=0):
    """A sequence of `tokens` random rows; its handle and rows."""
    rows = np.random.default_rng(seed).standard_normal((tokens, 2, 16)).astype(np.float16)
    create = SeqCreate(count=1, layers=1, kv_heads=2, head_dim=16, max_tokens=512)
    handle = int(run(device, create).data[0][0])
    run(device, KvAppend(seqs=(handle,), layer=0, lengths=np.array([tokens]), k=rows, v=-rows))
    return handle, rows


def check(device, handle, rows):
    k, v = run(device, KvRead(seqs=(handle,), layer=0)).data
    np.testing.assert_array_equal(k, rows)
    np.testing.assert_array_equal(v, -rows)


def test_flushed_rows_survive_reopen(small_drive, tmp_path):
    device = InProcessDrive(small_drive, tmp_path / "drive")
    handle, rows = filled(device, 100)
    run(device, Flush())
    filled(device, 50)
    device.close()
    again = InProcessDrive.reopen(tmp_path / "drive")
    assert set(again.firmware.ftl.sequences) == {handle}
    check(again, handle, rows)
    again.close()


@pytest.mark.parametrize("in_memory", [True, False])
def test_snapshot_equals_drive_at_that_moment(small_drive, tmp_path, in_memory):
    device = InProcessDrive(small_drive, None if in_memory else tmp_path / "drive")
    handle, rows = filled(device, 100)
    assert device.snapshot(tmp_path / "snapshot") == 1
    filled(device, 100, seed=1)
    device.close()
    before = {path.name: path.read_bytes() for path in (tmp_path / "snapshot").iterdir()}
    for target in ("one", "two"):
        source = InProcessDrive.reopen(tmp_path / "snapshot", private=True)
        filled(source, 30, seed=2)
        source.snapshot(tmp_path / target)
        source.close()
        restored = InProcessDrive.reopen(tmp_path / target)
        assert len(restored.firmware.ftl.sequences) == 2
        check(restored, handle, rows)
        filled(restored, 30)
        restored.close()
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "snapshot").iterdir()}


def test_snapshot_into_existing_path_is_refused(small_drive, tmp_path):
    device = InProcessDrive(small_drive)
    (tmp_path / "file").write_text("here")
    with pytest.raises(FileExistsError, match="not empty"):
        device.snapshot(tmp_path)
    device.close()


def test_formatted_drive_is_empty_and_usable(small_drive):
    device = InProcessDrive(small_drive)
    filled(device, 100)
    device.firmware.step(Flush(), 0)
    freed, took_ns = device.format()
    assert (freed, device.firmware.ftl.sequences) == (1, {})
    assert took_ns > small_drive.timing.erase_ns
    check(device, *filled(device, 100))
    device.close()


def test_a_drive_that_refuses_is_named(small_drive, tmp_path, monkeypatch):
    device = InProcessDrive(small_drive, tmp_path / "one")
    monkeypatch.setattr(device.firmware, "step", lambda *_: Completion(status=Status.READ_ONLY, reason="worn out"))
    with pytest.raises(DriveError, match=r"drive .*/one: read only: worn out"):
        device.snapshot(tmp_path / "copy")
    device.close()


def test_call_in_own_thread_runs_after_queued_commands(small_drive, monkeypatch):
    device, order, begun, go = InProcessDrive(small_drive), [], Event(), Event()

    def step(command, submit_ns):
        order.append((command, current_thread() is main_thread()))
        if len(order) == 1:
            begun.set()
            go.wait()
        return Completion(status=Status.SUCCESS)

    monkeypatch.setattr(device.firmware, "step", step)
    queued = [device.submit(number, 0) for number in range(3)]
    begun.wait()
    Timer(0.1, go.set).start()
    device.carry_out(3, 0)
    device.carry_out(4, 0)
    assert [number for number, _ in order] == [0, 1, 2, 3, 4] and all(future.done() for future in queued)
    assert [is_own for _, is_own in order] == [False] * 4 + [True], "only where nothing waits is it worth it"
    device.close()
    for ask in (device.submit, device.carry_out):
        with pytest.raises(RuntimeError, match="shutdown"):
            ask(5, 0)


def test_overridden_submit_is_always_called(small_drive):
    class Watched(InProcessDrive):
        seen = 0

        def submit(self, command, submit_ns):
            self.seen += 1
            return super().submit(command, submit_ns)

    device = Watched(small_drive)
    assert device.carry_out(Flush(), 0).status is Status.SUCCESS and device.seen == 1
    device.close()


def test_closing_waits_for_a_command_in_another_thread(small_drive, monkeypatch):
    device, begun, ended = InProcessDrive(small_drive), Event(), []

    def step(command, submit_ns):
        begun.set()
        time.sleep(0.2)
        ended.append(command)

    monkeypatch.setattr(device.firmware, "step", step)
    thread = Thread(target=device.carry_out, args=(Flush(), 0))
    thread.start()
    begun.wait()
    device.close()
    assert ended
    thread.join()


class Interrupt(Exception):
    """Exception raised by a signal handler."""


def test_raising_signal_handler_does_not_tear_command(small_drive, monkeypatch):
    """Time limits and batch systems send signals whose handlers raise; one such exception ended a command half way."""
    device, done = InProcessDrive(small_drive), []

    def step(command, submit_ns):
        signal.raise_signal(signal.SIGUSR1)
        done.append(command)

    def handle(*_):
        raise Interrupt

    monkeypatch.setattr(device.firmware, "step", step)
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(Interrupt):
            device.carry_out(Flush(), 0)
            time.sleep(10)  # the handler runs in this thread, at the latest here
    finally:
        signal.signal(signal.SIGUSR1, before)
    device.close()
    assert len(done) == 1


def test_ctrl_c_waits_for_end_of_command(small_drive, monkeypatch):
    monkeypatch.setattr("csd_firmware.inprocess._has_handlers", lambda: False)
    device, done = InProcessDrive(small_drive), []

    def step(command, submit_ns):
        signal.raise_signal(signal.SIGINT)
        done.append(command)

    monkeypatch.setattr(device.firmware, "step", step)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        device.carry_out(Flush(), 0)
    assert len(done) == 1 and signal.getsignal(signal.SIGINT) is before
    device.close()
