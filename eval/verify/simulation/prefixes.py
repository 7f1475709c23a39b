"""A host that keeps prefixes of prompts in drives, and knows what each of them must hold."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from csd_link.host_end import WindowDrive
from csd_spec import ModelShape
from csd_spec.arrays import F16
from host_driver.prefixes.cache_keys import PrefixNames
from host_driver.prefixes.identity import ModelIdentity
from host_driver.prefixes.store import PrefixStore
from vcsd_eval.verify.random_host import DIM
from vcsd_eval.verify.simulation.host import HEADS_A_DRIVE, LAYERS, Wrong

BLOCK_TOKENS, MOST_BLOCKS = 8, 12
PROMPT_BLOCKS = 5  # of a prompt, at most
VERBS = "store", "store", "load", "load", "load", "pin", "unpin", "remove", "flush"


class PrefixHost:
    """One tenant's store of prefixes. Prompts share their beginnings: each block's tokens are of one of two kinds.

    Attributes:
        held: Keys of prompts that are pinned.
    """

    def __init__(self, connects: list[Callable[[], WindowDrive]], draw: random.Random) -> None:
        """Raises DriveLostError if a drive does not answer."""
        self.draw, heads = draw, HEADS_A_DRIVE * len(connects)
        shape = ModelShape(name="sim", layers=LAYERS, q_heads=heads, kv_heads=heads, head_dim=DIM)
        model = ModelIdentity.from_text("simulated")
        self.names = PrefixNames(shape=shape, model=model, drives=len(connects), block_tokens=BLOCK_TOKENS)
        self.store = PrefixStore([connect() for connect in connects], self.names, MOST_BLOCKS)
        self.held: list[list[bytes]] = []

    def _prompt(self) -> tuple[list[bytes], F16, F16]:
        """Keys of a prompt's blocks, and K, V of its tokens, each (layers, tokens, heads, d).

        Equal tokens give equal data.
        """
        kinds = [self.draw.randrange(2) for _ in range(self.draw.randint(1, PROMPT_BLOCKS))]
        keys = self.names.keys([kind for kind in kinds for _ in range(BLOCK_TOKENS)])
        shape = self.names.shape.layers, BLOCK_TOKENS, self.names.shape.kv_heads, DIM
        blocks = [np.random.default_rng(list(key)).standard_normal((2, *shape)).astype(np.float16) for key in keys]
        k, v = np.concatenate(blocks, axis=2)
        return keys, k, v

    def work(self) -> None:
        """One verb; raises Wrong for a prefix that is not what was stored, DriveError if a drive refuses."""
        keys, k, v = self._prompt()
        match self.draw.choice(VERBS):
            case "store":
                self._store(keys, k, v)
            case "load":
                self._load(keys, k, v)
            case "pin" if len(self.held) < 2 and (matched := keys[: self.store.match(keys).tokens // BLOCK_TOKENS]):
                self.store.pin(matched)
                self.held.append(matched)
            case "unpin" if self.held:
                self.store.unpin(self.held.pop())
            case "remove":
                self.store.remove(keys)
            case "flush":
                self.store.flush()

    def _store(self, keys: list[bytes], k: F16, v: F16) -> None:
        try:
            self.store.store(keys, k, v)
        except ValueError as error:
            if not self.held:
                raise Wrong(f"nothing is pinned: {error}") from error

    def _load(self, keys: list[bytes], k: F16, v: F16) -> None:
        stored = self.store.match(keys).tokens
        arrays = self.store.load(keys)
        if arrays is None:
            return
        for array, wanted in zip(arrays, (k, v), strict=True):
            if not np.array_equal(array, wanted[:, :stored]):
                raise Wrong(f"a prefix of {stored} tokens reads back different data")

    def connected(self) -> int:
        """How often drives were connected to again: a store ends with its connection."""
        return 0

    def work_and_flush(self) -> list[bytes]:
        """Store a prompt and flush; keys of the blocks that have to be found from now on."""
        keys, k, v = self._prompt()
        self._store(keys, k, v)
        self.store.flush()
        self._load(keys, k, v)
        return keys[: self.store.match(keys).tokens // BLOCK_TOKENS]

    def check_flushed(self, keys: list[bytes]) -> None:
        """Raise Wrong if blocks are gone that were flushed."""
        if (blocks := self.store.match(keys).tokens // BLOCK_TOKENS) < len(keys):
            raise Wrong(f"of {len(keys)} blocks that were flushed {blocks} are found")

    def check(self) -> None:
        """Read all that is pinned; raises Wrong if some of it is gone without a reason."""
        for keys in self.held:
            if self.store.match(keys).tokens < len(keys) * BLOCK_TOKENS and not self.store.rejected:
                raise Wrong("a pinned prefix is not found")
            self.store.load(keys)

    def leave(self) -> None:
        """End the connections; prefixes stay."""
        for device in self.store.devices:
            device.close()
