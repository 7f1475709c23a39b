"""A stopped process has not exited; an unknown process may have."""

import os
import signal
import subprocess

import pytest

from csd_link.liveness import Liveness, is_running
from csd_link.run_dir import drive_dir, pid_path
from tests.served import until

pytestmark = pytest.mark.usefixtures("own_run_dir")


def test_process_is_live_until_it_exits():
    process = subprocess.Popen(["sleep", "60"])
    drive_dir("csd0").mkdir()
    assert not Liveness("csd0").is_known and not Liveness("csd0").has_exited()
    pid_path("csd0").write_text(str(process.pid))
    until(lambda: is_running(process.pid))
    drive = Liveness("csd0")
    process.send_signal(signal.SIGSTOP)
    assert is_running(process.pid) and drive.is_known and not drive.has_exited()
    process.kill()
    until(lambda: not is_running(process.pid))  # a zombie has exited too
    assert drive.has_exited()
    process.wait()
    assert is_running(os.getpid()) and drive.has_exited()


def test_drive_without_pid_file_has_exited():
    drive_dir("csd0").mkdir()
    pid_path("csd0").write_text(str(os.getpid()))
    drive = Liveness("csd0")
    assert not drive.has_exited()
    pid_path("csd0").unlink()
    assert drive.has_exited()
