"""TTFT of a request with a stored prefix, and queueing of requests, in closed form."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from numpy.polynomial.hermite_e import hermegauss
from numpy.typing import NDArray

from kv_cache.cost import CostModel, Overlay
from vcsd_eval.papers.profiles import Gpu, Model

NODES = 64  # of the integral over lengths
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Path:
    """How the KV data of a prefix is loaded to the GPU. layered: each layer while the previous one is computed."""

    bytes_per_s: float
    layered: bool = False


@dataclass(frozen=True, slots=True)
class GpuReading:
    """A model on a GPU."""

    model: Model
    cost: CostModel

    @classmethod
    def on(cls, model: Model, gpu: Gpu, overlay: Overlay) -> GpuReading:
        """A model on a GPU, as an overlay has it."""
        return cls(model, CostModel.of(model, gpu.accelerator, overlay))

    def compute_s(self, new: float, prefix: float) -> float:
        """Prefill time of new tokens after a prefix, seconds."""
        return self.cost.prefill_s(prefix + new, prefix)

    def load_s(self, prefix: float, path: Path) -> float:
        """Time to load the KV data of a prefix, seconds."""
        return self.model.shape.kv_bytes_per_token * prefix / path.bytes_per_s

    def first_token_s(self, new: float, prefix: float, path: Path | None, here: float = 0) -> float:
        """Both: one after the other, or by layers, where the first load and the last prefill stand alone.

        here: tokens of the prefix that need not come.
        """
        compute = self.compute_s(new, prefix)
        if path is None or prefix <= here:
            return compute
        load, layers = self.load_s(prefix - here, path), self.model.layers
        if not path.layered:
            return compute + load
        return max(compute + load / layers, load + compute / layers)

    def bubble_s(self, new: float, prefix: float, path: Path) -> float:
        """Time that the GPU waits for KV data, seconds."""
        return self.first_token_s(new, prefix, path) - self.compute_s(new, prefix)

    def crossover(self, tokens: int, path: Path, step: int) -> float:
        """The least share of a prompt, stored in blocks of step tokens, at which waiting takes longer than work."""

        def waits(prefix: int) -> bool:
            return self.bubble_s(tokens - prefix, prefix, path) > self.compute_s(tokens - prefix, prefix)

        stored = range(step, tokens, step)
        first = bisect_left(stored, True, key=waits)
        return stored[first] / tokens if first < len(stored) else math.inf


@dataclass(frozen=True, slots=True)
class DocumentWorkload:
    """Questions about documents of lognormal lengths: mean of its tokens, sigma of their logarithm."""

    mean: float
    sigma: float
    question: int

    def lengths(self) -> tuple[Array, Array]:
        """Lengths of documents and their weights, by Gauss-Hermite quadrature."""
        nodes, weights = hermegauss(NODES)
        return np.exp(math.log(self.mean) - self.sigma**2 / 2 + self.sigma * nodes), weights / weights.sum()

    def moments(self, reading: GpuReading, hit: float, path: Path | None) -> tuple[float, float]:
        """Mean and mean square of the service time, where a document is stored with probability hit."""
        lengths, weights = self.lengths()
        hits = np.array([reading.first_token_s(self.question, length, path) for length in lengths])
        misses = np.array([reading.first_token_s(self.question + length, 0, path) for length in lengths])
        mean, square = (float(weights @ (hit * hits**power + (1 - hit) * misses**power)) for power in (1, 2))
        return mean, square


def mean_ttft_s(moments: tuple[float, float], rate: float) -> float:
    """Mean TTFT of Poisson arrivals at one server, first come, first served (Pollaczek-Khinchine); inf on overload."""
    mean, square = moments
    return mean + rate * square / (2 * (1 - rate * mean)) if rate * mean < 1 else math.inf
