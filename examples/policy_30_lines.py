"""A policy of one's own: half of the layers stay on the device, the others come from host memory one layer ahead.

Modelled time:          vcsd eval policies --policy examples/policy_30_lines.py:half
Real bytes:             vcsd run --policy examples/policy_30_lines.py:half
Several requests:       vcsd.serve(model, Serving(policy="examples/policy_30_lines.py:half"))
"""

from kv_cache import DEVICE, HOST, Iteration, Policy


class Half(Policy):
    """What is attended next begins to move while the layer before it is computed."""

    tiers = (DEVICE, HOST)

    def layers(self, it: Iteration) -> None:
        stays = len(it.layers) // 2
        for layer in it.layers:
            for due in (layer, layer + 1):
                for block in it.blocks(due) if due in it.layers else ():
                    if DEVICE not in it.tiers_of(block):
                        it.copy(block, DEVICE, urgency=-due)
            it.attend(layer)
            for block in it.blocks(layer) if layer >= stays else ():
                it.move(block, HOST)


POLICIES = {"half": Half}
