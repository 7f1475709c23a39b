"""Methods side by side: what every row promises, and what ours are worth."""

import json

import pytest

from attention_engine import METHODS
from eval.accuracy.recorded import TEXT
from eval.accuracy.selectors import (
    OURS,
    Contender,
    Passages,
    bench_selectors,
    contenders,
    errors_over_bytes,
    gaussian,
    measured,
    record_layers,
    trials,
)
from eval.plot import save_figure
from vcsd.loading import CHECKPOINT, load


@pytest.fixture(scope="module")
def result():
    model, tokenizer = load(CHECKPOINT)
    return bench_selectors(record_layers(model, tokenizer, TEXT.read_text(), Passages(1024, 2, 2)), [2, 4, 8])


def rows_of(result, name):
    return {round(1 / row["budget"], 3): row for row in result["methods"] if row["name"] == name}


def test_every_row_keeps_its_budget_and_its_promises(result):
    json.dumps(result)
    for row in result["methods"]:
        assert row["bytes_useful_share"] <= 1.02 * row["budget"]
        assert row["bytes_useful_share"] <= row["bytes_fetched_share"] + 1e-12
        assert 0 <= row["mass_recall"] <= 1 + 1e-6
        assert row["overlapped_us"] <= row["serial_us"]
    (dense,) = rows_of(result, "dense").values()
    assert dense["output_rel_error"] < 1e-5
    assert dense["mass_recall"] == pytest.approx(1, abs=1e-5)
    assert rows_of(result, "sparf")[8]["output_rel_error"] == rows_of(result, "sparq")[8]["output_rel_error"]


def test_one_of_ours_halves_the_error_or_the_bytes_of_sparf(result):
    sparf = rows_of(result, "sparf")[8]
    ours = [row for row in result["methods"] if row["name"].startswith("ours-")]
    error, fetched = sparf["output_rel_error"], sparf["bytes_fetched_share"]
    assert any(r["output_rel_error"] <= error / 2 and r["bytes_fetched_share"] <= fetched for r in ours)
    assert any(r["output_rel_error"] <= error and r["bytes_fetched_share"] <= fetched / 2 for r in ours)


def test_the_picture(result, tmp_path):
    save_figure(errors_over_bytes(result), tmp_path / "all.svg")
    assert "ours-int4-pages" in (tmp_path / "all.svg").read_text()


def test_a_text_or_a_context_that_is_too_short_is_refused():
    model, tokenizer = load(CHECKPOINT)
    with pytest.raises(ValueError, match="the text has 5 tokens"):
        record_layers(model, tokenizer, "short", Passages(100, 1, 1))
    with pytest.raises(ValueError, match="context is 4096"):
        record_layers(model, tokenizer, TEXT.read_text(), Passages(4096, 1, 1))


def test_what_heeds_no_budget_has_one_row_with_what_it_uses(result):
    """K and V in 4 bits: 16 for a scale and a least value each of 32 channels or tokens, so 5 of 16 in all; in 8 bits
    a page of 31 tokens. The 2 tokens behind the last group are in DRAM."""
    for name, share in (("dense", 1.0), ("kivi", 5 / 16), ("kivi-2", 3 / 16), ("dense-8-bits", 16 / 31)):
        (row,) = (row for row in result["methods"] if row["name"] == name)
        assert row["budget"] == row["bytes_useful_share"] <= row["bytes_fetched_share"]
        assert row["budget"] == pytest.approx(share, rel=0.05)
    few = {row["name"]: row["output_rel_error"] for row in result["methods"] if row["budget"] not in (1 / 2, 1 / 4)}
    assert 0 < few["dense-8-bits"] < few["kivi"] < few["kivi-2"] < 1
    assert {contender.name for contender, c in trials(contenders(), [2, 4]) if c == 1} == {
        "dense",
        "kivi",
        "kivi-2",
        "dense-8-bits",
    }
    assert len({contender.name for contender in contenders()}) == len(contenders()) > len(OURS)


def test_normal_rows_have_little_that_weighs_more():
    model, tokenizer = load(CHECKPOINT)
    layers = record_layers(model, tokenizer, TEXT.read_text(), Passages(512, 1, 1))[:1]
    recorded, drawn = (
        measured(Contender("oracle", "top-k-oracle"), 4, each, METHODS) for each in (layers, gaussian(layers))
    )
    assert drawn["mass_recall"] < recorded["mass_recall"]
    assert drawn["output_rel_error"] > recorded["output_rel_error"]
    for mine, theirs in zip(layers, gaussian(layers), strict=True):
        assert mine.recorded.q.shape == theirs.recorded.q.shape
        assert (mine.tokens, mine.steps) == (theirs.tokens, theirs.steps)
