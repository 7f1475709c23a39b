"""Logit terms of a model in addition to the scale 1/sqrt(d): a cap, a distance bias and a sink.

A logit is cap x tanh(scale x q k / cap) - slope x distance, and distance is the number of tokens after the attended
token. Softmax includes the sink, which has no V, so the output lacks the share of the sink.
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
def apply_cap_and_bias(row, logit_terms, tokens):  # type: ignore[no-untyped-def]
    """Apply cap and distance bias to the logits of tokens (k,) in `row`. logit_terms: cap, slope, last token number."""
    cap, slope, last = logit_terms[0], logit_terms[1], logit_terms[2]
    for i in range(tokens.size):
        if cap < np.inf:
            size = exp(np.float32(-2) * abs(row[i]) / cap)
            capped = cap * (np.float32(1) - size) / (np.float32(1) + size)
            row[i] = capped if row[i] > 0 else -capped
        if slope != 0:
            row[i] += slope * (np.float32(tokens[i]) - last)


@njit(cache=True, nogil=True)
def _apply_cap_and_bias(begin, end, logits, logit_terms, tokens, counts):  # type: ignore[no-untyped-def]
    for stream in range(begin, end):
        for query in range(logits.shape[1]):
            apply_cap_and_bias(logits[stream, query], logit_terms[stream, query], tokens[stream, : counts[stream]])


@dataclass(frozen=True, slots=True)
class LogitTerms:
    """Logit terms of each stream and query.

    Attributes:
        factors: Factors of q, (N, G, 1).
        logit_terms: Cap, slope and number of the last token, (N, G, 3).
        sinks: Sink logits, (N, G).
    """

    factors: F32
    logit_terms: F32
    sinks: F32

    @classmethod
    def of(cls, terms: F32, seq_lens: I64, head_dim: int) -> LogitTerms:
        """Return the terms of a command, (H, G, 4), for sequences of seq_lens (N,), N = B * H."""
        of_heads = np.tile(terms, (seq_lens.size // terms.shape[0], 1, 1))
        factors = of_heads[:, :, :1] / np.float32(1 / math.sqrt(head_dim))
        last = np.broadcast_to((seq_lens - 1).astype(np.float32)[:, None], of_heads.shape[:2])
        logit_terms = np.ascontiguousarray(np.stack([of_heads[:, :, 1], of_heads[:, :, 3], last], axis=-1))
        return cls(factors, logit_terms, np.ascontiguousarray(of_heads[:, :, 2]))

    def per_query_head(self) -> LogitTerms:
        """Return the terms for one stream per query head."""
        return LogitTerms(self.factors.reshape(-1, 1, 1), self.logit_terms.reshape(-1, 1, 3), self.sinks.reshape(-1, 1))

    def apply_cap_and_bias(self, logits: F32, tokens: I32, counts: I64, threads: int = 1) -> F32:
        """Apply cap and distance bias in place to logits (N, G, k) of tokens (N, k); counts (N,) of them are valid."""
        over_streams(_apply_cap_and_bias, threads, logits.shape[0], (logits, self.logit_terms, tokens, counts))
        return logits

    def apply_sink(self, out: F32, rows: F32) -> F32:
        """Return an output (N, G, d) without the share of the sink, and add the sink to its rows m and l (N, G, 2).

        l = 0 means that the weight exceeds float32. It then exceeds any sink.
        """
        m, l = rows[:, :, 0], rows[:, :, 1]  # noqa: E741 - the names of the interface
        top = np.maximum(m, self.sinks)
        mass = l * np.exp(m - top)
        whole = mass + np.exp(self.sinks - top)
        positive = l > 0
        rows[:, :, 0], rows[:, :, 1] = np.where(positive, top, m), np.where(positive, whole, l)
        shares = np.divide(mass, whole, out=np.ones_like(mass), where=positive)
        rest: F32 = out * shares[:, :, None]
        return rest

    def share_without_sink(self, logits: F32) -> F32:
        """Return the share (N, G, 1) of the softmax weight over logits (N, G, k) that does not belong to the sink."""
        m = logits.max(-1, keepdims=True)
        total = np.exp(logits - m).sum(-1, keepdims=True)
        share: F32 = total / (total + np.exp(np.minimum(self.sinks[:, :, None] - m, 80)))
        return share

    def softmax_work(self, scores: I64) -> I64:
        """Return the number of softmax inputs of a query for logits (N,): a cap adds a second pass, a sink one."""
        passes = 2 if np.isfinite(self.logit_terms[:, :, 0]).any() else 1
        taken: I64 = passes * scores + bool(np.isfinite(self.sinks).any())
        return taken
