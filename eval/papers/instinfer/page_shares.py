"""Which share of token pages SparF touches, as recorded from the shipped model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from attention_engine import reference
from csd_spec import Compression
from eval.accuracy.recorded import TEXT, Recorded, record
from eval.papers.instinfer.systems import Setup
from vcsd.loading import CHECKPOINT, load


def page_shares(layers: list[Recorded], compressions: Sequence[float], n: int) -> dict[float, float]:
    """Share of pages of n tokens that SparF touches at the last token of recorded sequences, by compression."""
    shares = {}
    for c in compressions:
        touched = []
        for layer in layers:
            (B, _, S, d), H = layer.q.shape, layer.k.shape[1]
            params = Compression(c).at(S, d)
            for b, h in np.ndindex(B, H):
                q = layer.q[b].reshape(H, -1, S, d)[h, :, -1].astype(np.float64)
                K, V = (part[b, h].astype(np.float64) for part in (layer.k, layer.v))
                _, _, tokens = reference.sparf(q, K, V, params.r, params.k, params.l)
                touched.append(np.unique(tokens // n).size / -(-S // n))
        shares[c] = float(np.mean(touched))
    return shares


def recorded_shares(setup: Setup, compressions: Sequence[float]) -> dict[float, float]:
    """The same of the shipped model on the shipped text, in pages as large as the setup's."""
    loaded, tokenizer = load(CHECKPOINT)
    ids = torch.tensor(tokenizer(TEXT.read_text(encoding="utf-8"))["input_ids"])
    rows = torch.stack([ids[start : start + 1536] for start in (0, 3000, 6000)])
    n = setup.drive.geometry.page_bytes // (2 * setup.model.head_dim)
    return page_shares(record(loaded, rows), compressions, n)


def scaled(setup: Setup, recorded: dict[float, float]) -> dict[float, float]:
    """Recorded shares, scaled so that the one at 1/8 is the paper's."""
    scale = setup.constants.token_page_share / recorded[8.0]
    return {c: min(1.0, share * scale) for c, share in recorded.items()}
