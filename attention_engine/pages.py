"""Page interface for a step: the pages of a selection and their useful bytes."""

from __future__ import annotations

from typing import Protocol

from csd_spec import KvSlotView
from csd_spec.arrays import I32, I64, U32, Bools


class Plan(Protocol):
    """Pages of a selection, ordered by stream. Page numbers are opaque here."""

    @property
    def useful(self) -> I64:
        """Return the useful bytes (P,) of each page."""
        ...

    @property
    def nbytes(self) -> I64:
        """Return the bytes (P,) of each page that cross the channel."""
        ...

    @property
    def ends(self) -> I64:
        """Return the index (N,) after the last page of each stream."""
        ...


class Pages(Protocol):
    """Page lookup for selections."""

    def token_pages(self, view: KvSlotView, slots: U32, tokens: I32, counts: I64) -> Plan:
        """Return the pages of K or V with tokens (N, k); counts (N,) of them are valid."""
        ...

    def embedding_pages(self, view: KvSlotView, channels: I32) -> Plan:
        """Return the pages with channels (N, r) of K."""
        ...

    def refined_pages(self, view: KvSlotView, tokens: I32, counts: I64) -> Plan:
        """Return the 8-bit pages of keys and values of tokens (N, k); counts (N,) of them are valid."""
        ...

    def coarse_pages(self, view: KvSlotView, name: str, groups: Bools | None = None) -> Plan:
        """Return the pages of the map `scores` or `values`: those of groups (N, groups), by default all."""
        ...

    def table_pages(self, nbytes: I64) -> Plan:
        """Return the pages of a table of nbytes (N,)."""
        ...
