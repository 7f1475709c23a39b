"""BF16 and 8-bit rows in every method, far beyond FP16's range, against float64."""

import numpy as np
import pytest

from attention_engine import METHODS, DecodeStep, Queries, all_finite, reference, to_half
from attention_engine.methods.kivi import by_channel, by_token
from attention_engine.values import widen
from csd_spec import LAYOUTS
from ftl import Ftl, round_to_codec

H, G, D = 2, 3, 16
LENGTHS = (230, 100, 7)
LARGE = np.float32(2.0**30)
EXACT = [name for name in METHODS if not name.startswith(("progressive", "kivi"))]


def brains(values):
    return to_half(np.ascontiguousarray(values, np.float32), True)


def step_of(spec, layout="bf16", lengths=LENGTHS, seed=0):
    """A step on rows of a layout, with the stored K and V of each stream in float64; K is large, and q is as small."""
    generator, ftl = np.random.default_rng(seed), Ftl(spec)
    form = LAYOUTS[layout].form(spec.geometry.page_bytes, D, 512)
    handles = ftl.create(len(lengths), 1, H, form)
    k, v = (brains(generator.standard_normal((sum(lengths), H, D)) * size) for size in (LARGE, 100))
    ftl.append(handles, 0, np.array(lengths), k, v, 0)
    q = generator.standard_normal((len(lengths) * H, G, D)).astype(np.float32) / LARGE
    cuts = np.cumsum(lengths)[:-1]
    K, V = (np.split(widen(round_to_codec(form, rows), True).astype(np.float64), cuts) for rows in (k, v))
    view = ftl.view(handles, 0)
    share = -(-view.seq_lens // 4)
    v_mean = np.concatenate([rows.mean(0) for rows in V]).astype(np.float32)
    streams = [(K[s // H][:, s % H], V[s // H][:, s % H]) for s in range(len(lengths) * H)]
    return DecodeStep(view, ftl, Queries(q, 4, share, -(-share // 4), v_mean, [{} for _ in lengths])), streams


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("layout", ["bf16", "fp8", "int8-bf16", "int4-bf16"])
def test_output_equals_exact_attention_over_chosen_tokens(small_drive, name, layout):
    step, streams = step_of(small_drive, layout)
    out, (tokens, counts) = METHODS[name](step), step.chosen
    for stream, (K, V) in enumerate(streams):
        for query in range(G):
            row = stream if len(counts) == len(streams) else G * stream + query
            chosen, alpha = tokens[row, : counts[row]], step.alpha[stream, query]
            q = step.q[stream, query : query + 1].astype(np.float64)
            expected = alpha * reference.dense(q, K[chosen], V[chosen])[0] + (1 - alpha) * V.mean(0)
            np.testing.assert_allclose(out[stream, query], expected, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("layout", ["bf16", "fp8"])
def test_channels_and_tokens_equal_oracle(small_drive, layout):
    step, streams = step_of(small_drive, layout, seed=1)
    METHODS["sparf"](step)
    for stream, (K, V) in enumerate(streams):
        k = int(step.top_k[stream])
        _, _, chosen = reference.sparf(step.q[stream].astype(np.float64), K, V, 4, k, -(-k // 4))
        np.testing.assert_array_equal(step.chosen[0][stream, :k], chosen)


@pytest.mark.parametrize("layout", ["bf16", "fp8"])
@pytest.mark.parametrize(("name", "bits"), [("kivi", 4), ("kivi-2", 2)])
def test_kivi_attends_to_its_codes(small_drive, layout, name, bits):
    step, streams = step_of(small_drive, layout)
    out, n, levels = METHODS[name](step), step.view.layout.n, (1 << bits) - 1
    for stream, (K, V) in enumerate(streams):
        (K, errors_k), (V, errors_v) = (coded(rows, n, axis, levels) for rows, axis in ((K, 0), (V, 1)))
        q = step.q[stream].astype(np.float64)
        np.testing.assert_allclose(out[stream], reference.dense(q, K, V), rtol=1e-3, atol=1e-2)
        assert errors_k < 0.51 and errors_v < 0.51, "of a step, whose scale is rounded to BF16"


def coded(rows, n, axis, levels):
    """Rows (S, d) with every full group of n as its codes say, along an axis; and the largest error, in steps."""
    rows, worst = rows.copy(), 0.0
    for first in range(0, len(rows) // n * n, n):
        group = rows[first : first + n]
        low, span = group.min(axis, keepdims=True), np.ptp(group, axis=axis, keepdims=True)
        scale = widen(brains(span / levels), True)
        back = low + scale * np.clip(np.rint((group - low) / scale), 0, levels)
        worst = max(worst, float((np.abs(back - group) / span).max() * levels))
        rows[first : first + n] = back
    return rows, worst


def test_kivi_codes_cover_range_of_bf16():
    rows = np.full((1, 8, 32), 3e38, np.float32)
    rows[:, ::2] *= -1
    assert np.isfinite(by_channel(rows, 3, True)).all() and np.isfinite(by_token(rows, 3, True)).all()


def test_progressive_method_of_other_layout_is_refused(small_drive):
    with pytest.raises(ValueError, match="layout: stores no low-bit keys and values"):
        METHODS["progressive"](step_of(small_drive)[0])


def test_rounding_to_bf16_is_nearest_even():
    values = np.array([1, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 3.3e38, -1e-37], np.float32)
    expected = np.array([1, 1, 1 + 2.0**-6, 3.3e38, -1e-37])
    np.testing.assert_allclose(widen(to_half(values, True), True), expected, rtol=2.0**-8)
    assert widen(to_half(values[:3], True), True).tolist() == [1, 1, 1 + 2.0**-6]
    random = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    assert (np.abs(widen(to_half(random, True), True) - random) <= np.abs(random) * 2.0**-8).all()


def test_values_beyond_bf16_raise():
    for value in (3.4e38, np.inf, np.nan):
        with pytest.raises(FloatingPointError, match="BF16"):
            to_half(np.array([1, value], np.float32), True)
    assert all_finite(brains(np.array([1e38])), True)
    assert not all_finite(np.array([0x7F80], np.uint16).view(np.float16), True)
