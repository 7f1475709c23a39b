"""Replay of recorded decisions on another executor."""

from __future__ import annotations

from collections.abc import Sequence

from kv_cache.block_table import Transfer
from kv_cache.hardware import Machine
from kv_cache.iteration import Iteration, IterationRunner
from kv_cache.transfer.engine import Action, IterationRecord, TransferEngine


def replay(
    recorded: Sequence[IterationRecord], machine: Machine, transfers: TransferEngine, like: IterationRunner
) -> IterationRunner:
    """Execute the recorded actions of a run on a machine with the same tiers and routes."""
    acts: list[Action] = []

    def run_recorded(t: Iteration) -> None:
        transfers = dict[int, Transfer | None]()
        for number, act in enumerate(acts):
            before = [transfer for earlier in act.after if (transfer := transfers[earlier])]
            transfers[number] = _do(t, run, act, before)

    run = IterationRunner(machine, like.layers, run_recorded, transfers, parts=like.parts)
    for record in recorded:
        if record.new:
            acts[:] = record.acts
            run.run(record.new, record.row_bytes)
            continue
        for act in record.acts:
            if act.kind == "free":
                run.free(act.rows[0])
            elif act.block:
                run.crop(act.block, act.tokens)
    return run


def _do(t: Iteration, run: IterationRunner, act: Action, after: list[Transfer]) -> Transfer | None:
    """Execute one action; returns the transfer of a copy."""
    if act.block is None:
        t.attend(act.layer, act.rows, act.tiers, act.method, act.read)
    elif act.kind == "copy":
        return t.copy(act.block, act.tier, source=act.source, fifo=act.fifo, after=after)
    elif act.kind == "select":
        return t.select(act.block, act.tier, act.tokens)
    elif act.kind == "drop":
        t.drop(act.block, act.tier)
    else:
        run.rewrite(act.block, act.tier)
    return None
