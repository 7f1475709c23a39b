"""Sequential reads by queue depth."""

import pytest

from csd_spec.presets import INSTCSD_ZYNQ7045_8CH
from vcsd_eval.bench.queue_depth import bench_queue_depth, closed_loop


def test_flash_saturates_at_depth_4_and_link_limits_host():
    spec = INSTCSD_ZYNQ7045_8CH
    one, four = bench_queue_depth(spec, 16 << 20, 256 << 10, (1, 4))
    channels = spec.geometry.channels * spec.timing.channel_bytes_per_s / 1e9
    assert one["flash_gb_s"] < 0.5 * channels < 0.9 * channels < four["flash_gb_s"] <= channels
    alone_ns = (256 << 10) / one["flash_gb_s"] + spec.link.transfer_ns(256 << 10) + spec.link.command_ns
    assert one["host_gb_s"] == pytest.approx((256 << 10) / alone_ns, rel=0.02)
    link = spec.link.bytes_per_s / 1e9
    assert 0.95 * link < four["host_gb_s"] <= link


def test_closed_loop_keeps_queue_depth_in_flight():
    flying = []

    def read(at, submit_ns):
        flying.append(submit_ns)
        return submit_ns + 10

    assert closed_loop(read, range(7), 3, 100) == 130
    assert flying == [100, 100, 100, 110, 110, 110, 120]
