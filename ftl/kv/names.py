"""Prefixes of sequences by key: what a host finds again that has lost its own index."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import islice

from ftl.kv.sequence import Sequence

KEY_BYTES = 16
RECORDED_BYTES = 48  # of a name in a journal record, at most
RUN = 1024  # keys in order that are moved by one more at most

Found = tuple[int, int]  # handle, tokens


class SortedKeys:
    """Keys in order, in runs: one more costs the same however many there are."""

    def __init__(self) -> None:
        self._runs: list[list[bytes]] = [[]]
        self._firsts: list[bytes] = [b""]  # each run has the keys from its first on

    def add(self, key: bytes) -> None:
        """Add a key that is not there."""
        number = bisect_right(self._firsts, key) - 1
        run = self._runs[number]
        insort(run, key)
        if len(run) > RUN:
            self._runs[number : number + 1] = [run[: RUN // 2], run[RUN // 2 :]]
            self._firsts.insert(number + 1, run[RUN // 2])

    def remove(self, key: bytes) -> None:
        """Remove a key that is there."""
        number = bisect_right(self._firsts, key) - 1
        run = self._runs[number]
        del run[bisect_left(run, key)]
        if not run and number:
            del self._runs[number], self._firsts[number]

    def after(self, key: bytes) -> Iterator[bytes]:
        """Keys behind one, in order."""
        first = bisect_right(self._firsts, key) - 1
        for number in range(first, len(self._runs)):
            run = self._runs[number]
            yield from run[bisect_right(run, key) :] if number == first else run


class Names:
    """Keys of each label (whoever the sequences belong to), and which sequence has them. A sequence knows its own:
    `Sequence.names`, from key to tokens."""

    def __init__(self) -> None:
        self.holders: dict[int, dict[bytes, Sequence]] = {}
        self._sorted: dict[int, SortedKeys] = {}

    @property
    def count(self) -> int:
        """Of all labels."""
        return sum(map(len, self.holders.values()))

    def count_of(self, label: int) -> int:
        """Of one label."""
        return len(self.holders.get(label, ()))

    def unknown(self, label: int, keys: Seq[bytes]) -> set[bytes]:
        """Those keys that name nothing."""
        return set(keys).difference(self.holders.get(label, ()))

    def bind(self, seq: Sequence, keys: Seq[bytes], tokens: Seq[int]) -> set[int]:
        """Let keys name prefixes of a sequence; handles of those that had them before."""
        before = self.unbind(seq.label, [key for key in keys if key not in seq.names])
        seq.names |= dict(zip(keys, tokens, strict=True))
        self.index(seq, keys)
        return before

    def unbind(self, label: int, keys: Seq[bytes]) -> set[int]:
        """Forget keys; handles of those that had them."""
        holders = self.holders.get(label, {})
        had = set()
        for key in keys:
            if (seq := holders.pop(key, None)) is not None:
                del seq.names[key]
                self._sorted[label].remove(key)
                had.add(seq.handle)
        return had

    def index(self, seq: Sequence, keys: Seq[bytes]) -> None:
        """Find a sequence under these keys from now on."""
        holders, ordered = self.holders.setdefault(seq.label, {}), self._sorted.setdefault(seq.label, SortedKeys())
        for key in keys:
            if key not in holders:
                ordered.add(key)
            holders[key] = seq

    def crop(self, seq: Sequence, length: int) -> None:
        """A layer of a sequence has only so many tokens any more."""
        self.unbind(seq.label, [key for key, tokens in seq.names.items() if tokens > length])

    def holder(self, label: int, key: bytes) -> Sequence | None:
        """The sequence that a key names, lost data or not."""
        return self.holders.get(label, {}).get(key)

    def find(self, label: int, keys: Seq[bytes]) -> list[Found]:
        """What keys name, up to the first that names nothing, or what has lost data."""
        found, holders = list[Found](), self.holders.get(label, {})
        for key in keys:
            seq = holders.get(key)
            if seq is None or seq.failed:
                break
            found.append((seq.handle, seq.names[key]))
        return found

    def keys_after(self, label: int, key: bytes) -> Iterator[bytes]:
        """Keys of a label behind one, in order."""
        return self._sorted.get(label, SortedKeys()).after(key)

    def after(self, label: int, key: bytes, count: int) -> list[tuple[bytes, Found]]:
        """So many keys behind one, in order, and what they name."""
        holders = self.holders.get(label, {})
        named = ((each, holders[each]) for each in islice(self.keys_after(label, key), count))
        return [(each, (seq.handle, seq.names[each])) for each, seq in named]
