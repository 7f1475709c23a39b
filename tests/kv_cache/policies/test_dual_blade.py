"""Dual-Blade: number of layers that the page cache keeps."""

from types import SimpleNamespace

import pytest

from kv_cache.block_table import BlockKey
from kv_cache.hardware import DIRECT, PAGE_CACHE
from kv_cache.policies.dual_blade import CROSS, INTRA, DualBlade


@pytest.mark.parametrize("share", [None, 1.0])
@pytest.mark.parametrize(("margin", "kept"), [(0, 8), (3, 5), (9, 0)])
def test_a_margin_leaves_layers_out_of_the_cache(monkeypatch, share, margin, kept):
    tiers = []

    def stream(it, home, ahead, fifo):
        tiers.extend(home(BlockKey("r", layer)) for layer in it.layers)
        return {}

    monkeypatch.setattr("kv_cache.policies.dual_blade.stream", stream)
    fits_all = {"final_tokens": 1, "capacity": lambda tier: 8, "layer_bytes": lambda tokens: tokens}
    iteration = SimpleNamespace(layers=range(8), prefill=True, batch=["r"], new={"r": 1}, **fits_all)
    DualBlade(margin=margin, share=share).layers(iteration)
    assert tiers == [PAGE_CACHE] * kept + [DIRECT] * (8 - kept)


@pytest.mark.parametrize(
    ("intra_ns", "cross_ns", "expected"),
    [
        ({1: 5.0, 2: 5.0}, {1: 4.0, 2: 5.0}, [True, True, False, False]),
        ({1: 5.0, 2: 5.0}, {1: 6.0, 2: 4.0}, [False, False, True, True]),
        ({1: 5.0, 2: 5.0}, {1: 4.0}, [True, True, False, False]),
    ],
)
def test_a_group_is_loaded_in_the_way_that_its_trial_found_faster(monkeypatch, intra_ns, cross_ns, expected):
    """One after the other only if that is faster, and only if both ways were tried."""
    trials = list[list[bool]]()

    def stream(it, home, ahead, cross):
        trials.append([cross(layer) for layer in range(4)])

    monkeypatch.setattr("kv_cache.policies.dual_blade.stream", stream)
    policy = DualBlade(share=0.5)
    policy.trial, policy._step = {INTRA: intra_ns, CROSS: cross_ns}, CROSS
    for _ in range(2):
        policy.layers(SimpleNamespace(layers=range(4), prefill=False))
    assert trials == [expected] * 2
