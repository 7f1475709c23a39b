"""What vLLM's swap and DeepSpeed do: move what is missing when it is missing, and wait for it."""

from __future__ import annotations

from residency.machine import DEVICE, DIRECT, HOST
from residency.table import Extent, Ticket
from residency.turn import Turn

BELOW = {DEVICE: HOST, HOST: DIRECT}


def reactive(t: Turn) -> None:
    """All of KV stays as high as it fits; a layer that is not on the device comes when it is due."""
    for layer in t.layers:
        need = t.layer_bytes() - sum(t.nbytes(x) for x in t.extents(layer) if DEVICE in t.where(x))
        make_room(t, DEVICE, need, keep=layer)
        t.wait(*[bring(t, extent, layer) for extent in t.extents(layer)])
        t.attend(layer)


def bring(t: Turn, extent: Extent, keep: int) -> Ticket | None:
    """Let an extent come to the device, by way of the host where there is no other."""
    if DEVICE in t.where(extent):
        return None
    if not any(t.has_path(place, DEVICE) for place in t.where(extent)):
        make_room(t, HOST, t.nbytes(extent), keep)
        t.move(extent, HOST)
    return t.move(extent, DEVICE)


def make_room(t: Turn, place: str, need: float, keep: int) -> None:
    """Send down what was attended longest ago until so many bytes fit; the kept layer of the batch stays."""
    for extent in t.held(place):
        if t.room(place) >= need:
            return
        if extent.layer == keep and extent.request in t.batch:
            continue
        below = BELOW.get(place)
        while below and (not t.has_path(place, below) or t.room(below) < t.nbytes(extent)):
            below = BELOW.get(below)
        if below:
            t.move(extent, below)
