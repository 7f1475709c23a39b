"""Logits and sums computed directly from low-bit codes: equal to the decoded values, within the rounding of int8
factors.

partner of: attention_engine/coarse.py, attention_engine/_digits.py, attention_engine/_lanes.py,
attention_engine/_weights.py
"""

import numpy as np
import pytest

from attention_engine.coarse import ENERGY, NOISE, Scores, attend_coarse, score
from ftl.kv.layouts.codes import to_fp32
from tests.attention_engine.low_bit_drive import Drive, H, digits_of, in_few_bits, pages_of

KINDS = pytest.mark.parametrize("bf16", [False, True])
SHAPES = [
    (64, 1, "progressive", 700),
    (64, 4, "progressive4", 500),
    (80, 2, "progressive", 300),
    (96, 3, "progressive4", 260),
    (128, 5, "progressive", 300),
    (128, 8, "progressive4", 230),
    (256, 7, "progressive", 230),
    (576, 6, "progressive", 250),
    (576, 8, "progressive4", 200),
]


def layout_of(name, d, bf16):
    return f"{name}{'-bf16' * bf16}{'-latent' * (d == 576)}"


@pytest.mark.parametrize(("d", "G", "name", "tokens"), SHAPES)
@KINDS
def test_scores_equal_logits_of_codes(d, G, name, tokens, bf16):
    """q times K by its codes, less half of the variance; within half a unit times a digit, and at random 3.5 / 12."""
    step = Drive(d, layout_of(name, d, bf16), [tokens], alone=3).step(G)
    logits, T, root = step.score(), step.view.layout.progressive.T, np.sqrt(d)
    errors, typical = [], []
    for stream in range(H):
        K, variances, held = in_few_bits(step, "scores", stream), np.zeros(G), 0
        for group, units, variance, used in digits_of(step, stream):
            of_group = slice(group * T, min((group + 1) * T, tokens))
            expected = step.q[stream].astype(np.float64) @ K[of_group].T / root - variance[:, None] / 2
            error = logits[stream, :, of_group] - expected
            bound = (units * (1.5 * used + 3)).sum(1, keepdims=True) + d * 2.0**-21 / root + 3e-6 * np.abs(expected)
            assert (np.abs(error) <= bound + 2e-5).all()
            errors.append((error**2).mean(1))
            typical.append((units**2 * used).sum(1) * 3.5 / 12)
            variances += variance * error.shape[1]
            held += error.shape[1]
        assert held >= T
        np.testing.assert_allclose(step.variances[stream], variances / tokens, rtol=1e-4)
    assert np.mean(errors) <= 1.3 * np.mean(typical)


@pytest.mark.parametrize(("d", "name"), [(64, "progressive"), (96, "progressive4"), (576, "progressive")])
@KINDS
def test_tokens_without_codes_have_exact_scores(d, name, bf16):
    drive = Drive(d, layout_of(name, d, bf16), [60])
    step = drive.step(5)
    logits = step.score()
    for stream in range(H):
        exact = step.q[stream].astype(np.float64) @ drive.stream(stream)[0].T / np.sqrt(d)
        np.testing.assert_allclose(logits[stream], exact, rtol=1e-5, atol=1e-5)
    assert (step.variances == 0).all()


@pytest.mark.parametrize("d", [64, 576])
@KINDS
def test_number_of_threads_changes_no_bit_of_scores(d, bf16):
    step = Drive(d, layout_of("progressive", d, bf16), [300, 190, 20]).step(6)
    one, variances = (array.copy() for array in score(step.view, step.q, 1))
    many, others = score(step.view, step.q, 3)
    for stream, length in enumerate(step.seq_lens):
        np.testing.assert_array_equal(many[stream, :, :length], one[stream, :, :length])
    np.testing.assert_array_equal(others, variances)


@pytest.mark.parametrize("G", range(2, 9))
def test_queries_together_score_as_each_alone(G):
    step = Drive(64, "progressive", [400]).step(G)
    together = score(step.view, step.q)[0].copy()
    for query in range(G):
        alone = score(step.view, np.ascontiguousarray(step.q[:, query : query + 1]))[0]
        np.testing.assert_array_equal(alone[:, 0, :400], together[:, query, :400])


def attended(step, weights, reads):
    """Output, rows, `lost` and `errors` of all tokens by their weights, with no token chosen."""
    (N, G, d), nothing = step.q.shape, np.zeros(step.streams, np.int64)
    out, rows = np.zeros((N, G, d), np.float32), np.zeros((N, G, 2), np.float32)
    rows[:, :, 0] = -np.inf
    scores = Scores(weights.copy(), np.zeros((N, G), np.float32), np.full((N, G), 0.25, np.float32))
    lost, errors = attend_coarse(
        step.view,
        (out, rows, np.zeros((N, G), np.float32)),
        (np.zeros((N, 1), np.int32), nothing, reads),
        scores,
        step.v_mean,
    )
    return out, rows, lost, errors


def random_weights(step):
    """Weights of all tokens, few of them large; and the groups to read: all but every third one and the last one."""
    generator, groups = np.random.default_rng(0), step.view.maps["values"].shape[2]
    weights = np.exp(3 * generator.standard_normal((*step.q.shape[:2], int(step.seq_lens.max()))) - 9)
    return weights.clip(0, 1).astype(np.float32), np.arange(groups)[None] % 3 + np.zeros((step.streams, 1)) != 1


def model(step, weights, reads, stream):
    """Float64 model of each query: the output, the sum of weights, the weight that was not read, the length of the
    rounding error, and that of the likely error of the codes.
    """
    V, form = in_few_bits(step, "values", stream), step.view.layout.progressive
    w, T = weights[stream, :, : len(V)].astype(np.float64) * ~np.isnan(V[:, 0]), form.value_tokens
    read = reads[stream, np.arange(len(V)) // T]
    V = np.where(read[:, None], np.nan_to_num(V), step.v_mean[stream])
    (rounding, squares), energy = np.zeros((2, len(w))), ENERGY[form.v_bits // 4]
    for group, pages in pages_of(step, "values", stream):
        group_weights = w[:, group * T : (group + 1) * T]
        for page in pages if reads[stream, group] else ():
            products = group_weights * to_fp32(page.view(np.uint16)[: group_weights.shape[1]], form.bf16)
            rounding += (products.max(1) / 127) ** 2 * group_weights.shape[1] / 6 * form.m * 1.2 * energy
            squares += (products**2).sum(1) * form.m * (NOISE[form.v_bits // 4] + 0.25 * energy)
    total = w.sum(1)
    return (w @ V) / total[:, None], total, (w * ~read).sum(1), np.sqrt(rounding) / total, np.sqrt(squares) / total


@pytest.mark.parametrize(("d", "G", "name", "tokens"), SHAPES)
@KINDS
def test_value_sums_equal_weighted_codes(d, G, name, tokens, bf16):
    """A unit of weight x size is 1 / 127 of the largest in a page; carrying makes twice the variance of rounding."""
    step = Drive(d, layout_of(name, d, bf16), [tokens, tokens // 2], alone=3).step(G)
    weights, reads = random_weights(step)
    (out, rows, lost, errors), shares = attended(step, weights, reads), []
    for stream in range(step.streams):
        expected, total, left, rounding, missed = model(step, weights, reads, stream)
        shares += [np.linalg.norm(out[stream] - expected, axis=1) / rounding]
        np.testing.assert_allclose(rows[stream], np.stack([np.zeros(G), total], 1), rtol=2e-6)
        np.testing.assert_allclose(lost[stream], left / total, rtol=1e-4, atol=1e-7)
        np.testing.assert_allclose(errors[stream] * np.linalg.norm(out[stream], axis=1), missed, rtol=1e-3)
    assert np.max(shares) < 2.5 and np.sqrt(np.mean(np.square(shares))) < 1.3


@pytest.mark.parametrize("length", [400, 350, 230])
def test_cropped_pages_keep_scores_and_sums(length):
    """Also if the crop has left a part of a full page, which has rests."""
    drive = Drive(64, "progressive-exact", [460])
    before = in_few_bits(drive.step(2), "values", 0)
    drive.crop(length)
    step = drive.step(2)
    V = in_few_bits(step, "values", 0)
    np.testing.assert_allclose(V, np.where(np.isnan(V), V, before[:length]), atol=1e-6)
    weights, reads = random_weights(step)
    expected, _, _, rounding, _ = model(step, weights, reads, 0)
    assert (np.linalg.norm(attended(step, weights, reads)[0][0] - expected, axis=1) < 2.5 * rounding).all()


def test_small_weights_are_carried_not_lost():
    """A thousand tokens that weigh a five-hundredth of one: each is below a half of a unit."""
    step = Drive(64, "progressive4", [1000]).step(1)
    weights = np.full((H, 1, 1000), 1 / 500, np.float32)
    weights[:, :, ::112] = 1
    out = attended(step, weights, np.ones((H, step.view.maps["values"].shape[2]), np.bool_))[0]
    for stream in range(H):
        V = in_few_bits(step, "values", stream)
        w = weights[stream, 0].astype(np.float64) * ~np.isnan(V[:, 0])
        exact, small = (each @ np.nan_to_num(V) / w.sum() for each in (w, np.where(w == 1, 0, w)))
        assert np.linalg.norm(out[stream, 0] - exact) < 0.3 * np.linalg.norm(small)


@pytest.mark.parametrize("exponent", [-149, -126, -99])
def test_subnormal_weights_change_no_sum(exponent):
    """1 / 127 of such a weight is not an FP32 number, in all groups but the first."""
    step = Drive(64, "progressive", [1000]).step(3)
    weights, reads = random_weights(step)
    reads[:] = True
    weights[:, :, step.view.layout.progressive.value_tokens :] = 0
    expected = attended(step, weights, reads)[0]
    weights[:, :, -400::3] = np.ldexp(np.float32(1), exponent)
    np.testing.assert_allclose(attended(step, weights, reads)[0], expected, atol=1e-7)
