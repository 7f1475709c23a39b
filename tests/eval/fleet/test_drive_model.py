"""The linear model of the drive, and its deviation from the full emulator at sequences outside the fit.

partner of: eval/fleet/drive_model.py, eval/fleet/calibrate.py, eval/fleet/emulated.py
"""

from dataclasses import replace

import numpy as np
import pytest

from csd_spec.presets import INSTCSD_OVERLAPPED
from vcsd_eval.fleet.calibrate import CalibrationBench, compositions, deviations, over_time
from vcsd_eval.fleet.drive_model import DriveRates, coefficients
from vcsd_eval.fleet.emulated import EmulatedDrive
from vcsd_eval.papers.profiles import Model

SHAPE = Model.load("llama-3-8b").shape


def test_chain_ends_with_flash_or_arithmetic_of_last_sequence():
    rates = DriveRates(flash_s=1.0, engine_s=0.5, tail_s=2.0)
    assert rates.chain_s([10]) == 30
    assert rates.chain_s([10, 1]) == 30
    assert rates.chain_s([1, 10]) == 31
    assert replace(rates, engine_s=5.0).chain_s([1, 10]) == 55


def test_more_drives_have_slower_slowest():
    fitted = coefficients()
    ratios = [fitted.slowest(drives) for drives in (1, 2, 4, 8)]
    assert ratios == sorted(ratios) and ratios[0] == pytest.approx(1, abs=0.01)


def test_shipped_coefficients_have_command_and_deviation():
    fitted = coefficients()
    assert fitted.made_by.startswith("vcsd eval fleet --calibrate")
    assert set(fitted.deviation_percent) == {1, 4, 8}
    assert max(fitted.deviation_percent.values()) <= 5


@pytest.mark.parametrize("drives", (1, 4, 8))
def test_deviation_at_held_out_batch_is_below_5_percent(trace, drives):
    result = deviations(
        CalibrationBench(INSTCSD_OVERLAPPED, SHAPE, seed=5), coefficients(), trace.requests[20:36], drives, 3
    )
    assert np.mean(result) <= 5


def test_batch_shrinks_and_lengthens_over_time(trace):
    first, *_, last = over_time(trace.requests[:8], 4)
    assert len(first) == 8 and len(last) < 8
    assert all(last[number] > first[number] for number in last)
    assert compositions(0) == compositions(0) != compositions(1)


def test_emulated_drive_holds_given_sequences():
    drive = EmulatedDrive(INSTCSD_OVERLAPPED, replace(SHAPE, layers=2, kv_heads=1, q_heads=4), 1 << 14, seed=0)
    drive.hold({1: 4000, 2: 300})
    both_s = sum(drive.layers_s())
    drive.hold({1: 4040})
    assert drive.ftl.sequences[drive.handles[1]].lengths.tolist() == [4040, 4040]
    assert len(drive.handles) == 1 and sum(drive.layers_s()) < 1.2 * both_s
    drive.hold({1: 100})
    assert drive.ftl.sequences[drive.handles[1]].lengths.tolist() == [100, 100]
