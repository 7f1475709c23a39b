"""The `compare` command: the available papers, and the output for one paper and for all."""

import io

import pytest
from rich.console import Console

from vcsd_eval.papers import compare
from vcsd_eval.papers.claims import Claim, ClaimKind, Source
from vcsd_eval.papers.compare import PAPERS, Name, experiment, load
from vcsd_eval.papers.options import MachineOptions, Simulated
from vcsd_eval.papers.paper import Evaluation, Paper


@pytest.mark.parametrize("name", PAPERS)
def test_every_paper_is_consistent(name):
    paper = load(name)
    assert paper.name == name
    fixing = {claim.id for claim in paper.claims if claim.kind is ClaimKind.CALIBRATED}
    assert fixing <= {name for each in paper.calibrated for name in each.fixed_by.split(", ")}
    assert all(each.why for each in (*paper.calibrated, *paper.assumed))
    assert set(paper.commands) <= {claim.id for claim in paper.claims}
    assert any(claim.kind is ClaimKind.PREDICTED and not claim.bound for claim in paper.claims)


@pytest.fixture
def two(monkeypatch):
    """A table of two small papers."""
    made = {}
    speed = Claim(id="a1", page="I", what="speed", value=2, unit="x", source=Source.FORMULA)
    loss = Claim(
        id="b1",
        page="I",
        what="loss",
        value=1,
        unit="x",
        kind=ClaimKind.CONTRADICTS,
        source=Source.COUNT,
        reason="too early",
    )
    for name in ("one", "two"):
        columns = {"held_out": {"a1": 3.0, "b1": 1.0}}
        evaluation = Evaluation(values={"a1": 2.2, "b1": 4.0}, columns=columns, notes=["well"])
        fields = {"name": name, "title": name.title(), "claims": (speed, loss), "calibrated": (), "assumed": ()}
        made[name] = Paper(**fields, evaluate=lambda *_, each=evaluation: each)
    monkeypatch.setattr(compare, "PAPERS", made)
    monkeypatch.setattr(compare, "PREDICTED", {})
    monkeypatch.setattr(compare, "load", made.get)


def test_leave_one_out_without_constants_refused():
    with pytest.raises(ValueError, match="nothing of hilos is fitted"):
        experiment(MachineOptions(), Simulated(), Name("hilos"), leave_one_out=True)


@pytest.mark.parametrize("name", ["model", "gpu", "host"])
def test_unknown_profile_is_refused_before_evaluation(name):
    MachineOptions().check()
    with pytest.raises(ValueError, match="must be a YAML file or one of"):
        MachineOptions(**{name: "nothing"}).check()


def test_leave_one_out_on_another_machine_is_refused(two):
    with pytest.raises(ValueError, match="leave --model, --gpu and --host out"):
        experiment(MachineOptions(gpu="h100"), Simulated(), Name("instinfer"), leave_one_out=True)


def test_claims_of_one_paper_or_of_all_by_name(two):
    whole = experiment(MachineOptions(), Simulated(), Name("all")).result
    assert list(whole) == ["one", "two"]
    assert whole["one"]["worst_error_percent"] == pytest.approx(10)
    assert experiment(MachineOptions(), Simulated(), "two").result == whole["two"]


def test_claims_text_has_rows_constants_and_reasons(two):
    page = io.StringIO()
    console = Console(file=page, width=200)
    for part in experiment(MachineOptions(), Simulated(), Name("all")).shown:
        console.print(part)
    text = page.getvalue()
    for seen in ("Claims of One", "Claims of Two", "held_out", "3.000", "+10.0", "contradicts b1: too early", "well"):
        assert seen in text
    assert "by source: formula 1 rows, median 10.0 %, worst 10.0 %" in text
    assert "1 rows follow from the model: median error 10.0 %, 0 beyond 15 %, worst 10.0 % (a1: speed (I))" in text
