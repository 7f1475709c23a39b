"""Kinds and errors of claims, with a fictitious paper.

partner of: eval/papers/options.py
"""

from dataclasses import replace

import pytest

from vcsd_eval.papers.claims import COMPUTED, Claim, ClaimKind, Source
from vcsd_eval.papers.options import MachineOptions
from vcsd_eval.papers.paper import Constant, Evaluation, Paper, judge


def claim(name, what, value, unit, kind=ClaimKind.PREDICTED, **more):
    """A claim of section II; predicted and calibrated values come from a formula."""
    source = Source.FORMULA if kind in COMPUTED else None
    return Claim(**{"page": "II", "source": source} | more, id=name, what=what, value=value, unit=unit, kind=kind)


CLAIMS = (
    claim("a1", "tokens", 10, "x", ClaimKind.INPUT),
    claim("b1", "rate", 100, "GB/s", ClaimKind.CALIBRATED, quote="100 GB/s"),
    claim("c1", "cut", 40, "%"),
    claim("c2", "time", 2, "s", page="Table I", source=Source.COUNT),
    claim("c3", "hits", 1, "%", bound="<"),
    claim("d1", "gain", 3, "x", ClaimKind.CONTRADICTS, reason="c1 gives 1.7"),
    claim("e1", "latency", 5, "s", ClaimKind.UNDETERMINED, reason="of what, is not said"),
)
RATE = Constant("rate_gb_per_s", 101, "GB/s", "one thread", "b1")
MEMORY = Constant("anonymous_gib", 1, "GiB", "a runtime")
OURS = {"b1": 101, "c1": 42, "c2": 2.1, "c3": 0.2, "d1": 1.7}


def paper(claims=CLAIMS, **more):
    fields = {"calibrated": (RATE,), "assumed": (MEMORY,)} | more
    return Paper(name="one", title="One", claims=claims, evaluate=None, commands={"b1": "vcsd show"}, **fields)


def judged(columns=None, engine=None, **ours):
    evaluation = Evaluation(values=OURS | ours, columns=columns or {}, engine=engine or {}, more={"seen": 7})
    return judge(paper(), evaluation)


def test_a_row_for_each_claim():
    result = judged()
    rows = {row["id"]: row for row in result["rows"]}
    assert list(rows) == [each.id for each in CLAIMS]
    assert rows["b1"] == {
        "id": "b1",
        "text": "rate, GB/s (II)",
        "page": "II",
        "quote": "100 GB/s",
        "paper": 100,
        "ours": 101,
        "kind": "calibrated",
        "source": "formula",
        "error_percent": pytest.approx(1),
        "engine": None,
        "engine_error_percent": None,
        "command": "vcsd show",
    }
    assert (rows["a1"]["text"], rows["a1"]["error_percent"]) == ("tokens (II)", 0)
    assert (rows["a1"]["ours"], rows["a1"]["source"], rows["a1"]["quote"]) == (10, None, None)
    assert rows["a1"]["command"] == "vcsd eval claims --paper one"
    assert (rows["d1"]["reason"], rows["d1"]["ours"]) == ("c1 gives 1.7", 1.7)
    assert (rows["e1"]["ours"], rows["e1"]["error_percent"]) == (None, None)
    assert (result["calibrated"][0]["fixed_by"], result["assumed"][0]["name"]) == ("b1", "anonymous_gib")
    assert result["seen"] == 7


def test_judge_counts_kinds_and_errors_by_source():
    result = judged(c1=48.0)
    assert result["counts"] == {
        "input": 1,
        "calibrated": 1,
        "derived": 0,
        "predicted": 3,
        "contradicts": 1,
        "not determined": 1,
        "not modelled": 0,
    }
    assert result["by_source"] == {
        "engine": {"rows": 0, "median_error_percent": None, "worst_error_percent": None},
        "formula": {"rows": 2, "median_error_percent": pytest.approx(10), "worst_error_percent": pytest.approx(20)},
        "count": {"rows": 1, "median_error_percent": pytest.approx(5), "worst_error_percent": pytest.approx(5)},
    }


def test_judge_reports_engine_value_with_formula():
    rows = {row["id"]: row for row in judged(engine={"c2": 2.2})["rows"]}
    assert (rows["c2"]["ours"], rows["c2"]["engine"]) == (2.1, 2.2)
    assert rows["c2"]["engine_error_percent"] == pytest.approx(10)


def test_judge_value_without_a_claim_is_refused():
    with pytest.raises(ValueError, match=r"one: claims.csv has no row for c4, c9"):
        judged(c9=1.0, engine={"c4": 1.0})


def test_median_and_worst_use_predicted_rows_only():
    result = judged()
    assert result["median_error_percent"] == pytest.approx(5)
    assert result["worst_error_percent"] == pytest.approx(5)
    assert judged(c1=48.0)["worst_error_percent"] == pytest.approx(20)


def test_judge_derived_rows_and_bounds_are_not_independent():
    claims = tuple(replace(each, kind=ClaimKind.DERIVED) if each.id == "c2" else each for each in CLAIMS)
    result = judge(paper(claims), Evaluation(values=OURS | {"c1": 48.0}))
    assert (result["predicted_rows"], result["independent_rows"], result["rows_beyond_15_percent"]) == (3, 1, 1)
    assert result["dof"] == 2
    assert result["median_error_percent"] == pytest.approx(5)
    assert result["independent_median_error_percent"] == pytest.approx(20)
    assert result["worst_row"] == "c1"


def test_only_predicted_rows_can_be_exceptions():
    """Values in percent are off by points, others by percent."""
    assert judged(a1=20, b1=200)["exceptions"] == []
    assert [each["id"] for each in judged(c1=43.5, c2=2.29)["exceptions"]] == ["c1"]
    assert [each["id"] for each in judged(c1=42.9, c2=2.31)["exceptions"]] == ["c2"]


def test_further_columns_are_in_each_row():
    rows = judged({"held_out": {each.id: 4.0 for each in CLAIMS}})["rows"]
    assert all(row["held_out"] == 4 for row in rows)


def test_judge_predicted_claim_without_a_value_is_refused():
    with pytest.raises(ValueError, match="one: c2 is predicted and needs a computed value: add it to evaluate"):
        judge(paper(), Evaluation(values={name: value for name, value in OURS.items() if name != "c2"}))


def test_unmodelled_claim_is_a_row_without_value():
    wide = claim("g1", "gain", 3, "x", ClaimKind.UNMODELLED, reason="needs a GPU")
    row = judge(paper((wide, claim("h1", "gain", 3, "x"))), Evaluation(values={"h1": 3.0}))["rows"][0]
    result = (row["kind"], row["ours"], row["error_percent"], row["reason"])
    assert result == ("not modelled", None, None, "needs a GPU")


def test_default_machine_is_that_of_the_paper():
    model, gpu, host = MachineOptions(gpu="h100").profiles("opt-13b", "a6000", "pcie4")
    assert (model.name, gpu.name, host.name) == ("opt-13b", "h100", "pcie4")


def test_extra_column_may_lack_rows():
    rows = judged({"held_out": {"a1": 4.0}})["rows"]
    assert [row["held_out"] for row in rows][:2] == [4.0, None]
