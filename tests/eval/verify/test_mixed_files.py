"""Old and new files in one folder: each mix is refused by the names of the older files.

partner of: eval/verify/mixed_files.py
"""

import pytest

from csd_firmware import InProcessDrive
from csd_firmware.fsck import fsck
from ftl.flash import nand
from vcsd_eval.verify.mixed_files import FILES, bench_mixed_files, judge, make
from vcsd_eval.verify.random_host import DRIVE


def test_mixed_files_are_reported_on_every_medium():
    result = bench_mixed_files(0)
    assert (result["mixes"], result["reported"] + result["harmless"]) == (126, 126)
    assert (result["silent"], result["unnamed"]) == (0, 0), result["found"]


def test_judge_without_generations_sees_older_data(tmp_path, monkeypatch):
    """Older spare areas and block entries with newer content: the drive is older, without a finding."""
    monkeypatch.setattr(nand.Nand, "advance_generation", lambda self: None)
    copies = make(tmp_path, "progressive", "direct", 0)
    for name in FILES[1:]:
        (copies.new / name).write_bytes((copies.old / name).read_bytes())
    assert judge(copies.new, "direct", copies, FILES[1:]) == "silent"


@pytest.mark.parametrize("older", [FILES[:1], FILES[1:], FILES[2:3]])
def test_fsck_names_older_files_and_opens_the_drive(tmp_path, older):
    copies = make(tmp_path, "fp16", "memory", 0)
    for name in older:
        (copies.new / name).write_bytes((copies.old / name).read_bytes())
    before = {path.name: path.read_bytes() for path in copies.new.iterdir()}
    for dry_run in (True, False):
        report = fsck(copies.new, dry_run)
        named = {each["where"]: each["what"] for each in report.findings if each["where"] in FILES}
        assert named.keys() == set(older) and all("is older (generation" in what for what in named.values())
        assert report.lost >= len(older)
        if dry_run:
            assert before == {path.name: path.read_bytes() for path in copies.new.iterdir()}
    InProcessDrive(DRIVE, copies.new).close()
    assert not any("older" in each["what"] for each in fsck(copies.new, True).findings)
