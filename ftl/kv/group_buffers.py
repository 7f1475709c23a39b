"""Page buffers of unfinished groups in drive DRAM."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from csd_spec.arrays import I64, U8, U16, U32
from csd_spec.view import UNMAPPED, dram_slots, in_flash
from ftl.errors import OutOfSpaceError
from ftl.flash.memory import reserve_zeros
from ftl.kv.layouts import GroupMap


class GroupBuffers:
    """Pool of page-sized buffers."""

    def __init__(self, dram_bytes: int, page_bytes: int) -> None:
        self.capacity = dram_bytes // page_bytes
        self.content: U8 = reserve_zeros((self.capacity, page_bytes), np.uint8)
        self._fresh = 0
        self._returned: list[int] = []

    @property
    def left(self) -> int:
        return self.capacity - self._fresh + len(self._returned)

    def allocate(self, count: int) -> I64:
        """Take `count` uninitialized buffers; raises OutOfSpaceError before anything changes."""
        if count > self.left:
            raise OutOfSpaceError(
                f"{count} group buffers wanted, drive DRAM has room for {self.left}: free sequences first"
            )
        again = min(count, len(self._returned))
        split = len(self._returned) - again
        slots = self._returned[split:] + list(range(self._fresh, self._fresh + count - again))
        del self._returned[split:]
        self._fresh += count - again
        assert len(slots) == count and self._fresh <= self.capacity
        return np.array(slots, np.int64)

    def release(self, slots: I64) -> None:
        """Return buffers to the pool."""
        assert slots.min(initial=0) >= 0 and slots.max(initial=0) < self._fresh, "a buffer that was never taken"
        self._returned += slots.tolist()
        assert self.left <= self.capacity, "a buffer was given back twice"


class OpenGroups:
    """Buffers of unfinished groups: required for primary maps, best-effort for copies."""

    def __init__(self, buffers: GroupBuffers, flash: Callable[[U32], U8]) -> None:
        """`flash` reads the content of pages."""
        self.buffers, self._flash = buffers, flash
        self._copies: dict[tuple[GroupMap, int], None] = {}  # buffered layers of copies, oldest first
        self._of_copies = 0  # buffers of all copies

    @property
    def content(self) -> U16:
        """Buffers as FP16 bit patterns."""
        return self.buffers.content.view(np.uint16)

    def check_room(self, count: int) -> None:
        """Raise OutOfSpaceError unless drive DRAM can hold `count` more buffers."""
        left = self.buffers.left + self._of_copies
        if count > left:
            raise OutOfSpaceError(f"{count} group buffers wanted, drive DRAM has room for {left}: free sequences first")

    def _make_room(self, count: int) -> None:
        """Free `count` buffers by evicting unfinished groups of copies, whose rows the primary maps hold."""
        while count > self.buffers.left and self._copies:
            mapped, layer = next(iter(self._copies))
            assert not mapped.primary, "rows that no other map holds are evicted"
            self._release(mapped, layer)
            mapped.slots[layer][~in_flash(mapped.slots[layer])] = UNMAPPED

    def _release(self, mapped: GroupMap, layer: int) -> None:
        assert mapped.buffered(layer), f"layer {layer} has no buffers to release"
        self.buffers.release(mapped.buffers[layer])
        mapped.buffers[layer] = -1
        if not mapped.primary:
            del self._copies[mapped, layer]
            self._of_copies -= mapped.streams
            assert self._of_copies >= 0

    def release_all(self, mapped: GroupMap) -> None:
        """Release the buffers of all layers."""
        for layer in np.flatnonzero(mapped.buffers[:, 0] >= 0).tolist():
            self._release(mapped, layer)

    def buffer_group(self, mapped: GroupMap, layer: int, tokens: int) -> bool:
        """Give the unfinished group after `tokens` tokens its buffers; returns whether it has them."""
        group, position = divmod(tokens, mapped.per_group)
        if not mapped.can_buffer(group):
            return False
        if position and not mapped.buffered(layer):
            if mapped.primary:
                self._make_room(mapped.streams)
            if mapped.streams > self.buffers.left:
                return False
            mapped.buffers[layer] = self.buffers.allocate(mapped.streams)
            if not mapped.primary:
                self._copies[mapped, layer] = None
                self._of_copies += mapped.streams
        if position:
            mapped.slots[layer, :, group] = dram_slots(mapped.buffers[layer])
        elif mapped.buffered(layer):
            self._release(mapped, layer)
        assert mapped.buffered(layer) == (position > 0)
        return position > 0

    def _before(self, mapped: GroupMap, layer: int, group: int) -> U16 | None:
        """Pages of the previous group, if they are in flash."""
        slots = mapped.slots[layer, :, group - 1] if group else mapped.slots[layer, :, :0]
        return self._flash(slots).view(np.uint16) if slots.size and in_flash(slots).all() else None

    def buffer_tail(self, mapped: GroupMap, layer: int, length: int, tokens: int, rows: U16 | None) -> None:
        """Buffer the part of `tokens` rows after `length` that stays unfinished; for copies, only if possible."""
        begins = length % mapped.per_group == 0 or (length + tokens) // mapped.per_group > length // mapped.per_group
        if not (begins or mapped.buffered(layer)) or not self.buffer_group(mapped, layer, length + tokens):
            return
        if rows is not None:
            position, buffers = (length + tokens) % mapped.per_group, mapped.buffers[layer]
            if begins:
                mapped.begin(self.content, buffers, self._before(mapped, layer, (length + tokens) // mapped.per_group))
                rows = rows[rows.shape[0] - position :]
            assert rows.shape[0] == (position if begins else tokens), "the open group lacks rows"
            mapped.fill(self.content, buffers, position - rows.shape[0], rows)
