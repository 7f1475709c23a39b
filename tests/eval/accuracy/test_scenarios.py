"""Scenarios that break methods: each matches its name."""

import numpy as np
import pytest

from vcsd_eval.accuracy.scenarios import HEADS, SCENARIOS, scenario

TOKENS = 512


def weights(name):
    """Softmax weights (H, G, S) of a scenario's first decode step, in float64."""
    return scenario(name, TOKENS, 1, 0).exact(TOKENS).weights.astype(np.float64)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_shape_and_seed(name):
    _, G, d = SCENARIOS[name]
    layer = scenario(name, TOKENS, 2, 0)
    assert layer.recorded.q.shape == (1, HEADS * G, TOKENS + 2, d)
    assert layer.recorded.k.shape == layer.recorded.v.shape == (1, HEADS, TOKENS + 2, d)
    assert all(np.isfinite(part).all() for part in (layer.recorded.q, layer.recorded.k, layer.recorded.v))
    same, other = scenario(name, TOKENS, 2, 0), scenario(name, TOKENS, 2, 1)
    assert (same.recorded.k == layer.recorded.k).all() and not (other.recorded.k == layer.recorded.k).all()


def test_scenarios_have_their_named_property():
    assert weights("flat").max() < 0.01
    assert weights("peaky")[..., (TOKENS + 1) // 3].min() > 0.9
    assert weights("sinks")[..., :4].sum(-1).min() > 0.5
    best = weights("scattered")[..., 7 : TOKENS - 48 : 48].sum(-1)
    assert best.min() > 0.8
    opposed = weights("opposed")
    assert len({int(head.argmax()) for head in opposed[0]}) == opposed.shape[1]
    v = scenario("outliers", TOKENS, 1, 0).recorded.v
    norms = np.linalg.norm(v.astype(np.float32), axis=-1)
    assert (norms > 10 * np.median(norms)).sum() == 8 * HEADS
    ranges = scenario("inverse", TOKENS, 1, 0).recorded
    across_q, across_k = (np.ptp(part.astype(np.float32), axis=(0, 1, 2)) for part in (ranges.q, ranges.k))
    assert np.corrcoef(np.log(across_q), np.log(across_k))[0, 1] < -0.95
    near = weights("duplicates")
    assert (near.argmax(-1) == near.argmax(-1)[:, :1]).all() and near.max(-1).min() > 0.2
