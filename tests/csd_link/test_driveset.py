"""A drive set: fields are checked when it is created."""

from pathlib import Path

import pytest

from csd_link.driveset import DriveSetConfig


def test_drive_set_gives_kind_address_and_folders():
    drives = DriveSetConfig(count=2, transport="window:/dev/nvme0n1", data_dir=Path("kept"))
    assert (drives.kind, drives.where) == ("window", "/dev/nvme0n1")
    assert drives.folders == [Path("kept/drive0"), Path("kept/drive1")]
    assert DriveSetConfig(count=2).folders == [None, None]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"count": 0}, "count: must be"),
        ({"spares": -1}, "spares: must be"),
        ({"methods_file": Path("/nowhere.py")}, r"/nowhere\.py"),
    ],
)
def test_invalid_drive_set_field_is_named(fields, reason):
    with pytest.raises(ValueError, match=reason):
        DriveSetConfig(**fields)
