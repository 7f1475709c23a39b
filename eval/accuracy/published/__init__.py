"""Attention methods of other papers as functions on recorded q, k and v, with every byte they read counted.

`PUBLISHED` has them by name. docs/published-methods.md states what each stores, its checks and what is left out.
"""

from __future__ import annotations

from eval.accuracy.published import fier, kivi, pqcache, rabitq
from eval.accuracy.published.streams import Answer, Method, Published, Streams

__all__ = ["PUBLISHED", "Answer", "Method", "Published", "Streams"]

PUBLISHED: dict[str, Published] = {
    "fier": Published(fier.fier, "FIER, arXiv 2508.08256, section 3"),
    "rabitq": Published(
        rabitq.rabitq, "RaBitQ, arXiv 2405.12497, section 3; centered as in RaBitQCache, arXiv 2606.31519"
    ),
    "pqcache": Published(pqcache.pqcache, "PQCache, arXiv 2407.12820, section 3"),
    "kivi-2": Published(kivi.kivi(2), "KIVI, arXiv 2402.02750, Algorithm 1", budgeted=False),
    "kivi-4": Published(kivi.kivi(4), "KIVI, arXiv 2402.02750, Algorithm 1", budgeted=False),
}
