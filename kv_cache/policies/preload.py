"""LMCache without layer-wise loading, through GPUDirect Storage: all stored data is read before the first layer."""

from __future__ import annotations

from kv_cache.block_table import Transfer
from kv_cache.hardware import DEVICE, DIRECT
from kv_cache.iteration import Iteration
from kv_cache.policies.tutti import Tutti


class Preload(Tutti):
    """Like Tutti, but everything that fits on the device is read first, and nothing during computation."""

    def __init__(self, home: str = DIRECT) -> None:
        super().__init__(home, ahead=0)

    def layers(self, it: Iteration) -> None:
        transfers, grows = list[Transfer | None](), len(it.layers) * len(it.parts) * sum(map(it.new_bytes, it.batch))
        for layer in it.layers:
            for block in it.blocks(layer):
                if it.missing_bytes(block, DEVICE) + grows <= it.free_bytes(DEVICE):
                    transfers.append(it.copy(block, DEVICE))
        it.wait(*transfers)
        super().layers(it)
