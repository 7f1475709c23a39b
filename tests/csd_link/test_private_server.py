"""Server processes started for one run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from csd_link import private_server
from csd_link.host_end import DriveLostError
from csd_link.liveness import is_running
from csd_link.private_server import COMPILES
from csd_link.run_dir import drive_dir, run_dir
from tests.served import serving, until

pytestmark = pytest.mark.usefixtures("own_run_dir")


def test_server_runs_until_its_with_block_ends(tmp_path):
    with serving(tmp_path, "csd0", "csd1") as server:
        assert server.poll() is None
        assert drive_dir("csd0").exists()
    assert server.returncode == 0
    assert not drive_dir("csd0").exists()


def test_run_folder_open_to_others_is_refused(tmp_path):
    (tmp_path / "csd0").mkdir(mode=0o755)
    with pytest.raises(ConnectionError, match="only you own"), serving(tmp_path, "csd0", flash=tmp_path):
        raise AssertionError("it was served")


HOST = """
import sys, time
from pathlib import Path
from csd_link.driveset import DriveSetConfig
from vcsd.transport import open_drives
with open_drives(DriveSetConfig(count=2, transport=sys.argv[1])):
    print("open", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("state", ["serves", "stands still"])
@pytest.mark.parametrize("transport", ["process", "fuse"])
def test_killed_host_leaves_no_server_processes(transport, state, request):
    if transport == "fuse":
        request.getfixturevalue("fuse")
    host = subprocess.Popen([sys.executable, "-c", HOST, transport], stdout=subprocess.PIPE)
    assert host.stdout.readline() == b"open\n"
    pids = [int(file.read_text()) for file in run_dir().glob("*/pid")]
    mounts = list(run_dir().glob("run-*/mount*"))
    assert len(pids) == 2 and len(mounts) == (2 if transport == "fuse" else 0)
    if state == "stands still":
        os.kill(pids[0], signal.SIGSTOP)
    host.kill()
    host.wait()
    host.stdout.close()
    until(lambda: not any(map(is_running, pids)) and not list(run_dir().iterdir()))
    assert not any(str(mount) in Path("/proc/self/mounts").read_text() for mount in mounts)


SLOW = "import time; end = time.process_time() + {work}\nwhile time.process_time() < end: pass\ntime.sleep(600)"


def test_busy_starting_server_is_waited_for(tmp_path, monkeypatch):
    """A first start compiles for many seconds; a fixed timeout used to end it in spite of its progress."""
    monkeypatch.setattr("csd_link.private_server.IDLE_START_S", 0.3)
    log = tmp_path / "log"
    log.write_text(f"vcsd: {COMPILES}\n")
    server = subprocess.Popen([sys.executable, "-c", SLOW.format(work=1.5)])
    seen = []

    def connect():
        seen.append(private_server.compiling)
        raise DriveLostError("no drive answers")

    began = time.monotonic()
    with pytest.raises(ConnectionError, match="drives did not start"):
        private_server._await(connect, server, log)
    assert time.monotonic() - began > 1.5
    assert seen[-1] == 1 and private_server.compiling == 0
    server.kill()
    server.wait()
