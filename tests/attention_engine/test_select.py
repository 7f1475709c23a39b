"""argtopk against a stable sort."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from attention_engine import GroupScore, best_tokens, selected_mass, softmax_scores, top_channels
from attention_engine.reference import _argtopk

FEW_VALUES = st.sampled_from([-2.0, -0.0, 0.0, 0.5, 3.0])


def top_tokens(logits, seq_lens, k, recent, group_score=GroupScore.SOFTMAX):
    """Steps 4 to 7 of Algorithm 1."""
    tokens = best_tokens(softmax_scores(logits, seq_lens, group_score), seq_lens, k, recent)
    return tokens, selected_mass(logits, tokens, k)


@given(
    arrays(
        np.float32,
        st.tuples(st.integers(1, 3), st.integers(1, 3), st.just(24)),
        elements=FEW_VALUES | st.just(np.float32(1e-40).item()),
    ),
    st.data(),
)
def test_channels_with_ties(q, data):
    r = data.draw(st.integers(1, 24))
    chosen = top_channels(q, r)
    for stream in range(q.shape[0]):
        expected = _argtopk(np.abs(q[stream].astype(np.float64)).sum(0), r)
        np.testing.assert_array_equal(chosen[stream], expected)


@given(arrays(np.float32, st.tuples(st.just(1), st.just(1), st.integers(1, 80)), elements=FEW_VALUES), st.data())
def test_tokens_with_ties_and_forced_recent(logits, data):
    length = logits.shape[2]
    k = data.draw(st.integers(1, length))
    recent = data.draw(st.integers(0, k))
    mask = np.where(np.arange(length) >= length - recent, np.inf, 0)
    expected = _argtopk(logits[0, 0].astype(np.float64) + mask, k)
    one = np.array([1])
    tokens, alpha = top_tokens(logits.copy(), one * length, one * k, one * recent)
    np.testing.assert_array_equal(tokens[0], expected)
    weights = np.exp(logits[0, 0].astype(np.float64))
    assert np.isclose(alpha[0, 0], weights[expected].sum() / weights.sum(), atol=1e-5)


def test_streams_of_different_length_and_k():
    logits = np.zeros((2, 1, 6), np.float32)
    logits[0, 0] = [0, 5, 1, np.nan, np.nan, np.nan]  # beyond a stream's length nothing is looked at
    logits[1, 0] = [9, 0, 0, 0, 8, 0]
    tokens, alpha = top_tokens(logits, np.array([3, 6]), np.array([1, 2]), np.array([0, 0]))
    assert tokens[0, :1].tolist() == [1]
    assert tokens[1].tolist() == [0, 4]
    assert np.isfinite(alpha).all()


def test_groups_may_rank_by_logits_as_sparqs_reference_does():
    """One head is sure of token 0, two prefer token 1 a little."""
    logits = np.array([[[9.0, 0, 0], [0, 3, 0], [0, 3, 0]]], np.float32)
    one = np.array([1])
    by_softmax, _ = top_tokens(logits.copy(), one * 3, one, one * 0)
    by_logits, _ = top_tokens(logits.copy() * [[[0.5], [1], [1]]], one * 3, one, one * 0, GroupScore.LOGITS)
    assert (by_softmax[0, 0], by_logits[0, 0]) == (1, 1)
    sure = np.array([[[9.0, 0, 0], [0, 1, 0], [0, 1, 0]]], np.float32)
    softmax_choice, _ = top_tokens(sure.copy(), one * 3, one, one * 0)
    logits_choice, _ = top_tokens(sure.copy() * [[[0.2], [1], [1]]], one * 3, one, one * 0, GroupScore.LOGITS)
    assert (softmax_choice[0, 0], logits_choice[0, 0]) == (0, 1)
