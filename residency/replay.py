"""Recorded choices once more: the same acts on another executor."""

from __future__ import annotations

from collections.abc import Sequence

from residency.executor import Act, Executor, Recorded
from residency.machine import Machine
from residency.table import Ticket
from residency.turn import Residency, Turn


def replay(recorded: Sequence[Recorded], machine: Machine, executor: Executor, like: Residency) -> Residency:
    """Carry out what was recorded of a run, on a machine with the same places and paths."""
    acts: list[Act] = []

    def again(t: Turn) -> None:
        tickets = dict[int, Ticket | None]()
        for number, act in enumerate(acts):
            before = [ticket for each in act.after if (ticket := tickets[each])]
            tickets[number] = _do(t, run, act, before)

    run = Residency(machine, like.layers, again, executor, parts=like.parts)
    for each in recorded:
        if each.new:
            acts[:] = each.acts
            run.turn(each.new, each.row_bytes)
            continue
        for act in each.acts:
            if act.kind == "free":
                run.free(act.rows[0])
            elif act.extent:
                run.crop(act.extent, act.tokens)
    return run


def _do(t: Turn, run: Residency, act: Act, after: list[Ticket]) -> Ticket | None:
    """Returns the ticket of a copy."""
    if act.extent is None:
        t.attend(act.layer, act.rows, act.places, act.method)
    elif act.kind == "copy":
        return t.copy(act.extent, act.place, source=act.source, in_turn=act.in_turn, after=after)
    elif act.kind == "drop":
        t.drop(act.extent, act.place)
    else:
        run.rewrite(act.extent, act.place)
    return None
