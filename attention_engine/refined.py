"""Attention with 8-bit keys and values in refined pages (`csd_spec.progressive`).

A run is a range of adjacent tokens of one group: rows of codes, or FP16 or BF16 rows if the group is not full.
"""

from __future__ import annotations

import math

import numpy as np

from attention_engine._exp import exp
from attention_engine._lanes import squares_of
from attention_engine._parallel import over_streams
from attention_engine._rows import add_scaled, dot, prefetch, untagged_address
from attention_engine._runs import add_code_run, dot_codes, powers_of
from attention_engine.forms import RowRun, RunForm
from attention_engine.kernels import BLOCK, TokenSelection, _check_selection, _page, _place, _rescale
from attention_engine.logit_terms import apply_cap_and_bias
from csd_io.compiled import njit
from csd_spec import KvSlotView
from csd_spec.arrays import F32
from csd_spec.progressive import Progressive
from csd_spec.view import UNMAPPED


@njit(inline="always")
def _address(array):  # type: ignore[no-untyped-def]
    """Return the address of an array."""
    return np.uint64(array.ctypes.data)


@njit(inline="always")
def _four_rows(at, stride):  # type: ignore[no-untyped-def]
    """Return the addresses of four rows."""
    return at, at + stride, at + np.uint64(2) * stride, at + np.uint64(3) * stride


@njit(cache=True, nogil=True, error_model="numpy")
def _logits(q, scale, run, following, weights):  # type: ignore[no-untyped-def]
    """Compute the logits of the K rows of a run for q (G, d) into weights (G, ...), padded with -inf to full BLOCKs.

    run: `RowRun`. following: address and bytes of the data to prefetch.
    """
    (at, count, coded), (queries, d), each = run, q.shape, np.uint64(4 * q.shape[1])
    following_at, following_bytes = following
    part, together = (following_bytes + count - 1) // count, queries // 4 * 4 if coded else 0
    for i in range(count):
        prefetch((following_at + np.uint64(i * part),), part)
        row = at + np.uint64(i * d if coded else 2 * i * d)
        for first in range(0, together, 4):
            some = dot_codes(_four_rows(_address(q) + np.uint64(first) * each, each), row, d)
            for j in range(4):
                weights[first + j, i] = scale * some[j]
        for query in range(together, queries):
            one = _address(q) + np.uint64(query) * each
            weights[query, i] = scale * (dot_codes((one,), row, d)[0] if coded else dot(one, row, d))
    for query in range(queries):
        for i in range(count, (count + BLOCK - 1) // BLOCK * BLOCK):
            weights[query, i] = -np.inf


@njit(cache=True, nogil=True, error_model="numpy")
def _add_values(sums, weights, run, scales):  # type: ignore[no-untyped-def]
    """Add the weighted V rows of a run to sums (Q, d), with codes multiplied by scales (d,). run: see `_logits`."""
    (at, count, coded), (queries, d), first = run, sums.shape, 0
    each, width, scales_at = np.uint64(4 * d), np.uint64(4 * weights.shape[1]), _address(scales)
    while first < queries:
        s, w, left = (
            _address(sums) + np.uint64(first) * each,
            _address(weights) + np.uint64(first) * width,
            queries - first,
        )
        if not coded:
            for i in range(count):
                add_scaled(s, (weights[first, i],), (at + np.uint64(2 * i * d),), d)
            first += 1
        elif left >= 4:
            add_code_run(_four_rows(s, each), _four_rows(w, width), at, count, scales_at, d)
            first += 4
        else:
            add_code_run((s,), (w,), at, count, scales_at, d)
            first += 1


@njit(cache=True, nogil=True, error_model="numpy")
def _open_run(place, pages, slots, tokens, form, part, scales):  # type: ignore[no-untyped-def]
    """Return K (part 0) or V (the last part) of tokens [first, last) of one group as a run.

    scales (d,) is set to the channel scales, or to 1 if each token has a scale. form: `RunForm`.
    """
    (first, last), d, n, waiting = tokens, scales.size, form.n, form.waiting
    group, row = first // n, first % n
    if pages[group] == UNMAPPED:
        scales[:] = 1
        slot = slots[group * ((n + waiting - 1) // waiting) + row // waiting]
        return RowRun(_page(place, slot) + np.uint64(2 * (row % waiting) * d), last - first, False)
    at = untagged_address(_page(place, pages[group]))
    if part == 0:
        powers_of(_address(scales), at, d)
    else:
        scales[:] = 1
    return RowRun(at + np.uint64(form.header_bytes + (part * n + row) * d), last - first, True)


@njit(cache=True, nogil=True)
def _scale(q, scales, out):  # type: ignore[no-untyped-def]
    """Write q (G, d) times scales (d,) to `out`."""
    for query in range(q.shape[0]):
        for channel in range(q.shape[1]):
            out[query, channel] = q[query, channel] * scales[channel]


@njit(cache=True, nogil=True, error_model="numpy")
def score_rows(place, k_slots, pages, form, q, tokens, out):  # type: ignore[no-untyped-def]
    """Compute exact logits (G, S) of tokens [first, last) from their K rows, in 8 bits or unquantized."""
    (queries, d), (first, last), n, waiting = q.shape, tokens, form.n, form.waiting
    scales, keys = np.empty(d, np.float32), np.empty((queries, d), np.float32)
    weights = np.empty((queries, (n + BLOCK - 1) // BLOCK * BLOCK), np.float32)
    while first < last:
        end = min(last, (first // n + 1) * n, first + waiting - first % n % waiting)
        run = _open_run(place, pages, k_slots, (first, end), form, 0, scales)
        _scale(q, scales, keys)
        _logits(keys, np.float32(1 / math.sqrt(d)), run, (np.uint64(0), 0), weights)
        out[:, first:end] = weights[:, : end - first]
        first = end


@njit(inline="always")
def _run_end(tokens, first, length, n, waiting):  # type: ignore[no-untyped-def]
    """Return the end of the adjacent tokens of one group, or of one buffer of an incomplete group."""
    last = first + 1
    while last < length and tokens[last] == tokens[last - 1] + 1 and tokens[last] % n % waiting:
        last += 1
    return last


@njit(cache=True, nogil=True, error_model="numpy")
def _add_run(place, pages, slots, tokens, form, weights, scales, powers, sums, noise):  # type: ignore[no-untyped-def]
    """Add weighted V of tokens [first, last) of one group to sums (G, d), and the expected squared error to noise (G,).

    The square of a quantization step is 12 times the variance of its rounding error. weights (G, ...) are converted to
    weights of codes. scales (d,) and powers (n,) are scratch.
    """
    first, last = tokens
    run = _open_run(place, pages, slots, tokens, form, form.parts - 1, scales)
    if run.coded:
        if form.parts > 1:
            at = untagged_address(_page(place, pages[first // form.n])) + np.uint64(scales.size + first % form.n)
            powers_of(_address(powers), at, last - first)
            for query in range(weights.shape[0]):
                for i in range(last - first):
                    weights[query, i] *= powers[i]
        each, row = squares_of(_address(scales), scales.size) / np.float32(12), np.uint64(4 * weights.shape[1])
        for query in range(weights.shape[0]):
            noise[query] += squares_of(_address(weights) + np.uint64(query) * row, last - first) * each
    _add_values(sums, weights, run, scales)


@njit(cache=True, nogil=True, error_model="numpy")
def _attend_refined(begin, end, place, pages, slots, form, q, tokens, counts, logit_terms, out, rows, errors):  # type: ignore[no-untyped-def]
    """Compute attention of streams [begin, end), one run at a time: K is scored for all queries, then V is added.

    The page of the next run is prefetched.
    """
    (_, queries, d), n, waiting = q.shape, form.n, form.waiting
    scale, width = np.float32(1 / math.sqrt(d)), (n + BLOCK - 1) // BLOCK * BLOCK
    scales, keys, powers = np.empty(d, np.float32), np.empty((queries, d), np.float32), np.empty(n, np.float32)
    weights = np.ones((queries, width), np.float32)
    tops, totals = np.empty(queries, np.float32), np.empty(queries, np.float32)
    for stream in range(begin, end):
        sums, missed = out[stream], errors[stream]
        tops[:], totals[:], sums[:], missed[:] = -np.inf, 0, 0, 0
        chosen, groups, k_slots, v_slots = tokens[stream], pages[stream], slots[0][stream], slots[1][stream]
        queries_of_stream, length, first = q[stream], counts[stream], 0
        while first < length:
            last = _run_end(chosen, first, length, n, waiting)
            behind = groups[chosen[last] // n] if last < length else UNMAPPED
            following = _page(place, behind) if behind != UNMAPPED else np.uint64(0)
            size = np.int64(place.page_bytes) if behind != UNMAPPED else 0
            token_range = chosen[first], chosen[first] + (last - first)
            run = _open_run(place, groups, k_slots, token_range, form, 0, scales)
            _scale(queries_of_stream, scales, keys)
            _logits(keys, scale, run, (following, size), weights)
            for query in range(queries):
                if logit_terms is not None:
                    apply_cap_and_bias(weights[query], logit_terms[stream, query], chosen[first:last])
                before = tops[query]
                padded = (run.rows + BLOCK - 1) // BLOCK * BLOCK
                _rescale(_address(weights[query]), padded, tops, totals, query, sums[query])
                missed[query] *= exp(np.float32(2) * (before - tops[query]))
            _add_run(place, groups, v_slots, token_range, form, weights, scales, powers, sums, missed)
            first = last
        for query in range(queries):
            size = np.sqrt(squares_of(_address(sums[query]), d))
            missed[query] = np.sqrt(missed[query]) / size if size > 0 else np.float32(0)
            for channel in range(d):
                sums[query, channel] = sums[query, channel] / totals[query] if length else np.float32(0)
            rows[stream, query, 0], rows[stream, query, 1] = tops[query], totals[query]


def progressive_form(view: KvSlotView) -> Progressive:
    """Return the form of the layout's pages; raises ValueError if the layout has one precision only."""
    form = view.layout.progressive
    if form is None:
        raise ValueError("layout: stores no low-bit keys and values: use such a layout, for example progressive")
    return form


def run_form(form: Progressive) -> RunForm:
    """Return the format of the rows of a form's groups."""
    return RunForm(form.n, form.refined_header, form.parts, form.waiting)


def attend_refined(
    view: KvSlotView, q: F32, chosen: TokenSelection, logit_terms: F32 | None = None, threads: int = 1
) -> tuple[F32, F32, F32]:
    """Compute attention over some tokens, with 8-bit keys and values for full groups.

    Args:
        view: Pages of keys and values.
        q: Queries, (N, G, d) float32.
        chosen: Tokens (N, k), ascending, and valid tokens of each stream (N,).
        logit_terms: Logit terms of the model (`LogitTerms.logit_terms`).
        threads: Number of threads for the streams.

    Returns:
        The output, (N, G, d) float32; m and l of each row, (N, G, 2) float32, with m = -inf for a stream without
            tokens;
        and the expected error of each output from codes of V, relative to its norm, (N, G).
    """
    form = progressive_form(view)
    _check_selection(view, *chosen)
    out: F32 = np.empty(q.shape, np.float32)
    rows: F32 = np.empty((*q.shape[:2], 2), np.float32)
    errors: F32 = np.empty(q.shape[:2], np.float32)
    places = _place(view), view.maps["refined"][:, 0], (view.k_slots, view.v_slots), run_form(form)
    arguments = *places, np.ascontiguousarray(q), *chosen, logit_terms, out, rows, errors
    over_streams(_attend_refined, threads, q.shape[0], arguments)
    return out, rows, errors
