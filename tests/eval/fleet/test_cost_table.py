"""`vcsd eval cost-table`: figures follow the machine, and Vidur's reader finds its columns."""

import csv
from dataclasses import replace
from itertools import pairwise

import pytest

from vcsd_eval.fleet.cost_table import FORMAT, VIDUR_COLUMNS, CostTableOptions, experiment, graded, machine_of

SETTING = CostTableOptions(max_batch=8, max_tokens=4096)


@pytest.fixture(scope="module")
def result():
    return experiment(SETTING).result


def test_table_has_batches_and_contexts(result):
    assert result["format"] == FORMAT
    assert {row["batch"] for row in result["decode"]} == {1, 2, 4, 8}
    assert {row["tokens"] for row in result["decode"]} == {256, 512, 1024, 2048, 4096}
    assert result["capacity_bytes"] == 8 * machine_of(SETTING).spec.geometry.capacity_bytes


def test_time_grows_with_batch_and_context(result):
    seconds = {(row["batch"], row["tokens"]): row["layer_s"] for row in result["decode"]}
    assert all(seconds[batch, 4096] > seconds[batch, 256] for batch in (1, 2, 4, 8))
    assert all(seconds[8, tokens] > seconds[1, tokens] for tokens in (256, 4096))


def test_more_groups_of_drives_serve_a_batch_sooner(result):
    two = experiment(replace(SETTING, drives=16)).result
    assert two["decode"][-1]["layer_s"] < 0.6 * result["decode"][-1]["layer_s"]
    assert two["decode"][0]["layer_s"] == pytest.approx(result["decode"][0]["layer_s"], rel=0.01)


def test_vidur_file_has_columns_and_times(tmp_path, result):
    path = tmp_path / "attention.csv"
    experiment(replace(SETTING, vidur=path))
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == VIDUR_COLUMNS
    decode = [row for row in rows if row["prefill_chunk_size"] == "0"]
    prefill = [row for row in rows if row["prefill_chunk_size"] != "0"]
    assert decode and prefill and {row["n_embd"] for row in rows} == {"4096"}
    largest = max(decode, key=lambda row: (int(row["batch_size"]), int(row["kv_cache_size"])))
    assert float(largest["time_stats.attn_decode.median"]) == pytest.approx(1e3 * result["decode"][-1]["layer_s"])
    assert all(float(row["time_stats.attn_prefill.median"]) > 0 for row in prefill)


def test_graded_steps_are_within_16_percent():
    """Steps of one while numbers are small."""
    outcome = graded(1, 128)
    assert outcome[0] == 1 and outcome[-1] == 128
    assert all(b <= max(a + 1, 1.16 * a) for a, b in pairwise(outcome))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": "deepseek-v3"}, "latent"),
        ({"network": "10gbe"}, "must be one of"),
        ({"model": "llama-3-70b", "gpu": "rtx5060ti-16gb"}, "take several"),
    ],
)
def test_cost_table_errors_have_remedy(change, says):
    with pytest.raises(ValueError, match=says):
        experiment(replace(SETTING, **change))


def test_file_in_missing_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="choose a file in a folder that exists"):
        experiment(replace(SETTING, vidur=tmp_path / "no" / "attention.csv"))
