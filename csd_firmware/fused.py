"""Dense attention of a decode step in one compiled call: `FusedStep`.

The call checks values, appends the token and attends, with the kernels of the method. It changes nothing until all
values are known to be valid: a step that it declines is carried out by the method, or rejected with the reason.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from attention_engine import DecodeStep, Queries, Read
from attention_engine.fused import attend_dense, finite, place_of
from attention_engine.methods.dense import dense
from attention_engine.step import WORTH_THREADS
from attention_engine.values import first_tokens
from csd_firmware.state import DriveState, flash_read
from csd_io.compiled import njit
from csd_spec import Attend
from csd_spec.arrays import F16, F32
from ftl.kv.layer_plan import LayerPlan
from ftl.kv.layouts.packing import append_rows

Data = tuple[F16, F32]  # completion data: the output, and m and l of its rows
_NO_NUMBERS: Any = SimpleNamespace(attend=lambda view, q, *rest: (q, q[..., :1]))  # the step only records its work


@njit(cache=True, nogil=True, error_model="numpy")
def _store_and_attend(  # type: ignore[no-untyped-def]
    q, k, v, top_k, recent, stored, waiting, bf16, counts, tokens, places, sums, out, rows
):
    """Store one token of each sequence and attend over all tokens; returns False if a value is not representable.

    Args:
        stored: Tokens before, (B,).
        waiting: Arguments of `append_rows` for the open groups that get the token.
        counts: Output: tokens of each stream, (N,).
        Other arguments: See `attend_dense`.
    """
    heads = k.shape[1]
    for b in range(stored.size):
        length = stored[b] + 1
        if top_k[b] < 1 or top_k[b] > length or recent[b] < 0 or recent[b] > top_k[b]:
            return False
        counts[b * heads : (b + 1) * heads] = length
    if not finite(q, k, v, bf16):
        return False
    content, at, forms = waiting
    append_rows(content, at, forms, stored, k, v)
    return attend_dense(q, v, bf16, counts, tokens, places, sums, out, rows)


class FusedStep:
    """The compiled call on a plan, with the work of the method for the schedule.

    Attributes:
        work: What `dense` reads and computes, over as many tokens as the last step has attended.
        flash: Counters of that.
    """

    def __init__(self, state: DriveState, plan: LayerPlan, command: Attend) -> None:
        self.plan, view = plan, plan.view()
        tokens, place = first_tokens(view.seq_lens.size, max(end for _, end in plan.bounds)), place_of(view)
        places = place, view.k_slots, view.v_slots, np.uint64(view.layout.n)
        waiting = plan.banks[1], *plan.in_place_groups
        self.planned = waiting, view.layout.bf16 or None, view.seq_lens, tokens, places  # the call counts in seq_lens
        none = np.empty((view.seq_lens.size, *command.q.shape[2:]), np.float32)
        queries = Queries(none, 1, view.seq_lens, view.seq_lens, none[:, 0], [{}])
        dense(step := DecodeStep(view, state.ftl, queries, arithmetic=_NO_NUMBERS))
        self.work, self.flash = step.work, flash_read(*(item.plan for item in step.work if isinstance(item, Read)))

    def run(self, state: DriveState, command: Attend) -> Data | None:
        """Carry out a command that the plan accepts; None if it is declined, and nothing has changed."""
        if not state.ftl.placement.alive:
            return None
        plan, seqs = self.plan, command.seqs
        stored, sums = np.array(plan.stored()), state.sums(seqs, plan.layer)
        out, rows = np.empty(command.q.shape, np.float16), np.empty((*command.q.shape[:3], 2), np.float32)
        arrays: Any = command.q, command.k, command.v, command.top_k, command.recent
        # copies of read-only and unaligned arrays, for which the call would be compiled again
        q, k, v, top_k, recent = [array if array.flags.behaved else array.copy() for array in arrays]
        q, k, v, bits = [array.view(np.uint16) for array in (q, k, v, out)]
        if not _store_and_attend(q, k, v, top_k, recent, stored, *self.planned, sums, bits, rows):
            return None
        plan.count_token()
        state.ftl.kv.changes.dirty.update(seqs)
        state.set_sums(seqs, plan.layer, sums)
        return out, rows


def fused_step(state: DriveState, plan: LayerPlan, command: Attend) -> FusedStep | None:
    """The compiled call for commands like one on a plan; None if only the method can carry them out."""
    ftl, layout = state.ftl, plan.layout
    of_rows = layout.rows.exact and layout.keeps_rows and not (layout.latent or plan.encoded_groups)
    resident = ftl.nand.payload and not (ftl.nand.page_store.lazy or ftl.nand.faults.raw_bit_errors)
    one_thread = state.threads == 1 or (sum(plan.stored()) + len(plan.seqs)) * plan.heads < WORTH_THREADS
    is_plain = plan.in_bounds() and command.terms is None and state.methods[command.method] is dense
    return FusedStep(state, plan, command) if of_rows and resident and one_thread and is_plain else None
