"""Prefix index: finds sequences by key, for hosts that have lost their own index."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import islice

from ftl.kv.sequence import Sequence

KEY_BYTES = 16
RECORDED_BYTES = 48  # upper bound per name in a journal record
RUN = 1024  # keys per run: bounds the cost of an insertion

PrefixEntry = tuple[int, int]  # handle, tokens


class SortedKeys:
    """Sorted keys in runs of bounded length: the cost of an insertion does not grow with the number of keys."""

    def __init__(self) -> None:
        self._runs: list[list[bytes]] = [[]]
        self._firsts: list[bytes] = [b""]  # lower bound of each run

    def add(self, key: bytes) -> None:
        """Add a key that is not present."""
        number = bisect_right(self._firsts, key) - 1
        run = self._runs[number]
        at = bisect_left(run, key)
        assert at == len(run) or run[at] != key, f"key {key.hex()} is there twice"
        run.insert(at, key)
        if len(run) > RUN:
            self._runs[number : number + 1] = [run[: RUN // 2], run[RUN // 2 :]]
            self._firsts.insert(number + 1, run[RUN // 2])

    def remove(self, key: bytes) -> None:
        """Remove a key that is present."""
        number = bisect_right(self._firsts, key) - 1
        run = self._runs[number]
        at = bisect_left(run, key)
        assert at < len(run) and run[at] == key, f"key {key.hex()} is not there"
        del run[at]
        if not run and number:
            del self._runs[number], self._firsts[number]

    def iterate_after(self, key: bytes) -> Iterator[bytes]:
        """Iterate over the keys greater than `key`, in order."""
        first = bisect_right(self._firsts, key) - 1
        for number in range(first, len(self._runs)):
            run = self._runs[number]
            yield from run[bisect_right(run, key) :] if number == first else run


class PrefixIndex:
    """Keys of each label (tenant), and the sequence of each key.

    `Sequence.names` maps a sequence's own keys to tokens.
    """

    def __init__(self) -> None:
        self.holders: dict[int, dict[bytes, Sequence]] = {}
        self._sorted: dict[int, SortedKeys] = {}

    @property
    def count(self) -> int:
        """Number of keys of all labels."""
        return sum(map(len, self.holders.values()))

    def count_of(self, label: int) -> int:
        """Number of keys of one label."""
        return len(self.holders.get(label, ()))

    def unknown(self, label: int, keys: Seq[bytes]) -> set[bytes]:
        """Return the keys that are not bound."""
        return set(keys).difference(self.holders.get(label, ()))

    def bind(self, seq: Sequence, keys: Seq[bytes], tokens: Seq[int]) -> set[int]:
        """Bind keys to prefixes of a sequence; returns the handles that they were bound to before."""
        before = self.unbind(seq.label, [key for key in keys if key not in seq.names])
        seq.names |= dict(zip(keys, tokens, strict=True))
        self.index(seq, keys)
        return before

    def unbind(self, label: int, keys: Seq[bytes]) -> set[int]:
        """Unbind keys; returns the handles that they were bound to."""
        holders = self.holders.get(label, {})
        had = set()
        for key in keys:
            if (seq := holders.pop(key, None)) is not None:
                assert seq.label == label, f"key {key.hex()} of label {label} names a sequence of label {seq.label}"
                del seq.names[key]
                self._sorted[label].remove(key)
                had.add(seq.handle)
        return had

    def index(self, seq: Sequence, keys: Seq[bytes]) -> None:
        """Add keys of a sequence to the index."""
        holders, ordered = self.holders.setdefault(seq.label, {}), self._sorted.setdefault(seq.label, SortedKeys())
        for key in keys:
            if key not in holders:
                ordered.add(key)
            assert key in seq.names, f"sequence {seq.handle} does not have key {key.hex()}"
            holders[key] = seq

    def crop(self, seq: Sequence, length: int) -> None:
        """Unbind keys of prefixes longer than `length`, after a truncation."""
        self.unbind(seq.label, [key for key, tokens in seq.names.items() if tokens > length])
        assert max(seq.names.values(), default=0) <= length, f"sequence {seq.handle}: a key names tokens it lost"

    def holder(self, label: int, key: bytes) -> Sequence | None:
        """Return the sequence that a key names, even if it has lost data."""
        return self.holders.get(label, {}).get(key)

    def find(self, label: int, keys: Seq[bytes]) -> list[PrefixEntry]:
        """Return the entries of keys, up to the first key that is unbound or whose sequence has lost data."""
        entries, holders = list[PrefixEntry](), self.holders.get(label, {})
        for key in keys:
            seq = holders.get(key)
            if seq is None or seq.failed:
                break
            entries.append((seq.handle, seq.names[key]))
        return entries

    def keys_after(self, label: int, key: bytes) -> Iterator[bytes]:
        """Iterate over the keys of a label greater than `key`, in order."""
        return self._sorted.get(label, SortedKeys()).iterate_after(key)

    def list_after(self, label: int, key: bytes, count: int) -> list[tuple[bytes, PrefixEntry]]:
        """Return the next `count` keys greater than `key`, in order, with their entries."""
        holders = self.holders.get(label, {})
        named = ((name, holders[name]) for name in islice(self.keys_after(label, key), count))
        return [(name, (seq.handle, seq.names[name])) for name, seq in named]
