"""Names of prefixes: of what K and V depend on, and of all tokens up to the end of a block."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from hashlib import blake2b, sha256
from itertools import takewhile

import numpy as np

from csd_spec import ModelShape
from csd_spec.arrays import F16
from csd_spec.model import OPAQUE

KEY_BYTES = 16
PREFIX_BYTES = 4  # of a key, common to all of the same names
_MARK = 1  # of a key's last byte: it names a check


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixNames:
    """What K and V depend on beside the tokens, and how many tokens a block has. Another field is another name.

    shape: of what is stored; its q_heads do not matter. drives: that share its heads. layout: of K and V in the drives;
    `OPAQUE` takes any 2-byte values. model, tokenizer, dtype, adapter: the caller's own words. salt: the tenant's
    secret, so that nobody else finds or guesses its names. seed: of all names; another one starts anew.
    """

    shape: ModelShape
    drives: int = 1
    model: str = ""
    tokenizer: str = ""
    dtype: str = "float16"
    adapter: str = ""
    salt: str = ""
    seed: int = 0
    layout: int = OPAQUE
    block_tokens: int = 256
    _root: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens = {self.block_tokens}: must be at least 1")
        s = self.shape
        mine = {each.name: getattr(self, each.name) for each in fields(self) if each.init and each.name != "shape"}
        text = json.dumps([mine, s.layers, s.kv_heads, s.head_dim], sort_keys=True)
        object.__setattr__(self, "_root", blake2b(text.encode(), digest_size=KEY_BYTES).digest())

    def keys(self, tokens: Sequence[int], extra: str = "", known: Sequence[bytes] = ()) -> list[bytes]:
        """Of all whole blocks of a prompt: each is a hash of a block's tokens and of the key before it.

        extra: what else a request's K and V depend on. known: keys of its first blocks, which are not hashed again.
        """
        found = list(known)
        key = found[-1] if found else self.key_of(extra.encode())
        for at in range(len(found) * self.block_tokens, len(tokens) - self.block_tokens + 1, self.block_tokens):
            block = np.array(tokens[at : at + self.block_tokens], np.int64)
            key = self._key(blake2b(block.tobytes(), digest_size=KEY_BYTES, key=key).digest(), 0)
            found.append(key)
        return found

    def key_of(self, data: bytes) -> bytes:
        """The key of what has a name of another kind."""
        return self._key(blake2b(data, digest_size=KEY_BYTES, key=self._root).digest(), 0)

    def check(self, key: bytes, k: F16, v: F16) -> bytes:
        """The key of a block's content: of its K and V, each (layers, tokens, kv_heads, d), and of its key."""
        digest = sha256(key)
        for part in (k, v):
            digest.update(np.ascontiguousarray(part).view(np.uint8).data)
        return self._key(digest.digest(), _MARK)

    def are_of(self, key: bytes) -> bool:
        """Whether a key may be one of these names."""
        return key.startswith(self._root[:PREFIX_BYTES])

    def _key(self, digest: bytes, mark: int) -> bytes:
        body = digest[: KEY_BYTES - PREFIX_BYTES]
        return self._root[:PREFIX_BYTES] + body[:-1] + bytes([body[-1] & ~_MARK | mark])


def is_check(key: bytes) -> bool:
    """Whether a key is of a block's content, not of its tokens."""
    return bool(key[-1] & _MARK)


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
