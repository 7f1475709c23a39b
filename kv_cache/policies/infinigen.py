"""InfiniGen: KV data in host memory; a layer fetches only the tokens that the previous layer predicts to matter.

Wonbeom Lee et al., InfiniGen, OSDI 2024 (arXiv 2406.19707). While layer i - 1 computes, its attention input, a part of
layer i's query weights and a part of its keys on the device give approximate scores of layer i. Only the tokens with
the highest scores are fetched.

Modelled: a fixed fraction of the tokens over the link, attention to these alone, new tokens written to host memory, and
the time in which speculation reads the partial keys on the device. The first two layers are fetched whole, as in the
authors' code (github.com/snu-comparch/InfiniGen, speedup/flexgen/infinigen/flex_opt.py), where layer 1 is the first
that speculates. An iteration with a prompt attends to everything.

Not modelled: which tokens are selected, so no error of the output; the threshold `alpha` that makes the fraction vary
by layer and step; the memory of partial keys and query weights on the device; the CPU time to gather scattered tokens;
the pool in host memory, which evicts rarely selected tokens: data that does not fit in host memory goes to files. A
server with real bytes attends to all tokens, like `deepspeed`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from math import ceil

from kv_cache.block_table import BlockKey
from kv_cache.hardware import DEVICE, DIRECT, HOST
from kv_cache.iteration import Iteration
from kv_cache.placement_runner import PlacementRunner, returning, spill
from kv_cache.policies._stream import fits
from kv_cache.scheduler import Policy, SchedulerOutput, SchedulerState

SHARE = 0.1  # fraction of the tokens: with the paper's threshold, the mean over layers is below 10 %
PARTIAL = 0.3  # of the channels of queries and keys, the paper's partial weight ratio
WHOLE = 2  # layers that are fetched whole


class InfiniGen(Policy):
    """All layers of all requests are in host memory, and a fraction of their tokens is fetched.

    Args:
        share: Fraction of the tokens that a layer fetches.
        partial: Fraction of the channels of keys that speculation reads.
    """

    tiers: tuple[str, ...] = (DEVICE, HOST)

    def __init__(self, share: float = SHARE, partial: float = PARTIAL) -> None:
        if not (0 < share <= 1 and 0 <= partial <= 1):
            raise ValueError(f"share = {share}, partial = {partial}: must be in (0, 1] and [0, 1]")
        self.share, self.partial = share, partial

    def schedule(self, s: SchedulerState) -> SchedulerOutput | None:
        home = ((HOST,),) * s.cost.layers
        output = s.prefill() or s.output(s.sequences, [home] * len(s.sequences))
        return replace(output, placement=dict.fromkeys(output.num_scheduled_tokens, home))

    def layers(self, it: Iteration) -> None:
        if it.prefill or not it.can_select:
            PlacementRunner(it).run()
        else:
            fetch_selected(it, self.share, self.partial)

    @property
    def has_layers(self) -> bool:
        return False


def fetch_selected(it: Iteration, share: float = SHARE, partial: float = PARTIAL) -> None:
    """Run a decode iteration."""
    growth = len(it.layers) * len(it.parts) * sum(map(it.new_bytes, it.batch))
    spill(it, growth)
    for block in returning(it, growth):
        it.move(block, HOST)
    whole = it.layers[:WHOLE]
    for layer in it.layers:
        due = layer + 1
        speculates = due in it.layers and due not in whole
        if speculates:
            for block in it.blocks(due):
                it.select(block, DEVICE, ceil(share * it.tokens(block)), urgency=-due)
        speculation = partial / 2 if speculates else 0.0  # it reads keys, half of the KV data
        if layer in whole:
            _attend_whole(it, layer, due if due in whole else None, 1 + speculation)
        else:
            for tier, rows in _by_tier(it, layer).items():
                it.attend(layer, rows, at=tier, method="infinigen", read=share + speculation)


def _attend_whole(it: Iteration, layer: int, due: int | None, read: float) -> None:
    """Attend to all tokens of a layer; prefetch the next one if it is also fetched whole and fits."""
    homes = {block: it.tiers_of(block)[0] for block in it.blocks(layer)}
    for block in it.blocks(layer):
        it.copy(block, DEVICE, urgency=-layer)
    if due is not None and fits(it, layer, due):
        for block in it.blocks(due):
            it.copy(block, DEVICE, urgency=-due)
    it.attend(layer, read=read)
    for block in it.blocks(layer):
        _write_back(it, block, homes[block])


def _write_back(it: Iteration, block: BlockKey, home: str) -> None:
    it.move(block, home if it.free_bytes(home) >= it.missing_bytes(block, home) else DIRECT)


def _by_tier(it: Iteration, layer: int) -> dict[str, list[Hashable]]:
    """Requests by the tier of their blocks of a layer."""
    rows = dict[str, list[Hashable]]()
    for row in it.batch:
        rows.setdefault(it.tiers_of(it.blocks(layer, [row])[0])[0], []).append(row)
    return rows
