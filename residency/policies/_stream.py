"""Layer after layer through the device: what FlexGen, Dual-Blade and their kin have in common."""

from __future__ import annotations

from collections.abc import Callable

from residency.machine import DEVICE
from residency.table import Extent, Ticket
from residency.turn import Turn

Tickets = dict[int, list[tuple[Extent, Ticket]]]  # of copies to the device, by layer


def stream(
    t: Turn, home: Callable[[Extent], str], ahead: int, in_turn: Callable[[int], bool] = lambda layer: False
) -> Tickets:
    """Bring layers `ahead` of their turn, as far as the device has room; attend; send what is new home.

    in_turn: whether copies of a layer enter their first link one after the other.
    """
    coming: Tickets = {}
    for layer in t.layers:
        for due in t.layers[layer - t.layers.start :][: ahead + 1]:
            if due not in coming and (due == layer or fits(t, layer, due)):
                copies = ((x, t.copy(x, DEVICE, urgency=-due, in_turn=in_turn(due))) for x in t.extents(due))
                coming[due] = [(extent, ticket) for extent, ticket in copies if ticket]
        t.attend(layer)
        for extent in t.extents(layer):
            t.move(extent, home(extent))
    return coming


def fits(t: Turn, layer: int, due: int) -> bool:
    """Whether a layer can come while an earlier one is still to get its new tokens."""
    there = [extent for extent in t.extents(due) if DEVICE not in t.where(extent)]
    growth = t.layer_bytes() - sum(t.nbytes(extent) for extent in t.extents(layer))
    return t.room(DEVICE) >= sum(map(t.nbytes, there)) + growth
