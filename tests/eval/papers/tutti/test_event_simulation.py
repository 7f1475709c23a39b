"""Event-driven TTFT against its closed form.

partner of: eval/papers/tutti/event_simulation.py
"""

import random

import pytest

from vcsd_eval.papers.machines import overlay
from vcsd_eval.papers.profiles import Gpu, Model
from vcsd_eval.papers.tutti.event_simulation import ByEvents
from vcsd_eval.papers.tutti.reading import GpuReading, Path

GIVEN = Model.load("llama-3-8b"), Gpu.load("h100"), overlay("tutti")
FORMULA, EVENTS = GpuReading.on(*GIVEN), ByEvents.on(*GIVEN)


@pytest.mark.parametrize("seed", range(24))
def test_simulated_events_equal_closed_form(seed):
    draw = random.Random(seed)
    new, prefix = draw.randint(1, 20_000), draw.randint(0, 120_000)
    path = Path(10 ** draw.uniform(9, 11), layered=draw.random() < 0.5)
    assert EVENTS.first_token_s(new, prefix, path) == pytest.approx(FORMULA.first_token_s(new, prefix, path), rel=1e-6)


def test_load_without_path_takes_no_time():
    assert EVENTS.first_token_s(512, 4096, None) == FORMULA.compute_s(512, 4096)


def test_partial_prefix_has_no_event_simulation():
    with pytest.raises(ValueError, match="as a whole"):
        EVENTS.first_token_s(512, 4096, Path(1e9), here=64)
