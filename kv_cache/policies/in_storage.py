"""Attention in the drives that hold the KV cache: only q, k, v and outputs move."""

from __future__ import annotations

from dataclasses import replace

from kv_cache.hardware import CSD, DEVICE
from kv_cache.planner.problem import BLOCK_TOKENS, Offload
from kv_cache.scheduler import Policy, SchedulerOutput, SchedulerState


class InStorage(Policy):
    """InstInfer (arXiv 2409.04992): all layers of all requests are in drives, from their prefill on."""

    tiers: tuple[str, ...] = (CSD,)
    strided = True

    def schedule(self, s: SchedulerState) -> SchedulerOutput | None:
        in_drives = Offload(s.cost.layers, in_drives=True)
        return s.prefill(in_drives) or s.output(s.sequences, [in_drives] * len(s.sequences), filling=in_drives)


class InTwoPlaces(InStorage):
    """The first tokens of each request stay on the device as a block of their own, the others are in drives."""

    tiers: tuple[str, ...] = (DEVICE, CSD)
    strided = False

    def first_tokens(self, s: SchedulerState) -> int:
        """Number of first tokens of a request: as many as the device holds, at most half of the longest request."""
        return min(s.longest_tokens // 2, s.cost.room_blocks * BLOCK_TOKENS // s.max_batch_size)

    def schedule(self, s: SchedulerState) -> SchedulerOutput | None:
        first, output = self.first_tokens(s), super().schedule(s)
        if output is None:
            return None
        L, tokens = s.cost.layers, dict(output.num_scheduled_tokens)
        placed = dict.fromkeys(tokens, ((DEVICE, CSD) if first else (CSD,),) * L)
        filling = s.filling
        if filling is not None and filling.number in tokens and filling.num_computed_tokens < first:
            left = first - filling.num_computed_tokens
            tokens[filling.number] = min(left, tokens[filling.number])
            placed[filling.number] = ((DEVICE,),) * L
        return replace(output, num_scheduled_tokens=tokens, placement=placed)
