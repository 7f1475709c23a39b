"""Prefix cache in drives: blocks of tokens, identified by all tokens up to their end.

Drives store keys with the sequences (`KvName`), so a restarted host finds its data. A block has two keys: one of its
tokens, and one of its content, which is verified on read. A sequence is a chain of blocks; prompts that diverge are
forks that share their common beginning.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from csd_link.splitting import SplitRead, check_device, submit_reads
from csd_spec import (
    Command,
    Completion,
    Drive,
    DriveError,
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
from host_driver.prefixes.cache_keys import PrefixNames
from host_driver.prefixes.manifest import blocks_of, check_completion, list_keys, write_manifest
from host_driver.sharding import split_heads

MAX_TOKENS = 1 << 20  # per prompt
COMMAND_BYTES = 16 << 20  # maximum KV data per read command: the next one is read meanwhile


@dataclass(slots=True, eq=False)
class BlockChain:
    """A sequence on every drive: its handles, and the keys of its named blocks by end position in tokens."""

    handles: list[int]
    ends: dict[int, bytes]


@dataclass(frozen=True, slots=True)
class ChainBlock:
    """Chain and end position of a block, and the key of its content."""

    chain: BlockChain
    end: int
    check: bytes


@dataclass(frozen=True, slots=True)
class Hit:
    """A stored prefix: its length in tokens, and its chain."""

    tokens: int
    chain: BlockChain | None


class PrefixStore:
    """Prefixes of prompts on drives that share the heads. Prompts are given by keys: `PrefixNames.keys`.

    Eviction is LRU, deepest first: a block is never evicted before the blocks after it. Blocks that cannot be read or
    whose content differs are dropped and count as misses. If a drive is lost, every method raises DriveError with
    PATH_LOST: reconnect and create a new store. Not thread-safe.
    """

    def __init__(self, devices: Sequence[Drive], names: PrefixNames, max_blocks: int | None = None) -> None:
        """Open the store, and free sequences that an earlier host of this tenant did not complete.

        Args:
            devices: Connections to the drives.
            names: Key derivation.
            max_blocks: Maximum number of blocks; None: as many as fit in the drives.

        Raises:
            ValueError: An argument is invalid, or a drive's maximum command size is below the size of one token.
        """
        if max_blocks is not None and max_blocks < 1:
            raise ValueError(f"max_blocks = {max_blocks}: must be at least 1")
        if len(devices) != names.drives:
            raise ValueError(f"{len(devices)} drives: the names are for {names.drives}")
        self.devices, self.names, self.max_blocks = list(devices), names, max_blocks
        self._heads = split_heads(names.shape.kv_heads, len(devices))
        for device, heads in zip(devices, self._heads, strict=True):
            check_device(device, VERBS[KvAppend].example(H=len(heads), d=names.shape.head_dim))
        self._blocks: OrderedDict[bytes, ChainBlock] = OrderedDict()  # least recently used first
        self._pinned: dict[bytes, int] = {}
        self._changes: dict[bytes, bool] = {}
        self._others: set[bytes] = set()  # keys on these drives that do not belong to `names`
        self.hits = self.misses = self.evicted = self.rejected = 0
        self._described = False  # whether all drives have the manifest
        self._recover()

    @property
    def blocks(self) -> int:
        """Number of stored blocks."""
        return len(self._blocks)

    def take_changes(self) -> dict[bytes, bool]:
        """Keys added (True) or removed (False) since the last call; at first all stored keys."""
        taken, self._changes = self._changes, {}
        return taken

    def match(self, keys: Sequence[bytes]) -> Hit:
        """Find the longest stored prefix, and mark it as used."""
        matched = list(takewhile(lambda key: key in self._blocks, keys))
        self._touch(matched)
        self.hits += len(matched)
        self.misses += len(keys) - len(matched)
        if not matched:
            return Hit(0, None)
        block = self._blocks[matched[-1]]
        return Hit(block.end, block.chain)

    def _touch(self, keys: Sequence[bytes]) -> None:
        """Mark a prompt's blocks as used; the deepest becomes the least recent."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)

    def load(self, keys: Sequence[bytes], first: int = 0) -> tuple[F16, F16] | None:
        """Load KV data of the stored prefix from token `first` on.

        Returns:
            k and v, (layers, tokens, kv_heads, d) each. None if nothing is stored, or if a drive cannot read it or the
            content differs: then it is dropped.
        """
        hit, size = self.match(keys), self.names.block_tokens
        if hit.chain is None or hit.tokens <= first:
            return None
        start = first // size * size
        try:
            k, v = self._gather(hit.chain, start, hit.tokens)
        except DriveError as error:
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
        """Store a prompt's blocks from token `first` on.

        Keys are written after the data, so a host or drive that dies meanwhile leaves no partial block. On a full
        drive older blocks are evicted.

        Args:
            keys: Keys of the prompt's blocks.
            k, v: Rows from token `first` on, (layers, tokens, kv_heads, d) each.
            first: First token of the rows.

        Returns:
            Number of new blocks; 0 if the blocks before `first` are not stored.

        Raises:
            DriveError: A drive refuses the data.
            ValueError: There is no space besides blocks in use.
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
        """Write the manifest to every drive; False if a drive has no space for it."""
        try:
            for device in self.devices:
                write_manifest(device, self.names)
        except DriveError as error:
            if error.status is not Status.CAPACITY_EXCEEDED:
                raise
            return False
        return True

    def _written(self, hit: Hit, k: F16, v: F16, keys: Sequence[bytes]) -> BlockChain:
        """Append rows to the chain of a hit; evicts the oldest blocks if a drive is full."""
        while True:
            chain = self._chain_after(hit)
            try:
                self._append(chain, k, v)
                return chain
            except DriveError as error:
                self._cut(chain)
                full = error.status is Status.CAPACITY_EXCEEDED
                if not full or not (self._evict_foreign() or self._evict_oldest(keep=set(keys))):
                    raise

    def _name(self, chain: BlockChain, ends: dict[bytes, int], k: F16, v: F16) -> None:
        """Name the blocks whose rows k and v are the last of a chain, so that they can be found."""
        size, start = self.names.block_tokens, min(ends.values()) - self.names.block_tokens
        parts = [slice(end - size - start, end - start) for end in ends.values()]
        checks = [self.names.check(key, k[:, part], v[:, part]) for key, part in zip(ends, parts, strict=True)]
        for key in [key for key in ends if key in self._blocks]:  # stored after a block that was lost
            self._evict(key)
        keys, tokens = keys_of([*ends, *checks]), np.array([*ends.values(), *ends.values()])
        try:
            self._submit_all([KvName((handle,), tokens, keys) for handle in chain.handles])
        except DriveError:
            self._submit_all([KvDrop(keys) for _ in self.devices])
            self._cut(chain)
            raise
        for (key, end), check in zip(ends.items(), checks, strict=True):
            self._add(key, ChainBlock(chain, end, check))

    def _add(self, key: bytes, block: ChainBlock) -> None:
        block.chain.ends[block.end] = key
        self._blocks[key] = block
        self._changes[key] = True

    def _remove(self, key: bytes) -> ChainBlock:
        block = self._blocks.pop(key)
        del block.chain.ends[block.end]
        self._changes[key] = False
        return block

    def _append(self, chain: BlockChain, k: F16, v: F16) -> None:
        """Append rows (layers, tokens, kv_heads, d) to a chain, without names."""
        lengths = np.array([k.shape[1]])
        for layer in range(len(k)):
            self._submit_all(
                [
                    KvAppend((handle,), layer, lengths, _of(heads, k[layer]), _of(heads, v[layer]))
                    for handle, heads in zip(chain.handles, self._heads, strict=True)
                ]
            )

    def _gather(self, chain: BlockChain, first: int, end: int) -> tuple[F16, F16]:
        """Read rows of a chain, (layers, tokens, kv_heads, d) each, with all commands in flight at once."""
        s, tokens = self.names.shape, (np.array([first]), np.array([end - first]))
        head_bytes = 2 * FP16_BYTES * s.head_dim
        k, v = (np.empty((s.layers, end - first, s.kv_heads, s.head_dim), np.float16) for _ in range(2))
        reads = [
            SplitRead(device, KvGather((at,), *tokens, 0, s.layers), head_bytes * len(heads), max_bytes=COMMAND_BYTES)
            for device, at, heads in zip(self.devices, chain.handles, self._heads, strict=True)
        ]
        for drive, future in enumerate(submit_reads(reads, 0)):
            place = _cut_of(self._heads[drive])
            k[:, :, place], v[:, :, place] = check_completion(drive, future.result()).data
        return k, v

    def _cut(self, chain: BlockChain) -> None:
        """Cut a chain to its last named block; free it if it has none."""
        if not chain.ends:
            self._submit_all([KvFree((handle,)) for handle in chain.handles])
            return
        left = np.array([max(chain.ends)])
        for layer in range(self.names.shape.layers):
            self._submit_all([KvCrop((handle,), layer, left) for handle in chain.handles])

    def remove(self, keys: Sequence[bytes]) -> bool:
        """Remove blocks from the last one on, while they are stored, unpinned and at the end of a chain.

        Returns:
            Whether all were removed.
        """
        for key in reversed(keys):
            if key not in self._blocks or not self._is_last(key):
                return False
            self._evict(key)
        return True

    def pin(self, keys: Sequence[bytes]) -> None:
        """Pin blocks until as many unpins."""
        for key in keys:
            self._pinned[key] = self._pinned.get(key, 0) + 1

    def unpin(self, keys: Sequence[bytes]) -> None:
        """Undo a pin."""
        for key in keys:
            self._pinned[key] = self._pinned.get(key, 1) - 1
            if self._pinned[key] <= 0:
                del self._pinned[key]

    def flush(self) -> None:
        """Flush all drives; on return everything stored survives a power loss."""
        self._submit_all([Flush() for _ in self.devices])

    def _chain_after(self, hit: Hit) -> BlockChain:
        """A chain that ends where a hit does: the same one, or a fork."""
        if hit.chain is None:
            s, layout = self.names.shape, self.names.layout
            return BlockChain(
                self._handles([SeqCreate(1, s.layers, len(h), s.head_dim, MAX_TOKENS, layout) for h in self._heads]), {}
            )
        if max(hit.chain.ends) == hit.tokens:
            return hit.chain
        forks = [SeqFork((handle,), np.array([hit.tokens])) for handle in hit.chain.handles]
        return BlockChain(self._handles(forks), {})

    def _make_room(self, blocks: int, keep: Sequence[bytes]) -> None:
        """Evict the oldest blocks until `blocks` more fit; raises ValueError if they cannot."""
        if self.max_blocks is None:
            return
        if blocks > self.max_blocks:
            raise ValueError(f"{blocks} blocks: must be at most max_blocks = {self.max_blocks}")
        protected = set(keep)
        while len(self._blocks) + blocks > self.max_blocks:
            if not self._evict_oldest(protected):
                raise ValueError(f"no space for {blocks} blocks: all {self.max_blocks} of the store are in use")

    def _evict_oldest(self, keep: set[bytes]) -> bool:
        """Evict the oldest evictable block; False if there is none."""
        key = next((key for key in self._blocks if key not in keep and self._is_last(key)), None)
        if key is not None:
            self._evict(key)
        return key is not None

    def _evict_foreign(self) -> bool:
        """Drop data stored under other names, such as another model's; False if there is none."""
        others, self._others = self._others, set()
        if others:
            self._submit_all([KvDrop(keys_of(others)) for _ in self.devices])
            self._submit_all([SeqSweep() for _ in self.devices])
        return bool(others)

    def _evict(self, key: bytes) -> None:
        block = self._remove(key)
        self.evicted += 1
        self._submit_all([KvDrop(keys_of([key, block.check])) for _ in self.devices])
        self._cut(block.chain)

    def _is_last(self, key: bytes) -> bool:
        """Whether a block is the last of its chain and not pinned."""
        block = self._blocks[key]
        return block.end == max(block.chain.ends) and key not in self._pinned

    def _forget(self, chain: BlockChain) -> None:
        """Drop a chain that lost data, with all its blocks."""
        gone = [name for key in list(chain.ends.values()) for name in (key, self._remove(key).check)]
        for device, handle in zip(self.devices, chain.handles, strict=True):
            device.submit(KvDrop(keys_of(gone)), 0).result()
            device.submit(KvFree((handle,)), 0).result()

    def _recover(self) -> None:
        """Find blocks of an earlier host that all drives have; the deepest are the least recent."""
        self._submit_all([SeqSweep() for _ in self.devices])
        listed = [list_keys(device) for device in self.devices]
        self._others = {key for places in listed for key in places if not self.names.owns(key)}
        first, *others = tables = [blocks_of(places) for places in listed]
        whole = [
            key
            for key, block in first.items()
            if key not in self._others and all(key in other and other[key][1:] == block[1:] for other in others)
        ]
        for device, places, table in zip(self.devices, listed, tables, strict=True):
            valid = {name for key in whole for name in (key, table[key][2])} | self._others | {self.names.manifest_key}
            if half := [key for key in places if key not in valid]:
                check_completion(0, device.submit(KvDrop(keys_of(half)), 0).result())
        self._submit_all([SeqSweep() for _ in self.devices])  # sequences that only had keys of partial blocks
        self._described = all(self.names.manifest_key in places for places in listed)
        chains: dict[tuple[int, ...], BlockChain] = {}
        for key in sorted(whole, key=lambda key: -first[key][1]):
            handles = tuple(table[key][0] for table in tables)
            chain = chains.setdefault(handles, BlockChain(list(handles), {}))
            self._add(key, ChainBlock(chain, *first[key][1:]))
        for chain in chains.values():
            self._cut(chain)  # unnamed rows at its end

    def _handles(self, commands: Sequence[Command]) -> list[int]:
        return [int(done.data[0][0]) for done in self._submit_all(commands)]

    def _submit_all(self, commands: Sequence[Command]) -> list[Completion]:
        """Submit one command to each drive concurrently; raises DriveError for the first that fails."""
        submitted = [device.submit(command, 0) for device, command in zip(self.devices, commands, strict=True)]
        return [check_completion(drive, future.result()) for drive, future in enumerate(submitted)]


def _cut_of(heads: range) -> slice:
    return slice(heads.start, heads.stop)


def _of(heads: range, rows: F16) -> F16:
    """Rows (tokens, kv_heads, d) of some heads."""
    return np.ascontiguousarray(rows[:, _cut_of(heads)])
