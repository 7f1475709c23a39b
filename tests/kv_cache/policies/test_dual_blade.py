"""Dual-Blade: number of layers that the page cache keeps."""

from types import SimpleNamespace

import pytest

from kv_cache.policies.dual_blade import CROSS, INTRA, dual_blade, pipelined


@pytest.mark.parametrize(("margin", "kept"), [(0, 8), (3, 5), (9, 0)])
def test_a_margin_leaves_layers_out_of_the_cache(monkeypatch, margin, kept):
    monkeypatch.setitem(dual_blade.__globals__, "pipelined", lambda it, home, ahead, group: None)
    iteration = SimpleNamespace(memory={}, layers=range(8))
    dual_blade(iteration, margin=margin, share=1.0)
    assert iteration.memory["n1"] == kept


def test_a_group_is_loaded_in_the_way_that_its_trial_found_faster(monkeypatch):
    """One after the other only if that is faster, and only if both ways were tried."""
    trials = list[list[bool]]()

    def stream(it, home, ahead, cross):
        trials.append([cross(layer) for layer in range(4)])

    monkeypatch.setitem(pipelined.__globals__, "stream", stream)
    trial = {INTRA: {0: 5.0, 1: 5.0, 2: 5.0, 3: 5.0}, CROSS: {0: 4.0, 1: 5.0, 2: 6.0}}
    iteration = SimpleNamespace(memory={"step": CROSS, "trial": trial}, prefill=False)
    for _ in range(2):
        pipelined(iteration, lambda block: "", 1, lambda layer: layer)
    assert trials == [[True, False, False, False]] * 2
