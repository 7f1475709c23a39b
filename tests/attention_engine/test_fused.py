"""Dense attention from FP16 to FP16 in one call: the same bits as step by step."""

import numpy as np
import pytest

from attention_engine import attend, to_half, widen_inputs
from attention_engine.fused import attend_dense, finite, place_of
from attention_engine.values import first_tokens
from tests.attention_engine.test_kernels import view_of

B, H, G, D, TOKENS = 2, 2, 3, 16, 40


def halves(generator, *shape):
    return generator.standard_normal(shape).astype(np.float16)


def bits(values):
    return values.view(np.uint16)


def case(seed, tokens=TOKENS):
    generator = np.random.default_rng(seed)
    K, V = (halves(generator, B * H, tokens, D) for _ in range(2))
    view = view_of(K, V, 8, 4, generator)
    sums = V.astype(np.float32).sum(1)
    return view, halves(generator, B, H, G, D), halves(generator, B, H, D), sums


def in_one(view, q, v, sums):
    out, rows = np.empty(q.shape, np.uint16), np.empty((*q.shape[:3], 2), np.float32)
    places = place_of(view), view.k_slots, view.v_slots, np.uint64(view.layout.n)
    held = attend_dense(bits(q), bits(v), None, view.seq_lens, first_tokens(B * H, 2 * TOKENS), places, sums, out, rows)
    return held, out, rows


@pytest.mark.parametrize("seed", range(4))
def test_fused_step_equals_separate_kernels(seed):
    view, q, v, sums = case(seed)
    own, theirs = sums.copy(), sums.copy()
    held, out, rows = in_one(view, q, v, own)
    wide, means = widen_inputs(q, v, view.seq_lens, theirs)
    chosen = first_tokens(B * H, TOKENS), view.seq_lens
    exact, m_and_l = attend(view, wide, chosen, np.ones(wide.shape[:2], np.float32), means)
    assert held and (out == bits(to_half(exact)).reshape(out.shape)).all()
    assert (rows.reshape(m_and_l.shape) == m_and_l).all() and (own == theirs).all()


def test_fused_step_reports_values_beyond_fp16():
    view, q, v, sums = case(0)
    for bank in view.banks:
        bank[:] = bits(np.float16(np.inf))
    assert not in_one(view, q, v, sums)[0]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", range(3))
def test_values_that_are_not_finite_are_found(value, which):
    arrays = [halves(np.random.default_rng(0), *shape) for shape in ((B, H, G, D), (B, H, D), (B, H, D))]
    assert finite(*map(bits, arrays), None)
    arrays[which].flat[-1] = value
    assert not finite(*map(bits, arrays), None)
