"""`vcsd eval ssd`: rows, errors, filters, and NVMeVirt's points."""

import pytest

from vcsd_eval.ssd.ssd import NVMEVIRT, experiment, grouped, line_of, nvmevirt_rows, pairs, summary

ROWS = [
    {"drive": "a", "workload": "random_read", "depth": 1, "published": 100, "error_percent": -20.0, "class": "client"},
    {"drive": "a", "workload": "random_read", "depth": 4, "published": 100, "error_percent": 5.0, "class": "client"},
    {"drive": "b", "workload": "random_write", "depth": 4, "published": 9, "error_percent": 10.0, "class": "client"},
]


def test_one_drive_and_workload():
    outcome = experiment("wd-sn850x-2tb", "sequential_read")
    (row,) = outcome.result["rows"]
    assert (row["drive"], row["published"], row["unit"]) == ("wd-sn850x-2tb", 7300, "MB/s")
    assert row["error_percent"] == pytest.approx(100 * (row["ours"] / 7300 - 1))
    assert outcome.result["median_error_percent"] == abs(outcome.result["worst_error_percent"])
    assert outcome.result["fitted"] == 0
    assert outcome.result["drives"][0]["constants"]["read_us"]["value"] == 56
    assert [row["depth"] for row in outcome.result["nvmevirt"]] == list(NVMEVIRT)


def test_simulator_has_no_error():
    result = experiment("femu", "sequential_read").result
    assert (result["rows"], result["median_error_percent"]) == ([], None)
    assert result["simulators"][0]["ours"] > 0


def test_nvmevirt_points_unchanged():
    assert all(abs(row["error_percent"]) < 0.1 for row in nvmevirt_rows())


def test_median_and_worst():
    total = summary(ROWS)
    assert (total["median_error_percent"], total["worst_error_percent"]) == (10, -20)
    assert grouped(ROWS, "drive")["a"]["median_error_percent"] == 12.5
    assert "median error 10.0 % (client 10.0 %), worst -20.0 % (a, random_read, depth 1)" in line_of(ROWS, total)


@pytest.mark.parametrize(
    ("drive", "workload", "reason"),
    [
        ("floppy", None, "drive = 'floppy': must be one of hynix-p41-2tb"),
        (None, "fsync", "workload = 'fsync': must be one of sequential_read"),
        ("wd-sn850x-2tb", "random_write_steady", "wd-sn850x-2tb has no figure of it: choose one of random_read"),
    ],
)
def test_filter_unknown_raises(drive, workload, reason):
    with pytest.raises(ValueError, match=reason):
        pairs(drive, workload)
