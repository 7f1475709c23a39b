"""The short way of a decode step: dense attention whose like was seen before, in one compiled call.

Most steps only add a row to groups that wait: but for values and lengths, nothing of them is new. What `check` and
`attend` find out about the rest is kept until a table changes. A step changes nothing before all of it is known to be
good, so whatever is off goes the general way, which says what it is. Both give the same bits, times and counters
(`tests/csd_firmware/test_kept.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attention_engine import Compute, Read, Step
from attention_engine.methods.dense import dense
from attention_engine.short import attend_all, finite, place_of
from attention_engine.step import WORTH_THREADS, alike
from csd_firmware.schedule import SCHEDULES
from csd_firmware.state import DriveState, flash_read
from csd_firmware.stopwatch import Stopwatch
from csd_io.compiled import njit
from csd_spec import Attend, Command, Completion, Status
from csd_spec.arrays import F16, F32
from ftl.kv.layouts.lay import lay_each

Data = tuple[F16, F32]  # of a completion: the output, and m and l of its rows


@njit(cache=True, nogil=True, error_model="numpy")
def _step(  # type: ignore[no-untyped-def]
    q, k, v, top_k, recent, stored, bounds, waiting, bf16, counts, tokens, places, sums, out, rows
):
    """A token more of each sequence, and attention over all; whether it is done, or else nothing has changed.

    stored: tokens before, (B,). bounds: see `Standing`, (B, 2). waiting: what `lay_each` takes of the groups that get
    the token. counts (N,) are set to the tokens of each stream. The rest is what `attend_all` has.
    """
    heads = k.shape[1]
    for b in range(stored.size):
        length = stored[b] + 1
        if stored[b] < bounds[b, 0] or stored[b] >= bounds[b, 1]:
            return False
        if top_k[b] < 1 or top_k[b] > length or recent[b] < 0 or recent[b] > top_k[b]:
            return False
        counts[b * heads : (b + 1) * heads] = length
    if not finite(q, k, v, bf16):
        return False
    content, at, forms = waiting
    lay_each(content, at, forms, stored, k, v)
    return attend_all(q, v, bf16, counts, tokens, places, sums, out, rows)


class ShortStep:
    """What stays as it is, between two changes of the tables, of steps like one that was seen."""

    def __init__(self, state: DriveState, like: Attend, step: Step) -> None:
        """step: what the general way has just made of `like`."""
        view, standing = step.view, state.ftl.kv.standing(like.seqs, like.layer)
        self.state, self.standing, self.form = state, standing, _form(like)
        self.seqs, self.layer, self.shape = like.seqs, like.layer, like.q.shape
        self.bf16 = view.layout.bf16 or None
        self.bounds, self.waiting = np.array(standing.bounds), (standing.banks[1], *standing.laid)
        self.counts, self.tokens = np.empty_like(step.seq_lens), alike(step.streams, int(self.bounds.max()))
        self.places = place_of(view), view.k_slots, view.v_slots, np.uint64(view.layout.n)
        self.work = [self._as_counted(item) if isinstance(item, Compute) else item for item in step.work]
        self.flash = flash_read(*(item.plan for item in step.work if isinstance(item, Read)))
        self.nbytes = like.q.nbytes + step.rows.nbytes  # of data in its completion

    def _as_counted(self, item: Compute) -> Compute:
        """The same work over as many tokens as there are by then."""
        return replace(item, lines=self.counts, scores=self.counts if item.scores is item.lines else item.scores)

    def take(self, command: Attend) -> Data | None:
        """Carry a command out but for its time; None where the general way has to, and nothing has changed."""
        state, standing = self.state, self.standing
        if _form(command) != self.form or command.terms is not None or not state.ftl.placement.alive:
            return None
        stored, sums = np.array(standing.stored()), state.sums(self.seqs, self.layer)
        out, rows = np.empty(self.shape, np.float16), np.empty((*self.shape[:3], 2), np.float32)
        given = _as_ours(command.q), _as_ours(command.k), _as_ours(command.v), out
        q, k, v, bits = (each.view(np.uint16) for each in given)
        asked = _as_ours(command.top_k), _as_ours(command.recent)
        kept = self.bounds, self.waiting, self.bf16, self.counts, self.tokens, self.places
        if not _step(q, k, v, *asked, stored, *kept, sums, bits, rows):
            return None
        standing.grow()
        state.ftl.kv.changes.dirty.update(self.seqs)
        state.set_sums(self.seqs, self.layer, sums)
        return out, rows

    def finish(self, data: Data, state: DriveState, command: Attend, watch: Stopwatch) -> Completion:
        """The completion of what was taken, when its pages and units are done."""
        SCHEDULES[state.spec.engine.schedule](self.work, state.units, watch)
        return Completion(status=Status.SUCCESS, data=data, flash=self.flash)


def keep_short(state: DriveState, command: Attend, step: Step) -> None:
    """Let the next step like one that was taken the general way be short, where that is known to be the same."""
    ftl, layout = state.ftl, step.view.layout
    standing = ftl.kv.standing(command.seqs, command.layer)
    of_rows = layout.rows.exact and layout.keeps_rows and not (layout.latent or standing.others)
    as_they_lie = ftl.nand.payload and not (ftl.nand.held.lazy or ftl.nand.faults.raw_bit_errors)
    alone = state.threads == 1 or int(step.seq_lens.sum()) < WORTH_THREADS
    if of_rows and as_they_lie and alone and command.terms is None and state.methods[command.method] is dense:
        ftl.kv.keep(_key(command), ShortStep(state, command, step))


def short_step(state: DriveState, command: Command, max_bytes: int) -> Callable[..., Completion] | None:
    """Carry out a command the short way, but for its time, which what is returned ends it with, as an act does; None
    where that cannot be, and nothing has changed."""
    if type(command) is not Attend:
        return None
    try:
        short: ShortStep | None = state.ftl.kv.kept.get(_key(command))
    except TypeError:  # fields that no command can have: `check` says which
        return None
    data = short.take(command) if short is not None and short.nbytes <= max_bytes else None
    return partial(short.finish, data) if short is not None and data is not None else None


def _key(command: Attend) -> tuple[object, ...]:
    return ShortStep, tuple(command.seqs), command.layer


def _as_ours(array: NDArray[Any]) -> NDArray[Any]:
    """An array, or a copy where it is read-only or not aligned: for such `_step` would be compiled anew."""
    return array if array.flags.behaved else array.copy()


def _form(command: Attend) -> tuple[object, ...]:
    """All of a command but values, terms and whose it is; nothing where it has no arrays."""
    q, k, v, top_k, recent = command.q, command.k, command.v, command.top_k, command.recent
    if {type(q), type(k), type(v), type(top_k), type(recent)} != {np.ndarray}:
        return ()
    dtypes, shapes = (q.dtype, k.dtype, v.dtype, top_k.dtype, recent.dtype), (q.shape, k.shape, v.shape)
    strides = q.strides, k.strides, v.strides, top_k.strides, recent.strides
    return command.method, command.r, dtypes, shapes, strides, top_k.shape, recent.shape
