"""Host resources of drives (threads, durability, medium), in both classes that describe how drives run."""

import os
from pathlib import Path

import pytest

from csd_io.medium import IN_MEMORY, Medium
from csd_link.driveset import DriveSetConfig
from csd_link.served_drive import ServedDrive
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH

WAYS = {
    "in this process": (DriveSetConfig, "data_dir"),
    "in one of its own": (lambda **given: ServedDrive(name="a", spec=INSTCSD_ZYNQ7045_8CH, **given), "path"),
}


@pytest.mark.parametrize("way", WAYS)
def test_drives_share_cores_unless_threads_are_given(way):
    make, folder = WAYS[way]
    cores = len(os.sched_getaffinity(0))
    assert make().hosting_fields(1) == {"threads": cores} and make().storage == IN_MEMORY
    assert make().hosting_fields(2 * cores) == {"threads": 1}
    options = {"durability": "host", "medium": "direct", "page_buffer_mib": 2, "threads": 3}
    drive = make(**options, **{folder: Path("kept")})
    assert drive.hosting_fields(64) == drive.overrides == options and drive.storage == Medium("direct", 2 << 20)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"durability": "ever"}, "durability"),
        ({"medium": "direct"}, "medium = direct: needs a folder"),
        ({"threads": 0}, "threads: must be greater than or equal to 1"),
        ({"page_buffer_mib": 0}, "page_buffer_mib: must be greater than or equal to 1"),
    ],
)
def test_invalid_hosting_field_is_named(way, fields, reason):
    with pytest.raises(ValueError, match=reason):
        WAYS[way][0](**fields)
