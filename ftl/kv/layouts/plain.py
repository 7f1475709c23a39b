"""K and V token-indexed, and no copy: what is attended as a whole, or only kept for a host."""

from __future__ import annotations

from functools import partial

from csd_spec import KvLayout
from csd_spec.model import OPAQUE
from ftl.flash.tag import Kind
from ftl.kv.layouts.group_map import GroupMap
from ftl.kv.layouts.layout import Layout
from ftl.kv.layouts.token import TokenMap

PLAIN = 1


def form(page_bytes: int, head_dim: int, max_tokens: int, kind: int) -> KvLayout:
    """Groups of as many tokens as fill a page."""
    return KvLayout(page_bytes=page_bytes, head_dim=head_dim, m=head_dim, kind=kind)


def maps(form: KvLayout, layers: int, heads: int) -> dict[str, GroupMap]:
    """K and V."""
    return {name: TokenMap(kind, name, form, layers, heads) for name, kind in (("k", Kind.K), ("v", Kind.V))}


PLAIN_ROWS, OPAQUE_ROWS = (
    Layout(name, number, partial(form, kind=number), maps) for name, number in (("plain", PLAIN), ("opaque", OPAQUE))
)
