"""The contest runs, on every shape that it takes, and its errors are those of the kernels."""

import pytest

from attention_engine import METHODS
from csd_spec import SparFParams
from eval.bench.attention import Contest, bench_attention, scratch_mib


@pytest.mark.parametrize("method", list(METHODS))
def test_a_small_contest(method):
    result = bench_attention(700, 4, 64, 2, method, threads=2)
    assert result["max_rel_error"] < 1e-4
    assert result["tokens_chosen_otherwise"] == 0
    assert result["bandwidth_share"] > 0


def test_the_rivals_compute_the_same():
    contest = Contest(300, 4, 32, 2, threads=1, seed=0)
    contest.params = SparFParams(8, 40, 10)
    dense = contest.attend("dense")
    assert abs(contest.torch_sdpa().reshape(dense.shape).numpy() - dense).max() < 1e-4
    assert abs(contest.torch_gather()[0].numpy() - contest.attend("sparf")).max() < 1e-4


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="multiple of kv-heads"):
        bench_attention(64, 3, 16, 2, "dense", 1)


@pytest.mark.parametrize("method", ["dense", "sparf"])
def test_a_step_of_many_sequences_needs_little_scratch(method):
    assert 0 < scratch_mib(40, 128, 40, method, sequences=64, tokens=1536) <= 64
