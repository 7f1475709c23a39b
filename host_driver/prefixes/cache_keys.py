"""Cache keys of prefixes: hash chains over the model and all tokens up to the end of a block."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b, sha256
from itertools import takewhile

import numpy as np

from csd_spec import LAYOUTS, ModelShape
from csd_spec.arrays import F16
from host_driver.prefixes.identity import ModelIdentity

KEY_BYTES = 16
PREFIX_BYTES = 4  # start of a key, common to all keys of the same names
_BLOCK, _CHECK, _MANIFEST = range(3)  # kind of a key: the lowest two bits of its last byte
_KINDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixNames:
    """Everything that KV data depends on in addition to the tokens, and the block size. All fields change the keys.

    Attributes:
        shape: Shape of the stored data; its q_heads do not matter.
        drives: Number of drives that share its heads.
        model: The model: weights, dtype and everything else that its KV data depends on. The tokenizer does not matter:
            keys are computed from token IDs.
        rank: Index among several workers with their own heads and drives. All have the same keys; data of another
            worker is not accepted.
        layout: Code of the layout in the drives; `opaque` takes any 2-byte values.
        salt: The tenant's secret, so that no other tenant can find or guess its keys.
        seed: Seed of all keys; a new value invalidates everything stored.
        block_tokens: Tokens per block.
    """

    shape: ModelShape
    model: ModelIdentity
    drives: int = 1
    rank: int = 0
    salt: str = ""
    seed: int = 0
    layout: int = LAYOUTS["opaque"].code
    block_tokens: int = 256
    _root: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens = {self.block_tokens}: must be at least 1")
        text = json.dumps([self._key_fields(), self.model.digest, self.salt], sort_keys=True)
        object.__setattr__(self, "_root", blake2b(text.encode(), digest_size=KEY_BYTES).digest())

    def _key_fields(self) -> dict[str, int]:
        """Numbers that every key depends on."""
        s, named = self.shape, ("drives", "seed", "layout", "block_tokens")
        return {name: getattr(self, name) for name in named} | {
            "layers": s.layers,
            "kv_heads": s.kv_heads,
            "head_dim": s.head_dim,
        }

    @property
    def manifest(self) -> str:
        """Description of the model of these keys as JSON, without the salt."""
        return json.dumps({"model": self.model.to_dict(), "rank": self.rank} | self._key_fields())

    @property
    def manifest_key(self) -> bytes:
        """Key of the manifest."""
        return self._key(blake2b(b"manifest", digest_size=KEY_BYTES, key=self._root).digest(), _MANIFEST)

    def keys(self, tokens: Sequence[int], extra: str = "", first_keys: Sequence[bytes] = ()) -> list[bytes]:
        """Keys of all whole blocks of a prompt: each is a hash of the block's tokens and the previous key.

        Args:
            tokens: Token IDs of the prompt.
            extra: Anything else that the KV data of the request depends on.
            first_keys: Keys of the first blocks, which are not hashed again.
        """
        keys = list(first_keys)
        key = keys[-1] if keys else self.key_of(extra.encode())
        for at in range(len(keys) * self.block_tokens, len(tokens) - self.block_tokens + 1, self.block_tokens):
            block = np.array(tokens[at : at + self.block_tokens], np.int64)
            key = self._key(blake2b(block.tobytes(), digest_size=KEY_BYTES, key=key).digest(), _BLOCK)
            keys.append(key)
        return keys

    def key_of(self, data: bytes) -> bytes:
        """Key of data that is not identified by tokens."""
        return self._key(blake2b(data, digest_size=KEY_BYTES, key=self._root).digest(), _BLOCK)

    def check(self, key: bytes, k: F16, v: F16) -> bytes:
        """Key of a block's content: k and v, (layers, tokens, kv_heads, d) each, and the block's key."""
        digest = sha256(key + self.rank.to_bytes(4, "little"))
        for part in (k, v):
            digest.update(np.ascontiguousarray(part).view(np.uint8).data)
        return self._key(digest.digest(), _CHECK)

    def owns(self, key: bytes) -> bool:
        """Whether a key may belong to these names."""
        return key.startswith(self._root[:PREFIX_BYTES])

    def _key(self, digest: bytes, kind: int) -> bytes:
        body = digest[: KEY_BYTES - PREFIX_BYTES]
        return self._root[:PREFIX_BYTES] + body[:-1] + bytes([body[-1] & ~_KINDS | kind])


def is_block(key: bytes) -> bool:
    """Whether a key identifies a block by its tokens."""
    return key[-1] & _KINDS == _BLOCK


def is_check(key: bytes) -> bool:
    """Whether a key identifies a block by its content."""
    return key[-1] & _KINDS == _CHECK


def is_manifest(key: bytes) -> bool:
    """Whether a key is that of a manifest, for all keys that begin with the same `PREFIX_BYTES`."""
    return key[-1] & _KINDS == _MANIFEST


class AdmissionFilter:
    """Selects blocks worth storing: those requested often enough.

    Args:
        after: Minimum number of requests, including the current one; 1 admits every block.
        remembered: Number of keys to remember (LRU).
    """

    def __init__(self, after: int = 1, remembered: int = 1 << 16) -> None:
        if after < 1 or remembered < 1:
            raise ValueError(f"admit_after = {after}, remembered = {remembered}: both must be at least 1")
        self.after, self._remembered = after, remembered
        self._seen: OrderedDict[bytes, int] = OrderedDict()

    def record(self, keys: Sequence[bytes]) -> None:
        """Count a request for a prompt with these blocks."""
        if self.after == 1:
            return
        for key in reversed(keys):  # LRU: the deepest blocks of a prompt are forgotten first
            self._seen[key] = self._seen.pop(key, 0) + 1
        while len(self._seen) > self._remembered:
            self._seen.popitem(last=False)

    def admitted(self, keys: Sequence[bytes]) -> int:
        """Number of the prompt's first blocks that are worth storing."""
        if self.after == 1:
            return len(keys)
        return len(list(takewhile(lambda key: self._seen.get(key, 0) >= self.after, keys)))
