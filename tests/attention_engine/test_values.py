"""FP16 values in and out: sums in token order, and what is no number is found."""

import numpy as np
import pytest

from attention_engine import add_rows, all_finite, take_in, to_half


def some(generator, *shape):
    return generator.standard_normal(shape).astype(np.float16)


@pytest.mark.parametrize("B", [1, 3])
def test_what_a_step_begins_with(B):
    """q widened, a token added to the sums, and means, as numpy has them."""
    generator, H, G, d = np.random.default_rng(B), 2, 3, 8
    q, v = some(generator, B, H, G, d), some(generator, B, H, d)
    before = generator.standard_normal((B * H, d)).astype(np.float32)
    seq_lens, sums = np.arange(1, B * H + 1), before.copy()
    wide, means = take_in(q, v, seq_lens, sums)
    assert wide.dtype == np.float32 and (wide == q.reshape(B * H, G, d)).all()
    assert (sums == before + v.reshape(B * H, d).astype(np.float32)).all()
    assert (means == np.divide(sums, seq_lens[:, None], dtype=np.float32)).all()


def test_a_token_is_added_as_rows_are():
    generator = np.random.default_rng(0)
    q, v = some(generator, 1, 2, 1, 8), some(generator, 1, 2, 8)
    one, other = (generator.standard_normal((2, 8)).astype(np.float32) for _ in "ab")
    other[:] = one
    take_in(q, v, np.array([5, 5]), one)
    add_rows(other, v.view(np.uint16))
    assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan])
def test_what_is_no_number_is_found(wrong):
    for shape in ((7,), (2, 3), (2, 3, 4, 5)):
        values = np.full(shape, 65504, np.float16)
        assert all_finite(values) and all_finite(values.astype(np.float32))
        values[(-1,) * len(shape)] = wrong
        assert not all_finite(values) and not all_finite(values.astype(np.float32))
        with pytest.raises(FloatingPointError):
            to_half(values.astype(np.float32))


def test_halves_are_the_nearest():
    values = np.array([1 + 2**-11, 1 + 3 * 2**-11, 65519, 2**-25, -0.0], np.float32)
    assert to_half(values).tobytes() == values.astype(np.float16).tobytes()
