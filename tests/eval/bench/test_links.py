"""Links to a drive that does no work."""

import pytest

from vcsd_eval.bench.links import measure_links


@pytest.mark.usefixtures("own_run_dir")
def test_all_links_are_measured():
    result = measure_links(trips=10)
    names = {f"{link}_{figure}" for link in ("window", "nvme_tcp", "socket") for figure in ("rtt_us_median", "mbps")}
    assert set(result) == names | {"nvme_tcp_over_window", "nvme_tcp_over_socket"}
    assert all(value > 0 for value in result.values())
