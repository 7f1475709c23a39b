"""KIVI (keys quantized by channel, values by token): decoded values, attention output and link traffic."""

import numpy as np
import pytest

from attention_engine import METHODS, Compute, Read, reference
from attention_engine.methods.kivi import by_channel, by_token, group_bytes
from tests.attention_engine.test_methods import D, Drive, H

BITS = {"kivi": 4, "kivi-2": 2}


def rounded(rows, levels):
    """One run of values with a scale, value by value."""
    least, scale = min(rows), float(np.float16((max(rows) - min(rows)) / levels))
    return [least + scale * min(levels, round((value - least) / scale)) if scale else least for value in rows]


@pytest.mark.parametrize("levels", [3, 15])
def test_codes_scale_per_key_channel_and_value_token(levels):
    rows = np.random.default_rng(0).standard_normal((2, 8, 48)).astype(np.float16).astype(np.float32)
    rows[0, :, 5] = 1.5  # a channel that never changes
    coded = by_channel(rows, levels)
    for head, channel in np.ndindex(2, 48):
        np.testing.assert_allclose(
            coded[head, :, channel], rounded(rows[head, :, channel], levels), rtol=1e-5, atol=1e-6
        )
    coded = by_token(rows, levels)
    for head, token in np.ndindex(2, 8):
        for part in (slice(0, 32), slice(32, 48)):
            expected = rounded(rows[head, token, part], levels)
            np.testing.assert_allclose(coded[head, token, part], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", BITS)
def test_output_uses_codes_and_exact_unfinished_group(small_drive, name):
    """Over steps in which groups become full, of sequences of different lengths, one shorter than a group."""
    drive, levels = Drive(small_drive, [90, 40, 7]), (1 << BITS[name]) - 1
    for _ in range(20):
        drive.grow()
        step = drive.step()
        out, n = METHODS[name](step), step.view.layout.n
        for stream in range(step.streams):
            K, V = drive.stream(stream)
            for first in range(0, len(K) // n * n, n):
                part = slice(first, first + n)
                K[part] = by_channel(K[None, part].astype(np.float32), levels)[0]
                V[part] = by_token(V[None, part].astype(np.float32), levels)[0]
            q = step.q[stream].astype(np.float64)
            np.testing.assert_allclose(out[stream], reference.dense(q, K, V), rtol=1e-3, atol=1e-4)
            np.testing.assert_allclose(step.rows[stream], reference.dense_rows(q, K), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", BITS)
def test_read_bytes_are_codes_scales_and_zero_points(small_drive, name):
    """230 tokens: 14 full groups of 16 tokens on each of 2 heads, d = 16; the other 6 tokens are in DRAM."""
    step = Drive(small_drive, [230]).step()
    METHODS[name](step)
    n, codes = 16, 16 * D * BITS[name] // 8
    (plan,) = (item.plan for item in step.work if isinstance(item, Read))
    assert int(plan.useful.sum()) == 14 * H * (2 * codes + 4 * D + 4 * n)
    page = small_drive.geometry.page_bytes
    assert int(plan.nbytes.sum()) == H * page * -(-14 * group_bytes(n, D, BITS[name]) // page)
    assert [item.lines.tolist() for item in step.work if isinstance(item, Compute)] == [[230, 230]] * 2


def test_more_bits_lower_error(small_drive):
    drive = Drive(small_drive, [300])
    exact = METHODS["dense"](step := drive.step())
    errors = [np.abs(METHODS[name](drive.step(q=step.q)) - exact).max() for name in ("kivi", "kivi-2")]
    assert 0 < errors[0] < errors[1] / 2
