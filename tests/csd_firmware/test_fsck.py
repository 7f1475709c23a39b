"""A damaged folder: damage is reported, repaired if possible, and lost data is reported exactly once.

partner of: vcsd_cli/fsck.py, csd_io/undo_log.py
"""

import json
from contextlib import closing

import numpy as np
import pytest

from csd_firmware import InProcessDrive
from csd_firmware.fsck import fsck
from csd_io.undo_log import INDEX, OLD
from csd_spec import KvRead, Status
from tests.vcsd_cli.test_main import vcsd
from vcsd_eval.verify.flips import FlushedFolder, judge
from vcsd_eval.verify.random_host import is_stored

pytestmark = pytest.mark.usefixtures("own_run_dir")


@pytest.fixture
def kept(tmp_path):
    return FlushedFolder.make(tmp_path / "drive", 3)


@pytest.fixture
def say(capsys, monkeypatch, kept):
    """`vcsd drive fsck -o json` of the folder."""

    def run(*words):
        code, out, err = vcsd(capsys, monkeypatch, "drive", "fsck", str(kept.folder), *words, "-o", "json")
        assert err == ""
        return code, json.loads(out)

    return run


def change(file, at, data):
    raw = bytearray(file.read_bytes())
    raw[at : at + len(data)] = data
    file.write_bytes(raw)


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file() and file.name != "lock"}


def undone(folder):
    """The files as they were before the last run."""
    files, log = contents(folder), max(folder.glob("fsck-*"))
    old = (log / OLD).read_bytes()
    for line in reversed((log / INDEX).read_text().splitlines()):
        entry = json.loads(line)
        size = entry["bytes"] or 0
        data, old = old[len(old) - size :], old[: len(old) - size]
        if entry["bytes"] is None:
            del files[entry["file"]]
        elif entry["offset"] is None:
            files[entry["file"]] = data
        else:
            raw = bytearray(files[entry["file"]])
            raw[entry["offset"] : entry["offset"] + size] = data
            files[entry["file"]] = bytes(raw)
    return files


@pytest.fixture
def before(kept):
    return contents(kept.folder)


def test_intact_drive_is_clean(say, kept, before):
    clean = {"clean": True, "lost": 0, "findings": [], "kept": None}
    assert say() == (0, {"folder": str(kept.folder), "dry_run": False} | clean)
    assert contents(kept.folder) == before


def test_bit_flip_is_repaired_and_old_bytes_saved(say, kept, before):
    programmed = 32 * int(kept.host.ftl.nand.programmed()[0])
    for name, at in (("spare.bin", programmed), ("secret.bin", 7), ("drive.json", 40)):
        change(kept.folder / name, at, bytes([before[name][at] ^ 4]))
    damaged = contents(kept.folder)
    code, report = say("--dry-run")
    assert (code, [finding["where"] for finding in report["findings"]]) == (1, ["drive.json", "secret.bin", "flash"])
    assert contents(kept.folder) == damaged
    code, report = say()
    assert (code, report["lost"], len(report["findings"])) == (1, 0, 3)
    assert contents(kept.folder) == before
    assert undone(kept.folder) == damaged
    assert say()[1]["clean"] and judge(kept) == "harmless"


@pytest.mark.parametrize("name", ["content.bin", "spare.bin", "blocks.bin"])
def test_missing_file_read_only_open_reports_once(say, kept, name, capsys, monkeypatch):
    (kept.folder / name).unlink()
    code, out, err = vcsd(capsys, monkeypatch, "drive", "format", str(kept.folder), "--yes")
    assert (code, out, f"{name} is missing: vcsd drive fsck" in err) == (1, "", True)
    code, out, _ = vcsd(capsys, monkeypatch, "drive", "log", str(kept.folder), "smart", "-o", "json")
    smart = json.loads(out)
    assert code == 0 and smart["critical_warning"] & 4 and smart["media_errors"] > 0
    code, report = say()
    assert code == 4 and report["findings"][0]["what"] == "is missing"
    assert name not in undone(kept.folder)
    assert say()[0] == 0
    with closing(InProcessDrive.reopen(kept.folder)) as device:
        for handle, stored in kept.host.model.items():
            if name == "blocks.bin" and stored.value is not None:  # its content is known from the spare areas
                assert is_stored(device.firmware.ftl, handle, stored)
                continue
            done = device.submit(KvRead((handle,), 0), 0).result()
            if name == "blocks.bin":
                np.testing.assert_array_equal(done.data[0], stored.layers[0][0])
            elif stored.value != b"":
                assert done.status in (Status.UNRECOVERED_READ_ERROR, Status.UNKNOWN_SEQUENCE)


def test_truncated_file_keeps_remaining_data(say, kept, before):
    size = len(before["spare.bin"])
    (kept.folder / "spare.bin").write_bytes(before["spare.bin"][: size // 2])
    code, report = say()
    assert code == 4 and f"has {size // 2:,} bytes instead of {size:,}" in report["findings"][0]["what"]
    with closing(InProcessDrive.reopen(kept.folder)) as device:
        assert all(seq.failed for seq in device.firmware.ftl.sequences.values())


def test_lost_data_is_reported_once(say, kept, before):
    change(kept.folder / "content.bin", 0, bytes(len(before["content.bin"])))
    assert judge(kept) == "reported"
    code, report = say()
    assert code == 4 and any("checkpoint" in finding["what"] for finding in report["findings"])
    assert say()[0] == 0


def test_missing_description_is_restored_from_config(kept, before, capsys, monkeypatch):
    (kept.folder / "drive.json").unlink()
    code, _, err = vcsd(capsys, monkeypatch, "drive", "fsck", str(kept.folder))
    assert (code, "specify the drive (--drive-config FILE)" in err, len(err.splitlines())) == (1, True, 1)
    report = fsck(kept.folder, False, kept.host.ftl.spec)
    assert report.lost == 0 and contents(kept.folder) == before


def test_finding_names_place_and_loss(say, kept):
    change(kept.folder / "content.bin", 0, bytes((kept.folder / "content.bin").stat().st_size))
    _, report = say()
    lost = [(finding["where"], finding["what"]) for finding in report["findings"] if finding["action"] == "lost"]
    assert lost and all(where != "flash" and where and ": " not in what for where, what in lost)
