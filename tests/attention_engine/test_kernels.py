"""Kernels over scattered pages against Algorithm 1 in float64.

partner of: attention_engine/_half.py, attention_engine/_parallel.py, attention_engine/forms.py,
attention_engine/reference.py
"""

import multiprocessing
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_engine import (
    add_rows,
    approximate,
    attend,
    best_tokens,
    kernels,
    reference,
    selected_mass,
    softmax_scores,
    to_half,
    top_channels,
)
from attention_engine._parallel import over_streams
from attention_engine.values import widen
from csd_spec import LAYOUTS, KvSlotView
from csd_spec.view import UNMAPPED
from ftl.kv.layouts import channels_map
from tests.properties import examples
from tests.served import HANG_S

NAN = 0xFFFF


def layout_of(d, n, m, name="fp16"):
    """Pages of n tokens."""
    return LAYOUTS[name].paged(2 * d * n, d, m)


def view_of(K, V, n, m, generator, unfinished=False):
    """K and V of N streams in shuffled pages of two banks; unused bytes are NaN.

    unfinished: the last embedding group is not mapped.
    """
    streams, S, d = K.shape
    layout = layout_of(d, n, m)
    T, parts = layout.T, layout.embedding_pages
    groups, spans = -(-S // n), -(-S // T)
    total = streams * (2 * groups + spans * parts)
    banks = tuple(np.full((total, n * d), NAN, np.uint16) for _ in range(2))
    order = iter(generator.permutation(total))

    def place(values):
        slot = next(order)
        bank = int(generator.integers(2))
        banks[bank][slot, : values.size] = values.ravel()
        return np.uint32(slot | bank << 31)

    def token_slots(rows):
        return [[place(rows[s, g * n : (g + 1) * n]) for g in range(groups)] for s in range(streams)]

    def span(stream, part, index):
        page = np.full((m, T), NAN, np.uint16)
        block = K[stream, index * T : (index + 1) * T, part * m : (part + 1) * m].T
        page[: block.shape[0], : block.shape[1]] = block
        return place(page)

    K, V = K.view(np.uint16), V.view(np.uint16)
    e_slots = [[[span(s, p, g) for g in range(spans)] for p in range(parts)] for s in range(streams)]
    slots = (np.array(table, np.uint32) for table in (token_slots(K), token_slots(V), e_slots))
    k_slots, v_slots, e_slots = slots
    if unfinished:
        e_slots[:, :, -1] = UNMAPPED
    return KvSlotView(layout, banks, np.full(streams, S), k_slots, v_slots, e_slots)


def run_sparf(view, q, K, V, r, k, l, threads=1):  # noqa: E741
    streams, S, d = K.shape
    ones = np.full(streams, 1)
    v_sums = np.zeros((streams, d), np.float32)
    add_rows(v_sums, np.ascontiguousarray(V.view(np.uint16).transpose(1, 0, 2)))
    channels = top_channels(q, r, threads)
    logits = approximate(view, q, channels, threads)
    tokens = best_tokens(softmax_scores(logits, ones * S, threads=threads), ones * S, ones * k, ones * l, threads)
    alpha = selected_mass(logits, tokens, ones * k, threads)
    v_mean = v_sums / np.float32(S)
    out, rows = attend(view, q, (tokens, ones * k), alpha, v_mean, threads=threads)
    return out, channels, tokens, rows


def make(generator, streams, G, S, d, scale=1.0):
    q = (generator.standard_normal((streams, G, d)) * scale).astype(np.float16).astype(np.float32)
    K, V = (generator.standard_normal((streams, S, d)).astype(np.float16) for _ in range(2))
    return q, K, V


def relative_error(out, expected):
    return np.abs(out - expected).max() / np.abs(expected).max()


def same_weight(rows, expected):
    """m within FP32's error of a sum of d products, l * e^m within that of the exponent."""
    np.testing.assert_allclose(rows[:, 0], expected[:, 0], rtol=1e-5, atol=1e-5)
    weights = [np.log(pair[:, 1].astype(np.float64)) + pair[:, 0] for pair in (rows, expected)]
    np.testing.assert_allclose(*weights, rtol=1e-5, atol=2e-4)


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 2**32 - 1),
    G=st.sampled_from([1, 2, 4]),
    d=st.sampled_from([8, 20, 64, 80]),
    S=st.integers(1, 150),
    shape=st.sampled_from([(16, 4), (7, 2), (2, 2), (64, 8)]),
    data=st.data(),
)
def test_sparf_equals_the_oracle(seed, G, d, S, shape, data):
    r, k = data.draw(st.integers(1, d)), data.draw(st.integers(1, S))
    l = data.draw(st.integers(0, k))  # noqa: E741
    generator = np.random.default_rng(seed)
    q, K, V = make(generator, 2, G, S, d)
    n, m = shape
    out, channels, tokens, rows = run_sparf(view_of(K, V, n, m, generator), q, K, V, r, k, l)
    for stream in range(2):
        args = [x[stream].astype(np.float64) for x in (q, K, V)]
        expected, i, j = reference.sparf(*args, r, k, l)
        np.testing.assert_array_equal(channels[stream], i)
        np.testing.assert_array_equal(tokens[stream], j)
        assert relative_error(out[stream], expected) < 1e-4
        same_weight(rows[stream], reference.sparf_rows(args[0], args[1], r, k, l))


@pytest.mark.parametrize("scale", [0.01, 1, 30])
def test_sparf_with_all_selected_equals_dense(scale):
    generator = np.random.default_rng(0)
    q, K, V = make(generator, 3, 2, 200, 64, scale)
    out, _, _, rows = run_sparf(view_of(K, V, 32, 4, generator), q, K, V, 64, 200, 50)
    for stream in range(3):
        args = [x[stream].astype(np.float64) for x in (q, K, V)]
        assert relative_error(out[stream], reference.dense(*args)) < 1e-4
        same_weight(rows[stream], reference.dense_rows(*args[:2]))


def test_score_all_channels_gives_exact_weights():
    """Where scores are exact, the mean of V stands for just the weight that is left."""
    generator = np.random.default_rng(0)
    q, K, V = make(generator, 3, 2, 200, 64)
    view = view_of(K, V, 32, 4, generator)
    _, _, _, rows = run_sparf(view, q, K, V, 64, 20, 5)
    for stream in range(3):
        same_weight(rows[stream], reference.dense_rows(q[stream].astype(np.float64), K[stream].astype(np.float64)))


def test_rows_without_tokens_or_weight_have_l_zero():
    """Their outputs count for nothing in a merge."""
    generator = np.random.default_rng(0)
    q, K, V = make(generator, 2, 2, 40, 16)
    view, v_mean = view_of(K, V, 8, 4, generator), np.zeros((2, 16), np.float32)
    tokens = np.tile(np.arange(40, dtype=np.int32), (2, 1))
    alpha = np.array([[1, 1], [0, 1e-45]], np.float32)
    out, rows = attend(view, q, (tokens, np.array([0, 40])), alpha, v_mean)
    np.testing.assert_array_equal(rows[0], [[-np.inf, 0]] * 2)
    np.testing.assert_array_equal(rows[1, :, 1], 0)  # beyond FP32
    m = reference.dense_rows(*(x[1].astype(np.float64) for x in (q, K)))[:, 0]
    np.testing.assert_allclose(rows[1, :, 0], m, rtol=1e-5)
    assert np.isfinite(out[1]).all()


def peaked(generator, q, K):
    K[:, ::17] = (4 * np.sign(q[:, :1])).astype(np.float16)


def wide(generator, q, K):
    q *= np.float32(1000 / np.abs(np.einsum("ngd,nsd->ngs", q, K)).max() * np.sqrt(q.shape[2]))


def constant(generator, q, K):
    K[:] = np.float16(0.5)


def subnormal(generator, q, K):
    K[:] = (K * np.float16(6e-8)).astype(np.float16)
    q *= np.float32(1e-30)


def unchosen(generator, q, K):
    """The second query has nothing in the channels that the first chooses."""
    q[:, 0, 16:], q[:, 1, :16] = 0, 0
    q[:, 1] /= 64


@pytest.mark.parametrize("change", [peaked, wide, constant, subnormal, unchosen])
@pytest.mark.parametrize("S", [333, 2048])
def test_extreme_inputs_equal_reference(change, S):
    generator = np.random.default_rng(0)
    q, K, V = make(generator, 2, 2, S, 64)
    change(generator, q, K)
    view = view_of(K, V, 32, 4, generator)
    for r, k in ((8, S // 8), (64, S)):
        out, _, tokens, rows = run_sparf(view, q, K, V, r, k, k // 4)
        for stream in range(2):
            args = [x[stream].astype(np.float64) for x in (q, K, V)]
            expected, _, j = reference.sparf(*args, r, k, k // 4)
            np.testing.assert_array_equal(tokens[stream], j)
            assert relative_error(out[stream], expected) < 1e-3
            wanted = reference.sparf_rows(args[0], args[1], r, k, k // 4)
            np.testing.assert_allclose(rows[stream, :, 0], wanted[:, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_no_bit(threads):
    generator = np.random.default_rng(0)
    q, K, V = make(generator, 7, 2, 400, 64)
    view = view_of(K, V, 32, 4, generator)
    one, several = (run_sparf(view, q, K, V, 8, 50, 12, count) for count in (1, threads))
    for a, b in zip(one, several, strict=True):
        np.testing.assert_array_equal(a, b)


def test_page_size_changes_no_bit():
    generator = np.random.default_rng(0)
    q, K, V = make(generator, 2, 4, 300, 64)
    outs = [run_sparf(view_of(K, V, n, m, generator), q, K, V, 8, 40, 10)[0] for n, m in ((32, 4), (1, 2), (7, 8))]
    np.testing.assert_array_equal(outs[0], outs[1])
    np.testing.assert_array_equal(outs[0], outs[2])


def test_unselected_values_never_change_output():
    """Everything but the selected channels and tokens is poisoned after the selection is known."""
    generator = np.random.default_rng(0)
    q, K, V = make(generator, 1, 2, 120, 32)
    clean, channels, tokens, _ = run_sparf(view_of(K, V, 16, 4, generator), q, K, V, 8, 30, 7)
    K_tokens, V_tokens, K_channels = K.copy(), V.copy(), K.copy()
    other = np.setdiff1d(np.arange(120), tokens[0])
    K_tokens[:, other] = V_tokens[:, other] = np.nan
    K_channels[:, :, np.setdiff1d(np.arange(32), channels[0])] = np.nan
    by_token = view_of(K_tokens, V_tokens, 16, 4, generator)
    by_channel = view_of(K_channels, V, 16, 4, generator)
    one = np.array([1])
    logits = approximate(by_channel, q, channels)
    again = best_tokens(softmax_scores(logits, one * 120), one * 120, one * 30, one * 7)
    alpha = selected_mass(logits, again, one * 30)
    v_mean = V.astype(np.float32).mean(axis=1)
    out, _ = attend(by_token, q, (again, one * 30), alpha, v_mean)
    np.testing.assert_allclose(out, clean, rtol=1e-5, atol=1e-6)


def test_group_without_embedding_pages_uses_token_pages():
    generator = np.random.default_rng(0)
    q, K, V = make(generator, 2, 4, 300, 64)
    outs = [run_sparf(view_of(K, V, 7, 4, generator, missing), q, K, V, 8, 40, 10)[0] for missing in (False, True)]
    np.testing.assert_array_equal(outs[0], outs[1])


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(("bits", "m"), [(8, 8), (4, 8), (8, 40), (4, 40)])
def test_low_bit_scores_equal_dequantized_keys(bits, m, bf16):
    generator = np.random.default_rng(0)
    q, K, V = make(generator, 2, 4, 700, 40)
    K[:, 7] *= 100
    K[:, :, 9] = 3
    if bf16:
        K, q = to_half(K.astype(np.float32) * np.float32(2.0**40), True), q * np.float32(2.0**-40)
    layout = layout_of(40, 16, m, f"int{bits}{'-bf16' * bf16}")
    full = 700 // layout.T * layout.T
    mapped = channels_map(layout, 1, 2)
    packed = mapped.pack(np.ascontiguousarray(K[:, :full].transpose(1, 0, 2)).view(np.uint16))
    flash = np.full((packed.shape[0] * packed.shape[1], 16 * 40), NAN, np.uint16)
    flash[:, : packed.shape[2]] = packed.reshape(flash.shape[0], -1)
    exact = view_of(K, V, 16, 4, generator)
    exact = replace(exact, layout=replace(exact.layout, layout=LAYOUTS["bf16" if bf16 else "fp16"]))
    e_slots = np.arange(flash.shape[0], dtype=np.uint32).reshape(2, layout.embedding_pages, -1)
    view = KvSlotView(layout, (flash, exact.banks[1]), exact.seq_lens, exact.k_slots, exact.v_slots, e_slots)
    channels = np.array([[0, 1, 7, 8, 9, 30, 39], [2, 3, 4, 7, 9, 19, 38]], np.int32)
    whole = replace(exact, seq_lens=np.full(2, full))
    expected, out = approximate(whole, q, channels), approximate(replace(view, seq_lens=whole.seq_lens), q, channels)
    step = np.ptp(widen(K, bf16)[:, :full].astype(np.float64), axis=1)[:, None].max(-1) / (2**bits - 1)
    worst = np.take_along_axis(np.abs(q), np.broadcast_to(channels[:, None], (2, 4, 7)), 2).sum(-1) * step / 2
    assert (np.abs(out - expected).max(-1) < worst).all()
    assert np.abs(out - expected).max() > 0


def test_moving_tokens_between_pages_does_not_change_the_output():
    generator = np.random.default_rng(0)
    q, K, V = make(generator, 1, 1, 100, 32)
    order = np.concatenate([generator.permutation(92), np.arange(92, 100)])
    outs = [
        run_sparf(view_of(k, v, 16, 4, generator), q, k, v, 8, 32, 8)[0]
        for k, v in ((K, V), (np.ascontiguousarray(K[:, order]), np.ascontiguousarray(V[:, order])))
    ]
    np.testing.assert_allclose(outs[0], outs[1], rtol=1e-4, atol=1e-5)


def test_zero_query_outputs_mean_of_v():
    generator = np.random.default_rng(0)
    q, K, V = make(generator, 1, 1, 64, 16)
    out, *_ = run_sparf(view_of(K, V, 8, 4, generator), 0 * q, K, V, 4, 64, 16)
    assert relative_error(out[0], V.astype(np.float64).mean(axis=1)) < 1e-4


def test_rows_are_added_in_token_order():
    values = np.array([60000, 1e-3, -60000, 1e-3], np.float16)
    sums = np.zeros((1, 1), np.float32)
    add_rows(sums, values.view(np.uint16).reshape(4, 1, 1))
    expected = np.float32(0)
    for value in values:
        expected += np.float32(value)
    assert sums[0, 0] == expected


def test_forked_process_uses_its_own_kernel_threads():
    arguments = (lambda begin, end: None, 2, 8, ())
    over_streams(*arguments)
    child = multiprocessing.get_context("fork").Process(target=over_streams, args=arguments)
    child.start()
    child.join(HANG_S)
    child.kill()
    assert child.exitcode == 0


@pytest.mark.parametrize(
    ("flash", "dram"),
    [
        (np.zeros((4, 8), np.uint16), np.zeros((2, 16), np.uint16)),
        (np.zeros((4, 16), np.uint16)[:, ::2], np.zeros((2, 8), np.uint16)),
        (np.zeros((4, 8), np.uint16), np.zeros((4, 8), np.uint16)[::2]),
    ],
)
def test_banks_are_contiguous_pages_of_one_size(flash, dram):
    rows = SimpleNamespace(tag=0, name="fp16")
    view = SimpleNamespace(banks=(flash, dram), kept={}, layout=SimpleNamespace(rows=rows, row_bytes=4))
    with pytest.raises(ValueError, match="pages of one size"):
        kernels._place(view)
    view.banks = np.ascontiguousarray(flash[:, :8]), np.ascontiguousarray(dram[:, :8])
    assert int(kernels._place(view)[2]) == 16
