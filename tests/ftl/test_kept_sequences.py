"""A sequence whose layout is not loaded harms nothing else, survives, and can be freed."""

import numpy as np
import pytest

from csd_firmware.fsck import fsck
from csd_firmware.inprocess import InProcessDrive
from csd_spec import LAYOUTS, Flush, KvFree, KvRead, Status
from csd_spec.layouts import table
from ftl import Ftl, UncorrectableReadError

PLUGIN = """
from csd_spec.layouts import LAYOUTS as BUILT_IN
from dataclasses import replace
LAYOUTS = {"theirs": replace(BUILT_IN["fp16"], name="theirs", code=241)}
"""
TOKENS = 150  # full groups, and rows that wait in DRAM


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "_OF_FILES", {})
    file = tmp_path / "layouts.py"
    file.write_text(PLUGIN)
    table.load_layouts(file)
    return table.layouts()["theirs"]


def rows(seed):
    return np.random.default_rng(seed).standard_normal((TOKENS, 2, 16)).astype(np.float16)


def filled(ftl, layout, seed):
    (handle,) = ftl.create(1, 1, 2, layout.paged(512, 16, 4))
    ftl.append([handle], 0, np.array([TOKENS]), rows(seed), rows(seed + 1), 0)
    return handle


def restarted(ftl):
    ftl.nand.power_on()
    return Ftl(ftl.spec, ftl.nand)


def check(ftl, handle, seed):
    k, v, _ = ftl.read_back(handle, 0)
    np.testing.assert_array_equal(k, rows(seed))
    np.testing.assert_array_equal(v, rows(seed + 1))


def churn(ftl, times):
    """Overwrite blocks until garbage collection has moved what stays."""
    ftl.blocks.resize(40)
    generator = np.random.default_rng(0)
    for _ in range(times):
        ftl.blocks.write(generator.choice(40, 4, replace=False), np.zeros((4, 512), np.uint8), 0)
    ftl.flush(0)


@pytest.fixture
def mixed(small_drive, theirs):
    """A drive with two sequences of the layout, one of them a fork, between others."""
    ftl = Ftl(small_drive)
    before, unknown, after = filled(ftl, LAYOUTS["fp16"], 0), filled(ftl, theirs, 10), filled(ftl, LAYOUTS["bf16"], 20)
    copy = ftl.fork(unknown)
    ftl.flush(0)
    return ftl, before, unknown, copy, after


def test_sequences_of_a_missing_layout_survive_whatever_the_drive_does(mixed, theirs):
    ftl, before, unknown, copy, after = mixed
    table._OF_FILES.clear()
    for _ in range(3):
        ftl = restarted(ftl)
        assert not ftl.findings
        check(ftl, before, 0)
        check(ftl, after, 20)
        for handle in (unknown, copy):
            with pytest.raises(UncorrectableReadError, match="its layout is not loaded"):
                ftl.read_back(handle, 0)
        churn(ftl, 300)
    assert ftl.counters.moved > 0
    table._OF_FILES["theirs"] = theirs
    ftl = restarted(ftl)
    for handle, seed in ((before, 0), (unknown, 10), (copy, 10), (after, 20)):
        check(ftl, handle, seed)


def test_sequences_of_a_missing_layout_can_be_freed(mixed):
    ftl, before, unknown, copy, _ = mixed
    table._OF_FILES.clear()
    ftl = restarted(ftl)
    used = int(ftl.placement.valid.sum())
    ftl.free([copy], 0)
    assert int(ftl.placement.valid.sum()) == used  # the pages are shared
    ftl.free([unknown], 0)
    assert int(ftl.placement.valid.sum()) < used
    churn(ftl, 100)
    ftl = restarted(ftl)
    assert unknown not in ftl.sequences and copy not in ftl.sequences
    check(ftl, before, 0)


def test_a_key_that_moves_away_does_not_come_back(mixed, theirs):
    """Two sequences would have it once the layout is loaded again."""
    ftl, before, unknown, _, _ = mixed
    ftl.name(unknown, [b"k" * 16, b"l" * 16], [16, 16])
    ftl.flush(0)
    table._OF_FILES.clear()
    ftl = restarted(ftl)
    ftl.name(before, [b"k" * 16], [16])
    ftl.flush(0)
    table._OF_FILES["theirs"] = theirs
    ftl = restarted(ftl)
    assert (list(ftl.sequences[before].names), list(ftl.sequences[unknown].names)) == ([b"k" * 16], [b"l" * 16])
    check(ftl, unknown, 10)


def test_served_drive_and_fsck_leave_the_sequence_alone(small_drive, theirs, tmp_path):
    path = tmp_path / "drive"
    drive = InProcessDrive(small_drive, path)
    unknown, other = filled(drive.firmware.ftl, theirs, 0), filled(drive.firmware.ftl, LAYOUTS["fp16"], 10)
    for handle in (unknown, other):
        drive.firmware.state.open(handle)
    drive.submit(Flush(), 0).result()
    drive.close()
    table._OF_FILES.clear()
    for dry_run in (True, False, True):
        (finding,) = fsck(path, dry_run).findings
        assert f"sequence {unknown}: its layout is not loaded" in finding["what"]
    drive = InProcessDrive.reopen(path)
    read = [drive.submit(KvRead((handle,), 0), 0).result() for handle in (unknown, other)]
    assert [completion.status for completion in read] == [Status.UNRECOVERED_READ_ERROR, Status.SUCCESS]
    assert "layout is not loaded" in read[0].reason
    assert drive.submit(KvFree((unknown,)), 0).result().status is Status.SUCCESS
    drive.close()
