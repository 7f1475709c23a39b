"""The sweep over host memory: our policy is everywhere at least as fast as the better of the paper's and reactive."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from vcsd_eval.papers.options import MachineOptions
from vcsd_eval.papers.profiles import Gpu, Host, Model, Ssd
from vcsd_eval.papers.tierkv import tiers
from vcsd_eval.papers.tierkv.tiers import COMPARED, RequestOptions, experiment, summary


@pytest.fixture(scope="module")
def outcome():
    return experiment(MachineOptions(), RequestOptions(), dram_gb="8,64,512", slices="50,200")


def test_mended_is_at_least_as_fast_as_others(outcome):
    result = outcome.result
    json.dumps(result)
    assert result["literal_slower_than_reactive"] >= 2
    assert result["literal_over_reactive_least"] < 0.5
    assert result["mended_over_better_of_both_least"] >= 1
    assert result["corrected_over_oracle_min"] > 0.95
    assert result["oversubscription"] == pytest.approx(3, abs=0.2)


def test_tiers_have_a_row_per_slice_dram_and_policy(outcome):
    rows = outcome.result["rows"]
    assert len(rows) == 2 * 3 * len(COMPARED)
    at = {(row["slice"], row["dram_gb"], row["policy"]): row for row in rows}
    assert at[50, 512, "static"]["flash_bytes"] == at[50, 512, "tierkv"]["flash_bytes"] == 0
    assert at[50, 8, "mended"]["flash_bytes"] < at[50, 8, "tierkv"]["flash_bytes"] / 10
    assert at[50, 8, "lru"]["recomputed_tokens"] > 0


def test_tiers_text_starts_with_tables(outcome):
    page = io.StringIO()
    console = Console(file=page, width=120)
    for part in outcome.shown:
        console.print(part)
    text = page.getvalue()
    assert (
        text.index("tokens/s")
        < text.index("GB over NVMe")
        < text.index("longest wait")
        < text.index("oversubscription")
        < text.index("ratios are at unequal stay")
    )


def test_summary_quotes_the_worst_run():
    def rows(slice_tokens, **rates):
        return [
            {"slice": slice_tokens, "dram_gb": 8.0, "policy": name, "tokens_per_s": rate}
            for name, rate in rates.items()
        ]

    same = {"lru": 10.0, "lfu": 10.0, "static": 10.0, "oracle": 40.0}
    result = summary(rows(20, **same, tierkv=5.0, mended=12.0) + rows(50, **same, tierkv=20.0, mended=22.0))
    assert result["runs"] == 2
    assert result["literal_slower_than_reactive"] == 1
    assert result["literal_over_reactive_least"] == 0.5
    assert result["mended_over_better_of_both_least"] == pytest.approx(1.1)
    assert result["mended_over_better_of_both_least_where_literal_is_slower"] == pytest.approx(1.2)
    assert result["corrected_over_oracle_min"] == pytest.approx(0.3)


def test_requests_come_from_trace_or_generator(tmp_path):
    file = tmp_path / "some.csv"
    file.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,30,4\n2.5,20,2\n3.5,20,2\n")
    assert [request.arrival for request in RequestOptions(file, count=2).requests(1.0).requests] == [0, 2.5]
    assert {request.arrival for request in RequestOptions(count=5).requests(1.0).requests} == {0}
    assert RequestOptions(count=5, rate=2.0).requests(1.0).requests[-1].arrival > 0
    with pytest.raises(ValueError, match="--rate has no effect with --trace"):
        RequestOptions(file, count=2, rate=1.0).requests(1.0)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dram_gb": "0"}, "dram_gb = '0': each must be at least 1"),
        ({"dram_gb": "1"}, r"request \d+: 1,8\d\d.\d\d MB of KV cache, and the tier host has 1,000.00 MB"),
        ({"slices": "x"}, "slices = 'x': needs numbers"),
        ({"workload": RequestOptions(Path("nowhere.csv"))}, "trace nowhere.csv: No such file"),
        ({"ssd": "floppy"}, "ssd = 'floppy': must be a YAML file or one of"),
    ],
)
def test_invalid_input_is_one_line_error(options, reason):
    with pytest.raises(ValueError, match=reason):
        experiment(MachineOptions(), **({"workload": RequestOptions()} | options))


def test_gpu_filled_by_weights_is_refused():
    with pytest.raises(ValueError, match="gpu = rtx4090: 24 GiB are filled by the weights of opt-30b"):
        tiers.machine(Model.load("opt-30b"), Gpu.load("rtx4090"), Host.load("tierkv"), Ssd.load("tierkv"))


def test_tiers_plot_is_written(tmp_path):
    out = tmp_path / "tiers.svg"
    experiment(MachineOptions(), RequestOptions(count=20), dram_gb="8,16", slices="200", plot=out)
    assert "<svg" in out.read_text()
