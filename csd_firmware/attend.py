"""One decode step in a drive: runs the attention method, and schedules its work to get the simulated time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from attention_engine import DecodeStep, Queries, Read, to_half, widen_inputs
from csd_firmware.check import InvalidFieldError, check_array, require
from csd_firmware.decode_plan import accepted, register
from csd_firmware.fused import Data, FusedStep, fused_step
from csd_firmware.latency import LatencyBreakdown
from csd_firmware.schedule import SCHEDULES, Work
from csd_firmware.state import DriveState, flash_read, rows_of_v
from csd_spec import Attend, Command, Completion, Status
from csd_spec.arrays import F16, F32
from csd_spec.verbs import VERBS
from ftl import FtlError, round_to_codec

_ONE = np.ones(1, np.int64)


def check_attend(state: DriveState, command: Attend) -> None:
    """Raise InvalidFieldError for an unknown method, or for more tokens than the sequence will have."""
    methods = state.methods
    if not isinstance(command.method, str) or command.method not in methods:
        raise InvalidFieldError(f"method = {command.method!r}: this drive knows {', '.join(methods)}")
    sequences = [state.ftl.sequence(handle) for handle in command.seqs]
    if sequences[0].layout.opaque:
        raise InvalidFieldError("seqs: their layout is opaque: attention is not supported")
    if command.terms is not None:
        _check_terms(command.terms)
    for sequence, k, recent in zip(sequences, command.top_k.tolist(), command.recent.tolist(), strict=True):
        stored = int(sequence.lengths[command.layer]) + 1
        if not 1 <= k <= stored:
            raise InvalidFieldError(f"top_k = {k}: sequence {sequence.handle} has {stored} tokens")
        if not 0 <= recent <= k:
            raise InvalidFieldError(f"recent = {recent}: must be from 0 to top_k = {k}")


def _check_terms(terms: F32) -> None:
    scale, cap, sink, slope = np.moveaxis(terms, -1, 0)
    good = np.isfinite(scale).all() and (cap > 0).all() and (sink < np.inf).all() and np.isfinite(slope).all()
    require(bool(good), "terms: scales and slopes must be finite, caps above 0, sinks below infinity")


def planned_run(state: DriveState, command: Command, max_bytes: int) -> Callable[..., Completion] | None:
    """Return the run function of the plan that accepts a command (it checks values); None if a full check is needed."""
    if type(command) is not Attend:
        return None
    try:
        plan = state.ftl.kv.plans.get((command.seqs, command.layer))
        return accepted(plan, command, max_bytes) if plan else None
    except TypeError:  # a field has an invalid type: `check` reports which
        return None


def plan_and_attend(state: DriveState, command: Attend, watch: LatencyBreakdown) -> Completion:
    """Create the plan of a fully checked step, and run it."""
    plan = state.ftl.kv.plan(command.seqs, command.layer)
    run, verb = partial(_append_and_attend, fused_step(state, plan, command)), VERBS[Attend]
    register(plan, command, run, verb.reply_bytes(verb.sizes(command)))
    return run(state, command, watch, checked=True)


def _append_and_attend(
    fused: FusedStep | None, state: DriveState, command: Attend, watch: LatencyBreakdown, checked: bool = False
) -> Completion:
    """Append the new token and attend over all tokens.

    The token stays in DRAM; if it completes a group, the group is programmed in the background.

    Args:
        fused: A compiled step, if the method and the layout have one; it checks values itself.
        checked: Whether the command's values are checked already, not only its form.
    """
    if fused and (data := fused.run(state, command)):
        SCHEDULES[state.spec.engine.schedule](fused.work, state.units, watch)
        return Completion(status=Status.SUCCESS, data=data, flash=fused.flash)
    if not checked:
        _check_values(state, command)
    one_each = _ONE.repeat(len(command.seqs))
    v = rows_of_v(command)
    programmed, _ = state.ftl.append(command.seqs, command.layer, one_each, command.k, v, watch.now_ns)
    try:
        work, data = _attend(state, command, v, watch)
    except (InvalidFieldError, FtlError):  # the method failed, or data is lost
        _undo_append(state, command, watch.now_ns)
        raise
    flash = flash_read(*(item.plan for item in work if isinstance(item, Read)), programmed=programmed)
    return Completion(status=Status.SUCCESS, data=data, flash=flash)


def _check_values(state: DriveState, command: Attend) -> None:
    """Raise InvalidFieldError for invalid values in a command of valid form."""
    sizes = {"bf16": int(state.ftl.sequence(command.seqs[0]).layout.bf16)}
    for array in VERBS[Attend].modelled:
        check_array(array, getattr(command, array.name), sizes)
    check_attend(state, command)


def _attend(state: DriveState, command: Attend, v: F16, watch: LatencyBreakdown) -> tuple[Work, Data]:
    """Run the method; returns its work, which is scheduled, and the completion's data.

    Raises:
        InvalidFieldError: The method, which may be user-defined, raised an exception.
        FtlError: Data of a sequence is lost.
    """
    view = state.ftl.view(command.seqs, command.layer)
    B, H, G, d = command.q.shape
    v_sums = state.sums(command.seqs, command.layer)
    bf16 = view.layout.bf16
    q, v_means = widen_inputs(command.q, round_to_codec(view.layout, v), view.seq_lens, v_sums, bf16)
    queries = Queries(
        q,
        command.r,
        command.top_k.repeat(H),
        command.recent.repeat(H),
        v_means,
        [state.memory.setdefault((handle, command.layer), {}) for handle in command.seqs],
        command.terms,
    )
    step = DecodeStep(view, state.ftl, queries, state.threads)
    try:
        exact = state.methods[command.method](step).reshape(B, H, G, d)
        output = to_half(np.ascontiguousarray(exact, np.float32), bf16)
        rows: F32 = np.ascontiguousarray(step.rows, np.float32).reshape(B, H, G, 2)
        SCHEDULES[state.spec.engine.schedule](step.work, state.units, watch)
        if command.method != "dense":
            state.history.attend(command.method, step.lost, step.errors)
    except FtlError:
        raise
    except Exception as error:
        raise InvalidFieldError(f"method {command.method}: {type(error).__name__}: {error}") from error
    state.set_sums(command.seqs, command.layer, v_sums)
    return step.work, (output, rows)


def _undo_append(state: DriveState, command: Attend, now_ns: int) -> None:
    """Remove the token that a failed step has appended; sequences that lost data are skipped."""
    for handle in (handle for handle in command.seqs if not state.ftl.sequences[handle].failed):
        length = int(state.ftl.sequence(handle).lengths[command.layer])
        assert length > 0, f"sequence {handle} has no token to remove"
        state.ftl.crop(handle, command.layer, length - 1, now_ns)
        state.memory.pop((handle, command.layer), None)
