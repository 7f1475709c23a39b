"""What a layout is: a value with two functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from csd_spec import KvLayout
from ftl.kv.layouts.group_map import GroupMap


@dataclass(frozen=True, slots=True)
class Layout:
    """What a drive stores of K and V: at which precision, in which groups.

    number: what `SeqCreate.embedding_bits` names it by; a form of its own (`KvLayout.kind`) carries it too.
    form: from (page_bytes, head_dim, max_tokens) to how a head's rows fill pages; raises ValueError where they do not.
    maps: from (form, layers, heads) to the maps of one sequence by name. Those named k, v and embedding_k are what the
    kernels of `attention_engine` read; a method reads others from `KvView.planes`.
    lossy: what it keeps of K and V, where that is not all.
    """

    name: str
    number: int
    form: Callable[[int, int, int], KvLayout]
    maps: Callable[[KvLayout, int, int], dict[str, GroupMap]]
    lossy: str = ""

    def token_bytes(self, form: KvLayout, heads: int) -> dict[str, float]:
        """Bytes in flash of a token of `heads` heads, by map; of pages that are not full they are more."""
        stored = {name: mapped for name, mapped in self.maps(form, 1, heads).items() if mapped.programmed}
        return {name: each.streams * each.group_bytes / each.per_group for name, each in stored.items()}
