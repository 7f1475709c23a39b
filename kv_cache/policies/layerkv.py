"""LayerKV: a prompt needs device memory for only some of its layers; the others are offloaded during its prefill.

Yi Xiong et al., LayerKV (arXiv 2410.00428): KV blocks are allocated and offloaded by layers, so that a prompt does not
wait until the device has blocks for all of them. A scheduler keeps the time per output token of decoding requests.

Modelled: a prompt retains enough layers that the others are offloaded within its prefill. Layers of the latest requests
are offloaded first, evenly spread, and return when blocks are free. Each offloaded layer is fetched in each step. A
prompt waits until its prefill makes no decoding request miss its mean time per output token.

Not modelled: the forecast of output lengths that the paper's scheduler uses (here the budget of a request follows from
the tokens it has produced), contention of copies with collectives of several GPUs, and the memory of fetched layers
beyond one.
"""

from __future__ import annotations

from collections.abc import Sequence

from kv_cache.hardware import DEVICE, HOST
from kv_cache.planner.problem import BLOCK_TOKENS, Offload, blocks_on_device, strides
from kv_cache.request import SequenceState
from kv_cache.scheduler import Policy, SchedulerOutput, SchedulerState


class LayerKv(Policy):
    """FCFS with the fewest offloaded layers that fit."""

    tiers: tuple[str, ...] = (DEVICE, HOST)
    strided = True

    def schedule(self, s: SchedulerState) -> SchedulerOutput:
        L, running, prompt = s.cost.layers, sorted(s.sequences, key=lambda sequence: sequence.number), s.filling
        if prompt and all(_prefill_s(s, prompt) <= _slack_s(s, sequence) for sequence in running):
            most = hidden_layers(s, prompt) if running else L
            if options := offloads(s, [*running, prompt], most):
                tokens = {prompt.number: prompt.num_missing_tokens}
                return SchedulerOutput(num_scheduled_tokens=tokens, placement={prompt.number: options[-1]})
        while (options := offloads(s, running, L)) is None and len(running) > 1:
            running.pop()
        if options is None:
            longest = max(sequence.num_tokens for sequence in running)
            raise RuntimeError(
                f"a request of {longest} tokens does not fit on the device with all layers offloaded: use more device "
                "memory or a shorter request"
            )
        steps = min(BLOCK_TOKENS - sequence.num_computed_tokens % BLOCK_TOKENS for sequence in running)
        numbers = [sequence.number for sequence in running]
        return SchedulerOutput(
            num_scheduled_tokens=dict.fromkeys(numbers, 1),
            placement=dict(zip(numbers, options, strict=True)),
            num_steps=1 if prompt else steps,
        )


def hidden_layers(s: SchedulerState, prompt: SequenceState) -> int:
    """Layers of a prompt whose offload takes no longer than its prefill; the others are retained."""
    layer_s = float(s.cost.costs([prompt.num_tokens]).fetch[0])
    return min(s.cost.layers, int(_prefill_s(s, prompt) / layer_s)) if layer_s else s.cost.layers


def offloads(s: SchedulerState, requests: Sequence[SequenceState], most: int) -> list[Offload] | None:
    """Choose the offload of each request, latest requests first; None if they do not fit on the device.

    Args:
        s: The state.
        requests: In the order of their arrival.
        most: Maximum number of layers that the last request may offload.
    """
    L, costs = s.cost.layers, s.cost.costs([request.num_tokens + 1 for request in requests])
    chosen = [Offload(0)] * len(requests)
    if blocks_on_device(costs, chosen) <= costs.room:
        return chosen
    for place in reversed(range(len(requests))):
        for count in (*strides(L)[1:], L):
            if count <= (most if place == len(requests) - 1 else L):
                chosen[place] = Offload(count)
                if blocks_on_device(costs, chosen) <= costs.room:
                    return chosen
    return None


def _prefill_s(s: SchedulerState, prompt: SequenceState) -> float:
    return s.cost.compute.prefill_s(prompt.num_tokens, prompt.num_computed_tokens)


def _slack_s(s: SchedulerState, sequence: SequenceState) -> float:
    """Seconds that a request can wait and still meet its objective for the mean of its tokens so far."""
    first_s = float(sequence.bursts[0][0][0])
    return s.slo_s * sequence.num_output_tokens - (s.now_s - first_s)
