"""Prefixes of sequences by key: what a host finds again that has lost its own index."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence as Seq

from ftl.kv.sequence import Sequence

KEY_BYTES = 16
RECORDED_BYTES = 48  # of a name in a journal record, at most

Found = tuple[int, int]  # handle, tokens


class Names:
    """Keys of each label (whoever the sequences belong to), and which sequence has them. A sequence knows its own:
    `Sequence.names`, from key to tokens."""

    def __init__(self) -> None:
        self.holders: dict[int, dict[bytes, Sequence]] = {}
        self._sorted: dict[int, list[bytes]] = {}

    @property
    def count(self) -> int:
        """Of all labels."""
        return sum(map(len, self.holders.values()))

    def bind(self, seq: Sequence, keys: Seq[bytes], tokens: Seq[int]) -> set[int]:
        """Let keys name prefixes of a sequence; handles of those that had them before."""
        before = self.unbind(seq.label, [key for key in keys if key not in seq.names])
        seq.names |= dict(zip(keys, tokens, strict=True))
        self.index(seq, keys)
        return before

    def unbind(self, label: int, keys: Seq[bytes]) -> set[int]:
        """Forget keys; handles of those that had them."""
        holders, ordered = self.holders.get(label, {}), self._sorted.get(label, [])
        had = set()
        for key in keys:
            if (seq := holders.pop(key, None)) is not None:
                del seq.names[key], ordered[bisect_right(ordered, key) - 1]
                had.add(seq.handle)
        return had

    def index(self, seq: Sequence, keys: Seq[bytes]) -> None:
        """Find a sequence under these keys from now on."""
        holders, ordered = self.holders.setdefault(seq.label, {}), self._sorted.setdefault(seq.label, [])
        for key in keys:
            if key not in holders:
                insort(ordered, key)
            holders[key] = seq

    def crop(self, seq: Sequence, length: int) -> None:
        """A layer of a sequence has only so many tokens any more."""
        self.unbind(seq.label, [key for key, tokens in seq.names.items() if tokens > length])

    def find(self, label: int, keys: Seq[bytes]) -> list[Found]:
        """What keys name, up to the first that names nothing, or what has lost data."""
        found, holders = list[Found](), self.holders.get(label, {})
        for key in keys:
            seq = holders.get(key)
            if seq is None or seq.failed:
                break
            found.append((seq.handle, seq.names[key]))
        return found

    def after(self, label: int, key: bytes, count: int) -> list[tuple[bytes, Found]]:
        """So many keys behind one, in order, and what they name."""
        ordered, holders = self._sorted.get(label, []), self.holders.get(label, {})
        first = bisect_right(ordered, key)
        named = ((each, holders[each]) for each in ordered[first : first + count])
        return [(each, (seq.handle, seq.names[each])) for each, seq in named]
