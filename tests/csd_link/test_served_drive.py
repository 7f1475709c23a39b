"""Served drives as values, and as the text that their server reads."""

from dataclasses import replace
from pathlib import Path

import pytest

from csd_link.nvmeof.listen import AllowedHost, Listen
from csd_link.served_drive import ServedDrive, ServedDrives
from csd_link.window import WindowLayout
from csd_spec.presets import DRIVES, INSTCSD_ZYNQ7045_8CH

PLAIN = ServedDrive(name="plain", spec=INSTCSD_ZYNQ7045_8CH)
FULL = ServedDrive(
    name="full",
    spec=DRIVES["instcsd-overlapped"],
    path=Path("/flash"),
    tenants=("alice", "bob"),
    shares=(0.5, 0.25),
    layout=WindowLayout(depth=2, slot_blocks=4),
    device=Path("/dev/mem"),
    offset_bytes=4096,
    mount=Path("/mnt"),
    restarts=False,
    methods_file=Path("/mine.py"),
    durability="host",
    medium="direct",
    page_buffer_mib=1,
    threads=3,
    listen=Listen("127.0.0.1", 4420, ("full",), (AllowedHost("nqn.a", "bob"), AllowedHost("nqn.b"))),
)


def test_served_drives_round_trip_through_text():
    drives = ServedDrives((PLAIN, FULL))
    assert ServedDrives.from_json(drives.to_json()) == drives


@pytest.mark.parametrize("fields", [{"name": "a/b"}, {"tenants": ()}, {"tenants": ("x", "x")}, {"tenants": ("_x",)}])
def test_invalid_drive_names_are_refused(fields):
    with pytest.raises(ValueError, match=r"letters|each once"):
        ServedDrive(**{"name": "a", "spec": INSTCSD_ZYNQ7045_8CH} | fields)


@pytest.mark.parametrize("drives", [(), (PLAIN, PLAIN)])
def test_missing_or_repeated_drive_names_are_refused(drives):
    with pytest.raises(ValueError, match=r"there is none|twice"):
        ServedDrives(drives)


def test_tenant_shares_are_equal_by_default():
    assert [FULL.share_of(name) for name in (*FULL.tenants, "_admin")] == [0.5, 0.25, 1.0]
    assert [PLAIN.share_of("default"), PLAIN.share_of("_admin")] == [1.0, 1.0]
    assert ServedDrive(name="a", spec=PLAIN.spec, tenants=("x", "y", "z", "w")).share_of("z") == 0.25


@pytest.mark.parametrize("shares", [(1.0,), (0.0, 0.5), (-0.5, 0.5), (0.6, 0.5)])
def test_invalid_tenant_shares_are_refused(shares):
    with pytest.raises(ValueError, match="shares"):
        ServedDrive(name="a", spec=PLAIN.spec, tenants=("x", "y"), shares=shares)


def test_host_with_unknown_tenant_is_refused():
    with pytest.raises(ValueError, match=r"full: host nqn\.a is tenant 'carol': this drive has alice, bob"):
        replace(FULL, listen=Listen("127.0.0.1", 4420, ("full",), (AllowedHost("nqn.a", "carol"),)))
