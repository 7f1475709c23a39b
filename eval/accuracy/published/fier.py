"""FIER: 1-bit keys find the tokens, which are attended exactly.

Source: arXiv 2508.08256, section 3: asymmetric quantization of keys to 1 bit by channel in groups of tokens; the
product of the query with dequantized keys ranks tokens.

Stored: 1 bit for each channel of a key; an FP16 scale and zero point for each channel and `GROUP` tokens.

Left out: full attention of the first two layers. The group size of 32 tokens is assumed. A KV head's queries select
together.
"""

from __future__ import annotations

from vcsd_eval.accuracy.published.codes import SCALE_BYTES, packed_bytes, uniform_in_groups
from vcsd_eval.accuracy.published.streams import StreamOutput, Streams
from vcsd_eval.accuracy.published.tokens import attend_top, group_scores, logits

GROUP = 32  # tokens of a channel that share a scale


def code_bytes(seen: Streams) -> int:
    """Bytes of 1-bit keys of the prompt with scales and zero points, all streams."""
    N, _, _, d = seen.shape
    return N * (packed_bytes(seen.prompt * d, 1) + SCALE_BYTES * d * -(-seen.prompt // GROUP))


def fier(seen: Streams, budget: float) -> StreamOutput:
    """Attend to the tokens whose dequantized 1-bit keys give the largest weights."""
    keys = seen.once("fier", lambda: uniform_in_groups(seen.k[:, : seen.prompt], 1, 1, GROUP))
    return attend_top(seen, budget, group_scores(logits(seen.q, keys)), code_bytes(seen))
