"""Windows of a file or a device: whether a drive is served there."""

from pathlib import Path

import pytest

from csd_link.host_end import DriveLostError
from csd_link.transports import window_path


@pytest.fixture
def opened(monkeypatch):
    """Media that were opened, each with whether it was closed."""
    media = dict[Path, bool]()

    class Medium:
        def __init__(self, path):
            self.path = path
            media[path] = False

        def close(self):
            media[self.path] = True

    monkeypatch.setattr(window_path, "FileMedium", Medium)
    return media


@pytest.mark.parametrize("is_live", [True, False])
def test_drive_is_served_at_a_file_that_has_a_live_one(opened, monkeypatch, tmp_path, is_live):
    monkeypatch.setattr(window_path, "find_live_drive", lambda medium: is_live)
    missing, empty, full = (tmp_path / name for name in ("missing", "empty", "full"))
    empty.touch()
    full.write_bytes(b"window")
    assert not window_path._is_served(missing) and not window_path._is_served(empty)
    assert not opened, "there is nothing to open"
    assert window_path._is_served(full) == is_live
    assert opened == {full: True}
    device = Path("/dev/null")
    if is_live:
        assert window_path._is_served(device)
    else:
        with pytest.raises(DriveLostError):
            window_path._is_served(device)
    assert opened[device]
