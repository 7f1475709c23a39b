"""OrbitFlow's claims: values that follow from counting are exact, and runs fill every row that they can.

partner of: eval/papers/orbitflow/evaluate.py, eval/papers/orbitflow/constants.py
"""

import pytest

from vcsd_eval.papers.claims import ClaimKind
from vcsd_eval.papers.options import MachineOptions, Simulated
from vcsd_eval.papers.orbitflow import evaluate
from vcsd_eval.papers.orbitflow.evaluate import PAPER, _figure3, _layouts, generated
from vcsd_eval.papers.paper import judge

PRINTED = {claim.id: claim.value for claim in PAPER.claims}


def test_counted_values_equal_printed():
    result = _layouts()
    for name in ("o1a", "o1b", "o2a", "o2b", "o6a"):
        assert result[name] == PRINTED[name]
    assert result["o1d"] == pytest.approx(34.7, abs=0.05)
    assert result["o4b"] == pytest.approx(PRINTED["o4b"], rel=0.01) and result["o4a"] < 1.2


def test_figure_3_is_exact():
    assert _figure3() == {name: pytest.approx(PRINTED[name]) for name in ("o3a", "o3b", "o3c", "o3d", "o3e", "o3f")}


def test_generated_requests_match_published_code():
    trace = generated(5.0, 0)
    assert trace.unit == "steps" and len(trace.requests) == 52
    assert max(request.input_tokens + request.output_tokens for request in trace.requests) <= 12_000
    assert generated(5.0, 0) == trace != generated(5.0, 1)


def test_runs_fill_every_row(monkeypatch):
    monkeypatch.setattr(evaluate, "SEEDS", (0,))
    monkeypatch.setattr(evaluate, "REQUESTS", 6)
    outcome = PAPER.evaluate(MachineOptions(), Simulated(), False)
    result = judge(PAPER, outcome)
    assert {row["id"] for row in result["rows"]} == set(PRINTED)
    missing = {row["id"] for row in result["rows"] if row["ours"] is None}
    assert missing <= {claim.id for claim in PAPER.claims if claim.kind is ClaimKind.UNDETERMINED}
    assert set(result["ranges_percent"]) == {"o10", "o11", "o12"}
    parts = [outcome.values[f"o17{each}"] for each in "bcd"]  # request-wise, and pauses, and deposits
    assert parts == sorted(parts)
    assert all(row["late = 0"] is not None for row in result["rows"] if row["id"] in ("o10a", "o12a", "o17d"))
