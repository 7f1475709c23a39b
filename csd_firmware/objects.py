"""KV objects: forks, prefixes under keys, and reads of many ranges at once."""

from __future__ import annotations

import numpy as np

from csd_firmware.check import InvalidFieldError, require
from csd_firmware.latency import LatencyBreakdown
from csd_firmware.state import DriveState, flash_read
from csd_spec import Completion, FlashCounters, KvDrop, KvExist, KvGather, KvList, KvName, SeqFork, SeqSweep, Status
from csd_spec.arrays import I64, KEY, U64, key_list
from ftl import FtlError, OutOfSpaceError

NAME_BYTES = 64  # drive DRAM per name


def fork(state: DriveState, command: SeqFork, watch: LatencyBreakdown) -> Completion:
    """Create forks, which share the common part."""
    handles, flash = list[int](), FlashCounters()
    try:
        for handle, length in zip(command.seqs, command.lengths.tolist(), strict=True):
            handles.append(state.ftl.fork(handle))
            state.open(handles[-1])
            for layer in np.flatnonzero(state.ftl.sequences[handles[-1]].lengths > length).tolist():
                flash += crop_layer(state, handles[-1], layer, length, watch)
    except FtlError:
        state.ftl.free(handles, watch.now_ns)
        for child in handles:
            state.close(child)
        raise
    return Completion(status=Status.SUCCESS, data=(np.array(handles, np.uint64),), flash=flash)


def crop_layer(state: DriveState, handle: int, layer: int, length: int, watch: LatencyBreakdown) -> FlashCounters:
    """Truncate a layer; the sum of V is computed again, so that it stays the sum in token order."""
    watch.until("flash_token", state.ftl.crop(handle, layer, length, watch.now_ns))
    if state.ftl.sequences[handle].layout.opaque:
        return FlashCounters()
    _, v, plan = state.ftl.read_back(handle, layer)
    watch.until("flash_token", state.ftl.read(plan, watch.now_ns))
    state.memory.pop((handle, layer), None)
    state.v_sums[handle][layer] = 0
    state.add_v(handle, layer, v)
    return flash_read(plan)


def check_gather(state: DriveState, command: KvGather) -> None:
    """Raise InvalidFieldError for a range that is not stored."""
    ends = command.first + command.tokens
    for handle, end, count in zip(command.seqs, ends.tolist(), command.tokens.tolist(), strict=True):
        lengths = state.ftl.sequence(handle).lengths[command.layer : command.layer + command.layers]
        require(len(lengths) == command.layers, f"layers = {command.layers}: at most {len(lengths)} from this layer on")
        require(count > 0, "tokens: a range is empty")
        require(end <= int(lengths.min()), f"a range ends at {end:,}: sequence {handle} has {int(lengths.min()):,}")


def gather(state: DriveState, command: KvGather, watch: LatencyBreakdown) -> Completion:
    """Read ranges of many sequences and layers; all pages are requested at once."""
    layers = range(command.layer, command.layer + command.layers)
    ranges = [
        (handle, range(first, first + count))
        for handle, first, count in zip(command.seqs, command.first.tolist(), command.tokens.tolist(), strict=True)
    ]
    k, v, plans = state.ftl.read_ranges(ranges, layers)
    start_ns = watch.now_ns
    for plan in plans:  # all start with the command and share channels and planes
        watch.until("flash_token", state.ftl.read(plan, start_ns))
    return Completion(status=Status.SUCCESS, data=(k, v), flash=flash_read(*plans))


def check_name(state: DriveState, command: KvName) -> None:
    """Raise InvalidFieldError for prefixes that are not stored, OutOfSpaceError if drive DRAM has no room for names."""
    require(len(command.seqs) == 1, "seqs: must be exactly one sequence")
    stored = int(state.ftl.sequence(command.seqs[0]).lengths.min())
    most, least = int(command.tokens.max()), int(command.tokens.min())
    if not 1 <= least <= most <= stored:
        raise InvalidFieldError(f"tokens from {least} to {most}: sequence {command.seqs[0]} has {stored} in all layers")
    check_names(state, command.keys.size)


def max_names(state: DriveState) -> int:
    """Maximum names, of prefixes and of values, in drive DRAM."""
    return state.spec.dram_bytes // 4 // NAME_BYTES


def check_names(state: DriveState, more: int) -> None:
    """Raise OutOfSpaceError if drive DRAM has no room for more names."""
    wanted = state.ftl.kv.names.count + more
    if wanted > max_names(state):
        raise OutOfSpaceError(f"{wanted} names: drive DRAM has room for {max_names(state)}")


def name(state: DriveState, command: KvName, watch: LatencyBreakdown) -> Completion:
    """Bind keys to prefixes."""
    state.ftl.name(command.seqs[0], key_list(command.keys), command.tokens.tolist())
    return Completion(status=Status.SUCCESS)


def exist(state: DriveState, command: KvExist, watch: LatencyBreakdown) -> Completion:
    """Look up keys."""
    handles, tokens = _table(state.ftl.kv.names.find(state.tenant, key_list(command.keys)), command.keys.size)
    return Completion(status=Status.SUCCESS, data=(handles, tokens))


def drop(state: DriveState, command: KvDrop, watch: LatencyBreakdown) -> Completion:
    """Unbind keys."""
    state.ftl.unname(state.tenant, key_list(command.keys))
    return Completion(status=Status.SUCCESS)


def unnamed_sequences(state: DriveState, tenant: int) -> list[int]:
    """Handles of a tenant's sequences without keys."""
    return [seq.handle for seq in state.ftl.sequences.values() if seq.label == tenant and not seq.names]


def free_unnamed(state: DriveState, command: SeqSweep, watch: LatencyBreakdown) -> Completion:
    """Free the tenant's sequences without keys."""
    gone = unnamed_sequences(state, state.tenant)
    state.ftl.free(gone, watch.now_ns)
    for handle in gone:
        state.close(handle)
    return Completion(status=Status.SUCCESS, data=(np.array([len(gone)]),))


def names(state: DriveState, command: KvList, watch: LatencyBreakdown) -> Completion:
    """List keys."""
    entries = state.ftl.kv.names.list_after(state.tenant, key_list(command.after)[0], command.count)
    keys = np.frombuffer(b"".join(key for key, _ in entries).ljust(KEY.itemsize * command.count, b"\0"), KEY)
    return Completion(status=Status.SUCCESS, data=(keys, *_table([place for _, place in entries], command.count)))


def _table(places: list[tuple[int, int]], count: int) -> tuple[U64, I64]:
    """Handles and tokens as arrays, padded with zeros."""
    handles, tokens = np.zeros(count, np.uint64), np.zeros(count, np.int64)
    if places:
        handles[: len(places)], tokens[: len(places)] = zip(*places, strict=True)
    return handles, tokens
