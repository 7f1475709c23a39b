"""Choice of pages within a byte budget: weights per page, light groups, and the pages that a budget covers.

partner of: attention_engine/page_selection.py
"""

from dataclasses import replace

import numpy as np
import pytest

from attention_engine.coarse import score
from attention_engine.page_selection import drop_unaffordable, find_light_groups, spend, tokens_of_pages, weigh_pages
from attention_engine.select import softmax_scores
from csd_spec.view import in_flash
from tests.attention_engine.low_bit_drive import Drive

LENGTHS = np.array([150, 97, 12])
N, PER_GROUP = 31, 48


@pytest.fixture
def weighed():
    """Logits (3, 2, 150), variances, sinks, and the result of `weigh_pages`, with sinks or without."""
    generator = np.random.default_rng(0)
    logits = (3 * generator.standard_normal((3, 2, 150))).astype(np.float32)
    variances, sinks = generator.random((3, 2), np.float32), np.array([[2, -np.inf]] * 3, np.float32)
    copied = logits.copy()
    for row, length in zip(logits, LENGTHS, strict=True):
        row[:, length:] = np.nan  # never read
    return copied, logits, variances, sinks, weigh_pages(logits, LENGTHS, (N, PER_GROUP, 0), variances, sinks)


def test_weights_are_added_up_by_pages(weighed):
    logits, weights, variances, sinks, worth = weighed
    for stream, length in enumerate(LENGTHS):
        x = logits[stream, :, :length].astype(np.float64)
        top, sink = x.max(1, keepdims=True), np.exp(sinks[stream].astype(np.float64))[:, None]
        shares = np.exp(x) / (np.exp(x).sum(1, keepdims=True) + sink)
        np.testing.assert_allclose(weights[stream, :, :length], np.exp(x - top), rtol=1e-5)
        np.testing.assert_allclose(worth.rows[stream, :, 0], top[:, 0])
        np.testing.assert_allclose(worth.rows[stream, :, 1], np.exp(x - top).sum(1), rtol=1e-5)
        np.testing.assert_allclose(worth.shares[stream], shares.max(1), rtol=1e-5)
        for page in range(worth.errors.shape[1]):
            squares = (shares[:, page * N : (page + 1) * N] ** 2).sum(1) * variances[stream]
            np.testing.assert_allclose(worth.errors[stream, page], squares.max(), rtol=1e-5)
        for group in range(worth.masses.shape[2]):
            mass = shares[:, group * PER_GROUP : (group + 1) * PER_GROUP].sum(1)
            np.testing.assert_allclose(worth.masses[stream, :, group], mass, rtol=1e-5, atol=1e-7)


def test_lightest_groups_within_the_share_are_light():
    masses = np.array([[0.5, 0.02, 0.3, 0.01, 0.17], [0.2, 0.2, 0.2, 0.2, 0.2], [0.05, 0, 0.95, 0, 0]], np.float32)
    heads, spared = np.stack([masses, masses / 2], 1), np.empty(masses.shape, np.bool_)
    find_light_groups(heads, np.float32(0.05), 1, spared)
    np.testing.assert_array_equal(spared, [[0, 1, 0, 1, 0], [0] * 5, [1, 1, 0, 1, 1]])
    find_light_groups(heads, np.float32(0.05), 2e-4, spared)
    np.testing.assert_array_equal(spared, [[0, 0, 0, 1, 0], [0] * 5, [0, 1, 0, 1, 1]])
    find_light_groups(heads[:2], 0, 1, spared[:2])
    assert not spared[:2].any()


@pytest.mark.parametrize(
    ("left", "kept"),
    [
        (100, [1, 1, 0, 1, 1, 1]),
        (8, [1, 1, 0, 1, 1, 1]),
        (7, [1, 1, 0, 1, 0, 1]),
        (5, [1, 0, 0, 1, 0, 1]),
        (2, [1, 0, 0, 0, 0, 1]),
        (0, [0, 0, 0, 0, 0, 1]),
        (-3, [0, 0, 0, 0, 0, 1]),
    ],
)
def test_lightest_groups_dropped_at_end_of_budget(left, kept):
    """Rows in drive DRAM cost nothing, and are read however small their weight is."""
    reads = np.array([[1, 1, 0], [1, 1, 1]], np.bool_)
    costs = np.array([[2, 2, 2], [2, 2, 0]])
    masses = np.array([[0.9, 0.3, 0.8], [0.5, 0.2, 0.01]], np.float32)
    drop_unaffordable(reads, costs, masses[:, None], left)
    np.testing.assert_array_equal(reads.ravel(), kept)


def test_groups_of_equal_weight_dropped_in_order():
    reads = np.ones((2, 2), np.bool_)
    left = drop_unaffordable(reads, np.ones((2, 2), np.int64), np.full((2, 1, 2), 0.25, np.float32), 1)
    assert (reads.ravel().tolist(), left) == ([False, False, False, True], 0)


def test_tokens_of_pages_ascend_and_end_with_their_stream():
    pages = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 0]], np.bool_)
    tokens, counts = tokens_of_pages(pages, np.array([25, 30, 14]), 10)
    assert counts.tolist() == [15, 0, 4]
    assert tokens[0, :15].tolist() == [*range(10), *range(20, 25)] and tokens[2, :4].tolist() == [10, 11, 12, 13]


def chosen(step, left, lost=0.05, least=1e-5):
    form, (logits, variances) = step.view.layout.progressive, score(step.view, step.q)
    worth = weigh_pages(logits, step.seq_lens, (form.n, form.value_tokens, 0), variances + np.float32(0.1))
    copied = replace(worth, masses=worth.masses.copy())
    return spend(step.view, worth, logits, left, lost, least), copied, form


def test_masses_exclude_chosen_tokens():
    step = Drive(64, "progressive", [1200, 800], alone=3).step(2, sharp=3)
    form, (logits, variances) = step.view.layout.progressive, score(step.view, step.q)
    worth = weigh_pages(logits, step.seq_lens, (form.n, form.value_tokens, 0), variances)
    choice = spend(step.view, worth, logits, 20, 0.05, 1e-5)
    for stream, length in enumerate(step.seq_lens):
        weighted = logits[stream, :, :length] * worth.shares[stream, :, None]  # what lies after the end is not defined
        weighted[:, choice.tokens[stream, : choice.counts[stream]]] = 0
        for group in range(0, length, form.value_tokens):
            want = weighted[:, group : group + form.value_tokens].sum(1)
            np.testing.assert_allclose(worth.masses[stream, :, group // form.value_tokens], want, atol=1e-6)


def test_best_pages_of_all_streams_come_first():
    """By gain, within the budget that value groups leave; rows in drive DRAM are attended at no cost."""
    step = Drive(64, "progressive", [1200, 800], alone=3).step(2, sharp=3)
    refined = step.view.maps["refined"][:, 0]
    _, worth, form = chosen(step, 10**6)
    for left in (0, 20, 40, 60, 10**6):
        choice, _, _ = chosen(step, left)
        taken = np.zeros(worth.errors.shape, np.bool_)
        for stream, count in enumerate(choice.counts):
            taken[stream, np.unique(choice.tokens[stream, :count] // form.n)] = True
        exists = np.arange(taken.shape[1]) * form.n < step.seq_lens[:, None]
        stored = in_flash(refined)[:, : taken.shape[1]] & exists
        assert taken[exists & ~stored].all() and not taken[~exists].any()
        paid = int((taken & stored).sum()) + int((choice.reads & in_flash(step.view.maps["values"][:, 0])).sum())
        assert paid <= left
        gains, best = worth.errors[stored & ~taken], worth.errors[stored & taken]
        assert left == 10**6 or not best.size or best.min() >= gains.max()
        assert left < 10**6 or (gains <= 1e-5).all()


def test_tokens_without_codes_are_always_read():
    step = Drive(64, "progressive", [100, 700]).step(2)
    choice, _, form = chosen(step, 0)
    assert (choice.counts[:2] == 100).all() and not (choice.counts[2:] == 700).any()
    assert set(range(700 // form.n * form.n, 700)) <= set(choice.tokens[2, : choice.counts[2]].tolist())


def test_weights_of_pages_are_those_of_the_softmax():
    step = Drive(64, "progressive", [500]).step(1)
    logits = score(step.view, step.q)[0].copy()
    worth = weigh_pages(logits.copy(), step.seq_lens, (31, 31, 0), np.ones((2, 1), np.float32))
    softmax_scores(logits, step.seq_lens)
    pages = np.add.reduceat(logits[:, 0, :500], np.arange(0, 500, 31), axis=1)
    np.testing.assert_allclose(worth.masses[:, 0], pages, rtol=1e-4)
