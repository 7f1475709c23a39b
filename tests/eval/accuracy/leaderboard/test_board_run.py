"""Runs of the leaderboard: rows of all tasks, checks before the first measurement, and continuation."""

import pytest

from attention_engine import METHODS
from vcsd.loading import CHECKPOINT, load
from vcsd_eval.accuracy.compared_methods import contenders
from vcsd_eval.accuracy.leaderboard.board_run import (
    BoardPlan,
    BoardRun,
    BoardText,
    _figures_of,
    _increase,
    check_run,
    parts_of,
)
from vcsd_eval.accuracy.leaderboard.submission import LeaderboardRow
from vcsd_eval.accuracy.recorded import TEXT
from vcsd_eval.partial_results import ResultCache

NOTEXT = BoardText("short", "short", TEXT)
PASSAGE = BoardText("passage.txt", TEXT.read_text(), TEXT)


@pytest.fixture(scope="module")
def model():
    return load(CHECKPOINT)


def plan(tasks="output-error", methods="dense,local,rabitq", contexts=(256,), **changes):
    known = {each.name: each for each in contenders()}
    options = {"compressions": (4.0,), "convention": "bytes", "samples": 2, "drives": 2, "seed": 0}
    chosen = tuple(known[name] for name in methods.split(","))
    return BoardPlan(tasks=tuple(tasks.split(",")), contexts=contexts, methods=chosen, **options | changes)


def run(model, asked, tmp_path, kept=None, tick=lambda _: None):
    kept = kept or ResultCache(None)
    return BoardRun(*model, asked, PASSAGE, METHODS, kept, tmp_path / "parts", tick)


def test_rows_of_error_and_perplexity_are_valid(model, tmp_path):
    ticks, asked = [], plan("output-error,perplexity")
    check_run(asked, model[0], model[1], PASSAGE)
    rows = [LeaderboardRow(**each) for each in run(model, asked, tmp_path, tick=ticks.append).rows()]
    assert len(ticks) == parts_of(asked, model[0], PASSAGE)
    found = {(each.task, each.method): each for each in rows}
    assert list(found) == [
        ("output-error", "dense"),
        ("output-error", "local"),
        ("output-error", "rabitq"),
        ("perplexity", "dense"),
        ("perplexity", "local"),
    ]
    assert found["output-error", "dense"].score < 1e-4 < found["output-error", "local"].score
    assert found["output-error", "rabitq"].counted_by == "element"
    dense, local = found["perplexity", "dense"], found["perplexity", "local"]
    assert (dense.score, dense.low, dense.high, dense.worst) == (0, 0, 0, 0)
    assert local.worst >= local.score
    kv_bytes = 4 * 4 * 64 * 2 * 2 * 256  # layers, heads, channels, K and V, FP16, tokens
    assert local.bytes_read == round(local.bytes_fetched_share * kv_bytes)
    assert local.data == "passage.txt; prefix of 192 tokens, the next 64 forced"


def test_killed_run_continues_with_same_rows(model, tmp_path):
    whole, ticks = run(model, plan(), tmp_path).rows(), []

    def killed(_):
        ticks.append(1)
        if len(ticks) == 8:  # of 2 passages and 3 trials on 4 layers
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, plan(), tmp_path, ResultCache(tmp_path / "kept.jsonl"), killed).rows()
    kept, rest = ResultCache(tmp_path / "kept.jsonl"), []
    assert len(list(kept.values())) == 1
    assert run(model, plan(), tmp_path, kept, rest.append).rows() == whole
    assert len(rest) == parts_of(plan(), model[0], PASSAGE)
    again = []
    assert run(model, plan(), tmp_path, kept, again.append).rows() == whole
    assert len(again) == len(rest)


@pytest.mark.parametrize(
    ("asked", "text", "says"),
    [
        ({"contexts": (256, 99_999)}, PASSAGE, "contexts = 99999: must be from 128 to the model's context of 4096"),
        ({"contexts": (100,)}, PASSAGE, "contexts = 100: must be from 128"),
        ({}, NOTEXT, "the text short has 5 tokens: contexts and samples need 258; give a longer --text"),
        ({"tasks": "passkey"}, PASSAGE, "passkey: contexts = 256: too few for a pass key; give 1,100 or more"),
        ({"tasks": "repetition"}, PASSAGE, "repetition: contexts = 256: too few for a repetition"),
    ],
)
def test_invalid_run_is_refused_before_measuring(model, asked, text, says):
    with pytest.raises(ValueError, match=says):
        check_run(plan(**asked), *model, text)


def test_worst_is_lowest_group_or_sample():
    whole = {"value": 0.5, "ci_low": 0.2, "ci_high": 0.8, "sample_values": [0.0, 1.0]}
    assert _figures_of(whole, [0.25, 0.75])["worst"] == 0.25
    assert _figures_of(whole, [])["worst"] == 0.0
    dense = {"value": 2.0, "sample_values": [1.0, 3.0]}
    mine = {"difference": 0.5, "difference_low": 0.1, "difference_high": 0.9, "sample_values": [1.2, 3.8]}
    assert _increase(mine, dense) == pytest.approx({"score": 0.5, "low": 0.1, "high": 0.9, "worst": 0.8})
