"""KIVI: keys quantized by channel, values by token, the last tokens in FP16.

Source: arXiv 2402.02750, Algorithm 1: of a prompt of l tokens the last l mod R keys and the last R values stay in FP16;
the others are quantized asymmetrically, keys by channel in groups of 32 tokens, values by token in groups of 32
channels. R = 128.

Stored: b bits an element; an FP16 scale and zero point for each group.

Left out: nothing. After the prompt, keys of R tokens would be quantized together; tokens after the prompt are read in
FP16 here.
"""

from __future__ import annotations

import numpy as np

from csd_spec.arrays import F32
from vcsd_eval.accuracy.published.codes import SCALE_BYTES, packed_bytes, uniform_in_groups
from vcsd_eval.accuracy.published.streams import VALUE_BYTES, Method, StreamOutput, Streams
from vcsd_eval.accuracy.published.tokens import attend_all

GROUP, RESIDUAL = 32, 128


def coded_tokens(prompt: int) -> tuple[int, int]:
    """Numbers of tokens whose keys are quantized, and whose values are."""
    return prompt - prompt % RESIDUAL, max(prompt - RESIDUAL, 0)


def encode(k: F32, v: F32, bits: int) -> tuple[F32, F32]:
    """Dequantized keys and values of a prompt, (N, prompt, d) each."""
    of_k, of_v = coded_tokens(k.shape[1])
    keys = np.concatenate([uniform_in_groups(k[:, :of_k], bits, 1, GROUP), k[:, of_k:]], 1)
    values = np.concatenate([uniform_in_groups(v[:, :of_v], bits, 2, GROUP), v[:, of_v:]], 1)
    return keys, values


def code_bytes(seen: Streams, bits: int) -> int:
    """Bytes of the prompt: codes, scales, zero points and FP16 rows, all streams."""
    N, _, _, d = seen.shape
    of_k, of_v = coded_tokens(seen.prompt)
    codes = packed_bytes(of_k * d, bits) + packed_bytes(of_v * d, bits)
    scales = SCALE_BYTES * (d * of_k // GROUP + of_v * -(-d // GROUP))
    return N * (codes + scales + VALUE_BYTES * d * (2 * seen.prompt - of_k - of_v))


def kivi(bits: int) -> Method:
    """KIVI with codes of `bits` bits."""

    def method(seen: Streams, budget: float) -> StreamOutput:
        prompt = seen.prompt
        k, v = seen.once(f"kivi-{bits}", lambda: encode(seen.k[:, :prompt], seen.v[:, :prompt], bits))
        return attend_all(seen, k, v, code_bytes(seen, bits))

    return method
