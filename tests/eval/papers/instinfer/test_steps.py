"""Steps on the modelled executor, compared with the sum of their parts."""

import pytest

from kv_cache import CSD, HOST, PAGE_CACHE
from kv_cache.policies.flexgen import FlexGen
from kv_cache.transfer.simulated import LayerTime
from vcsd_eval.papers.instinfer import steps
from vcsd_eval.papers.instinfer.steps import TierContents, step_s

ROW, LAYERS = 10_000, 4
LAYER = 2 * ROW


def stored(home, tokens=100.0, **more):
    return TierContents(home=home, tokens=tokens, rows={"batch": ROW}, **more)


def test_layer_waits_for_its_weights_and_kv():
    took = step_s(steps.host_memory(1e9), steps.streamed, LAYERS, stored(HOST, weights=3_000_000), LayerTime(1_000_000))
    assert took == pytest.approx(LAYERS * ((100 * LAYER + 3_000_000) / 1e9 + 1e-3))


def test_step_at_mean_length_averages_both():
    whole, between, next_one = (
        step_s(steps.host_memory(1e9), steps.streamed, LAYERS, stored(HOST, tokens, weights=1), LayerTime(0))
        for tokens in (100.0, 100.5, 101.0)
    )
    assert between == pytest.approx((whole + next_one) / 2)
    assert whole < between < next_one


@pytest.mark.parametrize(("layers_kept", "rate"), [(5, 2e9), (3, 1e9)])
def test_page_cache_rate_only_if_files_fit(layers_kept, rate):
    machine = steps.files(2e9, 1e9, layers_kept * 100 * LAYER)
    took = step_s(machine, FlexGen(ahead=0).layers, LAYERS, stored(PAGE_CACHE), LayerTime(0))
    assert took == pytest.approx(LAYERS * 100 * LAYER / rate)


def test_serial_steps_add_and_half_batches_overlap():
    """Halves: the GPU computes for one while drives attend for the other, so only its first iteration is uncovered."""
    one, two = (TierContents(home=CSD, tokens=100, rows=dict.fromkeys(range(count), 1)) for count in (1, 2))
    serial = step_s(steps.drives(), steps.in_turns, LAYERS, one, LayerTime(1_000_000, 10_000_000))
    assert serial == pytest.approx(LAYERS * 11e-3)
    halves = step_s(steps.drives(), steps.in_turns, LAYERS, two, LayerTime(500_000, 5_000_000))
    assert halves == pytest.approx(LAYERS * 10e-3 + 0.5e-3)
