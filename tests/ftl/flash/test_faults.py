"""Flash with the failures that data sheets describe: nothing wrong is ever returned, and the drive continues."""

import numpy as np
import pytest

from csd_firmware import Firmware
from csd_spec import LAYOUTS, Flush, KvAppend, KvFree, KvRead, SeqCreate, Status
from ftl import FaultPlan, Ftl, Nand, OutOfSpaceError, ReadOnlyError, UncorrectableReadError


def make(drive, **faults):
    ftl = Ftl(drive, Nand(drive.geometry, FaultPlan(**faults)))
    return ftl, LAYOUTS["fp16"].paged(drive.geometry.page_bytes, 8, 4)


def rows(generator, tokens):
    return generator.standard_normal((tokens, 2, 8)).astype(np.float16)


@pytest.mark.parametrize("faults", [{"factory_bad": 0.05}, {"program_fail": 1e-3}, {"erase_fail": 5e-3}])
def test_bad_blocks_cost_space_and_no_data(small_drive, faults):
    ftl, layout = make(small_drive, seed=3, **faults)
    generator = np.random.default_rng(0)
    for _ in range(30):
        (handle,) = ftl.create(1, 1, 2, layout)
        k = rows(generator, 700)
        for start in range(0, 700, 100):
            ftl.append([handle], 0, np.array([100]), k[start : start + 100], k[start : start + 100], 0)
        np.testing.assert_array_equal(ftl.read_back(handle, 0)[0], k)
        ftl.flush(0)
        ftl.nand.power_on()
        ftl = Ftl(small_drive, ftl.nand)
        np.testing.assert_array_equal(ftl.read_back(handle, 0)[1], k)
        ftl.free([handle], 0)
    assert ftl.nand.bad.sum() > 0
    if "program_fail" not in faults:  # such a block keeps what was programmed before it failed
        assert not ftl.nand.next_page[ftl.nand.bad > 0].any()


def test_worn_out_drive_is_read_only_and_keeps_data(small_drive):
    ftl, layout = make(small_drive, seed=1, erase_fail=0.3)
    generator = np.random.default_rng(0)
    resting, moving = ftl.create(2, 1, 2, layout)
    k = rows(generator, 200)
    ftl.append([resting], 0, np.array([200]), k, k, 0)
    with pytest.raises((ReadOnlyError, OutOfSpaceError)):
        for _ in range(1000):
            ftl.append([moving], 0, np.array([200]), k, k, 0)
            ftl.free([moving], 0)
            ftl.flush(0)
            (moving,) = ftl.create(1, 1, 2, layout)
    assert ftl.nand.bad.sum() > 10
    np.testing.assert_array_equal(ftl.read_back(resting, 0)[0], k)


def test_corrected_reads_slow_uncorrectable_fail(small_drive):
    clean = dict.fromkeys(("ecc_bits", "retry_bits"), 1000)
    times = {}
    for name, faults in {
        "none": {},
        "corrected": {"raw_bit_errors": 1e-3, **clean},
        "retried": {"raw_bit_errors": 1e-3, "ecc_bits": 0, "retry_bits": 1000},
    }.items():
        ftl, layout = make(small_drive, **faults)
        (handle,) = ftl.create(1, 1, 2, layout)
        k = rows(np.random.default_rng(0), 200)
        ftl.append([handle], 0, np.array([200]), k, k, 0)
        start = ftl.timing.idle_ns()
        times[name] = ftl.read(ftl.read_back(handle, 0)[2], start) - start
    assert times["none"] == times["corrected"] < times["retried"]


def test_firmware_reports_loss_serves_other_sequences(small_drive):
    """One page in a few hundred is ECC-uncorrectable: its sequence fails, no wrong data is returned."""
    nand = Nand(small_drive.geometry, FaultPlan(raw_bit_errors=7.5e-3, codeword_bytes=512, ecc_bits=38, retry_bits=45))
    firmware, generator = Firmware(small_drive, nand), np.random.default_rng(0)
    handles = firmware.step(SeqCreate(4, 1, 2, 8, 512), 0).data[0].tolist()
    stored = {}
    for handle in handles:
        stored[handle] = rows(generator, 150)
        append = KvAppend((handle,), 0, np.array([150]), stored[handle], stored[handle])
        assert firmware.step(append, 0).status is Status.SUCCESS
    seen = set()
    for _ in range(60):
        for handle in handles:
            done = firmware.step(KvRead((handle,), 0), 0)
            seen.add(done.status)
            if done.status is Status.SUCCESS:
                np.testing.assert_array_equal(done.data[0], stored[handle])
            else:
                assert done.status is Status.UNRECOVERED_READ_ERROR
                assert str(handle) in done.reason
                assert firmware.step(KvRead((handle,), 0), 0).status is Status.UNRECOVERED_READ_ERROR
    assert seen == {Status.SUCCESS, Status.UNRECOVERED_READ_ERROR}
    assert firmware.step(Flush(), 0).status is Status.SUCCESS
    assert firmware.step(KvFree(tuple(handles)), 0).status is Status.SUCCESS


@pytest.mark.parametrize("bad", [{"program_fail": 1.0}, {"raw_bit_errors": -1.0}, {"ecc_bits": 9, "retry_bits": 3}])
def test_invalid_fault_plans_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad)).replace("ecc", "retry")):
        FaultPlan(**bad)


def test_uncorrectable_names_the_sequences():
    assert "sequences 3, 5" in str(UncorrectableReadError([3, 5]))


def test_bit_errors_have_doubled_at_the_endurance():
    """With a mean of 8.192 errors in a new block."""
    faults, generator = FaultPlan(raw_bit_errors=1e-3, endurance=100), np.random.default_rng(0)
    for erases, mean in ((0, 8.192), (100, 2 * 8.192), (300, 4 * 8.192)):
        worst = faults.worst_codewords(generator, np.full(4000, erases), 1024)
        assert worst.mean() == pytest.approx(mean, rel=0.03)


@pytest.mark.parametrize("name", ["factory_bad", "program_fail", "erase_fail", "raw_bit_errors"])
def test_rates_are_below_one(name):
    assert getattr(FaultPlan(**{name: 0.999}), name) == 0.999
    for rate in (1.0, -0.001):
        with pytest.raises(ValueError, match=name):
            FaultPlan(**{name: rate})
    assert FaultPlan(ecc_bits=0, retry_bits=0).retry_bits == 0


def test_worst_codeword_is_drawn_from_all_of_a_page():
    """With a mean of 2.048 errors, the largest of 16 is 4.9 on average, and that of one codeword 2.05."""
    faults, erases = FaultPlan(raw_bit_errors=1e-3, codeword_bytes=256), np.zeros(4000, np.int64)
    for page_bytes, low, high in ((256, 1.9, 2.2), (128, 1.9, 2.2), (4096, 4.7, 5.1)):
        worst = faults.worst_codewords(np.random.default_rng(0), erases, page_bytes)
        assert low < worst.mean() < high
