"""Attention over 8-bit keys and values, and over rows buffered in drive DRAM.

partner of: attention_engine/refined.py
"""

import numpy as np
import pytest

from attention_engine import METHODS, Read, reference
from attention_engine.refined import attend_refined, progressive_form
from tests.attention_engine.low_bit_drive import Drive, H

KINDS = pytest.mark.parametrize("bf16", [False, True])


def dense_attends(d, layout, tokens, alone, G=2):
    drive = Drive(d, layout, [tokens], alone=alone)
    step = drive.step(G)
    out = METHODS["dense"](step)
    for head in range(H):
        K, V = drive.stream(head)
        expected = reference.dense(step.q[head].astype(np.float64), K, V)
        np.testing.assert_allclose(out[head], expected, atol=2e-6 * np.abs(V).max())
        m, total = reference.dense_rows(step.q[head].astype(np.float64), K).T
        np.testing.assert_allclose(step.rows[head], np.stack([m, total], 1), rtol=1e-5, atol=1e-5)
    return step


@KINDS
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("tokens", "alone"), [(61, 0), (500, 30), (31 * 8, 3)])
def test_dense_attends_to_stored_rows(tokens, alone, exact, bf16):
    dense_attends(64, f"progressive{'-bf16' * bf16}{'-exact' * exact}", tokens, alone)


@pytest.mark.parametrize("G", range(1, 9))
def test_any_number_of_queries_is_attended(G):
    dense_attends(80, "progressive4", 130, 2, G)


@KINDS
@pytest.mark.parametrize(("d", "tokens"), [(64, 300), (144, 100), (576, 80)])
def test_latent_rows_are_read_once_for_k_and_v(d, tokens, bf16):
    """And a token costs one row of 8 bits."""
    step = dense_attends(d, f"progressive{'-bf16' * bf16}-latent", tokens, 5)
    (read,) = (item.plan for item in step.work if isinstance(item, Read))
    n = step.view.layout.n
    assert n == 4096 // d - 1 and read.ppns.size == H * (tokens // n)
    assert int(read.useful.sum()) == H * (tokens // n * n) * d


@KINDS
def test_attended_tokens_equal_chosen_tokens(bf16):
    """In runs and alone, over pages and buffered rows; a stream may have none. The number of threads changes no bit."""
    drive = Drive(64, f"progressive{'-bf16' * bf16}", [400, 300, 50], alone=5)
    step, generator = drive.step(5), np.random.default_rng(0)
    counts = np.array([200, 120, 80, 1, 40, 0])
    tokens = np.zeros((6, 200), np.int32)
    for row, count, length in zip(tokens, counts, step.seq_lens, strict=True):
        row[:count] = np.sort(generator.permutation(int(length))[:count])
    step.pages.refined_pages(step.view, tokens, counts)
    out, rows, errors = attend_refined(step.view, step.q, (tokens, counts))
    for stream in range(5):
        K, V = (rows_[tokens[stream, : counts[stream]]] for rows_ in drive.stream(stream))
        expected = reference.dense(step.q[stream].astype(np.float64), K, V)
        np.testing.assert_allclose(out[stream], expected, atol=2e-6 * np.abs(V).max())
    assert (out[5] == 0).all() and (rows[5, :, 0] == -np.inf).all() and (rows[5, :, 1] == 0).all()
    for got, wanted in zip(
        attend_refined(step.view, step.q, (tokens, counts), threads=3), (out, rows, errors), strict=True
    ):
        np.testing.assert_array_equal(got, wanted)


@KINDS
def test_code_error_matches_estimate(bf16):
    """For V in full groups; also if tokens that are small in all channels have most of the weight."""
    drive = Drive(64, f"progressive{'-bf16' * bf16}", [31 * 16], small=4)
    step = drive.step(8)
    for head in range(H):
        sinks = drive.stream(head)[0][:4]
        step.q[head, ::2] = 40 * sinks.sum(0) / (sinks**2).sum()
    out = METHODS["dense"](step)
    for head in range(H):
        K, V = drive.stream(head)[0], drive.came[0][:, head]
        missed = np.linalg.norm(out[head] - reference.dense(step.q[head].astype(np.float64), K, V), axis=-1)
        shares = missed / np.linalg.norm(out[head], axis=-1) / step.errors[head]
        assert (shares > 0.4).all() and (shares < 2.5).all(), shares


def test_layout_of_one_precision_is_refused():
    with pytest.raises(ValueError, match="layout: stores no low-bit keys and values"):
        progressive_form(Drive(64, "fp16", [20]).step(1).view)
