"""What a step needs to know of pages: where a selection lies, and what of it is wanted."""

from __future__ import annotations

from typing import Protocol

from csd_spec import KvView
from csd_spec.arrays import I32, I64, U32, Bools


class Plan(Protocol):
    """Pages behind a selection, stream by stream; what a page number means is not known here."""

    @property
    def useful(self) -> I64:
        """Bytes (P,) of each page that are wanted."""
        ...

    @property
    def nbytes(self) -> I64:
        """Bytes (P,) of each page that cross the channel."""
        ...

    @property
    def ends(self) -> I64:
        """Pages (N,) up to the last of each stream."""
        ...


class Pages(Protocol):
    """Where a selection lies."""

    def token_pages(self, view: KvView, slots: U32, tokens: I32, counts: I64) -> Plan:
        """Pages of K or V with tokens (N, k), of which counts (N,) are used."""
        ...

    def embedding_pages(self, view: KvView, channels: I32) -> Plan:
        """Pages with channels (N, r) of K."""
        ...

    def refined_pages(self, view: KvView, tokens: I32, counts: I64) -> Plan:
        """Pages with K and V in 8 bits of tokens (N, k), of which counts (N,) are used."""
        ...

    def coarse_pages(self, view: KvView, name: str, groups: Bools | None = None) -> Plan:
        """Pages of the map `scores` or `values`, all where no groups (N, groups) are named."""
        ...

    def table_pages(self, nbytes: I64) -> Plan:
        """Pages of a table of nbytes (N,)."""
        ...
