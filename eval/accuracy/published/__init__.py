"""Attention methods of other papers as functions on recorded q, k and v, with every byte they read counted.

`PUBLISHED` has them by name. docs/published-methods.md states each method's storage, checks and omissions.

Not expressed, since q, k and v of one layer do not suffice: InfiniGen (arXiv 2406.19707: hidden states of the layer
before and the weights), ShadowKV (arXiv 2410.21465: keys before RoPE, their low rank, and their rotation again), TOVA
(arXiv 2401.06104: weights averaged over all KV heads of a sequence, which streams do not name), DuoAttention (arXiv
2410.10819: heads classified by training). Methods that drives run, such as SparQ, H2O, Quest, KIVI, Double Sparsity and
StreamingLLM (`local`), are in `attention_engine.methods` alone.
"""

from __future__ import annotations

from vcsd_eval.accuracy.published import (
    evict,
    fier,
    hadamard,
    kvquant,
    loki,
    magicpig,
    pariskv,
    polarquant,
    pqcache,
    rabitq,
    retroinfer,
    turboquant,
)
from vcsd_eval.accuracy.published.streams import Method, Published, StreamOutput, Streams

__all__ = ["PUBLISHED", "Method", "Published", "StreamOutput", "Streams"]

KVQUANT = "KVQuant, arXiv 2401.18079, sections 3.1 and 3.3 to 3.5"
MSE, PROD = "TurboQuant_mse, arXiv 2504.19874, Algorithm 1", "TurboQuant_prod keys, arXiv 2504.19874, Algorithm 2"

PUBLISHED: dict[str, Published] = {
    "fier": Published(fier.fier, "FIER, arXiv 2508.08256, section 3"),
    "rabitq": Published(rabitq.rabitq, "RaBitQ, arXiv 2405.12497, section 3; centering: RaBitQCache, arXiv 2606.31519"),
    "pariskv": Published(pariskv.pariskv, "ParisKV, arXiv 2602.07721, and its published configuration"),
    "pqcache": Published(pqcache.pqcache, "PQCache, arXiv 2407.12820, section 3"),
    "magicpig": Published(magicpig.magicpig, "MagicPIG, arXiv 2410.16179, Algorithm 1"),
    "retroinfer": Published(retroinfer.retroinfer, "RetroInfer, arXiv 2505.02922, section 4"),
    "loki": Published(loki.loki, "Loki, arXiv 2406.02542, Algorithm 1"),
    "snapkv": Published(evict.snapkv, "SnapKV, arXiv 2404.14469, section 4"),
    "keydiff": Published(evict.keydiff, "KeyDiff, arXiv 2504.15364"),
    "kvquant-3": Published(kvquant.kvquant(3), KVQUANT, budgeted=False),
    "kvquant-4": Published(kvquant.kvquant(4), KVQUANT, budgeted=False),
    "hadamard-int4": Published(hadamard.hadamard_int4, "QuaRot, arXiv 2404.00456, section 4", budgeted=False),
    "polarquant": Published(polarquant.polarquant, "PolarQuant, arXiv 2502.02617, Algorithm 1", budgeted=False),
    **{f"turboquant-{b}": Published(turboquant.turboquant(b), MSE, budgeted=False) for b in (2, 3, 4)},
    **{f"turboquant-prod-{b}": Published(turboquant.turboquant(b, prod=True), PROD, budgeted=False) for b in (2, 3, 4)},
}
