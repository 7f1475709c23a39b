"""What it runs on, checked when it is made."""

from pathlib import Path

import pytest

from csd_io.medium import Medium
from csd_link.driveset import DriveSet


def test_a_set_says_where_its_drives_are():
    drives = DriveSet(count=2, transport="window:/dev/nvme0n1", keep=Path("kept"))
    assert (drives.kind, drives.where) == ("window", "/dev/nvme0n1")
    assert drives.folders == [Path("kept/drive0"), Path("kept/drive1")]
    assert DriveSet(count=2).folders == [None, None]


@pytest.mark.parametrize("fields", [{"count": 0}, {"methods": Path("/nowhere.py")}, {"medium": Medium("direct")}])
def test_what_is_off_is_named(fields):
    with pytest.raises(ValueError, match=r"drives = 0|/nowhere\.py|medium = direct: needs a folder"):
        DriveSet(**fields)
