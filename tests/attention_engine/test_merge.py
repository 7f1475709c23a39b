"""Attention over parts of a sequence: merged results equal those of the whole, and parts that cannot be merged are
refused.
"""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from attention_engine import merge, reference
from tests.properties import examples

D = 8
FINITE = st.floats(-60000, 60000, width=32)
SHAPES = st.sampled_from([(), (3,), (2, 3), (1, 2, 2)])


def part_of(q, K, V):
    """Output and rows of dense attention; for a part without tokens, an output that must not be read."""
    if not len(K):
        return np.full(q.shape, np.nan, np.float32), np.array([[-np.inf, 0]] * len(q), np.float32)
    return reference.dense(q, K, V).astype(np.float32), reference.dense_rows(q, K).astype(np.float32)


def merged(parts):
    return merge(*(list(column) for column in zip(*parts, strict=True)))


def weight(rows):
    return np.log(rows[..., 1].astype(np.float64)) + rows[..., 0]


@settings(max_examples=examples(100))
@given(
    seed=st.integers(0, 2**32 - 1),
    S=st.integers(1, 90),
    cuts=st.lists(st.floats(0, 1), max_size=4),
    scale=st.sampled_from([0.01, 1, 100]),
)
def test_merged_parts_equal_whole_for_any_cut(seed, S, cuts, scale):
    """Some parts without tokens; at scale 100 most parts have zero weight."""
    generator = np.random.default_rng(seed)
    q, K, V = scale * generator.standard_normal((3, D)), *generator.standard_normal((2, S, D))
    ends = [0, *sorted(round(cut * S) for cut in cuts), S]
    parts = [part_of(q, K[a:b], V[a:b]) for a, b in pairwise(ends)]
    out, rows = merged(parts)
    assert out.dtype == rows.dtype == np.float32
    near = 1e-6 * (1 + np.abs(q @ K.T).max())  # a logit in FP32, which the weights are exponentials of
    np.testing.assert_allclose(out, reference.dense(q, K, V), rtol=0, atol=near * np.abs(V).max())
    np.testing.assert_array_equal(rows[:, 0], part_of(q, K, V)[1][:, 0])
    np.testing.assert_allclose(weight(rows), weight(reference.dense_rows(q, K)), rtol=0, atol=near)
    for middle in range(1, len(parts)):
        left, right = merged(parts[:middle]), merged(parts[middle:])
        again, rows_again = merged([left, right])
        np.testing.assert_allclose(again, out, rtol=0, atol=near)
        np.testing.assert_allclose(weight(rows_again), weight(rows), rtol=0, atol=near)


@given(st.data(), SHAPES)
def test_merge_of_one_part_changes_no_bit(data, shape):
    out = data.draw(arrays(np.float32, (*shape, D), elements=FINITE))
    m = data.draw(arrays(np.float32, shape, elements=FINITE))
    l = data.draw(arrays(np.float32, shape, elements=st.floats(2.0**-100, 2.0**100, width=32)))  # noqa: E741
    rows = np.stack([m, l], axis=-1)
    again, rows_again = merge([out], [rows])
    assert (again.tobytes(), rows_again.tobytes()) == (out.tobytes(), rows.tobytes())
    for number in range(2):  # together with a part without a token, whose output and l are ignored
        parts = [(out, rows)]
        nothing = np.broadcast_to(np.array([-np.inf, np.nan], np.float32), rows.shape)
        parts.insert(number, (np.full_like(out, np.nan), nothing))
        again, rows_again = merged(parts)
        np.testing.assert_array_equal(again, out)
        np.testing.assert_array_equal(rows_again, rows)


def test_merge_of_empty_parts_is_empty():
    nothing = part_of(np.zeros((2, D)), np.zeros((0, D)), np.zeros((0, D)))
    out, rows = merged([nothing, nothing])
    np.testing.assert_array_equal(out, np.zeros((2, D)))
    np.testing.assert_array_equal(rows, nothing[1])
    some = part_of(*np.random.default_rng(0).standard_normal((3, 2, D)))
    np.testing.assert_array_equal(merged([(out, rows), some])[0], some[0])


def test_large_logits_neither_overflow_nor_underflow():
    out = np.stack([np.full((2, D), value, np.float32) for value in (1, 3)])
    rows = np.array([[[5e4, 1], [-5e4, 1]], [[5e4, 3], [-5e4 - 200, 1]]], np.float32)
    whole_out, whole = merge(out, rows)
    np.testing.assert_allclose(whole_out, [[2.5] * D, [1] * D], rtol=1e-7)
    np.testing.assert_array_equal(whole, [[5e4, 4], [-5e4, 1]])
    _, whole = merge(out, np.full((2, 2, 2), [0, 3e38], np.float32))
    np.testing.assert_array_equal(whole, [[0, 0]] * 2)  # its sum is beyond FP32, so it is no longer known


def part(m, l):  # noqa: E741
    return np.zeros((1, D), np.float32), np.array([[m, l]], np.float32)


def test_part_with_unknown_weight_is_refused():
    with pytest.raises(ValueError, match=r"^part 1: the softmax weight of 1 of 1 rows is not known \(l = 0\)$"):
        merged([part(0, 1), part(0, 0)])
    with pytest.raises(ValueError, match="part 0: the softmax weight"):
        merged([part(3, 0)])


@pytest.mark.parametrize(("m", "l"), [(np.nan, 1), (np.inf, 1), (0, np.nan), (0, np.inf), (0, -1)])
def test_part_with_invalid_weight_is_refused(m, l):  # noqa: E741
    with pytest.raises(ValueError, match="part 0: rows: m must be a finite logit or -inf, l a finite weight"):
        merged([part(m, l), part(0, 1)])


def test_shapes_that_do_not_fit_are_refused():
    out, rows = part(0, 1)
    with pytest.raises(ValueError, match="0 outputs and 0 rows"):
        merge([], [])
    with pytest.raises(ValueError, match="2 outputs and 1 rows"):
        merge([out, out], [rows])
    with pytest.raises(ValueError, match=r"part 1: output \(1, 4\)"):
        merge([out, out[:, :4]], [rows, rows])
    with pytest.raises(ValueError, match=r"part 0: output \(1, 8\) and rows \(1,\)"):
        merge([out], [rows[:, 0]])
