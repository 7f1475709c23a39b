"""Served drives as values, and as the text that their server reads."""

from pathlib import Path

import pytest

from csd_io.medium import Medium
from csd_link.served_drive import ServedDrive, ServedDrives
from csd_link.window import WindowLayout
from csd_spec.presets import DRIVES, INSTCSD_ZYNQ7045_8CH

PLAIN = ServedDrive(name="plain", spec=INSTCSD_ZYNQ7045_8CH)
FULL = ServedDrive(
    name="full",
    spec=DRIVES["instcsd-overlapped"],
    path=Path("/flash"),
    tenants=("alice", "bob"),
    layout=WindowLayout(depth=2, slot_blocks=4),
    device=Path("/dev/mem"),
    offset_bytes=4096,
    mount=Path("/mnt"),
    restarts=False,
    methods=Path("/mine.py"),
    durability="host",
    medium=Medium("direct", 1 << 20),
    threads=3,
)


def test_drives_survive_their_text():
    drives = ServedDrives((PLAIN, FULL))
    assert ServedDrives.from_json(drives.to_json()) == drives


@pytest.mark.parametrize("fields", [{"name": "a/b"}, {"tenants": ()}, {"tenants": ("x", "x")}, {"tenants": ("_x",)}])
def test_names_are_checked(fields):
    with pytest.raises(ValueError, match=r"letters|each once"):
        ServedDrive(**{"name": "a", "spec": INSTCSD_ZYNQ7045_8CH} | fields)


@pytest.mark.parametrize("drives", [(), (PLAIN, PLAIN)])
def test_a_server_has_drives_with_names_of_their_own(drives):
    with pytest.raises(ValueError, match=r"there is none|twice"):
        ServedDrives(drives)
