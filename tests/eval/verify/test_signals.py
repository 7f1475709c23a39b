"""Signals whose handlers raise: no command is torn.

partner of: eval/verify/signals.py
"""

import gc

import numpy as np
import pytest

from csd_firmware import InProcessDrive
from vcsd_eval.verify.random_host import DRIVE
from vcsd_eval.verify.signals import SIGNALS, SignalHost, bench_signals, judge


@pytest.fixture
def no_callbacks_of_the_collector():
    """Hypothesis installs one, and swallows an exception that a signal handler raises in it: no interruption."""
    before = list(gc.callbacks)
    gc.callbacks.clear()
    yield
    gc.callbacks.extend(before)


def test_signals_on_each_medium_lose_nothing(no_callbacks_of_the_collector):
    result = bench_signals(3 * len(SIGNALS), 1, 1)
    assert result["lives"] == 15 and result["interrupted"] > 30
    assert (result["lost"], result["wrong"], result["failed_drives"]) == (0, 0, 0)


def test_judge_counts_lost_and_wrong_sequences():
    host = SignalHost(InProcessDrive(DRIVE), 0)
    rows = np.ones((3, 2, 16), np.float16)
    host.rows, host.since_flush = {1: rows}, {1: [rows[:2], rows]}
    assert judge(host, {1: rows}, True) == judge(host, {1: rows[:2]}, False) == (0, 0)
    assert judge(host, {}, True)[0] == judge(host, {}, False)[0] == 1
    assert judge(host, {1: rows[:1]}, False) == judge(host, {1: rows, 2: rows}, False) == (0, 1)
    host.device.close()
