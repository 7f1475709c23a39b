"""Rows: values, intervals and paired differences, counted by hand."""

import math

import pytest

from vcsd_eval.accuracy.plan import MeasurementPlan, Turn, contenders
from vcsd_eval.accuracy.rows import REFERENCE, reference, rows


def plan(task="passkey", methods="dense,local", convention="both", compressions=(8.0,)):
    chosen = tuple(contenders(methods))
    sizes = {"samples": 4, "drives": 1, "max_context": 512}
    return MeasurementPlan(task=task, methods=chosen, compressions=compressions, convention=convention, **sizes)


def turn(method, values, batch=0, groups=None, c=None, convention="bytes", metric="accuracy"):
    c = c or (1.0 if method == "dense" else 8.0)
    samples = [{metric: value if isinstance(value, tuple) else (value, 1.0)} for value in values]
    return Turn(
        batch=batch,
        method=method,
        compression=c,
        convention=convention,
        samples=samples,
        groups=groups or [""] * len(values),
        useful_bytes=10,
        fetched_bytes=30,
        dense_bytes=100,
    )


def test_binary_figures_have_exact_intervals_and_mcnemar():
    done = [turn("dense", [1.0, 1.0, 1.0, 0.0]), turn("local", [1.0, 0.0, 0.0, 1.0])]
    dense, local = rows(done, plan())
    assert (dense["value"], dense["interval"]) == (0.75, "binomial")
    assert (dense["ci_low"], dense["ci_high"]) == pytest.approx((0.1941, 0.9937), abs=1e-4)
    assert "difference" not in dense
    assert local["difference"] == -0.25
    assert (local["lost"], local["gained"], local["p_value"]) == (2, 1, 1.0)
    assert local["difference_low"] < -0.25 < local["difference_high"]
    assert local["sample_values"] == [1, 0, 0, 1]
    assert (local["bytes_share"], local["pages_share"]) == (0.1, 0.3)


def test_equal_methods_have_zero_difference():
    values = [1.0, 0.0, 1.0, 0.0]
    _, local = rows([turn("dense", values), turn("local", values)], plan())
    assert (local["difference"], local["difference_low"], local["difference_high"], local["p_value"]) == (0, 0, 0, 1)


def test_batches_are_paired_by_number():
    """The same samples in another order of turns, as after a run that was killed."""
    done = [turn("local", [1.0], 1), turn("dense", [0.0], 0), turn("local", [0.0], 0), turn("dense", [1.0], 1)]
    _, local = rows(done, plan())
    assert (local["lost"], local["gained"]) == (0, 0)
    assert local["sample_values"] == [0, 1]


def test_dense_baseline_is_hidden_unless_requested():
    asked = plan(methods="local")
    assert [trial.contender.name for trial in asked.trials()] == ["dense", "local"]
    (row,) = rows([turn("dense", [1.0, 1.0]), turn("local", [1.0, 0.0])], asked)
    assert (row["method"], row["lost"]) == ("local", 1)


def test_sparf_has_rows_in_both_conventions():
    def found(convention, compressions=(1.0, 8.0)):
        asked = plan(methods="sparf,local,ours", convention=convention, compressions=compressions)
        return [(trial.contender.name, trial.c, trial.convention) for trial in asked.shown()]

    ours = plan(methods="ours").shown()[0]
    sparf = [("sparf", 1.0, "bytes"), ("sparf", 8.0, "bytes"), ("sparf", 8.0, "paper")]
    rest = [("local", 1.0, "bytes"), ("local", 8.0, "bytes"), ("ours", ours.c, ours.convention)]
    assert found("both") == sparf + rest
    assert [each[2] for each in found("paper")][:4] == ["paper"] * 4
    assert {each[2] for each in found("bytes")[:-1]} == {"bytes"}
    by_convention = {trial.convention: trial.budget.at(800, 64).k for trial in plan(methods="sparf").shown()}
    assert by_convention == {"bytes": 50, "paper": 100}
    with pytest.raises(ValueError, match="convention = 'tokens': must be one of both, bytes, paper"):
        plan(convention="tokens")


def test_groups_are_sorted_by_their_numbers():
    groups = ["2048 tokens", "512 tokens", "depth 0.5", "depth 0.25"]
    result = rows([turn("dense", [1.0] * 4, groups=groups)], plan(methods="dense"))
    names = [row["metric"].removeprefix("accuracy, ") for row in result[1:]]
    assert names == ["depth 0.25", "depth 0.5", "512 tokens", "2048 tokens"]


def test_each_group_has_its_own_rows():
    groups = ["short", "long", "short", "long"]
    done = [turn("dense", [1.0] * 4, groups=groups), turn("local", [1.0, 0.0, 1.0, 0.0], groups=groups)]
    result = {row["metric"]: row for row in rows(done, plan()) if row["method"] == "local"}
    assert {name: row["value"] for name, row in result.items()} == {
        "accuracy": 0.5,
        "accuracy, long": 0.0,
        "accuracy, short": 1.0,
    }
    assert result["accuracy, long"]["lost"] == 2


def test_likelihood_ratios_exclude_reference_row():
    of_dense = [(2.0, 1.0), (2.0, 3.0)]
    counted = turn("dense", of_dense, metric="perplexity")
    for n, each in enumerate(counted.samples):
        each[REFERENCE] = (1.0, n + 1.0)
    local = turn("local", [(4.0, 1.0), (4.0, 3.0)], metric="perplexity")
    asked = plan("wikitext")
    dense, other = rows([counted, local], asked)
    assert dense["value"] == pytest.approx(math.e)
    assert other["difference"] == pytest.approx(math.e**2 - math.e)
    assert dense["interval"] == "bootstrap"
    assert "p_value" not in other
    assert reference([counted, local], asked) == pytest.approx(2 / 3)
    assert reference([turn("dense", [1.0])], plan()) is None
