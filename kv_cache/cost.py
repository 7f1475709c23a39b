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
from typing import Protocol

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


class Decoder(Protocol):
    """Properties of a decoder-only transformer that its compute time depends on."""

    @property
    def layers(self) -> int:
        """All of them, those with windows included."""
        ...

    @property
    def shape(self) -> ModelShape:
        """The layers that attend to all tokens."""
        ...

    @property
    def active(self) -> float:
        """Parameters that a token passes."""
        ...

    @property
    def window_layers(self) -> int:
        """Layers that attend to the last `window` tokens alone."""
        ...

    @property
    def window(self) -> int:
        """Tokens that those layers attend to."""
        ...

    def read_bytes(self, batch: float) -> float:
        """Bytes of the weights that a step of so many tokens reads."""
        ...

    def window_bytes(self, tokens: float) -> float:
        """Bytes of the KV cache of one sequence in the layers with windows."""
        ...


@dataclass(frozen=True, slots=True)
class DenseDecoder:
    """A decoder whose tokens pass all parameters, in 16 bits, and whose layers all attend to all tokens."""

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
    """Measured or assumed terms of a cost model beyond data sheets. Fields that are None keep the roofline's term.

    Attributes:
        mfu: Share of the accelerator's peak operations/s that is reached.
        start_s: Seconds of a prefill without its tokens.
        sequence_layer_s: Seconds that the runtime takes for each sequence and layer of a decode step.
        step_s: Fitted seconds of a decode step without its tokens.
        token_s: Fitted seconds of a decode step for each stored token of its sequences.
        prefill_token_s: Fitted seconds of a prefill for each new token.
        prefill_pair_s: Fitted seconds of a prefill for each pair of a new token and one before it.
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
        """Whether nothing is left to the roofline."""
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
        slowdown: Measured decode time divided by the modelled one.
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
        """Lines fitted to a measured profile. prefill_tokens_per_s: of what does not depend on a prompt's length."""
        per_token_s = 1 / prefill_tokens_per_s
        overlay = Overlay(
            start_s=0, step_s=step_s, token_s=token_s, prefill_token_s=per_token_s, prefill_pair_s=prefill_pair_s
        )
        return cls(layers, overlay)

    def linear_s(self, batch: float = 1, tokens: float = math.inf) -> float:
        """Seconds of a decode step without attention in layers that attend to all tokens.

        Args:
            batch: Sequences.
            tokens: Stored tokens of each, which layers with windows read the last of; more than a window by default.
        """
        if self.overlay.step_s is not None:
            return self.slowdown * self.overlay.step_s
        model, accelerator = self._roofline
        read = model.read_bytes(batch) + batch * model.window_bytes(tokens)
        return self.slowdown * max(read / accelerator.bytes_per_s, 2 * model.active * batch / self._flops)

    @property
    def token_s(self) -> float:
        """Seconds of a decode step for each stored token of its sequences: attention to it in all full layers."""
        if self.overlay.token_s is not None:
            return self.slowdown * self.overlay.token_s
        model, accelerator = self._roofline
        return self.slowdown * max(model.shape.kv_bytes_per_token / accelerator.bytes_per_s, self.pair_s)

    @property
    def pair_s(self) -> float:
        """Seconds of multiplying for each pair of a new token and one before it, in all full layers."""
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
            until: Tokens that are stored afterwards.
            since: Tokens that were stored before.
            batch: Sequences.
        """
        new = until - since
        if not new:
            return 0.0
        pairs = (until * until - since * since) / 2
        if self.overlay.prefill_token_s is not None:
            return self.overlay.start_s + batch * (new * self.overlay.prefill_token_s + pairs * self.pair_s)
        model, accelerator = self._roofline
        multiplied_s = 2 * model.active * batch * new / self._flops
        seen = pairs * self.pair_s
        if model.window_layers:
            one = self.pair_s / model.shape.layers
            seen += model.window_layers * one * new * min(since + new / 2, model.window)
        read_s = model.read_bytes(batch * new) / accelerator.bytes_per_s
        return max(read_s, self.overlay.start_s + multiplied_s) + batch * seen

    @property
    def _roofline(self) -> tuple[Decoder, Accelerator]:
        assert self.model is not None and self.accelerator is not None
        return self.model, self.accelerator

    @property
    def _flops(self) -> float:
        return self.overlay.mfu * self._roofline[1].flops


@frozen_value
class DriveModel:
    """Computational drives with the KV cache of every head striped over all of them.

    Attributes:
        bytes_per_s: Rate at which all drives together read and attend.
        token_bytes: Bytes read per cached token in a layer.
        call_s: Fixed seconds per layer.
    """

    bytes_per_s: float = Field(gt=0)
    token_bytes: float = Field(gt=0)
    call_s: float = Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingCost:
    """A model on a GPU with a link to host memory, and optional computational drives.

    Attributes:
        name: For people.
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
        """The same machine with other bytes of GPU memory for the KV cache."""
        return replace(self, room_blocks=max(1, int(device_bytes / (BLOCK_TOKENS * self.layers * self.token_bytes))))

    def costs(self, tokens: Sequence[int], grown: int = 0) -> StepCosts:
        """Costs of a decode step.

        Args:
            tokens: Cached tokens of each request.
            grown: Tokens per request that the step has to leave room for.
        """
        each = np.array(tokens, np.int64)
        L, token_s = self.layers, self.compute.token_s
        attend = None
        if self.drives:  # the device does not attend to them meanwhile
            read_s = each * self.drives.token_bytes / self.drives.bytes_per_s
            attend = read_s + self.drives.call_s / max(1, each.size) - each * token_s / L
        return StepCosts(
            compute=np.full(L, self.compute.decode_s(each.size, int(each.sum())) / L),
            fetch=(each * self.fetch_token_s + self.fetch_s) / L,
            blocks=-(-(each + grown) // BLOCK_TOKENS),
            room=self.room_blocks * L,
            attend=attend,
        )

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest request that fits with every second layer offloaded."""
        return self.room_blocks * self.layers // (self.layers - self.layers // 2 + 1) * BLOCK_TOKENS

    def check(self, requests: Sequence[Request]) -> None:
        """Raise ValueError for a request that there never is room for."""
        for each in requests:
            if each.tokens > self.longest_tokens:
                raise ValueError(
                    f"request {each.number}: {each.tokens:,} tokens, {self.name} has room for {self.longest_tokens:,}"
                )

    def line(self, batch: int) -> tuple[float, float, float, float, float, float, float]:
        """Coefficients of `costs` of `batch` requests, for compiled loops.

        Returns:
            Seconds of a step without tokens and for each; of a fetch, the same; of drives, of a call and for each token
            in a layer; tokens of a block.
        """
        drives = self.drives
        in_drives = (drives.call_s, drives.token_bytes / drives.bytes_per_s) if drives else (0.0, 0.0)
        return *self.compute.line(batch), self.fetch_s, self.fetch_token_s, *in_drives, float(BLOCK_TOKENS)

    def slo_s(self, scale: float) -> float:
        """OrbitFlow's objective: the step of the longest request that fits the device, times a scale."""
        return scale * self.compute.decode_s(1, self.room_blocks * BLOCK_TOKENS)
