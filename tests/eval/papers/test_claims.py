"""The door: which papers there are, and what is shown of one and of all."""

import io

import pytest
from rich.console import Console

from eval.papers import claims
from eval.papers.claims import PAPERS, Name, experiment, load
from eval.papers.options import Machine, Simulated
from eval.papers.paper import Claim, Found, Kind, Paper


@pytest.mark.parametrize("name", PAPERS)
def test_a_paper_is_sound(name):
    paper = load(name)
    ids = [claim.id for claim in paper.claims]
    assert len(ids) == len(set(ids))
    assert all(claim.source and claim.text and claim.unit for claim in paper.claims)
    fixing = {each.id for each in paper.claims if each.kind is Kind.CALIBRATED}
    assert fixing <= {name for each in paper.calibrated for name in each.fixed_by.split(", ")}
    assert all(each.why for each in (*paper.calibrated, *paper.assumed))
    assert paper.counted <= {each.id for each in paper.claims if each.kind is Kind.PREDICTED}


@pytest.fixture
def two(monkeypatch):
    """A table of two small papers."""
    made = {}
    loss = Claim("b", "loss", 1, "x", "I", Kind.CONTRADICTION, reason="too early")
    for name in ("one", "two"):
        rows = (Claim("a", "speed", 2, "x", "I"), loss)
        found = Found(ours={"a": 2.2, "b": None}, columns={"held_out": {"a": 3.0, "b": 1.0}}, notes=["well"])
        made[name] = Paper(title=name.title(), claims=rows, calibrated=(), assumed=(), find=lambda *_, f=found: f)
    monkeypatch.setattr(claims, "PAPERS", made)
    monkeypatch.setattr(claims, "load", made.get)


def test_one_paper_is_its_result_and_all_are_by_name(two):
    whole = experiment(Machine(), Simulated(), Name("all")).result
    assert list(whole) == ["one", "two"]
    assert whole["one"]["worst_error_percent"] == pytest.approx(10)
    assert experiment(Machine(), Simulated(), "two").result == whole["two"]


def test_people_see_rows_constants_and_reasons(two):
    page = io.StringIO()
    console = Console(file=page, width=200)
    for part in experiment(Machine(), Simulated(), Name("all")).shown:
        console.print(part)
    text = page.getvalue()
    for seen in ("Claims of One", "Claims of Two", "held_out", "3.000", "+10.0", "contradiction b: too early", "well"):
        assert seen in text
    assert "1 predicted rows: median error 10.0 %, 0 beyond 15 %, worst 10.0 % (a: speed (I))" in text
