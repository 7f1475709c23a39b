"""Connecting to drives that are served."""

from types import SimpleNamespace

import pytest

from csd_link.connect import connect, find_live_drive, find_server, open_window
from csd_link.host_end import DriveLostError
from csd_link.lease import HeldError
from csd_link.medium import MappedMedium
from csd_link.run_dir import window_path
from csd_link.window import BLOCK_BYTES
from csd_spec import Flush, Status
from tests.served import kill, serving, until

pytestmark = pytest.mark.usefixtures("own_run_dir")


def test_served_drive_found_by_name_over_both_transports(tmp_path):
    assert find_server("csd0") is None
    with serving(tmp_path, "csd0", restarts=False):
        assert find_server("csd0").name == "csd0"
        for reach in (connect, open_window):
            device = reach(window_path("csd0"))
            assert device.name == "csd0"
            assert device.submit(Flush(), 0).result().status is Status.SUCCESS
            device.close()
        kill("csd0")
        until(lambda: not find_server("csd0"))
        with pytest.raises(DriveLostError, match="no drive is served"):
            connect(window_path("csd0"))


def test_connect_without_drive_is_lost(tmp_path):
    with pytest.raises(DriveLostError, match="no drive is served"):
        connect(tmp_path / "window")


def test_file_without_window_has_no_live_drive(tmp_path, monkeypatch):
    monkeypatch.setattr("csd_link.connect.HEARTBEAT_TIMEOUT_S", 0.05)
    MappedMedium.create(tmp_path / "file", 8 * BLOCK_BYTES)
    assert find_live_drive(MappedMedium(tmp_path / "file")) is None
    with pytest.raises(DriveLostError, match="holds no drive's window"):
        open_window(tmp_path / "file")


def test_windows_before_the_wanted_one_are_closed(tmp_path, monkeypatch):
    closed = []

    class Window:
        layout = SimpleNamespace(blocks=3)

        def __init__(self, at):
            self.at = at

        def close(self):
            closed.append(self.at)

    def held(path, at):
        raise HeldError(f"another host has {path} at {at}")

    monkeypatch.setattr("csd_link.connect._medium", lambda path, at: Window(at))
    monkeypatch.setattr("csd_link.connect._identity", lambda window, path: window)
    monkeypatch.setattr("csd_link.connect.Lease", held)
    with pytest.raises(DriveLostError):
        open_window(tmp_path, 2, 4096)
    assert closed == [4096 + number * 3 * BLOCK_BYTES for number in range(3)]
