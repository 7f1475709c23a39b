"""The attention contest runs on every supported shape, and its errors are those of the kernels.

partner of: eval/bench/kernel_cases.py
"""

import pytest

from attention_engine import METHODS
from csd_spec import NAMED, SparFParams
from vcsd_eval.bench.attention import bench_attention, scratch_mib
from vcsd_eval.bench.kernel_cases import Contest, Size


@pytest.mark.parametrize("method", [name for name in METHODS if not name.startswith(("kivi", "progressive"))])
def test_small_contest_reports_all_methods(method):
    result = bench_attention(Size(700, 4, 64, 2), method, threads=2)
    assert result["max_rel_error"] < 1e-4
    assert result["tokens_not_in_reference"] == 0


@pytest.mark.parametrize("method", NAMED)
def test_low_bit_methods_read_less_within_error_bounds(method):
    """Random normal rows are the worst case: nothing but noise is left of an output."""
    contest = Contest(Size(700, 4, 64, 2))
    error, _ = contest.error(contest.attend(method), method)
    assert 1e-4 < error < 1
    assert 0 < contest.used_bytes() < contest.read_all() / 4 and contest.row_bytes == 0


def test_reported_bytes_match_hand_count():
    """700 tokens of 2 KV heads with 64 channels: dense reads all keys and values; SparF reads 88 tokens, and 16
    channels of the 512 tokens whose embedding groups are in flash.
    """
    contest = Contest(Size(700, 4, 64, 2))
    assert contest.read_all() == 2 * 700 * 2 * 64 * 2
    contest.attend("dense")
    assert contest.used_bytes() == 2 * 700 * 2 * 64 * 2
    contest.attend("sparf")
    assert contest.used_bytes() == 2 * (88 * 2 * 64 * 2 + 16 * 512 * 2)
    assert contest.operations() == 2 * 2 * 2 * (88 * 64 * 2 + 16 * 700)


def test_baselines_compute_equal_outputs():
    contest = Contest(Size(300, 4, 32, 2))
    contest.params = SparFParams(8, 40, 10)
    dense = contest.attend("dense")
    assert abs(contest.torch_sdpa().reshape(dense.shape).numpy() - dense).max() < 1e-4
    assert abs(contest.torch_gather()[0].numpy() - contest.attend("sparf")).max() < 1e-4


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="multiple of kv-heads"):
        Size(64, 3, 16, 2)


@pytest.mark.parametrize("method", ["dense", "sparf"])
def test_a_step_of_many_sequences_needs_little_scratch(method):
    assert 0 < scratch_mib(Size(1536, 40, 128, 40), method, sequences=64) <= 64
