"""Comparison of methods: properties of every row, ranks, texts, and results of our methods.

partner of: eval/accuracy/compared_methods.py, eval/accuracy/errors.py, eval/accuracy/layers.py, eval/partial_results.py
"""

import gc
import json
from pathlib import Path

import numpy as np
import pytest

from tests.vcsd_cli.test_main import vcsd
from vcsd.loading import CHECKPOINT, load
from vcsd_eval.accuracy.compared_methods import OURS, Contender, Trial, chosen, contenders, trials
from vcsd_eval.accuracy.errors import measured
from vcsd_eval.accuracy.layers import Passages, record_layers
from vcsd_eval.accuracy.methods import bench_methods, errors_over_bytes, means, ranked
from vcsd_eval.accuracy.recorded import TEXT
from vcsd_eval.accuracy.scenarios import SCENARIOS
from vcsd_eval.partial_results import ResultCache
from vcsd_eval.plot import save_figure


@pytest.fixture(scope="module")
def result():
    model, tokenizer = load(CHECKPOINT)
    layers = record_layers(model, tokenizer, TEXT.read_text(), Passages(1024, 2, 1))
    return bench_methods({"coriolanus": layers}, trials(contenders(), [2, 4, 8]))


def rows_of(result, name, convention="bytes"):
    rows = (row for row in result["methods"] if row["name"] == name and row["convention"] == convention)
    return {round(1 / row["budget"], 3): row for row in rows}


def test_every_row_keeps_its_budget(result):
    json.dumps(result)
    for row in result["methods"]:
        more = 1.5 if row["convention"] == "paper" else 1
        assert row["within_budget"] == (row["bytes_useful_share"] <= 1.02 * more * row["budget"])
        assert row["bytes_useful_share"] <= row["bytes_fetched_share"] + 1e-12
        assert 0 <= row["mass_recall"] <= 1 + 1e-6
        assert 0 <= row["token_recall"] <= 1
        assert row["output_rel_error"] <= row["output_rel_error_p99"] * 1.001 <= row["output_rel_error_worst"] * 1.002
        assert row.get("overlapped_us", 0) <= row.get("serial_us", 0)
    beyond = {row["name"] for row in result["methods"] if not row["within_budget"]}
    assert "sparf-apart" in beyond and not beyond & {"sparf", "sparq", "ours", "kivi", "dense"}
    (dense,) = rows_of(result, "dense").values()
    assert dense["output_rel_error"] < 1e-5
    assert dense["mass_recall"] == pytest.approx(1, abs=1e-5)
    assert rows_of(result, "sparf")[8]["output_rel_error"] == rows_of(result, "sparq")[8]["output_rel_error"]


def test_best_of_ours_halves_error_or_bytes_of_sparf(result):
    sparf = rows_of(result, "sparf")[8]
    ours = [row for row in result["methods"] if row["name"].startswith("ours-")]
    error, fetched = sparf["output_rel_error"], sparf["bytes_fetched_share"]
    assert any(r["output_rel_error"] <= error / 2 and r["bytes_fetched_share"] <= fetched for r in ours)
    assert any(r["output_rel_error"] <= error and r["bytes_fetched_share"] <= fetched / 2 for r in ours)


def test_plot_has_methods_and_fronts(result, tmp_path):
    save_figure(errors_over_bytes(result["methods"]), tmp_path / "all.svg")
    drawn = (tmp_path / "all.svg").read_text()
    assert all(f"<!-- {name} -->" in drawn for name in ("ours-int4-pages", "front", "front of drives"))


def point(name, share, error, **more):
    row = {"text": "a", "name": name, "convention": "bytes", "counted_by": "page", "within_budget": True}
    return row | {"bytes_fetched_share": share, "output_rel_error": error} | more


def test_rank_counts_methods_better_at_equal_bytes():
    rows = [point("a", 0.5, 0.1), point("b", 0.5, 0.2), point("c", 0.2, 0.3), point("a", 0.6, 0.1)]
    rows += [point("oracle", 0.1, 0.0), point("array", 0.4, 0.15, counted_by="element"), point("b", 0.5, 0.2)]
    ranks = [(row["rank"], row["rank_on_drives"]) for row in ranked(rows, {"oracle"})]
    assert ranks == [(1, 1), (3, 2), (1, 1), (2, 2), (None, None), (1, None), (3, 2)]
    assert ranked([], set()) == []


def test_means_of_texts_are_ranked_again():
    rows = [point("a", 0.2, 0.1), point("b", 0.2, 0.3)]
    rows += [point("a", 0.4, 0.9, text="b", within_budget=False), point("b", 0.4, 0.3, text="b")]
    a, b = means(rows, set())
    assert (a["bytes_fetched_share"], a["output_rel_error"], a["within_budget"]) == (pytest.approx(0.3), 0.5, False)
    assert (b["output_rel_error"], b["within_budget"]) == (0.3, True)
    assert (a["rank"], b["rank"]) == (2, 1)


def test_front_is_rank_1_and_oracle_has_none(result):
    rows = result["methods"]
    front = sorted((row for row in rows if row["rank"] == 1), key=lambda row: -row["bytes_fetched_share"])
    errors = [row["output_rel_error"] for row in front]
    assert errors == sorted(errors) and front[0]["name"] == "dense"
    assert {row["rank"] for row in rows if row["name"] in ("top-k-oracle", "sparq")} == {None}
    assert all((row["rank_on_drives"] is None) == (row["counted_by"] == "element") for row in rows)


def test_a_text_or_a_context_that_is_too_short_is_refused():
    model, tokenizer = load(CHECKPOINT)
    with pytest.raises(ValueError, match="the text has 5 tokens"):
        record_layers(model, tokenizer, "short", Passages(100, 1, 1))
    with pytest.raises(ValueError, match="context is 4096"):
        record_layers(model, tokenizer, TEXT.read_text(), Passages(4096, 1, 1))


def test_method_without_budget_has_one_row(result):
    """Keys and values in 4 bits: a scale and a zero-point, 16 bits each, per 32 channels or tokens, so 5 / 16 in all.

    In 8 bits, a page of 31 tokens. The 2 tokens after the last group are in DRAM.
    """
    for name, share in (("dense", 1.0), ("kivi", 5 / 16), ("kivi-2", 3 / 16), ("dense-8-bits", 16 / 31)):
        (row,) = (row for row in result["methods"] if row["name"] == name)
        assert row["budget"] == row["bytes_useful_share"] <= row["bytes_fetched_share"]
        assert row["budget"] == pytest.approx(share, rel=0.05)
    few = {row["name"]: row["output_rel_error"] for row in result["methods"] if row["budget"] not in (1 / 2, 1 / 4)}
    assert 0 < few["dense-8-bits"] < few["kivi"] < few["kivi-2"] < 1
    once = {trial.contender.name for trial in trials(contenders(), [2, 4]) if trial.c == 1}
    assert once >= {"dense", "kivi", "kivi-2", "dense-8-bits"}
    assert {each.name for each in contenders() if each.dense} == once
    assert len({contender.name for contender in contenders()}) == len(contenders()) > len(OURS)


def test_sparf_has_both_conventions_paper_reads_more(result):
    mine, papers = rows_of(result, "sparf")[8], rows_of(result, "sparf", "paper")[8]
    assert mine["bytes_useful_share"] == pytest.approx(1 / 8, rel=0.02)
    assert papers["bytes_useful_share"] == pytest.approx(1.5 / 8, rel=0.02)
    assert papers["output_rel_error"] < mine["output_rel_error"]
    assert not rows_of(result, "ours-int4", "paper")


def test_rows_by_layer_and_head_add_up_to_the_row_of_all(result):
    layers = result["layers"]
    assert len(result["by_layer"]) == len(layers) * len(result["methods"])
    for i, row in enumerate(result["methods"]):
        mine = result["by_layer"][i * len(layers) : (i + 1) * len(layers)]
        assert [part["layer"] for part in mine] == layers == [0, 1, 2, 3]
        assert {(part["name"], part["convention"]) for part in mine} == {(row["name"], row["convention"])}
        assert np.mean([part["output_rel_error"] for part in mine]) == pytest.approx(row["output_rel_error"])
        assert len(row["passages"]) == result["sequences"]
        assert np.mean(row["passages"]) == pytest.approx(row["output_rel_error"])
        assert max(part["output_rel_error_worst"] for part in mine) == row["output_rel_error_worst"]
        for part in mine:
            assert len(part["heads"]) == 8
            assert np.mean(part["heads"]) == pytest.approx(part["output_rel_error"])


def test_killed_run_continues_where_it_stopped(tmp_path):
    model, tokenizer = load(CHECKPOINT)
    layers = record_layers(model, tokenizer, TEXT.read_text(), Passages(128, 1, 1, "1,3"))
    assert [layer.number for layer in layers] == [1, 3]
    tried = trials(chosen("sparf,ours", contenders()), [4.0])
    first, ticks = ResultCache(tmp_path / "kept.jsonl"), []
    whole = bench_methods({"a": layers}, tried, cache=first, tick=ticks.append)
    assert len(ticks) == 2 * len(tried) == 6
    lines = (tmp_path / "kept.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "kept.jsonl").write_text("".join(lines[:2]) + lines[2][:20])
    ticks.clear()
    again = ResultCache(tmp_path / "kept.jsonl")
    assert bench_methods({"a": layers}, tried, cache=again, tick=ticks.append) == whole
    assert len(ticks) == 2
    again.close()
    assert not (tmp_path / "kept.jsonl").exists()


def test_measured_drives_release_address_space():
    """A drive reserves 2 TB of address space; of hundreds, only the one being measured may exist."""

    def mapped():
        return 4096 * int(Path("/proc/self/statm").read_text().split()[0])

    model, tokenizer = load(CHECKPOINT)
    layers = record_layers(model, tokenizer, TEXT.read_text(), Passages(64, 1, 1, "0"))
    trial = Trial(Contender("dense", "dense", dense=True), 1)
    measured(trial, layers)
    gc.collect()
    gc.disable()
    try:
        before = mapped()
        for _ in range(5):
            measured(trial, layers)
        assert mapped() - before < 1 << 34
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--layers", "4"), "--layers '4': the model has layers 0 to 3"),
        (("--layers", "9:"), "--layers '9:': the model has layers 0 to 3"),
        (("--layers", "x"), "--layers 'x': needs a number"),
        (("--layers", "0:3:0"), "--layers '0:3:0': needs a number"),
        (("--method", "nosuch"), "--method 'nosuch': must be one of"),
        (("--text", "nowhere"), "nowhere: No such file"),
        (("--text", "short.txt"), "the text has 5 tokens"),
        (("--text", "code", "--text", "short.txt"), "short.txt: the text has 5 tokens"),
        (("--scenarios",), "--tokens 64: scenarios need at least 256"),
        (("--scenarios", "--text", "code"), "--text: has no effect with --scenarios"),
        (("--plot", "nowhere/all.png"), "nowhere/all.png: there is no folder"),
        (("--text", "wikitext"), "text wikitext: set VCSD_DATA to a folder that has wikitext-2-raw-test.txt or"),
        (("--model", "nosuch"), "no model at nosuch: a folder with config.json"),
        (("--model", "smollm2"), "model smollm2 has not been fetched: run `vcsd model get smollm2`"),
    ],
)
def test_invalid_methods_input_is_one_line_error(capsys, monkeypatch, tmp_path, words, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("short")
    monkeypatch.delenv("VCSD_DATA", raising=False)
    monkeypatch.setenv("VCSD_MODELS", str(tmp_path))
    code, out, err = vcsd(capsys, monkeypatch, "eval", "methods", "--tokens", "64", *words)
    assert code and not out
    assert says in err.splitlines()[-1]


def test_command_compares_on_texts_and_scenarios(capsys, monkeypatch, tmp_path):
    """As people call it: a method of a file takes part, and each text has its ranks."""
    own = "from attention_engine import METHODS\n\nMETHODS['mine'] = METHODS['local']\n"
    (tmp_path / "mine.py").write_text(own)
    (tmp_path / "other.txt").write_text("Once more unto the breach, dear friends. " * 60)
    monkeypatch.chdir(tmp_path)
    words = ("eval", "methods", "--methods-file", "mine.py", "--method", "dense,sparf,mine,fier", "--compression", "8")
    text = ("--text", "other.txt", "--text", "code", "--tokens", "256", "--num-passages", "1", "--plot", "two.png")
    code, out, err = vcsd(capsys, monkeypatch, *words, *text, "-o", "json")
    assert code == 0, err
    rows = json.loads(out)["methods"]
    labels = [("dense", "bytes"), ("sparf", "bytes"), ("sparf", "paper"), ("mine", "bytes"), ("fier", "bytes")]
    texts = ("other.txt", "code")
    assert [(row["text"], row["name"], row["convention"]) for row in rows] == [(t, *of) for t in texts for of in labels]
    assert all(row["rank"] >= 1 for row in rows) and (tmp_path / "two.png").stat().st_size > 1000
    code, out, err = vcsd(capsys, monkeypatch, *words, "--scenarios", "--tokens", "256", "--steps", "1")
    assert code == 0 and "Error by text" in out and all(name in out for name in ("scattered", "mine", "1 to")), err
    code, out, _ = vcsd(capsys, monkeypatch, *words, "--scenarios", "--tokens", "256", "--steps", "1", "-o", "json")
    rows = json.loads(out)["methods"]
    assert {row["text"] for row in rows} == set(SCENARIOS)
    assert max(row["output_rel_error_worst"] for row in rows if row["name"] == "dense") < 1e-5
