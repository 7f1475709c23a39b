"""Where somebody else wants K and V: what serves requests says before each turn where every layer of each of them lies.

What lies elsewhere is brought for its attention and leaves again; what does not fit where it should lie goes lower.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from residency.machine import CSD, DEVICE, DIRECT
from residency.table import Extent
from residency.turn import Turn

Homes = Callable[[Hashable, int], tuple[str, ...]]


def placed(t: Turn) -> None:
    """Carry out the memory's "homes": of a layer of a request, the place of each of its blocks.

    With one place more than there are blocks the new tokens begin another one. One new token is attended in drives if
    the last block lies there; several, and all other blocks, on the device.
    """
    for extent in t.held(DEVICE):
        if _home(t, extent) != DEVICE:
            _send(t, extent)
    for layer in t.layers:
        together: dict[tuple[str, ...], list[Hashable]] = {}
        for row in t.batch:
            together.setdefault(_attended(t, row, layer), []).append(row)
        for at, rows in together.items():
            for group in _groups(t, layer, rows, at):
                _attend(t, layer, group, at)


def _groups(t: Turn, layer: int, rows: list[Hashable], at: tuple[str, ...]) -> list[list[Hashable]]:
    """Rows that are attended at once: on the device those that stay there, if it has room, and each other by itself."""
    if DEVICE not in at:
        return [rows]
    stay = [row for row in rows if all(_home(t, extent) == DEVICE for extent in t.extents(layer, [row]))]
    need = sum(map(t.nbytes, t.extents(layer, stay))) + sum(map(t.new_bytes, stay)) * len(t.parts)
    if need > t.capacity(DEVICE):
        stay = []
    return [group for group in (stay, *([row] for row in rows if row not in stay)) if group]


def _attended(t: Turn, row: Hashable, layer: int) -> tuple[str, ...]:
    """Where each block of a row is attended."""
    homes: Homes = t.memory["homes"]
    blocks, places = len(t.extents(layer, [row])) // len(t.parts), homes(row, layer)
    count = max(blocks, min(blocks + 1, len(places)))
    last = CSD if t.new[row] == 1 and blocks and places[-1] == CSD else DEVICE
    return (*(DEVICE,) * (count - 1), last)


def _attend(t: Turn, layer: int, rows: list[Hashable], at: tuple[str, ...]) -> None:
    """Bring what rows have of a layer, attend, and send it home."""
    for extent in t.extents(layer, rows):
        _bring(t, extent, at[extent.block], rows)
    growth = sum(map(t.new_bytes, rows)) * len(t.parts) if at[-1] == DEVICE else 0
    _make_room(t, growth, layer, rows)
    _ahead(t, layer, rows, growth)
    t.attend(layer, rows, at=at)
    for extent in t.extents(layer, rows):
        _send(t, extent)


def _bring(t: Turn, extent: Extent, place: str, rows: list[Hashable]) -> None:
    """Let a place have all of an extent, by way of the device where there is no other."""
    if place in t.where(extent):
        return
    if not any(t.has_path(source, place) for source in t.where(extent)):
        _bring(t, extent, DEVICE, rows)
    if place == DEVICE:
        _make_room(t, t.lacking(extent, DEVICE), extent.layer, rows)
    t.copy(extent, place)


def _ahead(t: Turn, layer: int, rows: list[Hashable], kept: int) -> None:
    """Have the next layer come that a row attends on the device and that lies elsewhere, where there is room for it and
    so many bytes more."""
    for row in rows:
        for due in range(layer + 1, t.layers.stop):
            at = _attended(t, row, due)
            away = [x for x in t.extents(due, [row]) if at[x.block] == DEVICE and DEVICE not in t.where(x)]
            if away:
                need = kept + sum(t.lacking(x, DEVICE) for x in away) + t.new_bytes(row) * len(t.parts)
                if t.room(DEVICE) >= need and all(any(t.has_path(p, DEVICE) for p in t.where(x)) for x in away):
                    for extent in away:
                        t.copy(extent, DEVICE, urgency=-due)
                break


def _make_room(t: Turn, need: int, layer: int, rows: list[Hashable]) -> None:
    """Let what is due last leave the device, until so many bytes fit; the rows that are attended now stay."""
    count = len(t.layers)

    def due(extent: Extent) -> int:
        return (extent.layer - layer) % count if extent.request in t.batch else count

    for extent in sorted(t.held(DEVICE), key=due, reverse=True):
        if t.room(DEVICE) >= need:
            return
        if extent.layer != layer or extent.request not in rows:
            _send(t, extent, lower=True)


def _send(t: Turn, extent: Extent, lower: bool = False) -> None:
    """Let an extent lie at home alone. lower: or, where that is the device, below it."""
    home = _home(t, extent)
    if home == DEVICE and not lower:
        if DEVICE in t.where(extent):
            t.move(extent, DEVICE)
        return
    below = t.memory["below"] if home == DEVICE else home
    to = below if t.room(below) >= t.lacking(extent, below) else DIRECT
    if to in t.where(extent) or any(t.has_path(place, to) for place in t.where(extent)):
        t.move(extent, to)


def _home(t: Turn, extent: Extent) -> str:
    """Where an extent is to lie; of a row's blocks only the last one may lie in drives."""
    homes: Homes = t.memory["homes"]
    places = homes(extent.request, extent.layer)
    home = places[min(extent.block, len(places) - 1)]
    last = len(t.extents(extent.layer, [extent.request])) // len(t.parts) - 1
    below: str = t.memory["below"]
    return below if home == CSD and extent.block < last else home
