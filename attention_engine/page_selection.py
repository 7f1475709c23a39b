"""Selection of pages by the weights of their tokens, for `methods.progressive`.

Reading a refined page avoids the quantization error of its tokens. In units of a token's |V|^2, the error is the sum
of the squared weights of its tokens times the variance of a code of V and of a logit. Reading a group of value pages
avoids the replacement of its tokens by the mean of V. This error is at most the square of their weight, if their
values differ from the mean by the same amount.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attention_engine._exp import exp, exponentials, largest
from attention_engine._lanes import largest_of, squares_of, total_of
from attention_engine._parallel import over_streams
from attention_engine._rows import WIDTH
from attention_engine.refined import _address, progressive_form
from attention_engine.select import share_without_sink
from csd_io.compiled import njit
from csd_spec import KvSlotView
from csd_spec.arrays import F32, I32, I64, Bools
from csd_spec.view import BANK_SHIFT, UNMAPPED

VARIANCE = {2: 0.133, 4: 0.0116}  # error variance of a value by its bits, for values of variance 1


@dataclass(frozen=True, slots=True)
class Worth:
    """Value of pages, computed from weights.

    Attributes:
        rows: Largest logit and sum of e^(logit - largest) of each row, (N, G, 2).
        shares: Share of all weights, with sinks, of a weight of e^0, (N, G).
        errors: Squared low-precision error of the tokens of each refined page, for the worst query head, (N, pages).
        masses: Weight of the tokens of each value group, (N, G, groups).
    """

    rows: F32
    shares: F32
    errors: F32
    masses: F32


@dataclass(frozen=True, slots=True)
class Choice:
    """Pages to read.

    Attributes:
        tokens: Tokens (N, k) of refined pages, ascending.
        counts: Valid tokens of each stream, (N,).
        reads: Value groups to read, (N, groups).
        worth: Basis of the choice.
    """

    tokens: I32
    counts: I64
    reads: Bools
    worth: Worth


@njit(cache=True, nogil=True, error_model="numpy")
def _weigh_row(row, length, share, variance, form, errors, masses):  # type: ignore[no-untyped-def]
    """Compute the value of pages for a row of weights (S,).

    errors (pages,) gets the maximum of its previous value and the error of this row, masses (groups,) the weights.
    Pages with an error that is certainly below `least` are skipped.
    """
    n, per_group, least = form
    for group in range((length + per_group - 1) // per_group):
        first = group * per_group
        last = min(first + per_group, length)
        masses[group] = total_of(_address(row[first:]), last - first) * share
        most = largest_of(_address(row[first:]), last - first) * share
        if masses[group] * most * variance <= least:
            continue
        for page in range(first // n, (last + n - 1) // n):
            part = squares_of(_address(row[page * n :]), min(n, length - page * n)) * share * share
            errors[page] = max(errors[page], part * variance)


@njit(cache=True, nogil=True, error_model="numpy")
def _weigh_pages(begin, end, logits, seq_lens, form, sinks, variances, rows, shares, errors, masses):  # type: ignore[no-untyped-def]
    for stream in range(begin, end):
        length = seq_lens[stream]
        errors[stream], masses[stream] = 0, 0
        for query in range(logits.shape[1]):
            row, whole = logits[stream, query], length // WIDTH * WIDTH
            top = largest(_address(row), whole)
            for t in range(whole, length):
                top = max(top, row[t])
            total = exponentials(_address(row), whole, top)
            for t in range(whole, length):
                row[t] = exp(row[t] - top)
                total += row[t]
            rows[stream, query, 0], rows[stream, query, 1] = top, total
            share = np.float32(1) / total
            if sinks is not None:
                share *= share_without_sink(total, top, sinks[stream, query])
            shares[stream, query] = share
            _weigh_row(row, length, share, variances[stream, query], form, errors[stream], masses[stream, query])


def weigh_pages(
    logits: F32, seq_lens: I64, form: tuple[int, int, float], variances: F32, sinks: F32 | None = None, threads: int = 1
) -> Worth:
    """Replace logits (N, G, S) in place by e^(logit - largest), and sum them by page.

    Args:
        logits: Logits from scores; values after the end of a stream are ignored.
        seq_lens: Tokens of each stream, (N,).
        form: Tokens of a refined page, tokens of a group of value pages, and the error below which pages are skipped.
            If two pages share a group, half of this error may be treated as zero.
        variances: Error variance of a token's codes of keys and values, relative to its |V|^2, (N, G).
        sinks: Sink logits (N, G), which take a share of the weight.
        threads: Number of threads for the streams.
    """
    (N, G, _), longest, (n, per_group, least) = logits.shape, int(seq_lens.max()), form
    rows: F32 = np.empty((N, G, 2), np.float32)
    shares: F32 = np.empty((N, G), np.float32)
    errors: F32 = np.empty((N, -(-longest // n)), np.float32)
    masses: F32 = np.empty((N, G, -(-longest // per_group)), np.float32)
    sizes = n, per_group, np.float32(least)
    over_streams(_weigh_pages, threads, N, (logits, seq_lens, sizes, sinks, variances, rows, shares, errors, masses))
    return Worth(rows, shares, errors, masses)


@njit(cache=True, nogil=True)
def _mandatory_pages(slots, seq_lens, form, taken, stored):  # type: ignore[no-untyped-def]
    """Mark the refined pages (N, pages) that are always taken, and the pages in flash.

    A page is always taken if its tokens are in drive DRAM or have no low-precision page. slots: of refined pages, and
    of score and value groups.
    """
    (refined, scores, values), (n, T, per_group) = slots, form
    for stream in range(taken.shape[0]):
        scored, valued = 0, 0
        while scored < scores.shape[2] and scores[stream, 0, scored] != UNMAPPED:
            scored += 1
        while valued < values.shape[2] and values[stream, 0, valued] != UNMAPPED:
            valued += 1
        held = min(scored * T, valued * per_group)
        for page in range(taken.shape[1]):
            exists = page * n < seq_lens[stream]
            stored[stream, page] = exists and refined[stream, 0, page] >> np.uint32(BANK_SHIFT) == 0
            taken[stream, page] = exists and ((page + 1) * n > held or not stored[stream, page])


@njit(cache=True, nogil=True)
def find_light_groups(masses, share, least, spared):  # type: ignore[no-untyped-def]
    """Mark in `spared` the lightest groups (N, groups) whose total weight is at most `share` for all query heads.

    The square of the weight of each group must be below `least`. masses: (N, G, groups).
    """
    heaviest, left = np.empty(masses.shape[2], np.float32), np.float32(0)
    for stream in range(masses.shape[0]):
        heaviest[:] = 0
        for query in range(masses.shape[1]):
            for group in range(heaviest.size):
                heaviest[group] = max(heaviest[group], masses[stream, query, group])
        spared[stream], left = False, np.float32(0)
        for group in np.argsort(heaviest, kind="mergesort"):
            left += heaviest[group]
            if left > share:
                break
            spared[stream, group] = heaviest[group] * heaviest[group] < least


@njit(cache=True, nogil=True)
def drop_unaffordable(reads, costs, masses, left):  # type: ignore[no-untyped-def]
    """Drop the lightest groups (N, groups) until the cost of the others fits the budget; return the remaining budget.

    masses: (N, G, groups).
    """
    for stream in range(reads.shape[0]):
        for group in range(reads.shape[1]):
            left -= costs[stream, group] if reads[stream, group] else 0
    if left >= 0:
        return left
    where, weights, count = np.empty(reads.size, np.int64), np.empty(reads.size, np.float32), 0
    for stream in range(reads.shape[0]):
        for group in range(reads.shape[1]):
            if reads[stream, group] and costs[stream, group]:
                where[count], weights[count] = stream * reads.shape[1] + group, masses[stream, :, group].max()
                count += 1
    for i in np.argsort(weights[:count], kind="mergesort"):
        stream, group = where[i] // reads.shape[1], where[i] % reads.shape[1]
        reads[stream, group] = False
        left += costs[stream, group]
        if left >= 0:
            break
    return left


@njit(cache=True, nogil=True)
def _take_best(errors, stored, taken, least, left):  # type: ignore[no-untyped-def]
    """Take at most `left` pages (N, pages) in flash with the largest error above `least`; ties go to the first."""
    where, gains = np.empty(errors.size, np.int64), np.empty(errors.size, np.float32)
    count, pages = 0, errors.shape[1]
    for stream in range(errors.shape[0]):
        for page in range(pages):
            if errors[stream, page] > least and stored[stream, page] and not taken[stream, page]:
                where[count], gains[count] = stream * pages + page, -errors[stream, page]
                count += 1
    order = np.argsort(gains[:count], kind="mergesort") if count > left else np.arange(count)
    for i in order[: max(0, left)]:
        taken[where[i] // pages, where[i] % pages] = True


@njit(cache=True, nogil=True)
def tokens_of_pages(pages, seq_lens, n):  # type: ignore[no-untyped-def]
    """Return all tokens (N, k) of chosen pages (N, pages), ascending, and their number, (N,)."""
    most = 1
    for stream in range(pages.shape[0]):
        most = max(most, n * pages[stream].sum())
    tokens, counts = np.zeros((pages.shape[0], most), np.int32), np.zeros(pages.shape[0], np.int64)
    for stream in range(pages.shape[0]):
        for page in np.flatnonzero(pages[stream]):
            for t in range(page * n, min((page + 1) * n, seq_lens[stream])):
                tokens[stream, counts[stream]] = t
                counts[stream] += 1
    return tokens, counts


@njit(cache=True, nogil=True)
def _choose(worth, weights, slots, seq_lens, form, left, bounds):  # type: ignore[no-untyped-def]
    """Compute the choice of `spend`."""
    (shares, errors, masses), (n, _, per_group), (lost, least), values = worth, form, bounds, slots[2]
    taken, stored = np.empty(errors.shape, np.bool_), np.empty(errors.shape, np.bool_)
    _mandatory_pages(slots, seq_lens, form, taken, stored)
    for stream in range(taken.shape[0]):
        for page in range(taken.shape[1]):
            left -= taken[stream, page] and stored[stream, page]
    reads, spared = (
        np.empty((values.shape[0], values.shape[2]), np.bool_),
        np.empty((values.shape[0], values.shape[2]), np.bool_),
    )
    costs = np.empty(reads.shape, np.int64)
    find_light_groups(masses, lost, least, spared)
    for stream in range(reads.shape[0]):
        for group in range(reads.shape[1]):
            slot = values[stream, 0, group]
            costs[stream, group] = values.shape[1] if slot >> np.uint32(BANK_SHIFT) == 0 else 0
            free = costs[stream, group] == 0
            reads[stream, group] = slot != UNMAPPED and (free or not spared[stream, group])
    left = drop_unaffordable(reads, costs, masses, left)
    _take_best(errors, stored, taken, least, left)
    tokens, counts = tokens_of_pages(taken, seq_lens, n)
    if weights.size:
        for stream in range(masses.shape[0]):
            for query in range(masses.shape[1]):
                for i in range(counts[stream]):
                    t = tokens[stream, i]
                    masses[stream, query, t // per_group] -= weights[stream, query, t] * shares[stream, query]
        find_light_groups(masses, lost, least, spared)
    for stream in range(reads.shape[0]):
        for group in range(reads.shape[1]):
            if spared[stream, group] and costs[stream, group]:
                reads[stream, group] = False
    return tokens, counts, reads


def spend(view: KvSlotView, worth: Worth, weights: F32, left: int, lost: float, least: float) -> Choice:
    """Choose the refined pages with a gain above `least`, best first over all streams, and value pages for the rest.

    Tokens in drive DRAM cost nothing and are always attended. Tokens without a low-precision page are always attended,
    at any cost.

    Args:
        view: Slots of the pages.
        worth: Value of the pages; masses are reduced to those of tokens that are not chosen.
        weights: e^(logit - largest) of all tokens from their scores, (N, G, S); may be empty.
        left: Remaining budget in pages. Value groups have priority; if it is too small, the lightest groups of all
            streams are dropped.
        lost: Maximum share of the weight of a row in unread value groups, if the budget allows it.
        least: Minimum gain of a page.
    """
    form, maps = progressive_form(view), view.maps
    slots = maps["refined"], maps["scores"], maps["values"]
    sizes, bounds = (form.n, form.T, form.value_tokens), (np.float32(lost), np.float32(least))
    of_pages = worth.shares, worth.errors, worth.masses
    tokens, counts, reads = _choose(of_pages, weights, slots, view.seq_lens, sizes, left, bounds)
    return Choice(tokens, counts, reads, worth)
