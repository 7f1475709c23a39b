"""Slicing of long commands, so that a drive's other tenants get turns in between."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from csd_spec import (
    Command,
    Completion,
    FlashCounters,
    KvCrop,
    KvDrop,
    KvExist,
    KvFree,
    KvName,
    SeqCreate,
    SeqFork,
    SeqSweep,
)
from csd_spec.verbs import VERBS, ArrayType

SEQUENCES = 8  # sequences per slice
KEYS = 256

_BY_SEQUENCE, _BY_KEY = (SeqFork, KvFree, KvCrop), (KvName, KvExist, KvDrop)


def is_long(command: Any) -> bool:
    """Whether a command, valid or not, needs more than one slice."""
    if isinstance(command, SeqCreate):
        return isinstance(command.count, int) and command.count > SEQUENCES
    if isinstance(command, _BY_KEY):
        return isinstance(command.keys, np.ndarray) and command.keys.size > KEYS
    return isinstance(command, _BY_SEQUENCE) and len(command.seqs) > SEQUENCES


def slices(command: Any) -> list[Any]:
    """Split a valid long command into slices."""
    if isinstance(command, SeqCreate):
        firsts = range(0, command.count, SEQUENCES)
        return [replace(command, count=min(SEQUENCES, command.count - first)) for first in firsts]
    by_key = isinstance(command, _BY_KEY)
    most = KEYS if by_key else SEQUENCES
    arrays = [array.name for array in VERBS[type(command)].arrays if not (by_key and array.kind is ArrayType.HANDLES)]
    fields = {name: getattr(command, name) for name in arrays}
    firsts = range(0, len(fields[arrays[0]]), most)
    return [
        replace(command, **{name: field[first : first + most] for name, field in fields.items()}) for first in firsts
    ]


def ends(command: Command, done: Completion) -> bool:
    """Whether no later slice is needed: key look-up stops at the first unknown key."""
    return isinstance(command, KvExist) and not done.data[0].all()


def join_slices(command: Command, cut: list[Any], parts: list[Completion]) -> Completion:
    """Join the completions of a command's slices `cut`, which were carried out one after the other."""
    assert 0 < len(parts) <= len(cut), f"{len(parts)} completions of {len(cut)} slices"
    spent: dict[str, int] = {}
    for part in parts:
        for unit, ns in part.breakdown_ns.items():
            spent[unit] = spent.get(unit, 0) + ns
    data = [np.concatenate(arrays) for arrays in zip(*(part.data for part in parts), strict=True)]
    if isinstance(command, SeqSweep):
        data = [np.array([sum(len(piece.seqs) for piece in cut)])]
    if isinstance(command, KvExist):
        data = [np.concatenate([array, np.zeros(command.keys.size - array.size, array.dtype)]) for array in data]
    return replace(
        parts[-1],
        submit_ns=parts[0].submit_ns,
        breakdown_ns=spent,
        flash=sum((part.flash for part in parts), FlashCounters()),
        link_bytes=sum(part.link_bytes for part in parts),
        data=tuple(data),
    )
