"""A drive as a chain: seconds of a layer's decode step from the lengths of its sequences, in the order of the batch.

    layer_s = command_s + transfer x max over sequences i of (flash_s(0..i) + tail_s(i)), or the engine's time if longer

flash_s(0..i): KV data of all heads of the sequences up to i, at the rate of the drive's channels. tail_s(i): time of
one head of sequence i on all kernels after its last page has arrived: the sum of its values, and the part of its logits
that the transfer of its values does not hide. Both follow from the data sheet; command_s and transfer are fitted to the
full emulator (`vcsd_eval.fleet.calibrate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from csd_spec import DriveSpec, ModelShape
from csd_spec.checked import frozen_value
from nvmevirt_config.document import read_yaml

SHIPPED = Path(__file__).parent / "coefficients.yaml"
VALUES = 2  # keys and values
FP16_BYTES = 2
NotNegative = Annotated[float, Field(ge=0)]


@frozen_value
class Coefficients:
    """Fitted numbers and their origin.

    Attributes:
        made_by: The command that fitted them.
        trace: Name of the trace whose first requests they are compared with.
        command_s: Seconds of a command without tokens.
        transfer: Seconds over those of the chain.
        ratios: A drive's layer step over the mean of drives with the same sequences, quantiles at equal distances.
        fit_percent: Mean deviation at the fitted compositions.
        deviation_percent: Mean deviation of a step at compositions that were not fitted, by drives.
        worst_percent: The largest of those, by drives.
    """

    made_by: str
    trace: str
    command_s: NotNegative
    transfer: NotNegative
    ratios: list[float]
    fit_percent: NotNegative
    deviation_percent: dict[int, float]
    worst_percent: dict[int, float]

    def slowest(self, drives: int) -> float:
        """Expected ratio of the slowest of several drives to their mean."""
        ends = (np.arange(1024) + 0.5) / 1024
        levels = np.linspace(0, 1, len(self.ratios))
        return max(1.0, float(np.interp(ends ** (1 / drives), levels, self.ratios).mean()))


@cache
def coefficients(path: Path = SHIPPED) -> Coefficients:
    """Those of a file; raises ValueError if it is not of that form."""
    return read_yaml(path, Coefficients)


@dataclass(frozen=True, slots=True)
class DriveRates:
    """Data-sheet seconds of a layer on a drive that has `kv_heads` of a model.

    Attributes:
        flash_s: For each stored token of its sequences, all heads of the drive.
        engine_s: The same, arithmetic on all kernels.
        tail_s: For each token of a sequence: one head on all kernels, after its pages have come.
    """

    flash_s: float
    engine_s: float
    tail_s: float

    @classmethod
    def of(cls, spec: DriveSpec, shape: ModelShape, kv_heads: int) -> DriveRates:
        """A drive with some heads of a model."""
        engine, group = spec.engine, shape.q_heads // shape.kv_heads
        beats = -(-shape.head_dim // engine.lanes) * group
        # Keys or values of a token, one head, which all kernels share
        pass_s = beats / engine.kernel_efficiency / engine.clock_hz / engine.kernels
        v_flash_s = FP16_BYTES * shape.head_dim / spec.flash_bytes_per_s
        flash_s, engine_s = VALUES * kv_heads * v_flash_s, VALUES * kv_heads * pass_s
        return cls(flash_s, engine_s, pass_s + max(0.0, pass_s - v_flash_s))

    def chain_s(self, tokens: Sequence[int]) -> float:
        """Factor of `transfer` for sequences of these lengths, seconds."""
        lengths = np.asarray(tokens, np.float64)
        until = np.cumsum(lengths)
        return float(max((until * self.flash_s + lengths * self.tail_s).max(), until[-1] * self.engine_s))

    def layer_s(self, fitted: Coefficients, tokens: Sequence[int]) -> float:
        """Seconds of a layer's step of a mean drive."""
        return fitted.command_s + fitted.transfer * self.chain_s(tokens)
