"""The conventional SSD against NVMeVirt's times for the same requests, and against the limits of flash.

partner of: eval/baselines/_prefetch.py
"""

from dataclasses import replace

import numpy as np
import pytest

from csd_spec.presets import NVMEVIRT_970PRO
from vcsd_eval.baselines.conventional import READ, WRITE, ConventionalSsd


@pytest.mark.parametrize(
    ("depth", "iops", "mean_us"),
    [(1, 15_803, 63.28), (16, 195_959, 81.65), (32, 283_532, 112.86), (256, 379_975, 673.5)],
)
def test_random_reads_equal_nvmevirt(depth, iops, mean_us):
    end_ns, latencies = ConventionalSsd(NVMEVIRT_970PRO).closed_loop(depth, 300_000, 4096, 100)
    assert latencies.size / (end_ns / 1e9) == pytest.approx(iops, rel=0.01)
    assert latencies.mean() / 1e3 == pytest.approx(mean_us, rel=0.01)


def test_single_read_time_matches_hand_count():
    """Firmware, sensing (LSB or MSB), 32 units over the channel, 32 over PCIe."""
    _, latencies = ConventionalSsd(NVMEVIRT_970PRO).closed_loop(1, 1000, 4096, 100)
    base = 21_500 + 35_760 + 32 * 152 + 32 * 36
    assert set(latencies.tolist()) == {base - 6_000, base + 6_000}


def test_a_large_read_senses_each_flash_page_once():
    """128 KiB are one flash page of each partition, all sensed at once, in two chunks."""
    (latency,) = ConventionalSsd(NVMEVIRT_970PRO).replay(*(np.array([x]) for x in (0, 0, 131072, READ)))
    channel, pcie = 32768 // 128 * 152, 16384 // 128 * 36
    assert 30_490 + 36_013 - 6_000 + channel + pcie <= latency <= 30_490 + 36_013 + 6_000 + 2 * channel + 8 * pcie


def test_unmapped_reads_take_only_firmware_time():
    drive = ConventionalSsd(NVMEVIRT_970PRO)
    drive._s.l2p[:] = -1
    assert drive.replay(*(np.array([x]) for x in (0, 4096, 4096, READ)))[0] == 21_500


def test_a_small_write_completes_in_the_buffer():
    (latency,) = ConventionalSsd(NVMEVIRT_970PRO).replay(*(np.array([x]) for x in (0, 0, 4096, WRITE)))
    assert latency == 4_000 + 460 + 32 * 36


def test_the_mapping_stays_a_bijection_under_collection():
    drive = ConventionalSsd(NVMEVIRT_970PRO)
    drive.closed_loop(16, 1_200_000, 4096, 20)
    host, moved = drive.units_written
    assert host > 0 < moved
    for partition in range(NVMEVIRT_970PRO.partitions):
        l2p, p2l = drive._s.l2p[partition], drive._s.p2l[partition]
        np.testing.assert_array_equal(p2l[l2p], np.arange(l2p.size))
        assert (p2l >= 0).sum() == l2p.size
        per_line = (p2l >= 0).reshape(-1, NVMEVIRT_970PRO.line_units).sum(1)
        np.testing.assert_array_equal(per_line, drive._s.valid[partition])


@pytest.mark.parametrize(("size", "reads"), [(1000, 100), (0, 100), (2 << 20, 50)])
def test_impossible_sizes_are_refused(size, reads):
    with pytest.raises(ValueError, match="block_bytes"):
        ConventionalSsd(NVMEVIRT_970PRO).closed_loop(1, 10, size, reads)


def test_commands_pass_the_controller_one_by_one():
    spec = replace(NVMEVIRT_970PRO, command_ns=10_000)
    end_ns, _ = ConventionalSsd(spec).closed_loop(256, 20_000, 4096, 100)
    assert 20_000 / (end_ns / 1e9) == pytest.approx(100_000, rel=0.01)


def test_sequential_requests_use_all_channels():
    end_ns, latencies = ConventionalSsd(NVMEVIRT_970PRO).closed_loop(32, 5_000, 131072, 100, sequential=True)
    channels = NVMEVIRT_970PRO.channels * 128 / 152  # bytes a ns
    assert latencies.size * 131072 / end_ns == pytest.approx(min(channels, 128 / 36.4), rel=0.05)
