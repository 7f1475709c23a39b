"""Methods side by side: what every row promises, and what ours are worth."""

import json

import pytest

from eval.accuracy.recorded import TEXT
from eval.accuracy.selectors import Passages, bench_selectors, errors_over_bytes
from eval.plot import save_figure
from vcsd.loading import CHECKPOINT, load


@pytest.fixture(scope="module")
def result():
    model, tokenizer = load(CHECKPOINT)
    return bench_selectors(model, tokenizer, TEXT.read_text(), Passages(1024, 2, 2), [2, 4, 8])


def rows_of(result, name):
    return {round(1 / row["budget"], 3): row for row in result["methods"] if row["name"] == name}


def test_every_row_keeps_its_budget_and_its_promises(result):
    json.dumps(result)
    for row in result["methods"]:
        assert row["bytes_useful_share"] <= 1.02 * row["budget"]
        assert row["bytes_useful_share"] <= row["bytes_fetched_share"] + 1e-12
        assert 0 <= row["mass_recall"] <= 1 + 1e-6
        assert row["overlapped_us"] <= row["serial_us"]
    dense = rows_of(result, "dense")[1]
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
        bench_selectors(model, tokenizer, "short", Passages(100, 1, 1), [8])
    with pytest.raises(ValueError, match="context is 4096"):
        bench_selectors(model, tokenizer, TEXT.read_text(), Passages(4096, 1, 1), [8])
