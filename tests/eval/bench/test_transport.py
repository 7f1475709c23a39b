"""Rates of the transports are measured without a limit."""

import shutil

import pytest

from csd_firmware import InProcessDrive
from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from tests.conftest import missing
from vcsd_eval.bench.transport import WORKLOADS, bench_transport, measure_attends


@pytest.mark.usefixtures("fuse", "own_run_dir")
def test_transport_bench_reports_every_figure():
    if not shutil.which("fio"):
        missing("fuse", "fio is not installed: apt-get install fio")
    result = bench_transport(seconds=1, size_mb=16, trips=20)
    names = {"first_touch_mbps", "rtt_us_median", "rtt_us_p99", "rtt_read_us_median", *WORKLOADS}
    assert names < set(result) and {"nvme_tcp_over_window", "process_over_inproc"} < set(result)
    assert all(figure > 0 for figure in result.values())
    assert result["rtt_us_p99"] >= result["rtt_us_median"]


def test_attend_bench_accepts_any_number_of_trips():
    device = InProcessDrive(INSTCSD_ZYNQ7045_8CH)
    result = measure_attends(device, trips=25)
    device.close()
    assert result["process_over_inproc"] == result["attend_process_us_median"] / result["attend_inproc_us_median"]
