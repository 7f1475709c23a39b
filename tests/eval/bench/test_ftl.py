"""The FTL's benchmarks with small settings."""

import pytest

from vcsd_eval.bench.ftl import Churn, Reads, Schedule, bench_attention, bench_churn, lengths


def test_attention_reads_balance_all_channels():
    result = bench_attention(Reads(capacity_gb=8, fill=0.3, heads=40, tokens=1536, compression=8), requests=5)
    assert result["balance"] <= 1.1
    assert result["map_bytes_per_page"] <= 8
    assert 0.7 < result["bandwidth_share"] <= 1


def test_overlapped_schedule_hides_engine_time():
    """The same pages; the engine takes time, and an overlapping schedule hides part of it."""
    alone, serial, overlapped = (
        bench_attention(Reads(capacity_gb=1, heads=8, tokens=512, schedule=schedule), requests=3)
        for schedule in (None, Schedule.SERIAL, Schedule.OVERLAPPED)
    )
    assert alone["pages"] == serial["pages"] == overlapped["pages"] > 0
    assert alone["mean_latency_us"] < serial["mean_latency_us"]
    assert overlapped["mean_latency_us"] < serial["mean_latency_us"]


def test_churn_has_low_write_amplification():
    result = bench_churn(Churn(full=0.8, erase_mean=0.6))
    assert result["waf"] <= 1.05
    assert result["balance"] <= 1.1
    assert result["refused"] == 0
    assert 0.7 < result["full"] < 0.9


def test_length_traces_are_replayed(data_dir):
    result = lengths(data_dir / "splitwise_conv.csv", 0)
    assert len(result) > 1000
    assert result[0] == (374, 44)


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "num_prefill_tokens,num_decode_tokens\n5,x\n"])
def test_malformed_length_traces_name_the_line(tmp_path, text):
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(ValueError, match=r"trace\.csv"):
        lengths(tmp_path / "trace.csv", 0)
