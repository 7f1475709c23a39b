"""A drive in which a command handler dies half way: it stops writing, still reads, and restarts from its last flush."""

import threading

import numpy as np
import pytest

from csd_firmware import InProcessDrive, step
from csd_firmware.namespace import Namespace
from csd_link.recovery import RecoveringDrive
from csd_spec import Flush, GetLog, KvAppend, KvFree, KvRead, LogPage, SeqCreate, Status
from ftl import MediaFailedError
from ftl.flash.nand import Nand
from ftl.flash.timing.calendar import FlashCalendar
from ftl.journal import Journal
from ftl.kv.reader import Reader
from tests.served import pid, serving, until, window_of


def ask(device, command):
    return device.submit(command, 0).result()


def append(handle, tokens=40, seed=0):
    rows = np.random.default_rng(seed).standard_normal((tokens, 2, 16)).astype(np.float16)
    return KvAppend((handle,), 0, np.array([tokens]), rows, -rows)


def filled(device):
    """Two sequences; the drive is flushed."""
    handles = ask(device, SeqCreate(2, 1, 2, 16, 512)).data[0].tolist()
    for handle in handles:
        assert ask(device, append(handle)).status is Status.SUCCESS
    assert ask(device, Flush()).status is Status.SUCCESS
    return handles


def raise_in(monkeypatch, owner, name, error, calls=1):
    """Make a function raise in one of its calls."""
    real, left = getattr(owner, name), [calls]

    def failing(*arguments, **named):
        left[0] -= 1
        if not left[0]:
            raise error
        return real(*arguments, **named)

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("calls", [1, 2])
def test_flush_exception_in_record_keeps_flushed_data(small_drive, tmp_path, monkeypatch, calls, kept):
    """Between the two places of a record, an exception left a run of records that nothing could read."""
    device = InProcessDrive(small_drive, tmp_path if kept else None)
    one, other = filled(device)
    assert ask(device, append(one, 30, 1)).status is Status.SUCCESS
    with monkeypatch.context() as patched:
        raise_in(patched, Journal, "_write_place", MemoryError("no memory"), calls)
        done = ask(device, Flush())
    assert done.status is Status.INTERNAL_ERROR
    assert "failed in Flush (MemoryError: no memory)" in done.reason and "flushed data is safe" in done.reason
    assert ("open its folder again" in done.reason) == kept
    for command in (Flush(), append(other), KvFree((other,)), SeqCreate(1, 1, 2, 16, 16)):
        refused = ask(device, command)
        assert (refused.status, refused.reason) == (Status.WRITE_FAULT, done.reason)
    assert len(ask(device, KvRead((one,), 0)).data[0]) == 70  # reads go on
    assert ask(device, GetLog(LogPage.SMART)).status is Status.SUCCESS
    device.close()
    if kept:
        again = InProcessDrive(small_drive, tmp_path)
        assert not again.firmware.ftl.findings
        for handle in (one, other):
            np.testing.assert_array_equal(ask(again, KvRead((handle,), 0)).data[0][:40], append(handle).k)
        assert ask(again, Flush()).status is Status.SUCCESS
        again.close()


def test_append_exception_refuses_half_changed_sequences_only(small_drive, monkeypatch):
    device = InProcessDrive(small_drive)
    one, other = filled(device)
    raise_in(monkeypatch, Nand, "program", SystemExit(1))
    with pytest.raises(SystemExit):
        ask(device, append(one, 60))
    assert ask(device, KvRead((other,), 0)).status is Status.SUCCESS
    assert ask(device, KvRead((one,), 0)).status is Status.WRITE_FAULT
    device.close()


def test_a_lack_of_memory_ends_only_the_command_where_nothing_has_changed(small_drive, monkeypatch):
    device = InProcessDrive(small_drive)
    one, _ = filled(device)
    for owner, name, command in (
        (step, "check", append(one)),  # every command, while it is checked
        (Reader, "read_back", KvRead((one,), 0)),
    ):
        with monkeypatch.context() as patched:
            raise_in(patched, owner, name, MemoryError())
            done = ask(device, command)
        assert done.status is Status.INTERNAL_ERROR and "nothing has changed" in done.reason
        np.testing.assert_array_equal(ask(device, KvRead((one,), 0)).data[0], append(one).k)
    assert ask(device, append(one)).status is Status.SUCCESS
    assert ask(device, Flush()).status is Status.SUCCESS
    raise_in(monkeypatch, FlashCalendar, "read", MemoryError())  # flash was read: it may be half changed
    assert "failed in KvRead (MemoryError)" in ask(device, KvRead((one,), 0)).reason
    assert ask(device, append(one)).status is Status.WRITE_FAULT
    device.close()


def test_namespace_exception_fails_the_drive(small_drive, monkeypatch):
    device = InProcessDrive(small_drive)
    namespace = Namespace(device.firmware, threading.Lock())
    raise_in(monkeypatch, Nand, "program", MemoryError())
    with pytest.raises(MediaFailedError, match="failed in write"):
        namespace.write(0, bytes(32 * namespace.page_bytes))
    with pytest.raises(MediaFailedError):
        namespace.write(0, b"x")
    assert namespace.read(0, 4)[0] == bytes(4)
    device.close()


def test_served_drive_exception_restarts_from_last_flush(tmp_path, own_run_dir, monkeypatch):
    """The host hears of the failure; the drive is back, and takes again what was not flushed."""
    methods = tmp_path / "fails.py"
    methods.write_text(
        "from ftl.journal import Journal\n"
        "import os\n"
        "real = Journal._write_place\n"
        "def write(self, *given):\n"
        f"    if os.path.exists({str(tmp_path / 'fail')!r}):\n"
        f"        os.unlink({str(tmp_path / 'fail')!r})\n"
        "        raise RuntimeError('a bug')\n"
        "    return real(self, *given)\n"
        "Journal._write_place = write\n"
        "METHODS = {}\n"
    )
    with serving(tmp_path, "csd0", flash=tmp_path / "flash", methods_file=methods):
        device = RecoveringDrive(window_of("csd0"))
        one, _ = filled(device)
        assert ask(device, append(one, 30, 1)).status is Status.SUCCESS
        before = pid("csd0")
        (tmp_path / "fail").touch()
        done = ask(device, Flush())
        assert done.status is Status.INTERNAL_ERROR and "the drive restarts from there" in done.reason
        until(lambda: pid("csd0") != before)
        assert len(ask(device, KvRead((one,), 0)).data[0]) == 70
        assert ask(device, Flush()).status is Status.SUCCESS
        assert len(device.recoveries) == 1
        device.close()
