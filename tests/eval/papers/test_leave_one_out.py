"""Leave-one-out errors: of rows on which the others agree, and of rows that alone determine a constant."""

import sys
from dataclasses import replace

import numpy as np
import pytest

from vcsd_eval.papers import leave_one_out as module
from vcsd_eval.papers import paper as papers
from vcsd_eval.papers.claims import Claim, ClaimKind, Source
from vcsd_eval.papers.leave_one_out import fit, leave_one_out, values_with
from vcsd_eval.papers.machines import constant, overlay
from vcsd_eval.papers.paper import Constant, Paper


def test_fit_follows_the_majority_of_rows():
    slopes = np.array([[1.0], [1.0], [1.0], [2.0]])
    assert fit(np.array([-0.1, -0.1, 0.9, -0.2]), slopes) == pytest.approx([0.1], abs=0.01)


def test_fit_without_constants_changes_nothing():
    assert fit(np.array([0.1, 0.2]), np.zeros((2, 0))).size == 0


def test_left_out_row_is_predicted_by_the_others(monkeypatch):
    """Speed fixes rows a and b, on which they agree, and c is off by 10 %; size is fixed by d alone."""
    kinds = {
        "a1": ClaimKind.CALIBRATED,
        "b1": ClaimKind.PREDICTED,
        "b2": ClaimKind.PREDICTED,
        "c1": ClaimKind.PREDICTED,
        "d1": ClaimKind.CALIBRATED,
    }
    claims = [
        Claim(id=name, page="I", what="x", value=2, unit="x", kind=kind, source=Source.FORMULA)
        for name, kind in kinds.items()
    ]
    speed, size = Constant("speed", 1.0, "x", "y", "a1"), Constant("size", 1.0, "x", "y", "d1")

    def values(_, factors):
        faster, larger = factors.get("speed", 1), factors.get("size", 1)
        return {"a1": 2 * faster, "b1": 2 * faster, "b2": 2 * faster, "c1": 2.2 * faster, "d1": 2 * larger}

    class Inline:
        def __init__(self, *_, **__):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def submit(self, work, *given):
            return type("Done", (), {"result": lambda _: values(*given)})()

    monkeypatch.setattr(module, "ProcessPoolExecutor", Inline)
    paper = Paper(name="one", title="One", claims=claims, calibrated=(speed, size), assumed=(), evaluate=None)
    ticked = []
    result = leave_one_out(paper, "one", ticked.append)
    assert result["undetermined"] == ["d1"]
    assert result["rows"] == pytest.approx({"a1": 0, "b1": 0, "b2": 0, "c1": 10}, abs=0.6)
    assert result["worst_row"] == "c1"
    assert len(ticked) == module.ticks(paper) == 3


def test_factors_reach_constants_and_overlays(monkeypatch):
    plain = overlay("tutti").mfu
    monkeypatch.setitem(papers.FACTORS, "speed", 2.0)
    monkeypatch.setitem(papers.FACTORS, "tutti.prefill_tflops", 0.5)
    from vcsd_eval.papers.machines import machine_of

    machine_of.cache_clear()
    try:
        assert Constant("speed", 3.0, "x", "y").value == 6
        assert replace(Constant("other", 3.0, "x", "y")).value == 3
        assert overlay("tutti").mfu == pytest.approx(plain / 2)
        assert constant("tutti", "prefill_tflops").value == 192
    finally:
        machine_of.cache_clear()


def test_values_are_computed_by_the_papers_module(monkeypatch):
    paper = Paper(
        name="one", title="One", claims=(), calibrated=(), assumed=(), evaluate=None, values=lambda: {"a1": 1.0}
    )
    monkeypatch.setitem(sys.modules, "made_up", type("Module", (), {"PAPER": paper}))
    assert values_with("made_up", {}) == {"a1": 1.0}
