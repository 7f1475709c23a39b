"""Interface between a method and a drive in one decode step: page reads and unit work, recorded in order.

A method is a function from a `DecodeStep` to the attention output. It has no clock: the caller computes the timing from
the `work` of the step afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from attention_engine.arithmetic import Arithmetic
from attention_engine.coarse import Scores
from attention_engine.logit_terms import LogitTerms
from attention_engine.page_selection import VARIANCE, Choice, spend
from attention_engine.pages import Pages
from attention_engine.refined import progressive_form
from attention_engine.select import GroupScore
from attention_engine.values import first_tokens, to_half, widen
from csd_spec import KvSlotView, SparFParams
from csd_spec.arrays import F32, I32, I64, U32
from csd_spec.model import FP16_BYTES
from csd_spec.view import UNMAPPED, gather_rows

Memory = dict[str, Any]
WORTH_THREADS = 1 << 14  # tokens of all streams, about 1 ms of dense attention: threads cost more for less work


@dataclass(frozen=True, slots=True)
class Read:
    """Pages that a step waits for. The read can start after the end of the last argtopk before it."""

    unit: str
    plan: Any


@dataclass(frozen=True, slots=True)
class Compute:
    """Work of one unit: `lines` of `length` values for each stream and query. It starts after all previous work."""

    unit: str
    job: Literal["argtopk", "kernel"]
    lines: I64  # (N,)
    length: I64 | int  # (N,), or the same for all
    queries: int
    scores: I64  # (N,): concurrent softmax inputs of each query


@dataclass(frozen=True, slots=True)
class Queries:
    """Queries of one layer: one token for each of B sequences, N = B * H streams with G query heads each.

    r, top_k, recent: SparF parameters. memory: state of the methods between steps, for each sequence. terms: (H, G, 4)
    as in `csd_spec.Attend`.
    """

    q: F32  # (N, G, d)
    r: int
    top_k: I64  # (N,)
    recent: I64  # (N,)
    v_mean: F32  # (N, d)
    memory: Sequence[Memory]
    terms: F32 | None = None

    def __post_init__(self) -> None:
        streams, _, d = self.q.shape
        assert self.top_k.shape == self.recent.shape == (streams,) and self.v_mean.shape == (streams, d)
        assert streams % len(self.memory) == 0, f"{streams} streams of {len(self.memory)} sequences"

    @classmethod
    def uniform(cls, q: F32, params: SparFParams, v_mean: F32, memory: Sequence[Memory]) -> Queries:
        """Return queries for sequences with the same parameters."""
        ones = np.ones(q.shape[0], np.int64)
        return cls(q, params.r, params.k * ones, params.l * ones, v_mean, memory)


class DecodeStep:
    """One decode step of one layer. For all methods, `budget_bytes` (N,) is the number of bytes that SparF would use.

    The fields of `Queries` and `KvSlotView` have the same names here.
    """

    def __init__(
        self, view: KvSlotView, pages: Pages, queries: Queries, threads: int = 1, arithmetic: Arithmetic | None = None
    ) -> None:
        self.do = arithmetic or Arithmetic()
        self.view, self.pages = view, pages
        self.threads = threads if threads == 1 or int(view.seq_lens.sum()) >= WORTH_THREADS else 1
        self.q, self.v_mean, self.memory, self.terms = queries.q, queries.v_mean, queries.memory, None
        if queries.terms is not None:
            self.terms = LogitTerms.of(queries.terms, view.seq_lens, self.q.shape[2])
            self.q = self.q * self.terms.factors
        self.r, self.top_k, self.recent = queries.r, queries.top_k, queries.recent
        self.seq_lens = view.seq_lens
        self.streams, self.queries, self.head_dim = self.q.shape
        assert view.k_slots.shape[0] in (self.streams, 0) and self.seq_lens.shape == (self.streams,)
        self._none: I64 = np.zeros(self.streams, np.int64)
        self.each: I64 = self._none + 1  # one for each stream
        self.work: list[Read | Compute] = []
        self.byte_addressable = False  # whether selected bytes can be fetched without the rest of their pages
        self.chosen: tuple[I32, I64] | None = None  # attended tokens (N, k) and their numbers (N,)
        self.alpha: F32 = np.empty(self.q.shape[:2], np.float32)  # the weight of the attended tokens
        self.alpha.fill(1)
        self.lost: F32 = np.zeros(self.q.shape[:2], np.float32)  # the weight that the mean of V represents
        self.errors, self.variances = np.zeros_like(self.lost), np.zeros_like(self.lost)  # see `attend_coarse`, `score`
        self.rows: F32 = np.zeros((*self.q.shape[:2], 2), np.float32)  # m and l of the output
        self._scored: I32 | None = None

    @property
    def budget_bytes(self) -> I64:
        """Return the bytes (N,) of r channels of all tokens and of top_k rows of keys and values."""
        nbytes: I64 = 2 * self.r * self.seq_lens + self._row_bytes * self.top_k
        return nbytes

    @property
    def _row_bytes(self) -> int:
        """Return the bytes of the rows of a token: a row of K and a row of V, or one row if V is a part of K."""
        nbytes: int = FP16_BYTES * self.head_dim
        return nbytes if self.view.layout.latent else 2 * nbytes

    def rows_for(self, nbytes: I64) -> I64:
        """Return the number of rows (N,) of keys and values for a number of bytes, at least one and at most all."""
        rows: I64 = nbytes // self._row_bytes
        return rows.clip(1, self.seq_lens)

    @property
    def fetched_bytes(self) -> I64:
        """Return the bytes (N,) that have crossed the channels so far."""
        return self._by_stream("nbytes")

    @property
    def useful_bytes(self) -> I64:
        """Return the bytes (N,) that have passed the filters so far."""
        return self._by_stream("useful")

    def _by_stream(self, column: str) -> I64:
        total: I64 = np.zeros(self.streams, np.int64)
        for plan in (item.plan for item in self.work if isinstance(item, Read)):
            until = np.concatenate([[0], np.cumsum(getattr(plan, column))])[plan.ends]
            total += np.diff(until, prepend=0).reshape(self.streams, -1).sum(1)  # a query head may have separate reads
        return total

    def top_channels(self, r: int) -> I32:
        """Return the r channels (N, r) with the largest |q| of the query group."""
        self.compute("argtopk", "argtopk", self.each, self.head_dim)
        return self.do.top_channels(self.q, r, self.threads)

    def scoring_channels(self, share: float | None = None) -> I32:
        """Return the channels (N, r) for scores: the best r, or within a share of the budget if m = d."""
        layout, d = self.view.layout, self.head_dim
        if layout.m != d:
            return self.top_channels(self.r)
        if share is not None:
            paid = int((share * self.budget_bytes * 8 // (layout.bits * self.seq_lens)).min())
            if paid < d:
                return self.top_channels(max(1, paid))
        return np.tile(np.arange(d, dtype=np.int32), (self.streams, 1))

    def approximate(self, channels: I32) -> F32:
        """Return logits (N, G, S) from channels (N, r) of the embedding-indexed copy of K."""
        self._need_rows()
        self.read("flash_embed", self.pages.embedding_pages(self.view, channels))
        self.compute("logit0", "kernel", channels.shape[1] * self.each, self.seq_lens, self.seq_lens)
        return self.bend(self.do.approximate(self.view, self.q, channels, self.threads))

    def score(self) -> F32:
        """Return logits (N, G, S) from low-precision K, exact for tokens without a score page; set `variances`."""
        form, slots = progressive_form(self.view), self.view.maps["scores"].reshape(self.streams, -1)
        self.read("flash_embed", self.pages.coarse_pages(self.view, "scores"))
        words = form.page_bytes // FP16_BYTES * self.each
        self.compute("logit0", "kernel", (slots != UNMAPPED).sum(1), words, self.seq_lens)
        logits, self.variances = self.do.score(self.view, self.q, self.threads)
        return self.bend(logits)

    def choose_pages(self, logits: F32, lost: float, least: float) -> Choice:
        """Return the refined pages and value pages to read within the remaining budget; see `spend`.

        logits: from scores, (N, G, S); they are replaced by e^(logit - largest).
        """
        form, sinks = progressive_form(self.view), None if self.terms is None else self.terms.sinks
        variances, sizes = self.variances + np.float32(VARIANCE[form.v_bits]), (form.n, form.value_tokens, least)
        worth = self.do.weigh_pages(logits, self.seq_lens, sizes, variances, sinks, self.threads)
        pages = worth.errors.shape[1] + worth.masses.shape[2]
        self.compute("argtopk", "argtopk", self.each, pages * self.each)
        fetched = sum(int(np.add.reduce(item.plan.nbytes)) for item in self.work if isinstance(item, Read))
        left = (int(np.add.reduce(self.budget_bytes)) - fetched) // form.page_bytes
        choice = spend(self.view, worth, logits, left, lost, least)
        self.chosen = choice.tokens, choice.counts
        return choice

    def attend_coarse(self, logits: F32, choice: Choice) -> F32:
        """Return attention (N, G, d) over all tokens from 8-bit and low-bit pages; set `lost` and `errors`."""
        form, fine = progressive_form(self.view), self._refined(choice.tokens, choice.counts)
        self.read("flash_token", self.pages.coarse_pages(self.view, "values", choice.reads))
        pages = choice.reads.sum(1) * self.view.maps["values"].shape[1]
        self.compute("attend", "kernel", pages, form.page_bytes // FP16_BYTES * self.each)
        chosen = choice.tokens, choice.counts, choice.reads
        scores = Scores(logits, np.ascontiguousarray(choice.worth.rows[:, :, 0]), self.variances)
        self.lost, self.errors = self.do.attend_coarse(self.view, fine, chosen, scores, self.v_mean, self.threads)
        return self.sink(*fine[:2])

    def _refined(self, tokens: I32, counts: I64) -> tuple[F32, F32, F32]:
        """Run `refined.attend_refined` over the first counts (N,) of tokens (N, k)."""
        self.read("flash_token", self.pages.refined_pages(self.view, tokens, counts))
        self.compute("logit", "kernel", counts, self.head_dim, counts)
        self.compute("attend", "kernel", counts, self.head_dim)
        logit_terms = None if self.terms is None else self.terms.logit_terms
        return self.do.attend_refined(self.view, self.q, (tokens, counts), logit_terms, self.threads)

    def weigh(self, logits: F32, group_score: GroupScore = GroupScore.SOFTMAX) -> F32:
        """Replace logits by weights in place and return the token scores of the query group, (N, S)."""
        more = () if self.terms is None else (self.terms.sinks,)
        return self.do.softmax_scores(logits, self.seq_lens, group_score, self.threads, *more)

    def best_tokens(self, scores: F32, k: I64, recent: I64) -> I32:
        """Return the `recent` last tokens and the best other tokens, k in total, (N, max k)."""
        self.compute("argtopk", "argtopk", self.each, self.seq_lens)
        return self.do.best_tokens(scores, self.seq_lens, k, recent, self.threads)

    def best_pages(self, scores: F32, pages: I64, recent: I64, p: float = 1.0) -> tuple[I32, I64]:
        """Return all tokens (N, k) of the token pages with the largest score sums, and their numbers, (N,).

        If p < 1, return only the fewest of these pages that hold a share p of all scores.
        """
        n = self.view.layout.n
        self.compute("argtopk", "argtopk", self.each, self.seq_lens // n)
        return self.do.top_pages(scores, self.seq_lens, n, pages, recent, p, self.threads)

    def best_share(self, scores: F32, tokens: I32, counts: I64, p: float) -> tuple[I32, I64]:
        """Return the fewest of tokens (N, k) that hold a share p of their scores, and their numbers, (N,)."""
        self.compute("argtopk", "argtopk", self.each, counts)
        return self.do.top_mass(scores, tokens, counts, p, self.seq_lens, self.recent, self.threads)

    def logits(self, tokens: I32, counts: I64) -> F32:
        """Return exact logits (N, G, k) of tokens (N, k); counts (N,) of them are valid, -inf follows."""
        self._need_rows()
        self.read("flash_token", self.pages.token_pages(self.view, self.view.k_slots, tokens, counts))
        self.compute("logit", "kernel", counts, self.head_dim, counts)
        self._scored = tokens
        return self.bend(self.do.exact(self.view, self.q, tokens, counts, self.threads), tokens, counts)

    def bend(self, logits: F32, tokens: I32 | None = None, counts: I64 | None = None) -> F32:
        """Apply the model's cap and distance bias to logits (N, G, k) of tokens (N, k), by default all tokens."""
        if self.terms is None:
            return logits
        tokens = self.everything() if tokens is None else tokens
        return self.terms.apply_cap_and_bias(logits, tokens, self.seq_lens if counts is None else counts, self.threads)

    def attend(self, tokens: I32, counts: I64, weights: F32 | None = None) -> F32:
        """Return attention (N, G, d) over tokens (N, k), ascending; counts (N,) of them are valid.

        weights: approximate weights of all tokens, (N, G, S); the mean of V represents the weight outside the
        selection. Sets `rows` (N, G, 2) to m, the largest logit of a row, and l: l * e^m is the softmax weight of its
        output.
        """
        self.chosen = tokens, counts
        if not self.view.layout.keeps_rows:
            out, rows, self.errors = self._refined(tokens, counts)
            return self.sink(out, rows)
        if self._scored is not tokens:
            self.read("flash_token", self.pages.token_pages(self.view, self.view.k_slots, tokens, counts))
            self.compute("logit", "kernel", counts, self.head_dim, counts)
        if not self.view.layout.latent:  # in such a layout, a row of K includes the row of V
            self.read("flash_token", self.pages.token_pages(self.view, self.view.v_slots, tokens, counts))
        self.compute("attend", "kernel", counts, self.head_dim)
        if weights is not None:
            self.alpha = self.do.selected_mass(weights, tokens, counts, self.threads)
            self.lost = 1 - self.alpha
        logit_terms = None if self.terms is None else self.terms.logit_terms
        out, rows = self.do.attend(
            self.view, self.q, (tokens, counts), self.alpha, self.v_mean, logit_terms, self.threads
        )
        return self.sink(out, rows)

    def sink(self, out: F32, rows: F32) -> F32:
        """Return an output (N, G, d) with `rows` (N, G, 2) m and l without the share of the model's sinks."""
        self.rows[:] = rows
        return out if self.terms is None else self.terms.apply_sink(out, self.rows)

    def table(
        self,
        name: str,
        encode: Callable[[F32, Memory], NDArray[Any]],
        rows_of: Callable[[slice, int], F32] | None = None,
    ) -> NDArray[Any]:
        """Return a method-specific table with an entry for each token group, (N, groups, ...); see `read_table`.

        encode: from rows (H, t, d) float32 of a group and the memory of the sequence to entries (H, ...). A full group
        is encoded once, as on a write. rows_of: `keys` (default) or `values`. Groups after the end of a stream are
        zero.
        """
        n, heads = self.view.layout.n, self.streams // len(self.memory)
        parts = []
        for streams, memory in self.sequences():
            length = int(self.seq_lens[streams.start])
            entries = memory.setdefault(name, [])
            rows = (rows_of or self.keys)(streams, len(entries) * n)
            while len(entries) < length // n:
                entries.append(encode(rows[:, :n], memory))
                rows = rows[:, n:]
            parts.append(np.stack([*entries, encode(rows, memory)] if length % n else entries, axis=1))
        groups = max(part.shape[1] for part in parts)
        table = np.zeros((self.streams, groups, *parts[0].shape[2:]), parts[0].dtype)
        for number, part in enumerate(parts):
            table[number * heads : (number + 1) * heads, : part.shape[1]] = part
        return table

    def read_table(self, nbytes: I64) -> None:
        """Read nbytes (N,) of a table from flash. The table of a stream starts at a page boundary; writes are free."""
        self.read("flash_table", self.pages.table_pages(nbytes))

    def sequences(self) -> Iterator[tuple[slice, Memory]]:
        """Yield the streams and the memory of each sequence."""
        heads = self.streams // len(self.memory)
        for number, memory in enumerate(self.memory):
            yield slice(number * heads, (number + 1) * heads), memory

    def keys(self, streams: slice, first: int = 0) -> F32:
        """Return K rows (H, t, d) of a sequence from token `first`, the first of a group, as they were written."""
        return self._rows_behind(self.view.k_slots, streams, first)

    def values(self, streams: slice, first: int = 0) -> F32:
        """Return V rows (H, t, d) of a sequence from token `first`, the first of a group, as they were written."""
        return self._rows_behind(self.view.v_slots, streams, first)

    def _rows_behind(self, slots: U32, streams: slice, first: int) -> F32:
        self._need_rows()
        n, length = self.view.layout.n, int(self.seq_lens[streams.start])
        slots = slots[streams, first // n : -(-length // n)]
        self._page_in(slots, length - first)
        rows = gather_rows(self.view.banks, slots, length - first, self.view.layout)
        return widen(rows, self.view.layout.bf16).transpose(1, 0, 2)

    def rounded(self, values: F32) -> F32:
        """Round values to the 2-byte type of the stored rows, for method-specific tables."""
        bf16 = self.view.layout.bf16
        return widen(to_half(np.ascontiguousarray(values), bf16), bf16)

    def peek(self) -> F32:
        """Return exact logits (N, G, S) without cost, for oracles."""
        self._need_rows()
        self._page_in(self.view.k_slots, int(self.seq_lens.max()))
        return self.bend(self.do.exact(self.view, self.q, self.everything(), self.seq_lens, self.threads))

    def _page_in(self, slots: U32, tokens: int) -> None:
        """Page in the first `tokens` of slots (N, groups) without cost: the pages are planned but not read."""
        streams = slots.shape[0]
        self.pages.token_pages(self.view, slots, first_tokens(streams, tokens), np.full(streams, tokens))

    def everything(self) -> I32:
        """Return all tokens of all streams, (N, S)."""
        return first_tokens(self.streams, int(np.maximum.reduce(self.seq_lens)))

    def _need_rows(self) -> None:
        """Raise ValueError if the layout has no full rows of K."""
        if not self.view.layout.keeps_rows:
            raise ValueError("layout: stores keys in 8 bits only: use one with full rows, such as progressive-exact")

    def apart(self) -> DecodeStep:
        """Return this step with one stream for each query head, so that queries do not share fetched pages.

        `rows` is shared with this step.
        """
        G, view = self.queries, self.view
        slots = (np.repeat(per_stream, G, axis=0) for per_stream in (view.k_slots, view.v_slots, view.e_slots))
        k_slots, v_slots, e_slots = slots
        seq_lens, top_k, recent = (np.repeat(per_stream, G) for per_stream in (view.seq_lens, self.top_k, self.recent))
        apart = replace(view, seq_lens=seq_lens, k_slots=k_slots, v_slots=v_slots, e_slots=e_slots, kept={})
        q, v_mean = self.q.reshape(-1, 1, self.head_dim), np.repeat(self.v_mean, G, axis=0)
        queries = Queries(q, self.r, top_k, recent, v_mean, self.memory)
        step = DecodeStep(apart, self.pages, queries, self.threads, self.do)
        step.work, step.rows = self.work, self.rows.reshape(-1, 1, 2)
        step.terms, step.q = self.terms and self.terms.per_query_head(), q
        return step

    def read(self, unit: str, plan: Any) -> None:
        """Record a wait for pages."""
        self.work.append(Read(unit, replace(plan, nbytes=plan.useful) if self.byte_addressable else plan))

    def compute(
        self,
        unit: str,
        job: Literal["argtopk", "kernel"],
        lines: I64,
        length: I64 | int,
        scores: I64 | None = None,
    ) -> None:
        """Record work of a unit."""
        if scores is not None and self.terms is not None:
            scores = self.terms.softmax_work(scores)
        self.work.append(Compute(unit, job, lines, length, self.queries, self._none if scores is None else scores))


AttentionMethod = Callable[[DecodeStep], F32]
"""A function of a decode step; returns the attention output of its streams, FP32."""
