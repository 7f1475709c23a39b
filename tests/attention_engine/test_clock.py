"""The engine's clock counts cycles of the submitted work."""

import pytest

from attention_engine import EngineClock
from csd_spec import EngineSpec
from csd_spec.presets import ZYNQ7045

UNITS = {
    "kernels": 2,
    "lanes": 8,
    "kernel_efficiency": 0.5,
    "softmax_ways": 4,
    "topk_ways": 3,
    "nfc_bytes_per_cycle": 16,
}


def test_cycles_are_rounded_up():
    clock = EngineClock(EngineSpec(clock_hz=1_000_000_000, **UNITS))
    assert [clock.kernel_ns(beats) for beats in (0, 1, 100)] == [0, 2, 200]
    assert [clock.softmax_ns(scores) for scores in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [clock.topk_ns(values) for values in (0, 1, 4)] == [0, 1, 4]


def test_dense_step_takes_papers_cycles():
    """OPT-13B, batch 64, S = 1536: 0.137 of an 8.9 s step (figure 14, as read in ARCHITECTURE.md)."""
    beats = 2 * 64 * 40 * 40 * 1536 * 128 // ZYNQ7045.lanes
    assert EngineClock(ZYNQ7045).kernel_ns(beats) / ZYNQ7045.kernels == pytest.approx(0.137 * 8.9e9, rel=0.02)


@pytest.mark.parametrize(("field", "value"), [("lanes", 0), ("kernel_efficiency", 1.5), ("schedule", "eager")])
def test_invalid_engine_spec_is_refused(field, value):
    with pytest.raises(ValueError, match=field):
        EngineSpec(**{"clock_hz": 1_000_000_000, **UNITS, field: value})
