"""Recorded layers: a prompt, the decode steps after it, and the exact attention output of each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import torch
import typer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from csd_spec.arrays import F32, F64, I32, I64
from vcsd.progress import Tick, no_tick
from vcsd_eval.accuracy.recorded import Recorded, record

WINDOW = 256  # tokens among which pages are shared out
FEW_LAYERS = 12  # of a model with more every third is recorded by default
QUERIES = 512  # of a prompt, whose weights are added up at once
MANY_LAYERS = 1 << 16  # more than any model has
_SLICE = "a number, numbers with commas, or a slice such as 0:12:3"


@dataclass(frozen=True, slots=True)
class Passages:
    """Sizes of a recording."""

    tokens: Annotated[int, typer.Option(min=64, max=1 << 17, help="prompt length, tokens")] = 1536
    steps: Annotated[int, typer.Option(min=1, max=1 << 17, help="number of decode steps")] = 2
    sequences: Annotated[
        int, typer.Option("--num-passages", min=1, max=1024, help="number of passages of the text")
    ] = 4
    layers: Annotated[
        str | None, typer.Option(help=f"{_SLICE} (default: all, of more than {FEW_LAYERS} every third)")
    ] = None

    def __post_init__(self) -> None:
        layer_numbers(self.layers, MANY_LAYERS)  # its form, before a model is loaded


@dataclass(frozen=True, slots=True)
class Exact:
    """Attention of one decode step in float64.

    Attributes:
        out: Output, (N, G, d), N KV heads of all sequences, G query heads on each.
        weights: Softmax weights of all tokens, (N, G, S).
        rank: Place of each token by its weight, (N, G, S), 0 for the largest.
    """

    out: F64
    weights: F32
    rank: I32


@dataclass(slots=True)
class Layer:
    """One layer's decode steps after a prompt of `tokens` tokens; number: index of the layer in its model."""

    recorded: Recorded
    tokens: int
    number: int = 0
    _exact: dict[int, Exact] = field(default_factory=dict)
    _gathered: F32 | None = None
    _placed: Layer | None = None

    @property
    def steps(self) -> int:
        return int(self.recorded.q.shape[2]) - self.tokens

    def queries(self, position: int) -> F32:
        """Queries of a decode step, (N, G, d)."""
        (B, Hq, _, d), H = self.recorded.q.shape, self.recorded.k.shape[1]
        return self.recorded.q[:, :, position].astype(np.float32).reshape(B * H, Hq // H, d)

    def exact(self, position: int) -> Exact:
        """Attention of a decode step over all tokens up to its own; computed once."""
        if position not in self._exact:
            K, V = (self._stored(part, position).astype(np.float64) for part in (self.recorded.k, self.recorded.v))
            logits = self.queries(position) @ K.transpose(0, 2, 1) / np.sqrt(K.shape[2])
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            order = np.argsort(-weights, -1, kind="stable")
            rank = np.empty(order.shape, np.int32)
            np.put_along_axis(rank, order, np.arange(order.shape[-1], dtype=np.int32)[None, None], -1)
            self._exact[position] = Exact(weights @ V, weights.astype(np.float32), rank)
        return self._exact[position]

    def _stored(self, part: np.ndarray, position: int) -> np.ndarray:
        """Rows (N, S, d) of K or V up to a position."""
        return part[:, :, : position + 1].reshape(-1, position + 1, part.shape[3])

    def gathered(self) -> F32:
        """Attention weight (B, H, tokens) of each prompt token, summed over the prompt's queries."""
        if self._gathered is None:
            (B, _, _, d), H, tokens = self.recorded.q.shape, self.recorded.k.shape[1], self.tokens
            q, k = (torch.from_numpy(part[:, :, :tokens]).float() for part in (self.recorded.q, self.recorded.k))
            total = torch.zeros(B, H, tokens)
            for first in range(0, tokens, QUERIES):
                part = q[:, :, first : first + QUERIES].reshape(B, H, -1, min(QUERIES, tokens - first), d)
                logits = part @ k[:, :, None].transpose(-1, -2) / d**0.5
                logits += torch.full(logits.shape[-2:], float("-inf")).triu(1 + first)
                total += torch.softmax(logits, -1).sum((2, 3))
            self._gathered = total.numpy()
        return self._gathered

    def placed(self, n: int) -> Layer:
        """The same with similar tokens in the same page of n."""
        if self._placed is None:
            self._placed = Layer(_placed(self.recorded, self.tokens, n), self.tokens, self.number)
        return self._placed


def layer_numbers(chosen: str | None, count: int) -> list[int]:
    """Layer numbers from an option's text, for a model of `count` layers; raises ValueError for an invalid text."""
    if chosen is None:
        return list(range(0, count, 1 if count <= FEW_LAYERS else 3))
    try:
        result: Sequence[int] = []
        if ":" in chosen:
            result = range(count)[slice(*(int(part) if part else None for part in chosen.split(":")))]
        else:
            result = sorted({int(part) for part in chosen.split(",")})
    except (ValueError, TypeError) as error:
        raise ValueError(f"layers = {chosen!r}: needs {_SLICE}") from error
    if not result or not 0 <= min(result) <= max(result) < count:
        raise ValueError(f"layers = {chosen!r}: the model has layers 0 to {count - 1}")
    return sorted(result)


def record_layers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, passages: Passages, tick: Tick = no_tick
) -> list[Layer]:
    """Layers of passages that start at equal distances in the text."""
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    tokens, sequences = passages.tokens, passages.sequences
    length = tokens + passages.steps
    config = model.config.get_text_config(decoder=True)
    if length > config.max_position_embeddings:
        raise ValueError(f"tokens + steps = {length}: the model's context is {config.max_position_embeddings}")
    if ids.numel() < length + sequences:
        raise ValueError(f"the text has {ids.numel()} tokens: at least {length + sequences} are needed")
    numbers = layer_numbers(passages.layers, config.num_hidden_layers)
    starts = np.linspace(0, ids.numel() - length, sequences).astype(int)
    recorded = record(model, torch.stack([ids[start : start + length] for start in starts]), numbers, tick)
    return [Layer(each, tokens, number) for each, number in zip(recorded, numbers, strict=True)]


def _placed(recorded: Recorded, tokens: int, n: int) -> Recorded:
    """The same with the keys and values of the prompt in another order: in every WINDOW, tokens with similar keys share
    a page. The last WINDOW stays, so that recent tokens are the last ones."""
    k, v = recorded.k.copy(), recorded.v.copy()
    for start in range(0, (tokens // WINDOW - 1) * WINDOW, WINDOW):
        part = slice(start, start + WINDOW)
        for b, h in np.ndindex(k.shape[:2]):
            order = start + _alike(k[b, h, part].astype(np.float64), n)
            k[b, h, part], v[b, h, part] = recorded.k[b, h, order], recorded.v[b, h, order]
    return Recorded(recorded.q, k, v)


def _alike(rows: F64, n: int) -> I64:
    """An order of rows (t, d) in which those of a run of n are alike: halves along the widest direction, again and
    again."""
    if len(rows) <= n:
        return np.arange(len(rows))
    centred = rows - rows.mean(0)
    _, directions = np.linalg.eigh(centred.T @ centred)
    order = np.argsort(rows @ directions[:, -1], kind="stable")
    half = -(-len(rows) // (2 * n)) * n
    return np.concatenate([part[_alike(rows[part], n)] for part in (order[:half], order[half:])])
