"""K and V of prompts that come again: blocks of tokens in drives, found by all the tokens up to their end.

Drives keep keys with the sequences (`KvName`), so a host that starts anew finds what it had stored. A block has two:
the one of its tokens, and one of its K and V, by which it is checked when it is read. A sequence is a chain of blocks;
prompts that part are forks, which share what they begin with.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from csd_link.cutting import Read, check_device, submit_reads
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
    KvName,
    SeqCreate,
    SeqFork,
    SeqSweep,
    Status,
)
from csd_spec.arrays import F16, keys_of
from csd_spec.model import FP16_BYTES
from csd_spec.verbs import VERBS
from host_driver.prefixes.manifest import blocks_of, done_by, list_keys, write_manifest
from host_driver.prefixes.names import PrefixNames
from host_driver.sharding import split_heads

MAX_TOKENS = 1 << 20  # of a prompt
COMMAND_BYTES = 16 << 20  # of K and V that a command brings, at most: the next one is read meanwhile


@dataclass(slots=True, eq=False)
class Chain:
    """A sequence on every drive: its handles, and its blocks that have names, by the tokens at their end."""

    handles: list[int]
    ends: dict[int, bytes]


@dataclass(frozen=True, slots=True)
class Block:
    """Where a block ends, and under which other key if its K and V are what was stored."""

    chain: Chain
    end: int
    check: bytes


@dataclass(frozen=True, slots=True)
class Hit:
    """A prefix that is stored: so many tokens, in which chain."""

    tokens: int
    chain: Chain | None


class PrefixStore:
    """Prefixes of prompts over drives, each of which has some heads. Prompts are given by keys: `PrefixNames.keys`.

    Least recently used blocks go first, and of those the deepest: a block that others stand behind is never older than
    these. What cannot be read, or is not what was stored, is forgotten, and counts as not found. A drive that is gone
    is a DeviceError with PATH_LOST from every method: connect again, and make a new store. For one thread at a time.
    """

    def __init__(self, devices: Sequence[Device], names: PrefixNames, max_blocks: int | None = None) -> None:
        """max_blocks: that are kept; None: as many as the drives take.

        Frees what a host was storing in these drives, as this tenant, when it died. Raises ValueError where a drive
        takes less in a command than one token has.
        """
        if max_blocks is not None and max_blocks < 1:
            raise ValueError(f"max_blocks = {max_blocks}: must be at least 1")
        if len(devices) != names.drives:
            raise ValueError(f"{len(devices)} drives: the names are of {names.drives}")
        self.devices, self.names, self.max_blocks = list(devices), names, max_blocks
        self._heads = split_heads(names.shape.kv_heads, len(devices))
        for device, heads in zip(devices, self._heads, strict=True):
            check_device(device, VERBS[KvAppend].example(H=len(heads), d=names.shape.head_dim))
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()  # least recently used first
        self._pinned: dict[bytes, int] = {}
        self._changes: dict[bytes, bool] = {}
        self._others: set[bytes] = set()  # names on these drives that are not of `names`
        self.hits = self.misses = self.evicted = self.rejected = 0
        self._described = False  # whether all drives have the manifest
        self._recover()

    @property
    def blocks(self) -> int:
        """That are stored."""
        return len(self._blocks)

    def take_changes(self) -> dict[bytes, bool]:
        """Keys that came (True) or went since this was last asked; at first all that are stored."""
        taken, self._changes = self._changes, {}
        return taken

    def match(self, keys: Sequence[bytes]) -> Hit:
        """The longest prefix that is stored; it counts as used."""
        found = list(takewhile(lambda key: key in self._blocks, keys))
        self._touch(found)
        self.hits += len(found)
        self.misses += len(keys) - len(found)
        if not found:
            return Hit(0, None)
        block = self._blocks[found[-1]]
        return Hit(block.end, block.chain)

    def _touch(self, keys: Sequence[bytes]) -> None:
        """A prompt's blocks were used: of these the deepest is the first to go."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)

    def load(self, keys: Sequence[bytes], first: int = 0) -> tuple[F16, F16] | None:
        """K and V of the stored prefix from token `first` on, each (layers, tokens, kv_heads, d).

        None where nothing is stored, a drive cannot read it, or it is not what was stored: then it is forgotten.
        """
        hit, size = self.match(keys), self.names.block_tokens
        if hit.chain is None or hit.tokens <= first:
            return None
        start = first // size * size
        try:
            k, v = self._gather(hit.chain, start, hit.tokens)
        except DeviceError as error:
            if error.status is Status.PATH_LOST:
                raise
            self._forget(hit.chain)
            return None
        for at in range(start, hit.tokens, size):
            key, rows = keys[at // size], slice(at - start, at - start + size)
            if self.names.check(key, k[:, rows], v[:, rows]) != self._blocks[key].check:
                self.rejected += 1
                self._forget(hit.chain)
                return None
        return k[:, first - start :], v[:, first - start :]

    def store(self, keys: Sequence[bytes], k: F16, v: F16, first: int = 0) -> int:
        """Keep K and V of a prompt's blocks, each (layers, tokens, kv_heads, d), from token `first` on; how many blocks
        are new. None is where the blocks before `first` are not stored (any more).

        Names are given when the data is there: a host or a drive that dies meanwhile leaves no half block. On a full
        drive older blocks go. Raises DeviceError where a drive refuses all the same, ValueError where there is no room
        beside what is in use.
        """
        hit, size = self.match(keys), self.names.block_tokens
        new = keys[hit.tokens // size :]
        if not new or hit.tokens < first:
            return 0
        rows = slice(hit.tokens - first, len(keys) * size - first)
        k, v = k[:, rows], v[:, rows]
        self._make_room(len(new), keep=keys)
        self._described = self._described or self._describe()
        chain = self._written(hit, k, v, keys)
        ends = range(hit.tokens + size, len(keys) * size + 1, size)
        self._name(chain, dict(zip(new, ends, strict=True)), k, v)
        self._touch(keys)
        return len(new)

    def _describe(self) -> bool:
        """Write the manifest to every drive; False if one has no room for it."""
        try:
            for device in self.devices:
                write_manifest(device, self.names)
        except DeviceError as error:
            if error.status is not Status.CAPACITY_EXCEEDED:
                raise
            return False
        return True

    def _written(self, hit: Hit, k: F16, v: F16, keys: Sequence[bytes]) -> Chain:
        """The chain behind a hit, with these rows at its end; for those the oldest blocks go where a drive is full."""
        while True:
            chain = self._chain_behind(hit)
            try:
                self._append(chain, k, v)
                return chain
            except DeviceError as error:
                self._cut(chain)
                full = error.status is Status.CAPACITY_EXCEEDED
                if not full or not (self._let_others_go() or self._let_go(keep=set(keys))):
                    raise

    def _name(self, chain: Chain, ends: dict[bytes, int], k: F16, v: F16) -> None:
        """Let blocks be found from now on, whose rows k and v are the last of a chain."""
        size, start = self.names.block_tokens, min(ends.values()) - self.names.block_tokens
        parts = [slice(end - size - start, end - start) for end in ends.values()]
        checks = [self.names.check(key, k[:, part], v[:, part]) for key, part in zip(ends, parts, strict=True)]
        for key in [key for key in ends if key in self._blocks]:  # behind one that was lost
            self._evict(key)
        keys, tokens = keys_of([*ends, *checks]), np.array([*ends.values(), *ends.values()])
        try:
            self._all([KvName((handle,), tokens, keys) for handle in chain.handles])
        except DeviceError:
            self._all([KvDrop(keys) for _ in self.devices])
            self._cut(chain)
            raise
        for (key, end), check in zip(ends.items(), checks, strict=True):
            self._add(key, Block(chain, end, check))

    def _add(self, key: bytes, block: Block) -> None:
        block.chain.ends[block.end] = key
        self._blocks[key] = block
        self._changes[key] = True

    def _remove(self, key: bytes) -> Block:
        block = self._blocks.pop(key)
        del block.chain.ends[block.end]
        self._changes[key] = False
        return block

    def _append(self, chain: Chain, k: F16, v: F16) -> None:
        """Store rows (layers, tokens, kv_heads, d) behind a chain, without names yet."""
        lengths = np.array([k.shape[1]])
        for layer in range(len(k)):
            self._all(
                [
                    KvAppend((handle,), layer, lengths, _of(heads, k[layer]), _of(heads, v[layer]))
                    for handle, heads in zip(chain.handles, self._heads, strict=True)
                ]
            )

    def _gather(self, chain: Chain, first: int, end: int) -> tuple[F16, F16]:
        """Rows of a chain, each (layers, tokens, kv_heads, d); all commands are under way at once."""
        s, tokens = self.names.shape, (np.array([first]), np.array([end - first]))
        head_bytes = 2 * FP16_BYTES * s.head_dim
        k, v = (np.empty((s.layers, end - first, s.kv_heads, s.head_dim), np.float16) for _ in range(2))
        reads = [
            Read(device, KvGather((handle,), *tokens, 0, s.layers), head_bytes * len(heads), max_bytes=COMMAND_BYTES)
            for device, handle, heads in zip(self.devices, chain.handles, self._heads, strict=True)
        ]
        for drive, future in enumerate(submit_reads(reads, 0)):
            place = _cut_of(self._heads[drive])
            k[:, :, place], v[:, :, place] = done_by(drive, future.result()).data
        return k, v

    def _cut(self, chain: Chain) -> None:
        """Let a chain end with its last name; without any it is gone."""
        if not chain.ends:
            self._all([KvFree((handle,)) for handle in chain.handles])
            return
        left = np.array([max(chain.ends)])
        for layer in range(self.names.shape.layers):
            self._all([KvCrop((handle,), layer, left) for handle in chain.handles])

    def remove(self, keys: Sequence[bytes]) -> bool:
        """Forget blocks, from the last on as long as they are there, unpinned, and end a chain; whether all went."""
        for key in reversed(keys):
            if key not in self._blocks or not self._is_last(key):
                return False
            self._evict(key)
        return True

    def pin(self, keys: Sequence[bytes]) -> None:
        """Keep these blocks until they are unpinned as often."""
        for key in keys:
            self._pinned[key] = self._pinned.get(key, 0) + 1

    def unpin(self, keys: Sequence[bytes]) -> None:
        """They may go again."""
        for key in keys:
            self._pinned[key] = self._pinned.get(key, 1) - 1
            if self._pinned[key] <= 0:
                del self._pinned[key]

    def flush(self) -> None:
        """Returns when all that is stored survives a loss of power."""
        self._all([Flush() for _ in self.devices])

    def _chain_behind(self, hit: Hit) -> Chain:
        """A chain that ends where a hit does: the same one, or a fork of it."""
        if hit.chain is None:
            s, layout = self.names.shape, self.names.layout
            return Chain(
                self._handles([SeqCreate(1, s.layers, len(h), s.head_dim, MAX_TOKENS, layout) for h in self._heads]), {}
            )
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
            if not self._let_go(kept):
                raise ValueError(f"{blocks} blocks have no room: all {self.max_blocks} that are kept are in use")

    def _let_go(self, keep: set[bytes]) -> bool:
        """Evict the oldest block that may go; False where there is none."""
        key = next((key for key in self._blocks if key not in keep and self._is_last(key)), None)
        if key is not None:
            self._evict(key)
        return key is not None

    def _let_others_go(self) -> bool:
        """Drop what is stored under other names: of another model, say; False where there is nothing."""
        others, self._others = self._others, set()
        if others:
            self._all([KvDrop(keys_of(others)) for _ in self.devices])
            self._all([SeqSweep() for _ in self.devices])
        return bool(others)

    def _evict(self, key: bytes) -> None:
        block = self._remove(key)
        self.evicted += 1
        self._all([KvDrop(keys_of([key, block.check])) for _ in self.devices])
        self._cut(block.chain)

    def _is_last(self, key: bytes) -> bool:
        """Whether nothing of its chain stands behind a block, and nobody holds it."""
        block = self._blocks[key]
        return block.end == max(block.chain.ends) and key not in self._pinned

    def _forget(self, chain: Chain) -> None:
        """A chain lost data: nothing of it is found any more."""
        gone = [each for key in list(chain.ends.values()) for each in (key, self._remove(key).check)]
        for device, handle in zip(self.devices, chain.handles, strict=True):
            device.submit(KvDrop(keys_of(gone)), 0).result()
            device.submit(KvFree((handle,)), 0).result()

    def _recover(self) -> None:
        """Find what an earlier host has stored: what all drives have alike, the deepest first to go."""
        self._all([SeqSweep() for _ in self.devices])
        listed = [list_keys(device) for device in self.devices]
        self._others = {key for each in listed for key in each if not self.names.are_of(key)}
        first, *others = tables = [blocks_of(each) for each in listed]
        whole = [
            key
            for key, block in first.items()
            if key not in self._others and all(key in each and each[key][1:] == block[1:] for each in others)
        ]
        for device, each, table in zip(self.devices, listed, tables, strict=True):
            known = {name for key in whole for name in (key, table[key][2])} | self._others | {self.names.manifest_key}
            if half := [key for key in each if key not in known]:
                done_by(0, device.submit(KvDrop(keys_of(half)), 0).result())
        self._all([SeqSweep() for _ in self.devices])  # what only had names of halves
        self._described = all(self.names.manifest_key in each for each in listed)
        chains: dict[tuple[int, ...], Chain] = {}
        for key in sorted(whole, key=lambda key: -first[key][1]):
            handles = tuple(table[key][0] for table in tables)
            chain = chains.setdefault(handles, Chain(list(handles), {}))
            self._add(key, Block(chain, *first[key][1:]))
        for chain in chains.values():
            self._cut(chain)  # what was being stored behind it

    def _handles(self, commands: Sequence[Command]) -> list[int]:
        return [int(done.data[0][0]) for done in self._all(commands)]

    def _all(self, commands: Sequence[Command]) -> list[Completion]:
        """A command to each drive, side by side; raises DeviceError for the first that refuses."""
        submitted = [device.submit(command, 0) for device, command in zip(self.devices, commands, strict=True)]
        return [done_by(drive, future.result()) for drive, future in enumerate(submitted)]


def _cut_of(heads: range) -> slice:
    return slice(heads.start, heads.stop)


def _of(heads: range, rows: F16) -> F16:
    """Heads of rows (tokens, kv_heads, d)."""
    return np.ascontiguousarray(rows[:, _cut_of(heads)])
