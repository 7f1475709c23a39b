"""How many layers the page cache keeps."""

from types import SimpleNamespace

import pytest

from residency.policies.dual_blade import dual_blade


@pytest.mark.parametrize(("margin", "kept"), [(0, 8), (3, 5), (9, 0)])
def test_a_margin_leaves_layers_out_of_the_cache(monkeypatch, margin, kept):
    monkeypatch.setitem(dual_blade.__globals__, "pipelined", lambda t, home, ahead, group: None)
    turn = SimpleNamespace(memory={}, layers=range(8))
    dual_blade(turn, margin=margin, share=1.0)
    assert turn.memory["n1"] == kept
