"""The model at its limits: latencies at depth 1 by hand, rates at high depth below the limits of the hardware."""

import numpy as np
import pytest

from vcsd_eval.baselines.conventional import ConventionalSsd
from vcsd_eval.ssd.model import block_ssd, link_bytes_per_s, program_ns, simulate
from vcsd_eval.ssd.profile import PublishedFigure, drives, shared

DRIVE = drives()["wd-sn850x-2tb"]


def figure(workload, depth, unit):
    return PublishedFigure(workload=workload, depth=depth, value=None, unit=unit, source="sheet")


def test_read_latency_depth_1_is_sum_of_parts():
    """Command, sensing, 4 KiB over one channel, 4 KiB over the link."""
    bus_us, link_us = 4096 / DRIVE["bus_mt_per_s"], 4096 / link_bytes_per_s(DRIVE) * 1e6
    parts = shared()["command_us"] + DRIVE["read_us"] + bus_us + link_us
    assert simulate(DRIVE, figure("random_read", 1, "us")) == pytest.approx(parts, rel=0.005)


def test_write_latency_depth_1_is_command_and_link():
    parts = shared()["command_us"] + 4096 / link_bytes_per_s(DRIVE) * 1e6
    assert simulate(DRIVE, figure("random_write", 1, "us")) == pytest.approx(parts, rel=0.005)


@pytest.mark.parametrize("name", ["wd-sn850-1tb", "wd-sn850x-2tb"])
def test_sequential_read_reaches_link_or_channels(name):
    drive = drives()[name]
    limit = min(link_bytes_per_s(drive) / 1e6, drive["channels"] * drive["bus_mt_per_s"])
    assert 0.97 * limit < simulate(drive, figure("sequential_read", 32, "MB/s")) <= 1.005 * limit


def test_sequential_write_direct_is_below_programs():
    drive = drives()["samsung-980-pro-1tb"]
    limit = drive["dies"] * drive["die_program_mb_per_s"]
    assert 0.9 * limit < simulate(drive, figure("sequential_write_direct", 32, "MB/s")) <= limit


def test_random_read_is_below_command_rate():
    limit = shared()["commands_per_s_channel_gen4"] * DRIVE["channels"]
    assert 0.95 * limit < simulate(DRIVE, figure("random_read", 256, "IOPS")) <= 1.005 * limit


def test_slc_cache_program_time_is_that_of_slc():
    assert program_ns(DRIVE, True) == 200_000
    assert program_ns(drives()["samsung-pm9a3-7.68tb"], True) == round(2 * 16384 / 82e6 * 1e9)


@pytest.mark.parametrize("drive", drives().values(), ids=lambda drive: drive.name)
def test_spec_keeps_geometry_and_overprovisioning(drive):
    spec = block_ssd(drive)
    raw = drive["dies"] * drive["die_gbit"] * 2**27
    assert spec.channels * spec.luns_per_channel == drive["dies"] * drive["planes"]
    assert spec.overprovision_percent == pytest.approx(100 * (raw / (drive["user_gb"] * 1e9) - 1), abs=0.5)
    assert spec.flash_pages_per_block >= 1


def test_steady_state_amplifies_writes():
    ssd = ConventionalSsd(block_ssd(drives()["samsung-pm983-1.92tb"]))
    _, latencies = ssd.closed_loop(64, 4_000_000, 4096, 0)
    host, moved = ssd.units_written
    assert host == 4_000_000 and moved > 0
    assert np.all(latencies > 0)
