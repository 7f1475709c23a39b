"""Kinds and errors of a paper made up here.

partner of: eval/papers/options.py
"""

import pytest

from eval.papers.options import Machine
from eval.papers.paper import Claim, Constant, Found, Kind, Paper, judge

CLAIMS = (
    Claim("a", "tokens", 10, "x", "I", Kind.INPUT),
    Claim("b", "rate", 100, "GB/s", "II", Kind.CALIBRATED, "vcsd show"),
    Claim("c1", "cut", 40, "%", "II"),
    Claim("c2", "time", 2, "s", "Table I"),
    Claim("c3", "hits", 1, "%", "II", bound="<"),
    Claim("d", "gain", 3, "x", "II", Kind.CONTRADICTION, reason="c1 gives 1.7"),
    Claim("e", "latency", 5, "s", "II", Kind.CONTRADICTION, reason="of what, is not said"),
)
RATE = Constant("rate_gb_per_s", 101, "GB/s", "one thread", "b")
MEMORY = Constant("anonymous_gib", 1, "GiB", "a runtime")
OURS = {"a": 10, "b": 101, "c1": 42, "c2": 2.1, "c3": 0.2, "d": 1.7, "e": None}


def judged(columns=None, **ours):
    paper = Paper(title="One", claims=CLAIMS, calibrated=(RATE,), assumed=(MEMORY,), find=None)
    return judge(paper, Found(ours=OURS | ours, columns=columns or {}, more={"seen": 7}))


def test_a_row_for_each_claim():
    result = judged()
    rows = {row["id"]: row for row in result["rows"]}
    assert list(rows) == list(OURS)
    assert rows["b"] == {
        "id": "b",
        "text": "rate, GB/s (II)",
        "paper": 100,
        "ours": 101,
        "kind": "calibrated",
        "error_percent": pytest.approx(1),
        "command": "vcsd show",
    }
    assert (rows["a"]["text"], rows["a"]["error_percent"]) == ("tokens (I)", 0)
    assert (rows["d"]["reason"], rows["d"]["ours"]) == ("c1 gives 1.7", 1.7)
    assert (rows["e"]["ours"], rows["e"]["error_percent"]) == (None, None)
    assert (result["calibrated"][0]["fixed_by"], result["assumed"][0]["name"]) == ("b", "anonymous_gib")
    assert result["seen"] == 7


def test_the_median_and_the_worst_are_of_the_predicted_rows():
    result = judged()
    assert result["median_error_percent"] == pytest.approx(5)
    assert result["worst_error_percent"] == pytest.approx(5)
    assert judged(c1=48.0)["worst_error_percent"] == pytest.approx(20)


def test_judge_counted_rows_left_out_of_independent_median():
    paper = Paper(title="One", claims=CLAIMS, calibrated=(), assumed=(), find=None, counted=frozenset(("c2", "c3")))
    result = judge(paper, Found(ours=OURS | {"c1": 48.0}))
    assert (result["predicted_rows"], result["independent_rows"], result["rows_beyond_15_percent"]) == (3, 1, 1)
    assert result["median_error_percent"] == pytest.approx(5)
    assert result["independent_median_error_percent"] == pytest.approx(20)
    assert result["worst_row"] == "c1"


def test_a_bound_is_met_or_is_not():
    assert CLAIMS[4].error_percent(0) == 0
    assert CLAIMS[4].error_percent(3) == pytest.approx(200)
    over = Claim("f", "cut", 98, "%", "I", bound=">")
    assert (over.error_percent(98.8), over.is_off(98.8)) == (0, False)
    assert (over.error_percent(49), over.is_off(49)) == (pytest.approx(-50), True)


def test_only_predicted_rows_can_be_exceptions():
    """Values in percent are off by points, others by percent."""
    assert judged(a=20, b=200)["exceptions"] == []
    assert [each["id"] for each in judged(c1=43.5, c2=2.29)["exceptions"]] == ["c1"]
    assert [each["id"] for each in judged(c1=42.9, c2=2.31)["exceptions"]] == ["c2"]


def test_further_columns_are_in_each_row():
    rows = judged({"held_out": dict.fromkeys(OURS, 4.0)})["rows"]
    assert all(row["held_out"] == 4 for row in rows)


def test_only_a_contradiction_has_a_reason_and_may_be_without_a_value():
    with pytest.raises(ValueError, match="c2: only a contradiction, or what is not modelled, may"):
        judged(c2=None)
    with pytest.raises(ValueError, match="g: a contradiction, or what is not modelled, has"):
        Claim("g", "gain", 3, "x", "II", Kind.CONTRADICTION)
    with pytest.raises(ValueError, match="g: a contradiction, or what is not modelled, has"):
        Claim("g", "gain", 3, "x", "II", reason="why not")
    with pytest.raises(ValueError, match="g: a contradiction, or what is not modelled, has"):
        Claim("g", "gain", 3, "x", "II", Kind.UNMODELLED)


def test_what_is_not_modelled_is_a_row_without_a_value():
    wide = Claim("g", "gain", 3, "x", "II", Kind.UNMODELLED, reason="needs a GPU")
    plain = Claim("h", "gain", 3, "x", "II")
    paper = Paper(title="One", claims=(wide, plain), calibrated=(), assumed=(), find=lambda *_: Found(ours={}))
    row = judge(paper, Found(ours={"g": None, "h": 3.0}))["rows"][0]
    assert (row["kind"], row["ours"], row["error_percent"], row["reason"]) == (
        "not modelled",
        None,
        None,
        "needs a GPU",
    )


def test_a_machine_is_the_papers_where_it_is_not_said():
    model, gpu, host = Machine(gpu="h100").profiles("opt-13b", "a6000", "pcie4")
    assert (model.name, gpu.name, host.name) == ("opt-13b", "h100", "pcie4")


def test_a_column_may_lack_a_row_and_nothing_may_be_printed_as_zero():
    rows = judged({"held_out": {"a": 4.0}})["rows"]
    assert [row["held_out"] for row in rows][:2] == [4.0, None]
    none = Claim("g", "wasted", 0, "%", "I")
    assert (none.error_percent(0), none.error_percent(0.5)) == (0, pytest.approx(50))
    assert (none.is_off(0), none.is_off(2), none.is_off(4)) == (False, False, True)
