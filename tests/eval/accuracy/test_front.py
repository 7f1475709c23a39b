"""The Pareto front of bytes and error: allowed points, refused points, and the same methods on another text."""

import json

import pytest

from attention_engine import METHODS
from tests.vcsd_cli.test_main import vcsd
from vcsd.loading import CHECKPOINT, load
from vcsd_eval.accuracy.compared_methods import Contender, Trial, contenders, trials
from vcsd_eval.accuracy.front import (
    COLUMNS,
    LEAST,
    Short,
    bench_front,
    by_budget,
    bytes_and_errors,
    on_front,
    report_front,
    searched,
)
from vcsd_eval.accuracy.layers import record_layers
from vcsd_eval.accuracy.recorded import TEXT
from vcsd_eval.plot import save_figure

SMALL = ("--tokens", "256", "--steps", "1", "--num-passages", "1")


def point(name, nbytes, error):
    row = dict.fromkeys(COLUMNS, 0.0) | {"convention": "bytes", "counted_by": "page"}
    return row | {"name": name, "budget": nbytes, "bytes_fetched_share": nbytes, "output_rel_error": error}


def test_front_has_only_undominated_points():
    points = [point("a", 0.5, 0.1), point("b", 0.5, 0.2), point("c", 0.2, 0.3), point("d", 0.6, 0.1)]
    points += [point("e", 0.9, 0.0), point("a again", 0.5, 0.1), point("f", 0.3, 0.3)]
    assert on_front(points, set()) == [True, False, True, False, True, False, False]
    points.append(point("oracle", 0.1, 0.0))
    assert on_front(points, {"oracle"}) == [True, False, True, False, True, False, False, False]
    assert on_front(points, set()) == [False] * 7 + [True]
    assert on_front([], set()) == []


def test_best_method_within_each_budget():
    points = [point("a", 0.5, 0.1), point("a", 0.2, 0.4), point("b", 0.25, 0.3), point("oracle", 0.1, 0.0)]
    points += [point("array", 0.2, 0.2) | {"counted_by": "element"}]
    rows = by_budget(points, [2, 4], {"oracle"})
    best = {(row["within"], row["of"], row["place"]): (row["name"], row["output_rel_error"]) for row in rows}
    assert best == {
        (0.5, "all", 1): ("a", 0.1),
        (0.5, "all", 2): ("array", 0.2),
        (0.5, "all", 3): ("b", 0.3),
        (0.5, "drives", 1): ("a", 0.1),
        (0.5, "drives", 2): ("b", 0.3),
        (0.25, "all", 1): ("array", 0.2),
        (0.25, "all", 2): ("b", 0.3),
        (0.25, "all", 3): ("a", 0.4),
        (0.25, "drives", 1): ("b", 0.3),
        (0.25, "drives", 2): ("a", 0.4),
    }


def test_search_has_every_contender_once():
    methods, tried = searched(METHODS, [2, 8])
    assert set(trials(contenders(), [2, 8])) <= set(tried)
    named = [(trial.contender.name, trial.c, trial.convention) for trial in tried]
    assert len(set(named)) == len(named)
    for layout in ("progressive", "progressive4"):
        over = [trial for trial in tried if not trial.contender.dense and not trial.contender.own]
        ours = {(t.contender.method, t.c) for t in over if t.contender.layout == layout}
        assert ours == {(f"progressive{suffix}", c) for suffix in ("", *LEAST) for c in (2, 8)}
    assert {trial.contender.method for trial in tried if not trial.contender.arrays} <= set(methods)
    assert methods["progressive-1e-3"].keywords == {"least": 1e-3}


def test_front_methods_are_measured_on_holdout_text(tmp_path):
    model, tokenizer = load(CHECKPOINT)
    text, passages = TEXT.read_text(), Short(256, 1, 1)
    first, second = (record_layers(model, tokenizer, part, passages)[:2] for part in (text[:2000], text[2000:]))
    tried = [Trial(Contender("dense", "dense", dense=True), 1.0), Trial(Contender("kivi", "kivi", dense=True), 1.0)]
    tried += [
        Trial(Contender("top-k-oracle", "top-k-oracle", ideal=True), 8.0),
        Trial(Contender("ours-int4", "spending", "int4"), 2.0),
    ]
    ticks = []
    points = bench_front(first, tried, tick=ticks.append)
    assert len(ticks) == len(tried) * 2
    assert [set(each) for each in points] == [{*COLUMNS, "front", "front_drives"}] * 4
    front = {each["name"]: each["front"] for each in points}
    assert (front["dense"], front["kivi"], front["top-k-oracle"]) == (True, True, False)
    reported = report_front({"second": second, "first": first}, tried[:2])
    assert [(each["text"], each["name"]) for each in reported] == [
        (each, name) for each in ("second", "first") for name in ("dense", "kivi")
    ]
    assert [{name: each[name] for name in COLUMNS} for each in reported[2:]] == [
        {name: each[name] for name in COLUMNS} for each in points[:2]
    ]
    assert reported[1]["output_rel_error"] != reported[3]["output_rel_error"]
    save_figure(bytes_and_errors(points, {"top-k-oracle"}), tmp_path / "front.svg")
    drawn = (tmp_path / "front.svg").read_text()
    assert all(
        f"<!-- {label} -->" in drawn for label in ("ours", "rivals on drives", "what no drive does", "front", "kivi")
    )


def test_pareto_command_prints_front(capsys, monkeypatch, tmp_path):
    """As people call it, with little to try; texts that are too short name themselves."""
    few = [Contender("dense", "dense", dense=True), Contender("progressive", "progressive", "progressive")]
    monkeypatch.setattr("vcsd_eval.accuracy.front.contenders", lambda _: few)
    other = tmp_path / "other.txt"
    other.write_text("Once more unto the breach, dear friends. " * 20)
    words = ("eval", "pareto", *SMALL, "--compression", "2", "--holdout-text", str(other))
    code, out, err = vcsd(capsys, monkeypatch, *words, "--plot", str(tmp_path / "front.png"), "-o", "json")
    assert code == 0, err
    result = json.loads(out)
    front = [each["name"] for each in result["points"] if each["front"]]
    assert "dense" in front
    texts = ["passage.txt, second half", str(other)]
    assert [(each["text"], each["name"]) for each in result["report"]] == [
        (text, name) for text in texts for name in front
    ]
    assert result["text"] == "passage.txt, first half"
    assert (tmp_path / "front.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--text", "nowhere.txt"), "nowhere.txt: No such file"),
        (("--holdout-text", "nowhere.txt"), "nowhere.txt: No such file"),
        (("--holdout-text", "short.txt"), "short.txt: the text has 5 tokens"),
        (("--text", "short.txt"), "short.txt, first half: the text has 2 tokens"),
        (("--plot", "nowhere/front.png"), "nowhere/front.png: there is no folder"),
        (("--plot", "front.gif"), "front.gif: a picture's name ends in"),
        (("--compression", "x"), "--compression 'x'"),
        (("--text", "binary.txt"), "binary.txt: "),
    ],
)
def test_invalid_pareto_input_is_one_line_error(capsys, monkeypatch, tmp_path, words, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe" * 2000)
    code, out, err = vcsd(capsys, monkeypatch, "eval", "pareto", *SMALL, *words)
    assert code and not out
    (line,) = err.splitlines()
    assert line.startswith("vcsd: ")
    assert says in line
