"""The contest runs, on every shape that it takes, and its errors are those of the kernels."""

import pytest

from eval.bench_attention import Contest, bench_attention


@pytest.mark.parametrize("method", ["dense", "sparf"])
def test_a_small_contest(method):
    result = bench_attention(700, 4, 64, 2, method, threads=2)
    assert result["max_rel_error"] < 1e-4
    assert result["tokens_chosen_otherwise"] == 0
    assert result["bandwidth_share"] > 0


def test_the_rivals_compute_the_same():
    contest = Contest(300, 4, 32, 2, threads=1, seed=0)
    dense, _, _ = contest.dense()
    assert abs(contest.torch_sdpa().reshape(dense.shape).numpy() - dense).max() < 1e-4
    sparse, _, _ = contest.sparf(8, 40)
    assert abs(contest.torch_gather(8, 40)[0].numpy() - sparse).max() < 1e-4


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="multiple of kv-heads"):
        bench_attention(64, 3, 16, 2, "dense", 1)
