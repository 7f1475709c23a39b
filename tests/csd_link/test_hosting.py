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
    plain = {"durability": "process", "medium": IN_MEMORY}
    assert make().hosting_fields(1) == plain | {"threads": cores}
    assert make().hosting_fields(2 * cores) == plain | {"threads": 1}
    options = {"durability": "host", "medium": Medium("direct", 4096), "threads": 3}
    assert make(**options, **{folder: Path("kept")}).hosting_fields(64) == options


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"durability": "ever"}, "durability"),
        ({"medium": Medium("direct")}, "medium = direct: needs a folder"),
        ({"threads": 0}, "threads = 0: must be at least 1"),
    ],
)
def test_invalid_hosting_field_is_named(way, fields, reason):
    with pytest.raises(ValueError, match=reason):
        WAYS[way][0](**fields)
