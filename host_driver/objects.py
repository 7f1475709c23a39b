"""K and V of prompts that come again: blocks of tokens in drives, found by all the tokens up to their end.

A block's key is a hash of its tokens and of the key of the block before it, so a key stands for a whole prefix. Drives
keep keys with the sequences (`KvName`), so a host that starts anew finds what it had stored. A sequence is a chain of
blocks; prompts that part are forks, which share what they begin with.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile
from typing import Any

import numpy as np

from csd_spec import (
    Command,
    Completion,
    Device,
    DeviceError,
    Flush,
    KvAppend,
    KvCrop,
    KvDrop,
    KvFree,
    KvGather,
    KvList,
    KvName,
    ModelShape,
    SeqCreate,
    SeqFork,
    SeqSweep,
    Status,
)
from csd_spec.arrays import F16, key_list, keys_of
from csd_spec.model import OPAQUE
from host_driver.sharding import split_heads

KEY_BYTES = 16
LISTED = 1024  # names that a command asks for
MAX_TOKENS = 1 << 20  # of a prompt


@dataclass(slots=True, eq=False)
class Chain:
    """A sequence on every drive: its handles, and its blocks that have names, by the tokens at their end."""

    handles: list[int]
    ends: dict[int, bytes]


@dataclass(frozen=True, slots=True)
class Hit:
    """A prefix that is stored: so many tokens, in which chain."""

    tokens: int
    chain: Chain | None


class PrefixStore:
    """Prefixes of prompts over drives, each of which has some heads.

    Least recently used blocks go first, and of those the deepest: a block that others stand behind is never older than
    these. What cannot be read is forgotten, and counts as not found.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        shape: ModelShape,
        salt: bytes,
        block_tokens: int = 256,
        max_blocks: int | None = None,
        layout: int = OPAQUE,
    ) -> None:
        """salt: whatever K and V depend on beside the tokens: model, tokenizer, adapter, dtype, and whose they are.
        max_blocks: that are kept. layout: of K and V in the drives; `OPAQUE` takes any 2-byte values.

        Frees what a host was storing in these drives, as this tenant, when it died.
        """
        if block_tokens < 1 or (max_blocks is not None and max_blocks < 1):
            raise ValueError(f"block_tokens = {block_tokens}, max_blocks = {max_blocks}: both must be at least 1")
        self.devices, self.shape, self.block_tokens, self.max_blocks = list(devices), shape, block_tokens, max_blocks
        self._heads, self._layout = split_heads(shape.kv_heads, len(devices)), layout
        s = shape
        form = f"{s.layers}x{s.kv_heads}x{s.head_dim}, layout {layout}, {block_tokens} tokens, {len(devices)} drives"
        self._root = blake2b(salt + form.encode(), digest_size=KEY_BYTES).digest()
        self._blocks: OrderedDict[bytes, tuple[Chain, int]] = OrderedDict()  # least recently used first
        self._pinned: dict[bytes, int] = {}
        self.hits = self.misses = self.evicted = 0
        self._recover()

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        """Of all whole blocks of a prompt."""
        found, key = list[bytes](), self._root
        for at in range(self.block_tokens, len(tokens) + 1, self.block_tokens):
            block = np.array(tokens[at - self.block_tokens : at], np.int64)
            key = blake2b(block.tobytes(), digest_size=KEY_BYTES, key=key).digest()
            found.append(key)
        return found

    def match(self, tokens: Sequence[int]) -> Hit:
        """The longest prefix of whole blocks that is stored; it counts as used."""
        keys = self.keys(tokens)
        found = list(takewhile(lambda key: key in self._blocks, keys))
        self._touch(found)
        self.hits += len(found)
        self.misses += len(keys) - len(found)
        if not found:
            return Hit(0, None)
        chain, end = self._blocks[found[-1]]
        return Hit(end, chain)

    def _touch(self, keys: Sequence[bytes]) -> None:
        """A prompt's blocks were used: of these the deepest is the first to go."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)

    def load(self, tokens: Sequence[int], first: int = 0) -> tuple[F16, F16] | None:
        """K and V of the stored prefix from token `first` on, each (layers, tokens, kv_heads, d); one command to each
        drive. None where nothing is stored, or a drive cannot read it: then that prefix is forgotten."""
        hit = self.match(tokens)
        if hit.chain is None or hit.tokens <= first:
            return None
        span = np.array([first]), np.array([hit.tokens - first])
        gathers = [KvGather((handle,), *span, 0, self.shape.layers) for handle in hit.chain.handles]
        try:
            parts = [done.data for done in self._all(gathers)]
        except DeviceError:
            self._forget(hit.chain)
            return None
        k, v = (np.concatenate(each, axis=2) for each in zip(*parts, strict=True))
        return k, v

    def store(self, tokens: Sequence[int], k: F16, v: F16) -> int:
        """Keep K and V of a prompt's whole blocks, each (layers, tokens, kv_heads, d); how many blocks are new.

        Names are given when the data is there: a host or a drive that dies meanwhile leaves no half block. Raises
        DeviceError where a drive refuses, as when it is full.
        """
        keys = self.keys(tokens)
        hit = self.match(tokens)
        end = len(keys) * self.block_tokens
        if end == hit.tokens:
            return 0
        new = keys[hit.tokens // self.block_tokens :]
        self._make_room(len(new), keep=keys)
        chain = self._chain_behind(hit)
        try:
            self._append(chain, k[:, hit.tokens : end], v[:, hit.tokens : end])
        except DeviceError:
            self._cut(chain)
            raise
        ends = np.arange(hit.tokens, end, self.block_tokens) + self.block_tokens
        self._all([KvName((handle,), ends, keys_of(new)) for handle in chain.handles])
        for key, at in zip(new, ends.tolist(), strict=True):
            chain.ends[at] = key
            self._blocks[key] = chain, at
        self._touch(keys)
        return len(new)

    def _append(self, chain: Chain, k: F16, v: F16) -> None:
        """Store rows (layers, tokens, kv_heads, d) behind a chain, without names yet."""
        lengths = np.array([k.shape[1]])
        for layer in range(self.shape.layers):
            self._all(
                [
                    KvAppend((handle,), layer, lengths, _of(heads, k[layer]), _of(heads, v[layer]))
                    for handle, heads in zip(chain.handles, self._heads, strict=True)
                ]
            )

    def _cut(self, chain: Chain) -> None:
        """Let a chain end with its last name; without any it is gone."""
        if not chain.ends:
            self._all([KvFree((handle,)) for handle in chain.handles])
            return
        left = np.array([max(chain.ends)])
        for layer in range(self.shape.layers):
            self._all([KvCrop((handle,), layer, left) for handle in chain.handles])

    def pin(self, tokens: Sequence[int]) -> None:
        """Keep the blocks of a prompt until it is unpinned as often."""
        for key in self.keys(tokens):
            self._pinned[key] = self._pinned.get(key, 0) + 1

    def unpin(self, tokens: Sequence[int]) -> None:
        """They may go again."""
        for key in self.keys(tokens):
            self._pinned[key] = self._pinned.get(key, 1) - 1
            if self._pinned[key] <= 0:
                del self._pinned[key]

    def flush(self) -> None:
        """Returns when all that is stored survives a loss of power."""
        self._all([Flush() for _ in self.devices])

    @property
    def blocks(self) -> int:
        """That are stored."""
        return len(self._blocks)

    def _chain_behind(self, hit: Hit) -> Chain:
        """A chain that ends where a hit does: the same one, or a fork of it."""
        s = self.shape
        if hit.chain is None:
            creates = [
                SeqCreate(1, s.layers, len(heads), s.head_dim, MAX_TOKENS, self._layout) for heads in self._heads
            ]
            return Chain(self._handles(creates), {})
        if max(hit.chain.ends) == hit.tokens:
            return hit.chain
        forks = [SeqFork((handle,), np.array([hit.tokens])) for handle in hit.chain.handles]
        return Chain(self._handles(forks), {})

    def _make_room(self, blocks: int, keep: Sequence[bytes]) -> None:
        """Let the oldest blocks go until there is room for so many more; raises ValueError where there never is."""
        if self.max_blocks is None:
            return
        if blocks > self.max_blocks:
            raise ValueError(f"{blocks} blocks: the store keeps {self.max_blocks}")
        kept = set(keep)
        while len(self._blocks) + blocks > self.max_blocks:
            key = next((key for key in self._blocks if key not in kept and self._is_last(key)), None)
            if key is None:
                raise ValueError(f"{blocks} blocks have no room: all {self.max_blocks} that are kept are in use")
            self._evict(key)

    def _is_last(self, key: bytes) -> bool:
        """Whether nothing of its chain stands behind a block, and nobody holds it."""
        chain, end = self._blocks[key]
        return end == max(chain.ends) and key not in self._pinned

    def _evict(self, key: bytes) -> None:
        chain, end = self._blocks.pop(key)
        del chain.ends[end]
        self.evicted += 1
        self._all([KvDrop(keys_of([key])) for _ in self.devices])
        self._cut(chain)

    def _forget(self, chain: Chain) -> None:
        """A chain lost data: nothing of it is found any more."""
        for key in chain.ends.values():
            self._blocks.pop(key, None)
        for device, handle in zip(self.devices, chain.handles, strict=True):
            device.submit(KvDrop(keys_of(chain.ends.values())), 0).result()
            device.submit(KvFree((handle,)), 0).result()

    def _recover(self) -> None:
        """Find what an earlier host has stored: what all drives have, the deepest first to go."""
        self._all([SeqSweep() for _ in self.devices])
        named = [self._names(device) for device in self.devices]
        common = set.intersection(*(set(each) for each in named))
        for device, each in zip(self.devices, named, strict=True):
            if half := [key for key in each if key not in common]:
                _done(0, device.submit(KvDrop(keys_of(half)), 0).result())
        self._all([SeqSweep() for _ in self.devices])  # what only had names of halves
        chains: dict[tuple[int, ...], Chain] = {}
        for key in sorted(common, key=lambda key: -named[0][key][1]):
            handles = tuple(each[key][0] for each in named)
            chain = chains.setdefault(handles, Chain(list(handles), {}))
            chain.ends[named[0][key][1]] = key
            self._blocks[key] = chain, named[0][key][1]
        for chain in chains.values():
            self._cut(chain)  # what was being stored behind it

    def _names(self, device: Device) -> dict[bytes, tuple[int, int]]:
        """Keys of a drive, with handle and tokens."""
        found: dict[bytes, tuple[int, int]] = {}
        after = bytes(KEY_BYTES)
        while True:
            data: Any = _done(0, device.submit(KvList(keys_of([after]), LISTED), 0).result()).data
            keys, handles, tokens = key_list(data[0]), data[1].tolist(), data[2].tolist()
            there = sum(count > 0 for count in tokens)
            found |= {keys[i]: (handles[i], tokens[i]) for i in range(there)}
            if there < LISTED:
                return found
            after = keys[-1]

    def _handles(self, commands: Sequence[Command]) -> list[int]:
        return [int(done.data[0][0]) for done in self._all(commands)]

    def _all(self, commands: Sequence[Command]) -> list[Completion]:
        """A command to each drive, side by side; raises DeviceError for the first that refuses."""
        submitted = [device.submit(command, 0) for device, command in zip(self.devices, commands, strict=True)]
        return [_done(drive, future.result()) for drive, future in enumerate(submitted)]


def _of(heads: range, rows: F16) -> F16:
    """Heads of rows (tokens, kv_heads, d)."""
    return np.ascontiguousarray(rows[:, heads.start : heads.stop])


def _done(drive: int, done: Completion) -> Completion:
    if done.status is not Status.SUCCESS:
        raise DeviceError(drive, done.status, done.reason)
    return done
