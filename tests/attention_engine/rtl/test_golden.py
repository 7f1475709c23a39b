"""The golden model of the engine against Algorithm 1 in float64.

partner of: attention_engine/rtl/params.py, attention_engine/rtl/tables.py
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_engine import reference
from attention_engine.rtl.golden import sparf_engine
from attention_engine.rtl.params import EngineRun, EngineShape, _mant_exp
from csd_spec import SparFParams
from tests.properties import examples

MAX_ULPS = 1.5  # of FP16 at the largest |value| of V that is attended: half of it is the rounding of the output


def ulp(value):
    """One unit in the last place of FP16 at a value."""
    return 2.0 ** (max(np.floor(np.log2(value)), -14) - 10)


def make(seed, S, d, G, scale=1.0):
    numbers = np.random.default_rng(seed)
    parts = [
        numbers.normal(0, spread, size).astype(np.float16)
        for spread, size in ((scale, (G, d)), (1, (S, d)), (1, (S, d)))
    ]
    return *parts, parts[2].astype(np.float32).mean(0).astype(np.float16)


def run_of(S, d, G, r, k, l):  # noqa: E741
    shape = EngineShape(head_dim=d, q_heads=G, lanes=8, n_max=2048)
    return EngineRun(shape=shape, sparf=SparFParams(r, k, l), m=4, n=8, seq_len=S)


def close(data, run):
    """Whether output and selection are the oracle's; returns the largest error in units of MAX_ULPS' measure."""
    q, K, V, _ = data
    got = sparf_engine(*(part.view(np.uint16) for part in data), run)
    want, channels, tokens = reference.sparf(
        *(part.astype(np.float64) for part in (q, K, V)), run.sparf.r, run.sparf.k, run.sparf.l
    )
    assert got.channels == channels.tolist() and got.tokens == tokens.tolist()
    return np.abs(got.out.view(np.float16) - want).max() / ulp(np.abs(V).max())


@given(st.floats(1e-6, 1e6))
def test_factors_of_the_engine_have_24_bits(value):
    mantissa, exponent = _mant_exp(value)
    assert 1 << 23 <= mantissa <= 1 << 24
    assert mantissa * 2.0**-exponent == pytest.approx(value, rel=2**-24)


@settings(max_examples=examples(25))
@given(st.integers(0, 10**6), st.integers(1, 60), st.sampled_from([8, 16, 64]), st.integers(1, 3), st.data())
def test_output_within_ulps_of_algorithm_1(seed, S, d, G, data):
    k = data.draw(st.integers(1, S))
    run = run_of(S, d, G, data.draw(st.integers(1, d)), k, data.draw(st.integers(0, k)))
    assert close(make(seed, S, d, G), run) <= MAX_ULPS


@pytest.mark.parametrize("scale", [0.01, 1, 4])
def test_dense_is_attention(scale):
    data = make(7, 50, 32, 2, scale)
    assert close(data, run_of(50, 32, 2, 32, 50, 13)) <= MAX_ULPS


def test_parts_merge_by_m_and_l_to_whole():
    """Two halves attended by themselves, weighed with l x 2^m, are the whole; l x 2^m is the sum of e^logit."""
    d, G, sizes = 32, 2, (30, 50)
    q, K, V, mean = make(9, sum(sizes), d, G)
    parts, weights = [], []
    for start, S in zip((0, sizes[0]), sizes, strict=True):
        data = [part.view(np.uint16) for part in (q, K[start : start + S], V[start : start + S], mean)]
        got = sparf_engine(*data, run_of(S, d, G, d, S, 0))
        parts.append(got.out.view(np.float16).astype(float))
        weights.append([total * 2.0 ** (top - 32) for top, total in got.rows])
        logits = q.astype(float) @ K[start : start + S].T.astype(float) / np.sqrt(d)
        assert np.allclose(weights[-1], np.exp(logits).sum(1), rtol=1e-5)
    share = np.array(weights) / np.sum(weights, 0)
    want, *_ = reference.sparf(*(part.astype(np.float64) for part in (q, K, V)), d, sum(sizes), 0)
    assert abs((share[:, :, None] * parts).sum(0) - want).max() / ulp(np.abs(V).max()) <= MAX_ULPS


def test_equal_scores_select_lowest_tokens():
    q, K, V, mean = make(3, 40, 8, 1)
    got = sparf_engine(*(part.view(np.uint16) for part in (q, np.ones_like(K), V, mean)), run_of(40, 8, 1, 8, 9, 2))
    assert got.tokens == [0, 1, 2, 3, 4, 5, 6, 38, 39] and got.channels == list(range(8))


def test_nan_and_infinity_count_as_zero_and_set_flag():
    q, K, V, mean = make(4, 20, 8, 1)
    clean = K.copy()
    K[5, 3], clean[5, 3] = np.nan, 0
    run = run_of(20, 8, 1, 8, 20, 0)
    one, other = (sparf_engine(*(p.view(np.uint16) for p in (q, part, V, mean)), run) for part in (K, clean))
    assert np.array_equal(one.out, other.out) and one.bad and not other.bad


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lanes", 12),
        ("head_dim", 100),
        ("head_dim", 256),
        ("q_heads", 9),
        ("topk_ways", 3),
        ("n_max", 32776),
        ("page_bytes", 3000),
    ],
)
def test_invalid_engine_shape_is_refused(field, value):
    with pytest.raises(ValueError, match=field):
        EngineShape(**{"head_dim": 64, "lanes": 8, field: value})


@pytest.mark.parametrize(("field", "value"), [("m", 3), ("n", 65), ("n", 40), ("seq_len", 0), ("seq_len", 9)])
def test_invalid_engine_run_is_refused(field, value):
    good = {"shape": EngineShape(head_dim=64), "sparf": SparFParams(8, 10, 2), "m": 4, "n": 8, "seq_len": 100}
    with pytest.raises(ValueError, match=field if value != 9 else "k = 10"):
        EngineRun(**{**good, field: value})
