"""Decode steps with strided offloads as a compiled recurrence.

A layer starts when the previous one has ended and its fetches have arrived over one link. The times are those of the
same copies simulated by events (`event_timer.py`), computed about a thousand times faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from csd_io.compiled import njit
from csd_spec.arrays import F64
from kv_cache.cost import ServingCost, StepLine
from kv_cache.planner.problem import Offload, device_layers, option_arrays, run


def decode_s(
    cost: ServingCost,
    tokens: Sequence[int],
    options: Sequence[Offload],
    most: int,
    *,
    within_s: float = math.inf,
    extra_s: F64 | None = None,
) -> F64:
    """Seconds of each step of a batch whose requests grow by one token per step.

    Args:
        cost: Cost model of computation, fetches and drives.
        tokens: Tokens of each request that the first step attends to, (R,).
        options: Offload of each request, (R,).
        most: Maximum number of steps.
        within_s: Time after which no step starts, seconds.
        extra_s: Additional time of each step, (steps,) seconds; also limits the number of steps.

    Returns:
        Seconds of each step, (steps,), at most `most`; fewer if the requests outgrow the device.

    Raises:
        RuntimeError: The first step does not fit on the device.
    """
    took = np.zeros(max(1, most if extra_s is None else min(most, extra_s.size)))
    extra_s = np.zeros(took.size) if extra_s is None else extra_s
    forms = [option_arrays(cost.layers, option) for option in options]
    issued, due, in_drives = (np.array([[form[k]] for form in forms]) for k in range(3))
    shares = np.array([device_layers(cost.layers, option) for option in options])
    line, held = cost.line(len(tokens)), np.array(tokens)
    count = _steps(line, cost.room_blocks, held, issued, due, in_drives, shares, within_s, extra_s, took)
    if not count:
        raise RuntimeError(f"a placement of {tuple(options)} does not fit on the device: offload more layers")
    return took[:count]


@njit(cache=True, nogil=True)
def _steps(line: StepLine, room, tokens, issued, due, in_drives, shares, until_s, extra_s, took):  # type: ignore[no-untyped-def]
    """Fill `took` until the requests do not fit or the time limit is reached; returns the number of steps."""
    R, L = tokens.size, issued.shape[2]
    compute, ends, slower = np.zeros(L), np.zeros(L + 1), np.zeros(in_drives.shape)
    fetch, chosen, passed = np.zeros(R), np.zeros(R, np.int64), 0.0
    for step in range(took.size):
        held = 0
        for r in range(R):
            held += shares[r] * -(-(tokens[r] + step) // line.block_tokens)
        if held > room * L or passed >= until_s:
            return step
        compute[:] = (line.step_s + line.token_s * (tokens.sum() + R * step)) / L
        for r in range(R):
            now = tokens[r] + step
            fetch[r] = (line.fetch_s + line.fetch_token_s * now) / L
            slower[r] = in_drives[r] * (line.drive_token_s * now + line.call_s / R - line.token_s * now / L)
        run(compute, fetch, issued, due, slower, chosen, ends)
        took[step] = ends[L] + extra_s[step]
        passed += took[step]
    return took.size
