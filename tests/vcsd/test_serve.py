"""Drives with a process of their own: killed, restarted, lost, listed; and who may use them."""

import json
import os
import signal
import stat
import subprocess
import sys
import time

import numpy as np
import pytest

from csd_link.connect import connect, open_window
from csd_link.driveset import DriveSet
from csd_link.host_end import Lost
from csd_link.recovery import RecoveringDevice
from csd_link.run_dir import drive_dir, run_dir
from csd_spec import (
    Attention,
    Compression,
    DeviceError,
    Flush,
    KvAppend,
    KvCrop,
    KvFree,
    KvRead,
    ModelShape,
    SeqCreate,
    Status,
)
from host_driver.driver import Driver
from tests.served import kill, pid, serving, window_of
from vcsd.transport import open_drives

SHAPE = ModelShape(name="small", layers=2, q_heads=4, kv_heads=4, head_dim=16)


pytestmark = pytest.mark.usefixtures("own_run_dir")


def decoder(devices, **options):
    """A driver with a sequence, and a function that makes one decode step and returns its output."""
    driver, generator = Driver(devices, SHAPE, Attention("sparf", Compression(4)), **options), np.random.default_rng(0)

    def half(*shape):
        return generator.standard_normal(shape).astype(np.float16)

    batch = driver.create(1, 256)
    for layer in range(SHAPE.layers):
        rows = half(50, 4, 16), half(50, 4, 16)
        driver.append(batch, slice(None), layer, np.array([50]), lambda rows=rows: rows)
    driver.settle()

    def step():
        with driver.step(1) as (part,):
            each = [
                driver.decode(batch, slice(None), part, layer, half(1, 4, 16), half(1, 4, 16), half(1, 4, 16))
                for layer in range(SHAPE.layers)
            ]
        return np.stack(each)

    return driver, batch, step


@pytest.mark.parametrize("transport", ["process", "fuse", "window:{}/window.bin"])
def test_every_way_in_gives_the_same_outputs_and_modelled_times(tmp_path, transport, request):
    if transport == "fuse":
        request.getfixturevalue("fuse")
    runs = []
    for way in ("inproc", transport.format(tmp_path)):
        with open_drives(DriveSet(count=2, transport=way)) as devices:
            driver, _, step = decoder(devices, flush_every=3)
            outputs = [step() for _ in range(8)]
            records = [(each.ns, each.breakdown_ns, each.link_bytes, each.flash) for each in driver.traffic.steps]
            runs.append((np.stack(outputs), records, driver.now_ns))
            driver.close()
    (here, *figures), (there, *same) = runs
    np.testing.assert_array_equal(here, there)
    assert figures == same


def test_drives_that_are_killed_come_back_and_decode_goes_on(tmp_path):
    with open_drives(DriveSet(count=2)) as devices:
        _, _, step = decoder(devices)
        expected = [step() for _ in range(30)]
    with serving(tmp_path, "csd0", "csd1", flash=tmp_path):
        devices = [RecoveringDevice(window_of(name)) for name in ("csd0", "csd1")]
        driver, batch, step = decoder(devices, flush_every=7)
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


def test_a_crop_and_a_free_are_not_undone_by_a_death(tmp_path):
    generator = np.random.default_rng(1)
    with serving(tmp_path, "csd0", flash=tmp_path):
        device = RecoveringDevice(window_of("csd0"))

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


def test_handles_stay_apart_when_a_drive_gives_numbers_again(tmp_path):
    with serving(tmp_path, "csd0", flash=tmp_path):
        device = RecoveringDevice(window_of("csd0"))
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


def test_without_restart_the_error_names_drive_and_heads_and_others_go_on(tmp_path):
    with serving(tmp_path, "csd0", "csd1", flash=tmp_path, restarts=False):
        devices = [RecoveringDevice(window_of(name)) for name in ("csd0", "csd1")]
        driver, batch, step = decoder(devices)
        step()
        kill("csd1")
        began = time.monotonic()
        with pytest.raises(DeviceError) as failed:
            step()
        assert time.monotonic() - began < 1
        for word in ("drive 1", "csd1", "KV heads 2, 3", "unharmed"):
            assert word in str(failed.value)
        handle = tuple(batch.handles[0].tolist())
        assert devices[0].submit(KvRead(handle, 0), 0).result().status is Status.SUCCESS
        assert devices[1].submit(Flush(), 0).result().status is Status.PATH_LOST
        driver.free(batch)
        assert devices[0].submit(KvRead(handle, 0), 0).result().status is Status.UNKNOWN_SEQUENCE
        for device in devices:
            device.close()


def test_a_drive_that_hangs_is_noticed_within_a_second(tmp_path):
    with serving(tmp_path, "csd0", flash=tmp_path):
        device = open_window(drive_dir("csd0") / "window-default")
        os.kill(pid("csd0"), signal.SIGSTOP)
        began = time.monotonic()
        done = device.submit(Flush(), 0).result()
        assert done.status is Status.PATH_LOST
        assert time.monotonic() - began < 1.2
        os.kill(pid("csd0"), signal.SIGCONT)
        device.close()


def test_tenants_have_windows_of_their_own(tmp_path):
    with serving(tmp_path, "csd0", flash=tmp_path, tenants=("alice", "bob")):
        alice, bob = window_of("csd0", "alice")(), window_of("csd0", "bob")()
        hers = tuple(alice.submit(SeqCreate(1, 1, 1, 8, 64), 0).result().data[0].tolist())
        assert bob.submit(KvRead(hers, 0), 0).result().status is Status.UNKNOWN_SEQUENCE
        assert alice.submit(KvRead(hers, 0), 0).result().status is Status.SUCCESS
        alice.close(), bob.close()


def test_files_are_their_owners_only(tmp_path):
    with serving(tmp_path, "csd0", flash=tmp_path):
        for path in (run_dir(), drive_dir("csd0"), tmp_path / "csd0"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
        for path in drive_dir("csd0").glob("window*"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_folder_that_others_may_open_is_refused(tmp_path):
    (tmp_path / "csd0").mkdir(mode=0o755)
    with pytest.raises(ConnectionError, match="nobody else"), serving(tmp_path, "csd0", flash=tmp_path):
        pass


def test_no_drive_is_lost(tmp_path):
    with pytest.raises(Lost, match="no drive is served"):
        connect(tmp_path / "window")


def vcsd(*words):
    command = [sys.executable, "-c", "from vcsd_cli.main import main; main()", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_create_list_serve_delete(tmp_path):
    assert vcsd("create", "one").returncode == 0
    assert "exists" in vcsd("create", "one").stderr
    assert "letters" in vcsd("create", "a/b").stderr
    assert "nowhere.yaml" in vcsd("create", "two", "--drive", "/nowhere.yaml").stderr
    server = subprocess.Popen([sys.executable, "-c", "from vcsd_cli.main import main; main()", "serve", "--quiet"])
    try:
        deadline = time.monotonic() + 60
        while True:
            (drive,) = json.loads(vcsd("list", "-o", "json").stdout)["drives"]
            if drive["served"] or time.monotonic() > deadline:
                break
        assert drive["served"]
        assert drive["window"].endswith("window-default")
        assert "served already" in vcsd("serve", "one").stderr
        assert "stop" in vcsd("delete", "one").stderr
    finally:
        server.terminate()
        assert server.wait() == 0
    assert vcsd("delete", "one").returncode == 0
    assert json.loads(vcsd("list", "-o", "json").stdout) == {"drives": []}
    assert "no drive 'one'" in vcsd("delete", "one").stderr
