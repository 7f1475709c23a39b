"""`vcsd eval lifetime` on a small trace: all rows and keys, the headline from the rows, and one-line errors."""

import json
from dataclasses import replace

import pytest

from ftl.errors import OutOfSpaceError
from vcsd_eval.lifetime.energy import PROGRESSIVE, Prices
from vcsd_eval.lifetime.engines import EngineReplay
from vcsd_eval.lifetime.lifetime import (
    LAYOUTS,
    OURS,
    LifetimeOptions,
    ReplayRun,
    experiment,
    headline,
    load_of,
    replay,
    runs,
)
from vcsd_eval.lifetime.patterns import PATTERNS


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """600 conversations an hour, each of two turns of at least 2,000 tokens after a system prompt."""
    path = tmp_path_factory.mktemp("lifetime") / "small.jsonl"
    lines = [
        {
            "timestamp": 3000 * (2 * number + turn),
            "input_length": 2100 + 500 * turn,
            "output_length": 20,
            "hash_ids": [0, *(10 * number + at for at in range(1, 5 + turn))],
        }
        for number in range(600)
        for turn in range(2)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return LifetimeOptions(path, hours=16, over_provisioning="28")


@pytest.fixture(scope="module")
def outcome(setting):
    return experiment(setting, Prices())


def test_rows_have_all_figures(outcome):
    rows = outcome.result["rows"]
    assert [row["layout"] for row in rows if row["engine"] == OURS] == list(LAYOUTS)
    assert {row["engine"] for row in rows} == {OURS, *(pattern.name for pattern in PATTERNS)}
    for row in rows:
        assert row["waf"] >= 1 and row["dwpd"] > 0
        assert row["years_low"] < row["years"] < row["years_high"]
        energy = row["joules_per_million_tokens"]
        assert 0 < energy["low"] < energy["value"] < energy["high"]
        assert row["p50_read_us"] <= row["p99_read_us"]
    assert [each["kind"] for each in outcome.result["offload"]] == ["plain SSD", "host memory"]


def test_headline_is_ratio_of_rows(outcome):
    (result,) = outcome.result["headline"]
    by_layout = {row["layout"]: row["bytes_per_reused_token"] for row in outcome.result["rows"]}
    engines = [row["bytes_per_reused_token"] for row in outcome.result["rows"] if row["engine"] != OURS]
    assert result["worst_over_ours"][PROGRESSIVE] == pytest.approx(max(engines) / by_layout[PROGRESSIVE])
    assert result["ours_over_best"]["fp16"] == pytest.approx(by_layout["fp16"] / min(engines))
    assert f"{result['ours_over_best'][PROGRESSIVE]:.2f}x the best" in outcome.shown[-1]


def test_result_is_json_and_names_scale_and_sources(outcome):
    text = json.dumps(outcome.result)
    assert outcome.result["simulated"]["scale"] == 512
    assert "with repetition" in text and "Horowitz" in text


def test_replay_same_seed_is_same(setting):
    run = ReplayRun("Mooncake", "", 28)
    assert replay((run, setting), lambda _: None) == replay((run, setting), lambda _: None)


def test_runs_have_variants_at_first_over_provisioning():
    result = [run for run in runs((28, 12), 8) if run.name == "vLLM"]
    assert [(run.percent, run.placement) for run in result] == [
        (28, "-"),
        (12, "-"),
        (28, "8 handles"),
        (28, "discard"),
    ]


def test_headline_uses_one_over_provisioning():
    row = {"engine": OURS, "layout": "plain", "placement": "", "over_provisioning": 28, "bytes_per_reused_token": 2.0}
    engine = row | {"engine": "x", "bytes_per_reused_token": 4.0}
    other = engine | {"over_provisioning": 12, "bytes_per_reused_token": 100.0}
    assert headline([row, engine, other], 28)["worst_over_ours"] == {"plain": 2.0}


def test_heads_that_drives_cannot_share_raise(setting):
    with pytest.raises(ValueError, match="choose --drives that divide them"):
        load_of(replace(setting, drives=3), 28)


def test_missing_trace_raises_with_remedy(monkeypatch):
    monkeypatch.delenv("VCSD_DATA", raising=False)
    with pytest.raises(ValueError, match="--trace is missing: name a trace"):
        experiment(LifetimeOptions(), Prices())


def test_out_of_space_raises_with_remedy(setting, monkeypatch):
    def full(self, tick):
        raise OutOfSpaceError("0 blocks left")

    monkeypatch.setattr(EngineReplay, "run", full)
    with pytest.raises(
        ValueError, match=r"Mooncake -, over-provisioning = 1: no room .* take more --over-provisioning"
    ):
        replay((ReplayRun("Mooncake", "", 1), setting), lambda _: None)


def test_trace_without_hashes_has_no_headline(tmp_path):
    path = tmp_path / "small.csv"
    rows = [f"{6 * number}.0,{600 + number},20" for number in range(600)]
    path.write_text("\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", *rows]))
    result = experiment(LifetimeOptions(path, hours=2, over_provisioning="28"), Prices()).result
    assert result["headline"] == []
    assert {row["bytes_per_reused_token"] for row in result["rows"]} == {None}
    assert {row["p99_read_us"] for row in result["rows"]} == {None}
