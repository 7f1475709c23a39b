"""Contexts that arrive and finish: write amplification is low, and flash was full more than once."""

from ftl import Ftl
from vcsd_eval.papers.dual_blade import wear


def test_whole_discards_have_waf_near_1(monkeypatch):
    made = []
    monkeypatch.setattr(wear, "Ftl", lambda *given: made.append(Ftl(*given)) or made[-1])
    assert 1 <= wear.waf() < 1.01
    (ftl,) = made
    assert ftl.counters.blocks == wear.CONTEXTS * wear.TENSORS * (wear.PROMPT + wear.STEPS)
    assert ftl.counters.blocks > 5 * ftl.spec.geometry.pages
