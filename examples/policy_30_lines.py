"""A custom policy: half of the layers stay on the device, the others come from host memory one layer ahead.

Simulated time:         vcsd eval policies --policy examples/policy_30_lines.py:half
Real bytes:             vcsd run --policy examples/policy_30_lines.py:half
Several requests:       vcsd.serve(model, policy="examples/policy_30_lines.py:half")
"""

from kv_cache import DEVICE, HOST, Iteration, Policy


class Half(Policy):
    """The next layer is copied while the layer before it is computed."""

    tiers = (DEVICE, HOST)

    def layers(self, it: Iteration) -> None:
        room = 3 * it.layer_bytes()
        for layer in it.layers:
            for block in it.blocks_at(DEVICE):
                if it.free_bytes(DEVICE) < room and (block.layer != layer or block.request not in it.batch):
                    it.move(block, HOST)
            for due in range(layer, min(layer + 2, it.layers.stop)):
                for block in it.blocks(due):
                    it.copy(block, DEVICE, urgency=-due)  # nothing if it is there
            it.attend(layer)
            for block in it.blocks(layer) if layer >= len(it.layers) // 2 else ():
                it.move(block, HOST)


POLICIES = {"half": Half}
