"""The engine's clock counts cycles of the work that it is given."""

import pytest

from attention_engine import EngineClock
from csd_spec import EngineSpec
from csd_spec.presets import ZYNQ7045


def test_cycles_are_rounded_up():
    clock = EngineClock(EngineSpec(clock_hz=1_000_000_000, macs_per_cycle=100, topk_ways=3))
    assert [clock.macs_ns(macs) for macs in (0, 1, 100, 101)] == [0, 1, 1, 2]
    assert [clock.topk_ns(scores) for scores in (1, 4)] == [1, 4]


def test_the_papers_dense_step():
    """OPT-13B, batch 64, S = 1536: 0.137 of an 8.9 s step (figure 13, as read in ARCHITECTURE.md)."""
    macs = 2 * 64 * 40 * 40 * 1536 * 128
    assert EngineClock(ZYNQ7045).macs_ns(macs) == pytest.approx(0.137 * 8.9e9, rel=0.02)
