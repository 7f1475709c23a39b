"""LMCache without layers, and through GPUDirect Storage: what is stored comes before the first layer is computed."""

from __future__ import annotations

from kv_cache.block_table import Transfer
from kv_cache.hardware import DEVICE, DIRECT
from kv_cache.iteration import Iteration
from kv_cache.policies.tutti import tutti


def preload(it: Iteration, home: str = DIRECT) -> None:
    """As Tutti, but all that the device has room for is read first, and nothing while a layer is computed."""
    transfers, grows = list[Transfer | None](), len(it.layers) * len(it.parts) * sum(map(it.new_bytes, it.batch))
    for layer in it.layers:
        for block in it.blocks(layer):
            if it.missing_bytes(block, DEVICE) + grows <= it.free_bytes(DEVICE):
                transfers.append(it.copy(block, DEVICE))
    it.wait(*transfers)
    tutti(it, home, ahead=0)
