"""Progressive precision: low-bit keys and values for all tokens, 8-bit keys and values for the most important pages."""

from __future__ import annotations

from attention_engine.step import DecodeStep
from csd_spec.arrays import F32

LOST = 0.05
LEAST = 1e-5


def progressive(step: DecodeStep, lost: float = LOST, least: float = LEAST) -> F32:
    """Attend to all tokens.

    Low-bit keys score them. A refined page is read if it reduces the error by at least `least` of a token's |V|^2,
    within the budget. V of all other tokens is read at low precision, except for the lightest groups: the mean of V
    represents them, for at most `lost` of the weight of a row. Short contexts, in which each page matters, are
    therefore read completely in 8 bits.
    """
    logits = step.score()
    return step.attend_coarse(logits, step.choose_pages(logits, lost, least))
