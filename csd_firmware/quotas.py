"""Quotas of tenants, checked before a command changes anything."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np

from csd_firmware.handlers import form_of
from csd_firmware.objects import max_names
from csd_firmware.state import DriveState, Quota
from csd_spec import KvName
from csd_spec.arrays import key_list
from csd_spec.verbs import AppendsRows, CommandSpec, CreatesSequences, ForksSequences, TruncatesSequences
from ftl import OutOfSpaceError
from ftl.flash.tag import MAX_OWNERS
from ftl.kv.usage import Usage, layer_usage, table_bytes, usage_of
from ftl.kv.values import VALUES


def check_quota(state: DriveState, verb: CommandSpec, command: Any, tenant: int) -> None:
    """Raise OutOfSpaceError if a command would exceed its tenant's quota."""
    if tenant not in state.quotas:
        return
    if isinstance(command, KvName):
        check_use(state, tenant, Usage(), len(state.ftl.kv.names.unknown(tenant, key_list(command.keys))))
    else:
        check_use(state, tenant, _wanted(state, verb, command))


def check_use(state: DriveState, tenant: int, wanted: Usage, names: int = 0) -> None:
    """Raise OutOfSpaceError if a tenant's sequences and values would exceed its quota.

    Args:
        tenant: Its label.
        wanted: Additional usage of sequences and values.
        names: Additional names.
    """
    quota = state.quotas.get(tenant)
    if quota is None or (wanted == Usage() and not names):
        return
    used, labels = Usage(), (tenant, tenant | VALUES)
    for label in labels:
        used.add(state.ftl.kv.usage.of(label))
    _check(quota, "sequences", wanted.sequences, used.sequences, max_sequences())
    _check(quota, "bytes of tables in DRAM", wanted.table_bytes, used.table_bytes, state.spec.dram_bytes)
    _check(quota, "flash pages", wanted.pages, used.pages, max_pages(state))
    _check(quota, "group buffers in DRAM", wanted.buffers, used.buffers, state.ftl.buffers.capacity)
    _check(quota, "names", names, sum(map(state.ftl.kv.names.count_of, labels)), max_names(state))


def max_sequences() -> int:
    """Maximum sequences and values of a drive."""
    return MAX_OWNERS // 2


def max_pages(state: DriveState) -> int:
    """Flash pages available to sequences and values."""
    g = state.spec.geometry
    return g.pages - state.ftl.blocks.pages - g.pages // 8  # 1/8 is reserved for the journal and garbage collection


def _check(quota: Quota, what: str, more: int, used: int, whole: int) -> None:
    limit = int(whole * quota.share)
    if more > 0 and used + more > limit:
        raise OutOfSpaceError(
            f"{more:,} more {what}: tenant {quota.tenant} uses {used:,} of its quota of {limit:,} "
            f"({quota.share:.0%} of the drive)"
        )


def _wanted(state: DriveState, verb: CommandSpec, command: Any) -> Usage:
    """Additional usage of the tenant after a command."""
    wanted = Usage()
    match verb.effect:
        case CreatesSequences():
            with suppress(ValueError):  # unknown layout: the handler rejects it
                tables = table_bytes(command.layers, command.kv_heads, form_of(state.spec, command))
                wanted.add(Usage(1, tables), command.count)
        case ForksSequences():
            for handle, length in zip(command.seqs, command.lengths.tolist(), strict=True):
                parent = state.ftl.sequence(handle)
                wanted.add(usage_of(parent, np.minimum(parent.lengths, length).tolist()))
        case AppendsRows(lengths):
            counts = getattr(command, lengths).tolist() if lengths else [1] * len(command.seqs)
            _add_growth(state, command, counts, wanted)
        case TruncatesSequences():
            ends = command.lengths.tolist()
            seqs = [state.ftl.sequence(handle) for handle in command.seqs]
            cut = [min(0, end - int(seq.lengths[command.layer])) for seq, end in zip(seqs, ends, strict=True)]
            _add_growth(state, command, cut, wanted)
        case _:
            pass
    return wanted


def _add_growth(state: DriveState, command: Any, tokens: list[int], wanted: Usage) -> None:
    """Add the additional usage of the command's layer with `tokens` more tokens per sequence."""
    for handle, more in zip(command.seqs, tokens, strict=True):
        seq = state.ftl.sequence(handle)
        length = int(seq.lengths[command.layer])
        wanted.add(layer_usage(seq, length + more))
        wanted.add(layer_usage(seq, length), -1)
