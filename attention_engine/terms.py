"""What a model does with logits beyond a scale of 1/sqrt(d): a cap, a bias by distance, and a sink beside them.

A logit is cap x tanh(scale x q k / cap) - slope x distance, where distance is how many tokens lie behind the one that
is attended. Softmax is over the logits and the sink, which has no V: what it takes is missing from the output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from attention_engine._exp import exp
from attention_engine._parallel import over_streams
from csd_io.compiled import njit
from csd_spec.arrays import F32, I32, I64


@njit(cache=True, nogil=True, error_model="numpy")
def bend(row, bends, tokens):  # type: ignore[no-untyped-def]
    """Logits of tokens (k,), the first of `row`, as a model has them. bends: cap, slope and the last token's number."""
    cap, slope, last = bends[0], bends[1], bends[2]
    for i in range(tokens.size):
        if cap < np.inf:
            size = exp(np.float32(-2) * abs(row[i]) / cap)
            capped = cap * (np.float32(1) - size) / (np.float32(1) + size)
            row[i] = capped if row[i] > 0 else -capped
        if slope != 0:
            row[i] += slope * (np.float32(tokens[i]) - last)


@njit(cache=True, nogil=True)
def _bend(begin, end, logits, bends, tokens, counts):  # type: ignore[no-untyped-def]
    for stream in range(begin, end):
        for query in range(logits.shape[1]):
            bend(logits[stream, query], bends[stream, query], tokens[stream, : counts[stream]])


@dataclass(frozen=True, slots=True)
class Terms:
    """Of each stream and query: factors (N, G, 1) of q; bends (N, G, 3): cap, slope and the number of the last token;
    sinks (N, G)."""

    factors: F32
    bends: F32
    sinks: F32

    @classmethod
    def of(cls, terms: F32, seq_lens: I64, head_dim: int) -> Terms:
        """From a command's terms (H, G, 4) for sequences of seq_lens (N,), N = B * H."""
        each = np.tile(terms, (seq_lens.size // terms.shape[0], 1, 1))
        factors = each[:, :, :1] / np.float32(1 / math.sqrt(head_dim))
        last = np.broadcast_to((seq_lens - 1).astype(np.float32)[:, None], each.shape[:2])
        bends = np.ascontiguousarray(np.stack([each[:, :, 1], each[:, :, 3], last], axis=-1))
        return cls(factors, bends, np.ascontiguousarray(each[:, :, 2]))

    def apart(self) -> Terms:
        """The same where each query is a stream of its own."""
        return Terms(self.factors.reshape(-1, 1, 1), self.bends.reshape(-1, 1, 3), self.sinks.reshape(-1, 1))

    def bend(self, logits: F32, tokens: I32, counts: I64, threads: int = 1) -> F32:
        """Logits (N, G, k) of tokens (N, k), of which counts (N,) are used, as the model has them, in place."""
        over_streams(_bend, threads, logits.shape[0], (logits, self.bends, tokens, counts))
        return logits

    def sink(self, out: F32, rows: F32) -> F32:
        """An output (N, G, d) with rows m and l (N, G, 2), without what sinks take; `rows` then count that as well.

        A weight that is not known, l = 0, is beyond FP32, and so beyond any sink.
        """
        m, l = rows[:, :, 0], rows[:, :, 1]  # noqa: E741 - the names of the interface
        top = np.maximum(m, self.sinks)
        kept = l * np.exp(m - top)
        whole = kept + np.exp(self.sinks - top)
        known = l > 0
        rows[:, :, 0], rows[:, :, 1] = np.where(known, top, m), np.where(known, whole, l)
        shares = np.divide(kept, whole, out=np.ones_like(kept), where=known)
        rest: F32 = out * shares[:, :, None]
        return rest

    def kept(self, logits: F32) -> F32:
        """Of the softmax over logits (N, G, k) and the sink, the share that is not the sink's, (N, G, 1)."""
        m = logits.max(-1, keepdims=True)
        total = np.exp(logits - m).sum(-1, keepdims=True)
        share: F32 = total / (total + np.exp(np.minimum(self.sinks[:, :, None] - m, 80)))
        return share

    def scores(self, scores: I64) -> I64:
        """How many numbers softmax takes of a query for so many logits (N,): a cap is a second pass through it, a sink
        one more."""
        passes = 2 if np.isfinite(self.bends[:, :, 0]).any() else 1
        taken: I64 = passes * scores + bool(np.isfinite(self.sinks).any())
        return taken
