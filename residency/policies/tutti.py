"""Tutti: K and V of prefixes on SSDs; layers come while others are computed, what is new goes there in the slack.

arXiv 2605.03375. Reads and writes that an SSD gets together are slow, so one waits for the other: beside a prompt a
write begins only where the layer under way takes longer than what is read meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable

from residency.machine import DEVICE, DIRECT
from residency.table import Extent, Ticket
from residency.turn import Turn

BLOCK_TOKENS = 64  # of an object: in decode fewer are not written yet


def tutti(t: Turn, home: str = DIRECT, ahead: int = 1) -> None:
    """Layers stay on the device as long as it has room; `home` gets what is new of them.

    The memory's "slack" is the paper's table: seconds of a layer by tokens that are new and stored, as its first turn
    took them; a turn whose like has not been yet writes when all of it has been read.
    """
    shape = sum(t.new.values()), (t.layer_bytes() // len(t.batch)).bit_length()
    window_s = t.memory.setdefault("slack", {}).get(shape, 0.0)
    grows = len(t.parts) * sum(map(t.new_bytes, t.batch))  # each layer
    reads, writes = list[Ticket](), list[Ticket]()
    for layer in t.layers:
        writes += _make_room(t, home, _lacking(t, layer) + grows, layer, reads)
        for due in t.layers[layer - t.layers.start :][: ahead + 1]:
            if due == layer or _lacking(t, due) + grows <= t.room(DEVICE):
                copies = (t.copy(x, DEVICE, urgency=-due, after=writes) for x in t.extents(due))
                if came := [ticket for ticket in copies if ticket]:
                    reads, writes = came, []
        left_s = window_s - t.queued_s(home, DEVICE) if t.has_path(home, DEVICE) else 0.0
        writes += _write(t, home, _owed(t, home, layer), reads, left_s)
        t.attend(layer)
    t.memory["slack"].setdefault(shape, t.layer_s())
    _write(t, home, _owed(t, home, t.layers.stop), reads)


def _lacking(t: Turn, layer: int) -> int:
    """Bytes of a layer that the device has not."""
    return sum(t.lacking(x, DEVICE) for x in t.extents(layer))


def _owed(t: Turn, home: str, end: int) -> list[Extent]:
    """Extents below a layer of which the home lacks something; in decode, a block of it."""
    below = (x for layer in range(t.layers.start, end) for x in t.extents(layer))
    least = 1 if t.prefill else BLOCK_TOKENS
    return [x for x in below if t.lacking(x, home) * t.tokens(x) >= least * t.nbytes(x)]


def _write(
    t: Turn, home: str, owed: Iterable[Extent], after: list[Ticket], within_s: float = float("inf")
) -> list[Ticket]:
    """Let the home have extents too, as many as can be written in a time, when what is read has come."""
    begun = list[Ticket]()
    for extent in owed:
        within_s -= t.transfer_s(DEVICE, home, t.lacking(extent, home))
        if within_s < 0:
            break
        if ticket := t.copy(extent, home, source=DEVICE, after=after):
            begun.append(ticket)
    return begun


def _make_room(t: Turn, home: str, need: float, keep: int, after: list[Ticket]) -> list[Ticket]:
    """Leave the device with what was attended longest ago, until so many bytes fit; what is written for that."""
    begun = list[Ticket]()
    for extent in t.held(DEVICE):
        if t.room(DEVICE) >= need:
            break
        if extent.layer != keep or extent.request not in t.batch:
            begun += _write(t, home, [extent], after)
            t.drop(extent, DEVICE)
    return begun
