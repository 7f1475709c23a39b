"""Recording of a prompt's keys and values and of the first decode steps after it, to repeat them on other drives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from csd_spec import DriveSpec, ModelShape
from csd_spec.arrays import F16, F32, I64
from csd_spec.model import FP16_BYTES

Rows = slice | I64  # rows of a batch

MAX_STEPS = 8
MAX_BYTES = 256 << 20  # recorded keys and values; of a larger model, fewer layers are recorded


@dataclass(slots=True)
class RecordedLayer:
    """One layer's arguments of `Driver.append` and `Driver.attend`.

    Attributes:
        prompt: Rows, tokens per row, and keys and values (sum of tokens, kv_heads, d) of each append.
        steps: One list per step: rows, q (rows, q_heads, d), k and v (rows, kv_heads, d) of each attend.
        terms: Terms of the layer's logits (kv_heads, G, 4), see `csd_spec.Attend`; None if they are only scaled.
    """

    prompt: list[tuple[Rows, I64, F16, F16]] = field(default_factory=list)
    steps: list[list[tuple[Rows, F16, F16, F16]]] = field(default_factory=lambda: [[]])
    terms: F32 | None = None


@dataclass(slots=True, eq=False)
class FirstSteps:
    """A prompt and its first decode steps, as a driver ships them; a `Driver` drops it after the last of these.

    Attributes:
        specs: One for each drive.
        shape: The model's shape.
        sequences: Number of sequences.
        max_tokens: Maximum length of a sequence.
        bf16: Whether arrays of values hold BF16 bits.
        layers: Recorded layers by index, evenly spread over the model.
        steps: Recorded decode steps.
    """

    specs: Sequence[DriveSpec] = ()
    shape: ModelShape | None = None
    sequences: int = 0
    max_tokens: int = 0
    bf16: bool = False
    layers: dict[int, RecordedLayer] = field(default_factory=dict)
    steps: int = 0

    def begin(self, specs: Sequence[DriveSpec], shape: ModelShape, sequences: int, max_tokens: int, bf16: bool) -> None:
        """Start a recording; drops an earlier one."""
        self.specs, self.shape, self.bf16, self.steps = specs, shape, bf16, 0
        self.sequences, self.max_tokens = sequences, max_tokens
        layer_bytes = 2 * FP16_BYTES * shape.kv_heads * shape.head_dim * sequences * max_tokens
        count = min(shape.layers, max(1, MAX_BYTES // layer_bytes))
        self.layers = {(2 * part + 1) * shape.layers // (2 * count): RecordedLayer() for part in range(count)}

    def add_prompt(self, layer: int, rows: Rows, lengths: I64, k: F16, v: F16) -> None:
        """Record an append; arrays are kept, not copied."""
        if layer in self.layers:
            self.layers[layer].prompt.append((rows, lengths, k, v))

    def add_step(self, layer: int, rows: Rows, qkv: tuple[F16, F16, F16], terms: F32 | None) -> None:
        """Record an attend."""
        if layer in self.layers:
            q, k, v = (part.copy() for part in qkv)
            self.layers[layer].steps[-1].append((rows, q, k, v))
            self.layers[layer].terms = terms

    def end_step(self) -> bool:
        """End a step; returns whether it was the last one."""
        self.steps += 1
        if self.steps < MAX_STEPS:
            for layer in self.layers.values():
                layer.steps.append([])
        return self.steps == MAX_STEPS

    def shortened(self, tokens: int) -> FirstSteps:
        """The same steps after the first `tokens` tokens of each prompt."""
        layers = {}
        for number, layer in self.layers.items():
            left, prompt = np.full(self.sequences, tokens), list[tuple[Rows, I64, F16, F16]]()
            for rows, lengths, k, v in layer.prompt:
                counts = np.minimum(lengths, left[rows])
                left[rows] -= counts
                starts = np.cumsum(lengths) - lengths
                index = np.concatenate([start + np.arange(n) for start, n in zip(starts, counts, strict=True)])
                prompt.append((rows, counts, k[index], v[index]))
            layers[number] = replace(layer, prompt=prompt)
        return replace(self, layers=layers)

    @property
    def recorded_shape(self) -> ModelShape:
        """The model's shape with only the recorded layers."""
        assert self.shape is not None
        return replace(self.shape, layers=len(self.layers))

    @property
    def context_tokens(self) -> int:
        """Stored tokens of the longest sequence at the start of the first step."""
        tokens = np.zeros(self.sequences, np.int64)
        for rows, lengths, _, _ in next(iter(self.layers.values())).prompt:
            tokens[rows] += lengths
        return int(tokens.max())
