"""LMCache without layers, and through GPUDirect Storage: what is stored comes before the first layer is computed."""

from __future__ import annotations

from residency.machine import DEVICE, DIRECT
from residency.policies.tutti import tutti
from residency.table import Ticket
from residency.turn import Turn


def preload(t: Turn, home: str = DIRECT) -> None:
    """As Tutti, but all that the device has room for is read first, and nothing while a layer is computed."""
    tickets, grows = list[Ticket | None](), len(t.layers) * len(t.parts) * sum(map(t.new_bytes, t.batch))
    for layer in t.layers:
        for extent in t.extents(layer):
            if t.lacking(extent, DEVICE) + grows <= t.room(DEVICE):
                tickets.append(t.copy(extent, DEVICE))
    t.wait(*tickets)
    tutti(t, home, ahead=0)
