"""Every published method: exact with enough budget, within its budget, and independent of data that it has not read.

partner of: eval/accuracy/published/streams.py, eval/accuracy/published/tokens.py
"""

from dataclasses import replace

import numpy as np
import pytest

from tests.eval.accuracy.published.random_streams import dense, draw, error
from vcsd_eval.accuracy.published import PUBLISHED
from vcsd_eval.accuracy.published.tokens import MIN_TOKENS

TOLERANCE = 1.02
# bits of codes that a step reads for each channel of each prompt token, without any scale: a lower bound by hand
SCANNED = {"fier": 1, "rabitq": 1, "pariskv": 1, "pqcache": 12 / 64 / 4, "magicpig": 0}
SCANNED |= {"retroinfer": 1, "loki": 1}
EVICTING = ["snapkv", "keydiff"]
CODED = {"kvquant-3": 6, "kvquant-4": 8, "hadamard-int4": 8, "polarquant": 5.75}
CODED |= {f"turboquant-{prod}{bits}": 2 * bits for bits in (2, 3, 4) for prod in ("", "prod-")}
# methods that attend to all tokens in fewer bits, and bounds of their errors on the drawn data
DENSE_ERROR = {name: {"2": 0.45, "3": 0.25}.get(name[-1], 0.15) for name in CODED}
SELECTING = [name for name in PUBLISHED if name not in CODED]
EXACT = [name for name in SELECTING if name != "magicpig"]  # the full budget gives dense attention
BUDGETS = 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0


@pytest.mark.parametrize("name", EXACT)
def test_selecting_with_enough_budget_equals_dense(name):
    seen = draw()
    answer = PUBLISHED[name].method(seen, 2.0)
    assert answer.attended.all()
    assert error(answer.out, dense(seen)[0]) < 1e-5


@pytest.mark.parametrize("name", DENSE_ERROR)
def test_quantizing_is_close_to_dense(name):
    seen = draw()
    answer = PUBLISHED[name].method(seen, 1.0)
    assert answer.attended.all()
    assert 1e-5 < error(answer.out, dense(seen)[0]) < DENSE_ERROR[name]


@pytest.mark.parametrize("name", SELECTING)
def test_error_falls_with_budget(name):
    seen = draw(n=4)
    errors = [error(PUBLISHED[name].method(seen, budget).out, dense(seen)[0]) for budget in (1 / 8, 1 / 2, 2)]
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("shape", [(2, 3, 512, 64), (1, 1, 333, 96), (2, 8, 256, 128)])
def test_bytes_within_budget_and_above_lower_bound(name, shape):
    seen = draw(*shape)
    n, _, s, d = shape
    recent = 4 * d * (s - seen.prompt) * n
    for budget in BUDGETS:
        answer = PUBLISHED[name].method(seen, budget)
        attended = answer.attended if answer.attended.ndim == 2 else answer.attended.any(1)
        if name in SELECTING:
            least = SCANNED.get(name, 0) * n * seen.prompt * d / 8 + 4 * d * attended.sum()
            few = attended.sum() <= n * (MIN_TOKENS + s - seen.prompt)
            assert few or answer.nbytes <= TOLERANCE * budget * seen.dense_bytes
        else:
            least = CODED[name] * n * seen.prompt * d / 8 + recent
            assert not PUBLISHED[name].budgeted
        assert answer.nbytes >= least
        assert answer.out.shape == (n, shape[1], d)
        assert answer.out.dtype == np.float32


@pytest.mark.parametrize("name", PUBLISHED)
def test_step_ignores_unread_keys_and_values(name):
    """Once codes are built, other keys and values of prompt tokens that are not attended exactly change nothing."""
    seen = draw()
    before = PUBLISHED[name].method(seen, 1 / 4)
    exact = np.zeros(seen.k.shape[:2], bool)
    if name in SELECTING:
        exact = before.attended if before.attended.ndim == 2 else before.attended.any(1)
    exact[:, seen.prompt :] = True
    k, v = (np.where(exact[..., None], part, np.float32(7)) for part in (seen.k, seen.v))
    after = PUBLISHED[name].method(replace(seen, k=k, v=v), 1 / 4)
    np.testing.assert_array_equal(before.out, after.out)
    assert before.nbytes == after.nbytes


@pytest.mark.parametrize("name", PUBLISHED)
def test_recent_tokens_are_exact(name):
    """A recent token that has almost all of the weight is the output."""
    seen = draw()
    k, v = seen.k.copy(), seen.v.copy()
    k[:, -1] = 40 * seen.q[:, 0] / np.linalg.norm(seen.q[:, 0], axis=-1, keepdims=True)
    v[:, -1] = 3
    answer = PUBLISHED[name].method(replace(seen, k=k, v=v), 1 / 4)
    assert answer.attended[..., -1].all()
    np.testing.assert_allclose(answer.out[:, 0], 3, atol=0.02)


@pytest.mark.parametrize("name", [name for name in PUBLISHED if "kvquant" not in name])
def test_streams_do_not_mix(name):
    """A stream gives the same result alone and among others; KVQuant has joint signposts for all streams of a layer."""
    seen = draw(n=3)
    alone = replace(seen, **{part: getattr(seen, part)[1:2] for part in ("q", "k", "v", "prompt_q")}, kept={})
    together = PUBLISHED[name].method(seen, 1 / 4)
    single = PUBLISHED[name].method(alone, 1 / 4)
    np.testing.assert_array_equal(together.attended[1:2], single.attended)
    np.testing.assert_allclose(together.out[1:2], single.out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PUBLISHED)
def test_short_prompt_gives_finite_output(name):
    seen = draw(s=20, recent=1, window=8)
    answer = PUBLISHED[name].method(seen, 1 / 4)
    assert np.isfinite(answer.out).all()


def test_a_method_is_deterministic():
    first, second = ([each.method(draw(), 1 / 8).out for each in PUBLISHED.values()] for _ in range(2))
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", EVICTING)
def test_evicted_tokens_stay_evicted(name):
    """Later steps with more recent tokens attend to a subset of the prompt tokens of earlier ones."""
    last = draw(recent=12)
    before = None
    for recent in (1, 4, 8, 12):
        s = last.prompt + recent
        step = replace(last, k=last.k[:, :s], v=last.v[:, :s], q=np.roll(last.q, recent, 1))
        answer = PUBLISHED[name].method(step, 1 / 4)
        kept = answer.attended[:, : last.prompt]
        assert before is None or (kept <= before).all()
        assert answer.nbytes <= step.dense_bytes / 4
        before = kept


def test_every_method_has_a_category():
    assert set(PUBLISHED) == {*SCANNED, *EVICTING, *CODED}
    assert {name for name, each in PUBLISHED.items() if each.budgeted} == set(SELECTING)
