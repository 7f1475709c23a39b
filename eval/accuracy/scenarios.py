"""Scenarios: generated q, k and v on which attention methods are known to fail.

A scenario is a function of a generator of random numbers and a shape. It returns q (H, G, S, d), k and v (H, S, d) in
FP32; logits are q k^T / sqrt(d). Only the last queries are ever used, the others are what methods that look back see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from csd_spec.arrays import F32, I64
from vcsd_eval.accuracy.layers import Layer
from vcsd_eval.accuracy.recorded import Recorded

HEADS = 2  # KV heads
Rows = tuple[F32, F32, F32]


@dataclass(frozen=True, slots=True)
class ScenarioShape:
    """Query heads of a KV head, tokens, channels."""

    G: int
    S: int
    d: int


def _normal(draw: np.random.Generator, shape: ScenarioShape) -> Rows:
    q = draw.standard_normal((HEADS, shape.G, shape.S, shape.d), np.float32)
    k, v = (draw.standard_normal((HEADS, shape.S, shape.d), np.float32) for _ in range(2))
    return q, k, v


def _towards(k: F32, tokens: I64, direction: F32, logit: float) -> None:
    """Give keys a part along each head's direction (H, d), by which a query along it has this logit."""
    size = np.linalg.norm(direction, axis=1)[:, None]
    unit = (direction / size)[:, None]
    across = (k[:, tokens] * unit).sum(-1)
    k[:, tokens] += (logit * np.sqrt(k.shape[2]) / size - across)[..., None] * unit


def _asking(draw: np.random.Generator, q: F32, noise: float = 0.1) -> F32:
    """Make all queries of a KV head ask along one direction, which is returned, (H, d)."""
    direction = draw.standard_normal((q.shape[0], q.shape[3]), np.float32)
    q[:] = direction[:, None, None] + noise * q
    return direction


def flat(draw: np.random.Generator, shape: ScenarioShape) -> Rows:
    """All tokens weigh about the same: no selection of few can stand for all."""
    q, k, v = _normal(draw, shape)
    return 0.1 * q, k, v + 1


def peaky(draw: np.random.Generator, shape: ScenarioShape) -> Rows:
    """One old token has nearly all weight."""
    q, k, v = _normal(draw, shape)
    _towards(k, np.array([shape.S // 3]), _asking(draw, q), 16)
    return q, k, v


def sinks(draw: np.random.Generator, shape: ScenarioShape) -> Rows:
    """The first four tokens take most of the weight and hold almost nothing; the rest decides the output."""
    q, k, v = _normal(draw, shape)
    _towards(k, np.arange(4), _asking(draw, q, 0.5), 10)
    v[:, :4] *= 0.01
    return q, k, v


def biases(draw: np.random.Generator, shape: ScenarioShape) -> Rows:
    """A few channels of K are large and nearly constant, as biases of projections make them (Qwen 2)."""
    q, k, v = _normal(draw, shape)
    channels = draw.choice(shape.d, shape.d // 16, replace=False)
    k[:, :, channels] += 40 * np.sign(draw.standard_normal(channels.size)).astype(np.float32)
    q[..., channels] *= 0.2
    return q, k, v


def scattered(draw: np.random.Generator, shape: ScenarioShape) -> Rows:
    """One relevant token in each 48: a page holds few relevant tokens."""
    q, k, v = _normal(draw, shape)
    tokens = np.arange(7, shape.S - 48, 48)
    _towards(k, tokens, _asking(draw, q), 9)
    v[:, tokens] += 3
    return q, k, v


def opposed(draw: np.random.Generator, shape: ScenarioShape) -> Rows:
    """Query heads of one KV head attend to different tokens, by other channels."""
    q, k, v = _normal(draw, shape)
    for head in range(shape.G):
        direction = draw.standard_normal((HEADS, shape.d), np.float32)
        q[:, head] = direction[:, None] + 0.1 * q[:, head]
        _towards(k, np.arange(11 + 5 * head, shape.S // 2, 16 * shape.G), direction, 9)
    return q, k, v


def duplicates(draw: np.random.Generator, shape: ScenarioShape) -> Rows:
    """A needle among keys that nearly equal its own and hold something else: coarse scores cannot tell them apart."""
    q, k, v = _normal(draw, shape)
    direction = _asking(draw, q, 0.05)
    like = draw.choice(shape.S - 64, shape.S // 8, replace=False)
    k[:, like] = k[:, like[:1]] + 0.15 * k[:, like]
    _towards(k, like, direction, 8)
    _towards(k, like[:1], direction, 12)
    v[:, like[0]] += 4
    return q, k, v


def inverse(draw: np.random.Generator, shape: ScenarioShape) -> Rows:
    """Channels of K range inversely to those of q: the large ones of either do not decide alone."""
    q, k, v = _normal(draw, shape)
    scale = np.logspace(-1.5, 1.5, shape.d, dtype=np.float32)[draw.permutation(shape.d)]
    return 1.5 * q * scale, k / scale, v


def outliers(draw: np.random.Generator, shape: ScenarioShape) -> Rows:
    """A few tokens have values 50 times as large: small weight, large effect on the output."""
    q, k, v = _normal(draw, shape)
    v[:, draw.choice(shape.S - 64, 8, replace=False)] *= 50
    return q, k, v


def drift(draw: np.random.Generator, shape: ScenarioShape) -> Rows:
    """Keys and values drift: ranges and means of the first tokens do not hold for the last ones."""
    q, k, v = _normal(draw, shape)
    for part in (k, v):
        part += np.cumsum(0.15 * draw.standard_normal(part.shape, np.float32), 1)
    return 0.7 * q, k, v


def rotated(draw: np.random.Generator, shape: ScenarioShape) -> Rows:
    """One content at all places, rotated by position as RoPE does (theta 10,000): logits swing with the distance."""
    q, k, v = _normal(draw, shape)
    content = 0.7 * draw.standard_normal((HEADS, 1, shape.d), np.float32)
    half = shape.d // 2
    angle = np.arange(shape.S)[:, None] * 10_000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)

    def turned(rows: F32) -> F32:
        a, b = rows[..., :half], rows[..., half:]
        return np.concatenate([a * cos - b * sin, a * sin + b * cos], -1)

    return turned(content[:, None] + 0.5 * q), turned(content + 0.5 * k), v


def massive(draw: np.random.Generator, shape: ScenarioShape) -> Rows:
    """Two channels of q and K are 20 times the others: their product alone passes for the logit."""
    q, k, v = _normal(draw, shape)
    channels = draw.choice(shape.d, 2, replace=False)
    k[..., channels] *= 20
    q[..., channels] *= 20 / shape.d**0.5
    q /= 4
    _towards(k, np.arange(5, shape.S - 64, 97), _asking(draw, q[..., :], 0.5), 8)
    return q, k, v


SCENARIOS: dict[str, tuple[Callable[[np.random.Generator, ScenarioShape], Rows], int, int]] = {  # G, d
    "flat": (flat, 3, 64),
    "peaky": (peaky, 4, 128),
    "sinks": (sinks, 3, 64),
    "biases": (biases, 7, 128),
    "scattered": (scattered, 3, 64),
    "opposed": (opposed, 8, 128),
    "duplicates": (duplicates, 2, 64),
    "inverse": (inverse, 4, 128),
    "outliers": (outliers, 1, 64),
    "drift": (drift, 4, 96),
    "rotated": (rotated, 8, 256),
    "massive": (massive, 1, 256),
}


def scenario(name: str, tokens: int, steps: int, seed: int) -> Layer:
    """A scenario as a layer that decodes `steps` steps after `tokens` tokens."""
    make, G, d = SCENARIOS[name]
    draw = np.random.default_rng([seed, *name.encode()])
    q, k, v = make(draw, ScenarioShape(G, tokens + steps, d))
    q = q.reshape(1, HEADS * G, tokens + steps, d)
    return Layer(Recorded(*(part.astype(np.float16) for part in (q, k[None], v[None]))), tokens)
