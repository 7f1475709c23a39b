"""Keys of prefixes: a digest of the model, and of all tokens up to the end of a block."""

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
PREFIX_BYTES = 4  # of a key, common to all of the same names
_BLOCK, _CHECK, _MANIFEST = range(3)  # what a key names: the lowest two bits of its last byte
_KINDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixNames:
    """What KV data depends on in addition to the tokens, and how many tokens a block has. Another field is another key.

    Attributes:
        shape: Of what is stored; its q_heads do not matter.
        drives: Drives that share its heads.
        model: The model, with its weights, dtype and all else that its keys and values depend on. A tokenizer does not
            matter: keys are of token ids.
        rank: Which of several workers, each with heads and drives of its own. All have the same keys; what another
            worker has stored is not taken.
        layout: Code of the layout of keys and values in the drives; `opaque` takes any 2-byte values.
        salt: The tenant's secret, so that nobody else finds or guesses its keys.
        seed: Of all keys; with another one nothing that is stored is found.
        block_tokens: Tokens of a block.
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
        text = json.dumps([self._public(), self.model.digest, self.salt], sort_keys=True)
        object.__setattr__(self, "_root", blake2b(text.encode(), digest_size=KEY_BYTES).digest())

    def _public(self) -> dict[str, int]:
        """Numbers that every key depends on."""
        s, named = self.shape, ("drives", "seed", "layout", "block_tokens")
        return {name: getattr(self, name) for name in named} | {
            "layers": s.layers,
            "kv_heads": s.kv_heads,
            "head_dim": s.head_dim,
        }

    @property
    def manifest(self) -> str:
        """Which model these keys are of, as JSON for people; the salt is left out."""
        return json.dumps({"model": self.model.to_dict(), "rank": self.rank} | self._public())

    @property
    def manifest_key(self) -> bytes:
        """The key of the manifest."""
        return self._key(blake2b(b"manifest", digest_size=KEY_BYTES, key=self._root).digest(), _MANIFEST)

    def keys(self, tokens: Sequence[int], extra: str = "", known: Sequence[bytes] = ()) -> list[bytes]:
        """Of all whole blocks of a prompt: each is a hash of a block's tokens and of the key before it.

        extra: what else a request's K and V depend on. known: keys of its first blocks, which are not hashed again.
        """
        found = list(known)
        key = found[-1] if found else self.key_of(extra.encode())
        for at in range(len(found) * self.block_tokens, len(tokens) - self.block_tokens + 1, self.block_tokens):
            block = np.array(tokens[at : at + self.block_tokens], np.int64)
            key = self._key(blake2b(block.tobytes(), digest_size=KEY_BYTES, key=key).digest(), _BLOCK)
            found.append(key)
        return found

    def key_of(self, data: bytes) -> bytes:
        """The key of what has a name of another kind."""
        return self._key(blake2b(data, digest_size=KEY_BYTES, key=self._root).digest(), _BLOCK)

    def check(self, key: bytes, k: F16, v: F16) -> bytes:
        """The key of a block's content: of its K and V, each (layers, tokens, kv_heads, d), and of its key."""
        digest = sha256(key + self.rank.to_bytes(4, "little"))
        for part in (k, v):
            digest.update(np.ascontiguousarray(part).view(np.uint8).data)
        return self._key(digest.digest(), _CHECK)

    def are_of(self, key: bytes) -> bool:
        """Whether a key may be one of these names."""
        return key.startswith(self._root[:PREFIX_BYTES])

    def _key(self, digest: bytes, kind: int) -> bytes:
        body = digest[: KEY_BYTES - PREFIX_BYTES]
        return self._root[:PREFIX_BYTES] + body[:-1] + bytes([body[-1] & ~_KINDS | kind])


def is_block(key: bytes) -> bool:
    """Whether a key is of a block's tokens."""
    return key[-1] & _KINDS == _BLOCK


def is_check(key: bytes) -> bool:
    """Whether a key is of a block's content."""
    return key[-1] & _KINDS == _CHECK


def is_manifest(key: bytes) -> bool:
    """Whether a key is of the manifest of all keys that begin with the same `PREFIX_BYTES`."""
    return key[-1] & _KINDS == _MANIFEST


class Admission:
    """Which blocks are worth their writes: those that were asked for often enough.

    after: as many times, the present one among them; 1 is every block. The keys that were seen last are remembered.
    """

    def __init__(self, after: int = 1, remembered: int = 1 << 16) -> None:
        if after < 1 or remembered < 1:
            raise ValueError(f"admit_after = {after}, remembered = {remembered}: both must be at least 1")
        self.after, self._remembered = after, remembered
        self._seen: OrderedDict[bytes, int] = OrderedDict()

    def see(self, keys: Sequence[bytes]) -> None:
        """A prompt with these blocks was asked for."""
        if self.after == 1:
            return
        for key in reversed(keys):  # of a prompt that does not fit the deepest are forgotten first
            self._seen[key] = self._seen.pop(key, 0) + 1
        while len(self._seen) > self._remembered:
            self._seen.popitem(last=False)

    def admitted(self, keys: Sequence[bytes]) -> int:
        """How many of a prompt's first blocks are worth keeping."""
        if self.after == 1:
            return len(keys)
        return len(list(takewhile(lambda key: self._seen.get(key, 0) >= self.after, keys)))
