"""Prefixes as sequences of one of several in-storage attention drives, each with some heads of all requests."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from math import ceil, lcm

import numpy as np

from csd_spec import LAYOUTS
from csd_spec.view import in_flash
from ftl.errors import OutOfSpaceError
from ftl.kv.layouts import maps_of
from vcsd_eval.lifetime.drive import DayReplay, DriveTraffic
from vcsd_eval.lifetime.patterns import FILL
from vcsd_eval.lifetime.workload import Key, Visit


@dataclass(slots=True, eq=False)
class Chain:
    """A sequence, and the tokens at the ends of its blocks that can be found."""

    handle: int
    ends: dict[Key, int] = field(default_factory=dict)


class OurReplay(DayReplay):
    """Requests append their new tokens and their answers; prompts stay until others need the room.

    As in `host_driver.prefixes.store`: a prompt that goes on where another one ends is the same sequence, one that
    parts from it is a fork; the least recently used blocks go first, and of those the deepest. An answer is cut off
    at its end, since traces do not tell whether it is used again.
    """

    def __init__(self, layout: str, load: DriveTraffic) -> None:
        super().__init__(load)
        shape, tokens = load.shape, max(visit.input_tokens for visit in load.day.visits)
        self.layers, self.heads = shape.layers, max(1, shape.kv_heads // load.drives)
        self.form = LAYOUTS[layout].form(load.spec.geometry.page_bytes, shape.head_dim, tokens)
        maps = maps_of(self.form, 1, self.heads).values()
        self.token_pages = self.layers * sum(m.streams / m.per_group for m in maps if m.programmed)
        self.group = lcm(*{m.per_group for m in maps if m.primary})  # no row of a prompt that waits is in drive DRAM
        self.limit = int(load.logical_pages * FILL)
        self.blocks: OrderedDict[Key, Chain] = OrderedDict()

    def visit(self, visit: Visit, number: int) -> None:
        """Read what a request reuses, store its prompt and its answer, and cut the answer off."""
        now_ns, keys = self.load.ns(visit.arrival_s), visit.keys
        hits = 0
        while hits < len(keys) and keys[hits] in self.blocks:
            hits += 1
        parent = self.blocks[keys[hits - 1]] if hits else None
        tokens = parent.ends[keys[hits - 1]] if parent else 0
        reused = min(tokens, visit.input_tokens - 1)
        self.meter.tally.add(visit.input_tokens, visit.output_tokens, reused)
        for key in reversed(keys[:hits]):
            self.blocks.move_to_end(key)
        if parent and tokens:
            self._read(parent, tokens, now_ns, number)
        chain = self._chain_at(parent, tokens, now_ns)
        stored = int(self.ftl.sequences[chain.handle].lengths[0])
        self._append(chain, visit.input_tokens + visit.output_tokens - 1 - stored, set(keys[:hits]), now_ns)
        whole = visit.input_tokens // self.group * self.group
        self._crop(chain, whole, now_ns)
        ends = [min((at + 1) * self.load.day.block_tokens, whole) // self.group * self.group for at in range(len(keys))]
        for key, end in zip(keys[hits:], ends[hits:], strict=True):
            self.blocks[key] = chain
            chain.ends[key] = end
        for key in reversed(keys):
            self.blocks.move_to_end(key)

    def _chain_at(self, parent: Chain | None, tokens: int, now_ns: int) -> Chain:
        """A sequence that holds the first `kept` tokens of a chain, to be appended to."""
        if parent is None:
            return Chain(self.ftl.create(1, self.layers, self.heads, self.form)[0])
        if tokens == max(parent.ends.values()):
            return parent
        chain = Chain(self.ftl.fork(parent.handle))
        self._crop(chain, tokens, now_ns)
        return chain

    def _read(self, chain: Chain, tokens: int, now_ns: int, number: int) -> None:
        """Read the KV data of a prefix for prompt tokens to attend to."""
        seq = self.ftl.sequences[chain.handle]
        holders = {id(m.holder): m.holder for m in seq.primary.values()}.values()
        slots = np.concatenate([m.slots[:, :, : tokens // m.per_group].ravel() for m in holders])
        if (ppns := slots[in_flash(slots)]).size:
            self.meter.read(ppns, now_ns, number)

    def _append(self, chain: Chain, tokens: int, needed: set[Key], now_ns: int) -> None:
        """Add tokens to all layers; older blocks are evicted to make room."""
        count = np.array([tokens])
        self._make_room(ceil(tokens * self.token_pages), chain, needed)
        for layer in range(self.layers):
            while True:
                try:
                    self.ftl.append([chain.handle], layer, count, None, None, now_ns)
                    break
                except OutOfSpaceError:
                    if not self._evict(ceil(tokens * self.token_pages / self.layers), chain, needed, now_ns):
                        raise

    def _make_room(self, pages: int, chain: Chain, needed: set[Key]) -> None:
        over = int(self.ftl.placement.valid.sum()) + pages - self.limit
        if over > 0:
            self._evict(over, chain, needed, 0)

    def _evict(self, pages: int, chain: Chain, needed: set[Key], now_ns: int) -> bool:
        """Cut the least recently used blocks off, until about `pages` are free; False if no block is left."""
        cut: dict[Chain, None] = {}
        before = int(self.ftl.placement.valid.sum())
        while self.blocks and before - int(self.ftl.placement.valid.sum()) < pages:
            tokens = 0
            while self.blocks and tokens * self.token_pages < pages:
                key = next(iter(self.blocks))
                holder = self.blocks[key]
                if holder is chain or key in needed:
                    break
                del self.blocks[key]
                end = holder.ends.pop(key)
                tokens += end - max(holder.ends.values(), default=0)
                cut[holder] = None
            if not cut:
                return False
            for each in cut:
                self._trim(each, now_ns)
            cut.clear()
        return True

    def _trim(self, chain: Chain, now_ns: int) -> None:
        """Free what no block of a chain needs."""
        if chain.ends:
            self._crop(chain, max(chain.ends.values()), now_ns)
        else:
            self.ftl.free([chain.handle], now_ns)

    def _crop(self, chain: Chain, tokens: int, now_ns: int) -> None:
        for layer in range(self.layers):
            self.ftl.crop(chain.handle, layer, tokens, now_ns)
