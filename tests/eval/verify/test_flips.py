"""Damage of every kind is found, and the judge detects a drive that does not report it.

partner of: eval/verify/random_host.py
"""

from ftl.flash.files import data_sizes
from vcsd_eval.verify.flips import FlushedFolder, bench_flips, judge
from vcsd_eval.verify.random_host import DRIVE


def test_bit_flips_are_never_silent_single_ones_corrected():
    result = bench_flips(480, 1)
    assert result["flips"] == 480 == sum(result[each] for each in ("reported", "corrected", "harmless", "silent"))
    assert result["silent"] == 0 and result["corrected"] > 50
    assert result["by_kind"]["bit"]["reported"] == 0 and result["by_kind"]["burst"]["reported"] > 0


def test_judge_detects_silent_damage(tmp_path, monkeypatch):
    kept = FlushedFolder.make(tmp_path / "drive", 0)
    assert judge(kept) == "harmless"
    content = bytearray(kept.files["content.bin"])
    size = data_sizes(DRIVE.geometry)["content.bin"]
    content[:size] = bytes(size)  # but for its footer
    (kept.folder / "content.bin").write_bytes(content)
    assert judge(kept) == "reported"
    monkeypatch.setattr("vcsd_eval.verify.flips.smart", lambda ftl: {"critical_warning": 0})
    assert judge(kept) == "silent"
    kept.restore()
    assert judge(kept) == "harmless"
