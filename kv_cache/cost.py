"""Compute time of a decoder on an accelerator: one roofline per operator, summed over the sequences of a batch.

F: mfu x peak operations/s. B: memory bytes/s. W: bytes of the weights that a step reads. P: active parameters.
n: new tokens after p cached ones. S: bytes of the KV cache that a step reads.

    prefill(n, p)        = max(W / B, start + 2 P n / F) + 4 L Hq d n (p + n / 2) / F
    decode(batch, p)     = max(W / B, 2 P batch / F) + max(S / B, 4 L Hq d sum(p) / F) + sequence_layer_s x batch x L

A fitted profile replaces terms of this sum. No paper or policy has another formula.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from pydantic import Field

from csd_spec import ModelShape
from csd_spec.checked import frozen_value
from kv_cache.hardware import Accelerator
from kv_cache.planner.problem import BLOCK_TOKENS, StepCosts
from kv_cache.trace import Request

Seconds = Field(ge=0, le=1e3)
Fitted = Field(default=None, ge=0, le=1e3)
PREFILL_FLOPS, PEAK_FLOPS = 384e12, 989e12  # a measured prefill of Llama-3-8B on an H100 (Tutti, Table 5), and its peak


@runtime_checkable
class Decoder(Protocol):
    """Properties of a decoder-only transformer that its compute time depends on."""

    @property
    def layers(self) -> int:
        """Number of layers, including sliding-window layers."""
        ...

    @property
    def shape(self) -> ModelShape:
        """Shape of the layers with full attention."""
        ...

    @property
    def active(self) -> float:
        """Active parameters per token."""
        ...

    @property
    def window_layers(self) -> int:
        """Number of sliding-window layers."""
        ...

    @property
    def window(self) -> int:
        """Length of the sliding window, tokens."""
        ...

    def read_bytes(self, batch: float) -> float:
        """Bytes of the weights that a step of `batch` tokens reads."""
        ...

    def window_bytes(self, tokens: float) -> float:
        """Bytes of the KV cache of one sequence in the sliding-window layers."""
        ...


@dataclass(frozen=True, slots=True)
class DenseDecoder:
    """A dense decoder with 16-bit weights and full attention in all layers."""

    shape: ModelShape
    parameters: float

    window_layers = window = 0

    @property
    def layers(self) -> int:
        return self.shape.layers

    @property
    def active(self) -> float:
        return self.parameters

    def read_bytes(self, batch: float) -> float:
        return 2 * self.parameters

    def window_bytes(self, tokens: float) -> float:
        return 0.0


@frozen_value
class Overlay:
    """Measured or assumed terms of a cost model in addition to data sheets. None keeps the roofline's term.

    Attributes:
        mfu: Fraction of the accelerator's peak operations/s that is reached.
        start_s: Constant part of a prefill, seconds.
        sequence_layer_s: Runtime overhead of each sequence and layer of a decode step, seconds.
        step_s: Fitted constant part of a decode step, seconds.
        token_s: Fitted seconds of a decode step for each stored token of its sequences.
        prefill_token_s: Fitted seconds of a prefill for each new token.
        prefill_pair_s: Fitted seconds of a prefill for each pair of a new token and an earlier one.
    """

    mfu: float = Field(default=PREFILL_FLOPS / PEAK_FLOPS, gt=0, le=1)
    start_s: float = Field(default=8e-3, ge=0, le=10)
    sequence_layer_s: float = Field(default=0.0, ge=0, le=1)
    step_s: float | None = Fitted
    token_s: float | None = Fitted
    prefill_token_s: float | None = Fitted
    prefill_pair_s: float | None = Fitted

    @property
    def is_complete(self) -> bool:
        """Whether no term is left to the roofline."""
        return None not in (self.step_s, self.token_s, self.prefill_token_s, self.prefill_pair_s)


BASE = Overlay()


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of prefill and decode of a decoder on an accelerator.

    Attributes:
        layers: Layers of the decoder.
        overlay: Terms that replace those of the roofline.
        model: The decoder; None if the overlay has all terms.
        accelerator: The GPU; None if the overlay has all terms.
        slowdown: Measured divided by modelled decode time.
    """

    layers: int
    overlay: Overlay = BASE
    model: Decoder | None = None
    accelerator: Accelerator | None = None
    slowdown: float = 1.0

    def __post_init__(self) -> None:
        if (self.model is None or self.accelerator is None) and not self.overlay.is_complete:
            raise ValueError("a cost model needs a model and an accelerator, or an overlay with all fitted terms")

    @classmethod
    def of(cls, model: Decoder, accelerator: Accelerator, overlay: Overlay = BASE) -> CostModel:
        """A decoder on an accelerator."""
        return cls(model.layers, overlay, model, accelerator)

    @classmethod
    def fitted(
        cls, layers: int, *, step_s: float, token_s: float, prefill_tokens_per_s: float, prefill_pair_s: float = 0.0
    ) -> CostModel:
        """Build a model from lines fitted to a measured profile.

        Args:
            layers: Layers of the decoder.
            step_s: Constant part of a decode step, seconds.
            token_s: Seconds of a decode step per stored token.
            prefill_tokens_per_s: Prefill rate without the part that grows with the prompt's length.
            prefill_pair_s: Seconds of a prefill per pair of tokens.
        """
        per_token_s = 1 / prefill_tokens_per_s
        overlay = Overlay(
            start_s=0, step_s=step_s, token_s=token_s, prefill_token_s=per_token_s, prefill_pair_s=prefill_pair_s
        )
        return cls(layers, overlay)

    def linear_s(self, batch: float = 1, tokens: float = math.inf) -> float:
        """Seconds of a decode step without attention in layers that attend to all tokens.

        Args:
            batch: Sequences.
            tokens: Stored tokens of each sequence, for sliding-window layers; by default more than the window.
        """
        if self.overlay.step_s is not None:
            return self.slowdown * self.overlay.step_s
        model, accelerator = self._roofline
        read = model.read_bytes(batch) + batch * model.window_bytes(tokens)
        return self.slowdown * max(read / accelerator.bytes_per_s, 2 * model.active * batch / self._flops)

    @property
    def token_s(self) -> float:
        """Seconds of a decode step for each stored token of its sequences: attention in all full layers."""
        if self.overlay.token_s is not None:
            return self.slowdown * self.overlay.token_s
        model, accelerator = self._roofline
        return self.slowdown * max(model.shape.kv_bytes_per_token / accelerator.bytes_per_s, self.pair_s)

    @property
    def pair_s(self) -> float:
        """Seconds of arithmetic for each pair of a new token and an earlier one, in all full layers."""
        if self.overlay.prefill_pair_s is not None:
            return self.overlay.prefill_pair_s
        shape = self._roofline[0].shape
        return 4 * shape.layers * shape.q_heads * shape.head_dim / self._flops

    def runtime_s(self, batch: float) -> float:
        """Seconds of runtime overhead in a decode step: a constant for each sequence and layer."""
        return self.overlay.sequence_layer_s * batch * self.layers

    def line(self, batch: int) -> tuple[float, float]:
        """A decode step of `batch` sequences as a line: (seconds without cached tokens, seconds per cached token)."""
        return self.linear_s(batch) + self.runtime_s(batch), self.token_s

    def decode_s(self, batch: int, tokens: int) -> float:
        """Seconds of a decode step of `batch` sequences with `tokens` cached tokens in total."""
        constant_s, token_s = self.line(batch)
        return constant_s + token_s * tokens

    def prefill_s(self, until: float, since: float = 0, batch: int = 1) -> float:
        """Seconds to prefill tokens since..until of `batch` equal prompts.

        Args:
            until: Tokens stored after the prefill.
            since: Tokens stored before it.
            batch: Sequences.
        """
        new = until - since
        if not new:
            return 0.0
        attention_s = batch * self.prefill_attention_s(until, since)
        if self.overlay.prefill_token_s is not None:
            return self.overlay.start_s + batch * new * self.overlay.prefill_token_s + attention_s
        model, accelerator = self._roofline
        multiplied_s = 2 * model.active * batch * new / self._flops
        read_s = model.read_bytes(batch * new) / accelerator.bytes_per_s
        return max(read_s, self.overlay.start_s + multiplied_s) + attention_s

    def prefill_attention_s(self, until: float, since: float = 0) -> float:
        """Attention part of a prefill, s: tokens since..until of one prompt attend to all earlier ones."""
        seen_s = (until * until - since * since) / 2 * self.pair_s
        if self.overlay.prefill_token_s is None and (model := self._roofline[0]).window_layers:
            new, one = until - since, self.pair_s / model.shape.layers
            seen_s += model.window_layers * one * new * min(since + new / 2, model.window)
        return seen_s

    @property
    def _roofline(self) -> tuple[Decoder, Accelerator]:
        assert self.model is not None and self.accelerator is not None
        return self.model, self.accelerator

    @property
    def _flops(self) -> float:
        return self.overlay.mfu * self._roofline[1].flops


@frozen_value
class DriveModel:
    """Computational drives with the KV cache of each head striped over all of them.

    Attributes:
        bytes_per_s: Rate at which all drives together read and attend.
        token_bytes: Bytes read per cached token in a layer.
        call_s: Fixed seconds per layer.
    """

    bytes_per_s: float = Field(gt=0)
    token_bytes: float = Field(gt=0)
    call_s: float = Seconds


class StepLine(NamedTuple):
    """A decode step of a batch as a line of its tokens.

    Attributes:
        step_s, token_s: Step with the KV cache on the device, seconds: constant, and per cached token.
        fetch_s, fetch_token_s: Fetch of a request, seconds: constant, and per cached token, all layers.
        call_s, drive_token_s: Attention of a layer in drives, seconds: per call, and per token.
        block_tokens: Tokens per block.
    """

    step_s: float
    token_s: float
    fetch_s: float
    fetch_token_s: float
    call_s: float
    drive_token_s: float
    block_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingCost:
    """A model on a GPU with a link to host memory, and optional computational drives.

    Attributes:
        name: Name in reports and messages.
        compute: Cost of prefill and decode with the KV cache in GPU memory.
        fetch_s: Fixed seconds to copy all layers of a request to the GPU.
        fetch_token_s: Seconds per cached token of that copy.
        room_blocks: KV blocks per layer that fit in GPU memory if all layers stay there.
        token_bytes: Bytes of the KV cache per token and layer.
        drives: Computational drives; None if there are none.
    """

    name: str
    compute: CostModel
    fetch_s: float
    fetch_token_s: float
    room_blocks: int
    token_bytes: float = 4096
    drives: DriveModel | None = None

    def __post_init__(self) -> None:
        if min(self.fetch_s, self.fetch_token_s) < 0 or self.room_blocks < 1 or self.token_bytes <= 0:
            raise ValueError(f"{self.name}: seconds must be at least 0, room_blocks at least 1, token_bytes above 0")

    @property
    def layers(self) -> int:
        return self.compute.layers

    def with_room(self, device_bytes: int) -> ServingCost:
        """Copy with another size of the KV cache in GPU memory, bytes."""
        return replace(self, room_blocks=max(1, int(device_bytes / (BLOCK_TOKENS * self.layers * self.token_bytes))))

    def costs(self, tokens: Sequence[int], grown: int = 0) -> StepCosts:
        """Costs of a decode step.

        Args:
            tokens: Cached tokens of each request.
            grown: Tokens per request to reserve space for.
        """
        lengths = np.array(tokens, np.int64)
        L, token_s = self.layers, self.compute.token_s
        attend = None
        if self.drives:  # the device does not attend to them meanwhile
            read_s = lengths * self.drives.token_bytes / self.drives.bytes_per_s
            attend = read_s + self.drives.call_s / max(1, lengths.size) - lengths * token_s / L
        return StepCosts(
            compute=np.full(L, self.compute.decode_s(lengths.size, int(lengths.sum())) / L),
            fetch=(lengths * self.fetch_token_s + self.fetch_s) / L,
            blocks=-(-(lengths + grown) // BLOCK_TOKENS),
            room=self.room_blocks * L,
            attend=attend,
        )

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest request that fits with every second layer offloaded."""
        return self.room_blocks * self.layers // (self.layers - self.layers // 2 + 1) * BLOCK_TOKENS

    def check(self, requests: Sequence[Request]) -> None:
        """Raise ValueError if a request can never fit."""
        for request in requests:
            if request.tokens > self.longest_tokens:
                most = f"{self.name} has room for {self.longest_tokens:,}"
                raise ValueError(f"request {request.number}: {request.tokens:,} tokens, {most}")

    def line(self, batch: int) -> StepLine:
        """Coefficients of `costs` for `batch` requests, for compiled loops."""
        drives = self.drives
        in_drives = (drives.call_s, drives.token_bytes / drives.bytes_per_s) if drives else (0.0, 0.0)
        return StepLine(*self.compute.line(batch), self.fetch_s, self.fetch_token_s, *in_drives, BLOCK_TOKENS)

    def slo_s(self, scale: float) -> float:
        """OrbitFlow's objective: the step of the longest request that fits on the device, times `scale`, seconds."""
        return scale * self.compute.decode_s(1, self.room_blocks * BLOCK_TOKENS)
