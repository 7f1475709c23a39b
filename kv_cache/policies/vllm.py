"""vLLM's preemption: whole requests, latest first; their KV data is recomputed."""

from __future__ import annotations

from collections.abc import Sequence

from kv_cache.hardware import DEVICE
from kv_cache.planner.problem import BLOCK_TOKENS, Offload
from kv_cache.request import SequenceState
from kv_cache.scheduler import Policy, SchedulerOutput, SchedulerState


class Vllm(Policy):
    """FCFS with all KV data on the device.

    If the next tokens of the running requests need more blocks than are free, the latest request is preempted: its KV
    data is dropped and prefilled again when it fits (recomputation, vLLM's default). A queued request is prefilled,
    whole, before others decode.
    """

    tiers = (DEVICE,)
    strided = True

    def schedule(self, s: SchedulerState) -> SchedulerOutput:
        first_come = sorted([*s.sequences, *([s.filling] if s.filling else [])], key=lambda sequence: sequence.number)
        running = [sequence for sequence in first_come if not sequence.prefills]
        preempted = set()
        while len(running) > 1 and _blocks(running) > s.cost.room_blocks:
            last = running.pop()
            last.num_computed_tokens = 0
            preempted.add(last.number)
        waiting = next((sequence for sequence in first_come if sequence.prefills), None)
        if waiting is not None and _blocks([*running, waiting]) <= s.cost.room_blocks:
            tokens, placement = {waiting.number: waiting.num_missing_tokens}, {waiting.number: Offload(0)}
            return SchedulerOutput(num_scheduled_tokens=tokens, placement=placement, preempted=frozenset(preempted))
        if not running or _blocks(running) > s.cost.room_blocks:
            longest = max(sequence.num_tokens for sequence in first_come)
            raise RuntimeError(
                f"a request of {longest} tokens does not fit on the device: use more device memory or a shorter request"
            )
        numbers = [sequence.number for sequence in running]
        free = s.cost.room_blocks - _blocks(running)
        return SchedulerOutput(
            num_scheduled_tokens=dict.fromkeys(numbers, 1),
            placement=dict.fromkeys(numbers, Offload(0)),
            preempted=frozenset(preempted),
            num_steps=1 + free // len(running) * BLOCK_TOKENS,
        )


def _blocks(sequences: Sequence[SequenceState]) -> int:
    """Blocks of a layer that hold the tokens of sequences and the next token of each."""
    return sum(-(-(sequence.num_tokens + 1) // BLOCK_TOKENS) for sequence in sequences)
