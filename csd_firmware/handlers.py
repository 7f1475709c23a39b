"""Command handlers: one function per command, with checks beyond its row in `csd_spec.verbs`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from csd_firmware import logs, objects
from csd_firmware.attend import check_attend, plan_and_attend
from csd_firmware.check import InvalidFieldError, require
from csd_firmware.latency import LatencyBreakdown
from csd_firmware.objects import crop_layer
from csd_firmware.state import DriveState, flash_read, rows_of_v
from csd_spec import (
    Attend,
    Completion,
    DriveSpec,
    FlashCounters,
    Flush,
    GetLog,
    KvAppend,
    KvCrop,
    KvDrop,
    KvExist,
    KvFree,
    KvGather,
    KvList,
    KvName,
    KvRead,
    PageFormat,
    SeqCreate,
    SeqFork,
    SeqSweep,
    Status,
)
from csd_spec.layouts import layout_of
from ftl import OutOfSpaceError
from ftl.flash.tag import MAX_STREAMS
from ftl.kv.usage import table_bytes


def _nothing(state: DriveState, command: Any) -> None: ...


Run = Callable[[DriveState, Any, LatencyBreakdown], Completion]


@dataclass(frozen=True, slots=True)
class CommandHandler:
    """Handler of a command.

    Attributes:
        run: Carries out a valid command. The completion's finish_ns is the end of its programs; all other time is
            added to the breakdown.
        check: Raises InvalidFieldError or an FtlError before anything changes.
    """

    run: Run
    check: Callable[[DriveState, Any], None] = _nothing


def create(state: DriveState, command: SeqCreate, watch: LatencyBreakdown) -> Completion:
    """Create sequences."""
    form = form_of(state.spec, command)
    handles = state.ftl.create(command.count, command.layers, command.kv_heads, form)
    for handle in handles:
        state.open(handle)
    return Completion(status=Status.SUCCESS, data=(np.array(handles, np.uint64),))


def form_of(spec: DriveSpec, command: SeqCreate) -> PageFormat:
    """Page format for the sequences of a command; raises ValueError if the layout is unknown or a row fits no page."""
    return layout_of(command.layout).form(spec.geometry.page_bytes, command.head_dim, command.max_tokens)


def check_create(state: DriveState, command: SeqCreate) -> None:
    """Raise InvalidFieldError for a shape that fits no page, OutOfSpaceError if the tables of all sequences (without
    tokens) would not fit drive DRAM."""
    try:
        form = form_of(state.spec, command)
    except ValueError as error:
        raise InvalidFieldError(str(error)) from error
    pages = command.kv_heads * form.embedding_pages
    require(pages <= MAX_STREAMS, f"kv_heads = {command.kv_heads}: {pages} streams, at most {MAX_STREAMS}")
    check_tables(state, command.count, command.count * table_bytes(command.layers, command.kv_heads, form))


def check_fork(state: DriveState, command: SeqFork) -> None:
    """Raise OutOfSpaceError if the tables of all sequences would not fit drive DRAM."""
    parents = [state.ftl.sequence(handle) for handle in command.seqs]
    check_tables(state, len(parents), sum(table_bytes(seq.layers, seq.heads, seq.layout) for seq in parents))


def check_tables(state: DriveState, count: int, wanted: int) -> None:
    """Raise OutOfSpaceError if tables of `wanted` bytes, of `count` more sequences, would not fit drive DRAM."""
    used = state.ftl.kv.usage.total.table_bytes
    if wanted + used > state.spec.dram_bytes:
        raise OutOfSpaceError(f"{count} sequences need tables of {wanted} bytes, {used} of drive DRAM are in use")


def append(state: DriveState, command: KvAppend, watch: LatencyBreakdown) -> Completion:
    """Store rows; the command ends when their pages are programmed."""
    v = rows_of_v(command)
    stored = command.seqs, command.layer, command.lengths, command.k, v
    programmed, finish_ns = state.ftl.append(*stored, watch.now_ns)
    for handle, rows in zip(command.seqs, np.split(v, np.cumsum(command.lengths)[:-1]), strict=True):
        state.add_v(handle, command.layer, rows)
    flash = FlashCounters(pages_programmed=programmed)
    return Completion(status=Status.SUCCESS, flash=flash, finish_ns=finish_ns)


def read(state: DriveState, command: KvRead, watch: LatencyBreakdown) -> Completion:
    """Read keys and values of tokens of a layer."""
    rows, flash = [], FlashCounters()
    for handle in command.seqs:
        length = int(state.ftl.sequence(handle).lengths[command.layer])
        tokens = KvRead.of(length, command.first, command.tokens)
        k, v, plan = state.ftl.read_back(handle, command.layer, tokens)
        watch.until("flash_token", state.ftl.read(plan, watch.now_ns))
        flash += flash_read(plan)
        rows.append((k, v))
    data = tuple(np.concatenate(parts) for parts in zip(*rows, strict=True))
    return Completion(status=Status.SUCCESS, data=data, flash=flash)


def crop(state: DriveState, command: KvCrop, watch: LatencyBreakdown) -> Completion:
    """Truncate sequences."""
    flash = FlashCounters()
    for handle, length in zip(command.seqs, command.lengths.tolist(), strict=True):
        flash += crop_layer(state, handle, command.layer, length, watch)
    return Completion(status=Status.SUCCESS, flash=flash)


def free(state: DriveState, command: KvFree, watch: LatencyBreakdown) -> Completion:
    """Free sequences."""
    state.ftl.free(command.seqs, watch.now_ns)
    for handle in command.seqs:
        state.close(handle)
    return Completion(status=Status.SUCCESS)


def get_log(state: DriveState, command: GetLog, watch: LatencyBreakdown) -> Completion:
    """Return a log page."""
    page = logs.page_bytes(state.ftl, state.history, state.methods, command.page)
    return Completion(status=Status.SUCCESS, data=(page,))


def flush(state: DriveState, command: Flush, watch: LatencyBreakdown) -> Completion:
    """Make earlier commands durable."""
    return Completion(status=Status.SUCCESS, finish_ns=state.ftl.flush(watch.now_ns))


HANDLERS: dict[type[Any], CommandHandler] = {
    SeqCreate: CommandHandler(create, check_create),
    KvAppend: CommandHandler(append),
    Attend: CommandHandler(plan_and_attend, check_attend),
    KvRead: CommandHandler(read),
    KvGather: CommandHandler(objects.gather, objects.check_gather),
    KvCrop: CommandHandler(crop),
    KvFree: CommandHandler(free),
    SeqFork: CommandHandler(objects.fork, check_fork),
    KvName: CommandHandler(objects.name, objects.check_name),
    KvExist: CommandHandler(objects.exist),
    KvDrop: CommandHandler(objects.drop),
    KvList: CommandHandler(objects.names),
    SeqSweep: CommandHandler(objects.free_unnamed),
    GetLog: CommandHandler(get_log),
    Flush: CommandHandler(flush),
}
