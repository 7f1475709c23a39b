"""Exceptions inside command handlers: a sample, and the judge on firmware that continues after one.

partner of: eval/verify/exceptions.py, eval/verify/injector.py, eval/verify/interrupted.py
"""

import pytest

from csd_firmware import Firmware
from vcsd_eval.verify.exceptions import AllowedContents, bench_exceptions, events, judge
from vcsd_eval.verify.injector import Injector
from vcsd_eval.verify.interrupted import CASES, InterruptedDrives


@pytest.mark.slow
def test_exceptions_sample_loses_nothing():
    result = bench_exceptions(1000, 2, 1)
    assert result["points"] == 1000 == result["line"] + result["allocation"]
    assert (result["lost"], result["wrong"], result["unreadable"]) == (0, 0, 0), result["found"]
    assert result["failed"] > 900 and result["lines"] > 500


def test_judge_counts_drive_that_continues_as_wrong(tmp_path, monkeypatch):
    """Without a failed state, a flush after a torn record says that it succeeded."""
    monkeypatch.setattr(Firmware, "fail", lambda self, *args: None)
    bench = InterruptedDrives("fp16", "memory", tmp_path / "drive")
    expected = AllowedContents.of(bench, "append long")
    every = list(events(bench, "append long"))
    inside = [at for kind, at, place in every if kind == "line" and place[0].endswith("ftl/kv/append.py")]
    assert any(any(judge(bench, "append long", expected, Injector("line", at))[1:]) for at in inside)


def test_events_are_the_same_in_each_run(tmp_path):
    bench = InterruptedDrives("fp16", "memory", tmp_path / "drive")
    for name in CASES:
        assert list(events(bench, name)) == list(events(bench, name)), name
