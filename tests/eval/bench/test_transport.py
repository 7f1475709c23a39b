"""Rates of the ways to a drive are measured, not judged."""

import shutil

import pytest

from eval.bench.transport import WORKLOADS, bench_transport
from tests.conftest import missing


@pytest.mark.usefixtures("fuse", "own_run_dir")
def test_every_figure_is_there():
    if not shutil.which("fio"):
        missing("fuse", "fio is not installed: apt-get install fio")
    found = bench_transport(seconds=1, size_mb=16, trips=20)
    names = {"first_touch_mbps", "rtt_us_median", "rtt_us_p99", "rtt_read_us_median", *WORKLOADS}
    assert names < set(found) and "nvme_tcp_rtt_us_median" in found
    assert all(figure > 0 for figure in found.values())
    assert found["rtt_us_p99"] >= found["rtt_us_median"]
