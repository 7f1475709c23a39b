"""Which share of token pages SparF touches, as recorded from a trained model, or from the shipped one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from attention_engine import reference
from csd_spec import CompressionBudget
from vcsd.loading import CHECKPOINT, load
from vcsd.models import find_model
from vcsd_eval.accuracy.layers import layer_numbers
from vcsd_eval.accuracy.recorded import TEXT, Recorded, record
from vcsd_eval.papers.instinfer.options import TRAINED
from vcsd_eval.papers.instinfer.systems import SPARF, InStorageSystem, Setup

TOKENS, PASSAGES = 1536, 3


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of token pages by compression, and the name of the model that they were recorded of."""

    model: str
    by_compression: dict[float, float]


def page_shares(layers: list[Recorded], compressions: Sequence[float], n: int) -> dict[float, float]:
    """Share of pages of n tokens that SparF touches at the last token of recorded sequences, by compression."""
    shares = {}
    for c in compressions:
        touched = []
        for layer in layers:
            (B, _, S, d), H = layer.q.shape, layer.k.shape[1]
            params = CompressionBudget(c).at(S, d)
            for b, h in np.ndindex(B, H):
                q = layer.q[b].reshape(H, -1, S, d)[h, :, -1].astype(np.float64)
                K, V = (part[b, h].astype(np.float64) for part in (layer.k, layer.v))
                _, _, tokens = reference.sparf(q, K, V, params.r, params.k, params.l)
                touched.append(np.unique(tokens // n).size / -(-S // n))
        shares[c] = float(np.mean(touched))
    return shares


def recorded_shares(setup: Setup, compressions: Sequence[float], model: Path | None = None) -> Shares:
    """The same of a model on the shipped text, in pages as large as the setup's.

    Every third layer of a model with many layers is recorded. The default model is SmolLM2-135M if it has been fetched,
    otherwise the shipped one.
    """
    folder = model or trained() or CHECKPOINT
    loaded, tokenizer = load(folder)
    ids = torch.tensor(tokenizer(TEXT.read_text(encoding="utf-8"), verbose=False)["input_ids"])
    starts = np.linspace(0, ids.numel() - TOKENS, PASSAGES).astype(int)
    layers = layer_numbers(None, loaded.config.get_text_config(decoder=True).num_hidden_layers)
    recorded = record(loaded, torch.stack([ids[start : start + TOKENS] for start in starts]), layers)
    n = setup.drive.geometry.page_bytes // (2 * setup.model.head_dim)
    return Shares(folder.name, page_shares(recorded, compressions, n))


def recorded_system(setup: Setup, model: Path) -> InStorageSystem:
    """SparF with the page share that is recorded from a model."""
    shares = recorded_shares(setup, [setup.compression], model)
    name = f"InstI-SparF, pages of {shares.model}"
    return replace(SPARF, name=name, page_share=shares.by_compression[setup.compression])


def trained() -> Path | None:
    """The folder of SmolLM2-135M; None if it has not been fetched."""
    try:
        return find_model(TRAINED)
    except ValueError:
        return None


def scaled(setup: Setup, recorded: dict[float, float]) -> dict[float, float]:
    """Recorded shares, scaled so that the one at 1/8 is the paper's."""
    scale = setup.constants.token_page_share / recorded[8.0]
    return {c: min(1.0, share * scale) for c, share in recorded.items()}
