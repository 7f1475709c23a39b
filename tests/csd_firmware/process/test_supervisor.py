"""Drives in processes of their own: killed, restarted, lost; and the users that may access them.

partner of: csd_firmware/process/serve.py, csd_firmware/process/mounts.py, csd_firmware/process/__main__.py
"""

import os
import signal
import stat
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from threading import Timer
from types import SimpleNamespace

import numpy as np
import pytest

from csd_firmware.folder import DriveFolder
from csd_firmware.process import supervisor as supervisor_module
from csd_firmware.process.__main__ import main
from csd_firmware.process.serve import open_firmware
from csd_firmware.process.supervisor import MAX_CRASH_LOOP, Supervisor
from csd_link.connect import open_window
from csd_link.doorbell import SocketDoorbell, call
from csd_link.driveset import DriveSetConfig
from csd_link.host_end import DriveLostError, WindowDrive
from csd_link.liveness import is_running
from csd_link.medium import MappedMedium
from csd_link.recovery import RecoveringDrive
from csd_link.run_dir import doorbell_path, drive_dir, run_dir, window_path
from csd_link.served_drive import ServedDrive, ServedDrives
from csd_spec import DriveError, Flush, KvAppend, KvCrop, KvFree, KvRead, SeqCreate, Status
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from ftl.flash.content import DirectPageStore
from tests.served import decoder, kill, pid, serving, window_of
from vcsd.transport import open_drives

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.usefixtures("own_run_dir")


def test_decode_continues_after_drives_are_killed(tmp_path):
    with open_drives(DriveSetConfig(count=2)) as devices:
        _, _, step = decoder(devices)
        expected = [step() for _ in range(30)]
    with serving(tmp_path, "csd0", "csd1", flash=tmp_path):
        devices = [RecoveringDrive(window_of(name)) for name in ("csd0", "csd1")]
        driver, batch, step = decoder(devices, flush_interval_steps=7)
        for number, outputs in enumerate(expected):
            if number % 4 == 1:
                kill(f"csd{number // 4 % 2}")
            if number == 15:
                kill("csd0"), kill("csd1")
            np.testing.assert_array_equal(step(), outputs)
        k, _ = driver.read(batch, slice(None), 1)
        assert len(k) == 50 + len(expected)
        assert sum(len(device.recoveries) for device in devices) >= 8
        driver.free(batch)
        driver.close()
        for device in devices:
            device.close()


def test_served_drive_uses_configured_medium_and_threads(tmp_path):
    options = {"path": tmp_path, "medium": "direct", "threads": 3}
    drive = ServedDrive(name="csd0", spec=INSTCSD_ZYNQ7045_8CH, **options)
    folder = DriveFolder(drive.spec, tmp_path)
    firmware = open_firmware(drive, folder)
    assert firmware.state.threads == 3
    assert isinstance(firmware.ftl.nand.page_store, DirectPageStore)
    firmware.ftl.nand.page_store.close()
    folder.close()


@pytest.mark.parametrize("medium", ["direct"])
def test_file_backed_drive_continues_after_kill(tmp_path, medium):
    with open_drives(DriveSetConfig()) as devices:
        _, _, step = decoder(devices)
        expected = [step() for _ in range(12)]
    with serving(tmp_path, "csd0", flash=tmp_path, medium=medium, page_buffer_mib=1, threads=2):
        device = RecoveringDrive(window_of("csd0"))
        _, _, step = decoder([device], flush_interval_steps=3)
        for number, outputs in enumerate(expected):
            if number in (4, 9):
                kill("csd0")
            np.testing.assert_array_equal(step(), outputs)
        assert len(device.recoveries) == 2
        device.close()


def test_crop_and_free_survive_a_kill(tmp_path):
    generator = np.random.default_rng(1)
    with serving(tmp_path, "csd0", flash=tmp_path):
        device = RecoveringDrive(window_of("csd0"))

        def do(command):
            done = device.submit(command, 0).result()
            assert done.status is Status.SUCCESS, done.reason
            return done

        one, other = do(SeqCreate(2, 1, 2, 16, 512)).data[0].tolist()
        rows = generator.standard_normal((2, 100, 2, 16)).astype(np.float16)
        for seq in (one, other):
            do(KvAppend((seq,), 0, np.array([100]), *rows))
        do(Flush())
        do(KvCrop((one,), 0, np.array([60])))
        do(KvAppend((one,), 0, np.array([7]), rows[0, :7], rows[1, :7]))
        do(KvCrop((one,), 0, np.array([64])))
        do(KvFree((other,)))
        (third,) = do(SeqCreate(1, 1, 2, 16, 512)).data[0].tolist()
        do(KvAppend((third,), 0, np.array([5]), rows[0, :5], rows[1, :5]))
        kill("csd0")
        k, v = do(KvRead((one,), 0)).data
        np.testing.assert_array_equal(k, np.concatenate([rows[0, :60], rows[0, :4]]))
        np.testing.assert_array_equal(v, np.concatenate([rows[1, :60], rows[1, :4]]))
        np.testing.assert_array_equal(do(KvRead((third,), 0)).data[0], rows[0, :5])
        assert device.submit(KvRead((other,), 0), 0).result().status is Status.UNKNOWN_SEQUENCE
        device.close()


def test_handles_stay_distinct_when_numbers_are_reused(tmp_path):
    with serving(tmp_path, "csd0", flash=tmp_path):
        device = RecoveringDrive(window_of("csd0"))
        create, seen = SeqCreate(1, 1, 1, 16, 64), {}

        def do(command):
            done = device.submit(command, 0).result()
            assert done.status is Status.SUCCESS, done.reason
            return done

        for turn in range(6):
            (handle,) = do(create).data[0].tolist()
            assert handle not in seen
            seen[handle] = np.full((3, 1, 16), turn, np.float16)
            do(KvAppend((handle,), 0, np.array([3]), seen[handle], seen[handle]))
            if turn % 2:
                gone = min(seen)
                do(KvFree((gone,)))
                del seen[gone]
                kill("csd0")
        for handle, rows in seen.items():
            np.testing.assert_array_equal(do(KvRead((handle,), 0)).data[0], rows)
        device.close()


def test_no_restart_error_names_drive_others_continue(tmp_path):
    with serving(tmp_path, "csd0", "csd1", flash=tmp_path, restarts=False):
        devices = [RecoveringDrive(window_of(name)) for name in ("csd0", "csd1")]
        driver, batch, step = decoder(devices)
        step()
        kill("csd1")
        with pytest.raises(DriveError) as failed:
            step()
        for word in ("drive 1", "csd1", "KV heads 2, 3", "unharmed"):
            assert word in str(failed.value)
        handle = tuple(batch.handles[0].tolist())
        assert devices[0].submit(KvRead(handle, 0), 0).result().status is Status.SUCCESS
        assert devices[1].submit(Flush(), 0).result().status is Status.PATH_LOST
        driver.free(batch)
        assert devices[0].submit(KvRead(handle, 0), 0).result().status is Status.UNKNOWN_SEQUENCE
        for device in devices:
            device.close()


def test_stopped_drive_resumes_without_loss(tmp_path):
    with serving(tmp_path, "csd0", flash=tmp_path):
        device = RecoveringDrive(window_of("csd0"))
        os.kill(pid("csd0"), signal.SIGSTOP)
        Timer(1.5, os.kill, (pid("csd0"), signal.SIGCONT)).start()
        assert device.submit(Flush(), 0).result().status is Status.SUCCESS
        assert not device.recoveries
        device.close()


def test_each_tenant_has_its_own_window(tmp_path):
    with serving(tmp_path, "csd0", flash=tmp_path, tenants=("alice", "bob")):
        alice, bob = window_of("csd0", "alice")(), window_of("csd0", "bob")()
        hers = tuple(alice.submit(SeqCreate(1, 1, 1, 8, 64), 0).result().data[0].tolist())
        assert bob.submit(KvRead(hers, 0), 0).result().status is Status.UNKNOWN_SEQUENCE
        assert alice.submit(KvRead(hers, 0), 0).result().status is Status.SUCCESS
        alice.close(), bob.close()


def test_tenants_of_served_drive_get_configured_shares(tmp_path):
    with serving(tmp_path, "csd0", tenants=("alice", "bob"), shares=(0.25, 0.75)):
        alice, bob = window_of("csd0", "alice")(), window_of("csd0", "bob")()
        refused = alice.submit(SeqCreate(20_000, 1, 1, 8, 64), 0).result()
        assert refused.status is Status.CAPACITY_EXCEEDED
        assert "tenant alice uses 0 of its quota of 16,384 (25% of the drive)" in refused.reason
        long = bob.submit(SeqCreate(2_000, 1, 1, 8, 64), 0)
        assert alice.submit(SeqCreate(16, 1, 1, 8, 64), 0).result().data[0].size == 16
        assert len(set(long.result().data[0].tolist())) == 2_000
        alice.close(), bob.close()


def test_run_files_are_private_to_owner(tmp_path):
    with serving(tmp_path, "csd0", flash=tmp_path):
        for path in (run_dir(), drive_dir("csd0"), tmp_path / "csd0"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
        for path in drive_dir("csd0").glob("window*"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_window_second_host_refused_until_first_closes(tmp_path):
    with serving(tmp_path, "csd0"):
        first = window_of("csd0")()
        for second in (window_of("csd0"), partial(open_window, window_path("csd0"))):
            with pytest.raises(
                DriveLostError, match=f"window-default is in use by process {os.getpid()} .*: end it, or"
            ):
                second()
        assert first.submit(Flush(), 0).result().status is Status.SUCCESS, "nothing was stolen"
        first.close()
        second = window_of("csd0")()
        assert second.submit(Flush(), 0).result().status is Status.SUCCESS
        second.close()


def test_window_of_a_killed_host_is_free(tmp_path):
    code = "import sys; from tests.served import window_of; held = window_of('csd0')(); print(); sys.stdin.read()"
    with serving(tmp_path, "csd0"):
        piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
        with subprocess.Popen([sys.executable, "-c", code], **piped) as host:
            host.stdout.readline()
            with pytest.raises(DriveLostError, match=f"is in use by process {host.pid} "):
                window_of("csd0")()
            host.kill()
            host.wait()
        device = window_of("csd0")()
        assert device.submit(Flush(), 0).result().status is Status.SUCCESS
        device.close()


def test_replaced_host_error_names_new_host(tmp_path):
    """A host on another machine sees no lock: the doorbell closes before the drive's header names the next host."""
    with serving(tmp_path, "csd0"):
        first = window_of("csd0")()
        line = call(doorbell_path(window_path("csd0")))
        second = WindowDrive(MappedMedium(window_path("csd0")), SocketDoorbell(line), line.close)
        done = first.submit(Flush(), 0).result()
        assert done.status is Status.PATH_LOST
        assert done.reason.startswith(f"another host has taken its window: process {os.getpid()} (")
        assert second.submit(Flush(), 0).result().status is Status.SUCCESS
        first.close()
        second.close()


def test_replaced_host_does_not_reclaim_window(tmp_path):
    with serving(tmp_path, "csd0"):
        first = RecoveringDrive(window_of("csd0"))
        line = call(doorbell_path(window_path("csd0")))
        second = WindowDrive(MappedMedium(window_path("csd0")), SocketDoorbell(line), line.close)
        done = first.submit(Flush(), 0).result()
        assert done.status is Status.PATH_LOST and "another host has taken its window: process" in done.reason
        assert second.submit(Flush(), 0).result().status is Status.SUCCESS
        first.close()
        second.close()


def supervised(monkeypatch, child, meanwhile=lambda pid: None):
    """Supervise a drive whose process runs this code; returns the supervisor's exit code and its printed lines."""
    monkeypatch.setattr(supervisor_module, "warm_up", lambda: None)
    monkeypatch.setattr(supervisor_module, "_child", child)
    drive, (said, says) = ServedDrive(name="csd0", spec=INSTCSD_ZYNQ7045_8CH), os.pipe()
    pid = os.fork()
    if not pid:
        signal.alarm(60)
        supervisor = Supervisor(ServedDrives((drive,)), lambda line: os.write(says, f"{line}\n".encode()))
        os._exit(supervisor.run())
    os.close(says)
    meanwhile(pid)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with os.fdopen(said) as lines:
        return code, lines.read().splitlines()


def test_restart_limit_of_drive_that_dies_at_once(monkeypatch):
    code, lines = supervised(monkeypatch, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    again = ["drive csd0 was killed (SIGKILL); it is restarted"] * (MAX_CRASH_LOOP - 1)
    assert lines == [*again, "drive csd0 was killed (SIGKILL); it is not restarted"]
    assert code == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_sigterm_stops_supervisor_and_drives(monkeypatch, number):
    begun, begins = os.pipe()

    def child(*arguments):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
        os.write(begins, os.getpid().to_bytes(4, "little"))
        time.sleep(60)

    children = []

    def stop(pid):
        children.append(int.from_bytes(os.read(begun, 4), "little"))
        os.kill(pid, number)

    code, _ = supervised(monkeypatch, child, stop)
    assert code == 0 and not is_running(children[0])


@pytest.mark.parametrize("is_orphaned", [True, False])
def test_server_removes_run_folder_when_run_ends(monkeypatch, tmp_path, is_orphaned):
    file = tmp_path / "served" / "drives.json"
    file.parent.mkdir()
    file.write_text(ServedDrives((ServedDrive(name="csd0", spec=INSTCSD_ZYNQ7045_8CH),)).to_json())
    seen = []

    def made(drives, say, owner):
        seen.append((drives.drives[0].name, owner))
        return SimpleNamespace(run=lambda: 3, orphaned=is_orphaned)

    monkeypatch.setattr("csd_firmware.process.__main__.Supervisor", made)
    monkeypatch.setattr(sys, "argv", ["vcsd", str(file), "77"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, file.exists(), seen) == (3, not is_orphaned, [("csd0", 77)])
