"""Dual-Blade: number of layers that the page cache keeps."""

from types import SimpleNamespace

import pytest

from kv_cache.policies.dual_blade import dual_blade


@pytest.mark.parametrize(("margin", "kept"), [(0, 8), (3, 5), (9, 0)])
def test_a_margin_leaves_layers_out_of_the_cache(monkeypatch, margin, kept):
    monkeypatch.setitem(dual_blade.__globals__, "pipelined", lambda it, home, ahead, group: None)
    iteration = SimpleNamespace(memory={}, layers=range(8))
    dual_blade(iteration, margin=margin, share=1.0)
    assert iteration.memory["n1"] == kept
