"""Decode steps that a drive has checked: later ones of the same form skip the checks until their plan ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from csd_spec import Attend
from ftl.kv.layer_plan import LayerPlan

Run = Callable[..., Any]
_NONE: tuple[list[Any], int, Run | None] = [], 0, None


def register(plan: LayerPlan, command: Attend, run: Run, reply_bytes: int) -> None:
    """Accept later commands with the signature of this checked one; completions of `run` have `reply_bytes`."""
    plan.user_data[command.method] = _signature(command), reply_bytes, run


def accepted(plan: LayerPlan, command: Attend, max_bytes: int) -> Run | None:
    """What carries out a command with the signature of a checked one; None if one more token is out of bounds."""
    form, reply_bytes, run = plan.user_data.get(command.method, _NONE)
    return run if _signature(command) == form != [] and reply_bytes <= max_bytes and plan.in_bounds() else None


def _signature(command: Attend) -> list[Any]:
    """Everything in a command but its values and sequences; empty if an array is not a plain ndarray."""
    terms = () if command.terms is None else (command.terms,)
    form = [command.r, *map(type, (command.r, command.layer, *command.seqs))]
    for array in (command.q, command.k, command.v, command.top_k, command.recent, *terms):
        if type(array) is not np.ndarray:
            return []
        form += array.dtype, array.shape, array.strides
    return form
