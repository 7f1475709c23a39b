"""Folders and files of served drives."""

import os
import stat
from pathlib import Path

import pytest

from csd_link.run_dir import doorbell_path, drive_dir, pid_path, private_dir, run_dir, window_path


def test_all_run_files_are_in_drives_run_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("VCSD_RUN_DIR", str(tmp_path))
    assert drive_dir("a") == tmp_path / "a"
    assert window_path("a") == tmp_path / "a" / "window-default"
    assert doorbell_path(window_path("a", "bob")) == tmp_path / "a" / "window-bob.bell"
    assert pid_path("a").parent == drive_dir("a")
    monkeypatch.delenv("VCSD_RUN_DIR")
    assert run_dir() == Path(f"/dev/shm/vcsd-{os.getuid()}")


def test_run_folder_is_private_to_owner(tmp_path):
    folder = private_dir(tmp_path / "new" / "folder")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o750)
    with pytest.raises(PermissionError, match="only you own"):
        private_dir(folder)
