"""Maps of a sequence: how the groups of a layout (`csd_spec.layouts`) are packed into pages; one module per packing."""

from __future__ import annotations

from csd_spec import Group, PageFormat
from ftl.flash.tag import PageKind
from ftl.kv.layouts.coded import CodedEmbeddingMap
from ftl.kv.layouts.embedding import EmbeddingMap
from ftl.kv.layouts.encoded import CodecEmbeddingMap, CodecRowMap, round_to_codec
from ftl.kv.layouts.group_map import GroupMap, PrimaryMap
from ftl.kv.layouts.progressive import RefinedMap, ScoreMap, ValueMap, staging_map
from ftl.kv.layouts.token import TokenMap

_KINDS = {"k": PageKind.K, "v": PageKind.V}  # tag kind of rows, by source


def maps_of(form: PageFormat, layers: int, heads: int) -> dict[str, GroupMap]:
    """Create the maps of one sequence by name, in the order of its layout's groups."""
    refined = RefinedMap(form, layers, heads) if form.progressive else None
    return {group.name: _map_of(group, form, layers, heads, refined) for group in form.layout.groups}


def _map_of(group: Group, form: PageFormat, layers: int, heads: int, refined: RefinedMap | None) -> GroupMap:
    if callable(group.packing):
        own: GroupMap = group.packing(form, layers, heads)
        return own
    if group.packing == "channels":
        return channels_map(form, layers, heads)
    if group.packing == "rows":
        rows = TokenMap if form.rows.exact else CodecRowMap
        return rows(_KINDS[group.source], group.source, form, layers, heads)
    assert refined is not None, f"layout {form.layout.name}: {group.packing} needs a group of scores"
    if group.packing == "staged":
        return staging_map(_KINDS[group.source], group.source, form, (layers, heads), refined)
    if group.packing == "refined":
        return refined
    return (ScoreMap if group.packing == "scores" else ValueMap)(form, layers, heads)


def token_bytes(form: PageFormat, heads: int) -> dict[str, float]:
    """Flash bytes per token of `heads` heads, by map; partially filled pages take more."""
    programmed = {name: mapped for name, mapped in maps_of(form, 1, heads).items() if mapped.programmed}
    return {name: each.streams * each.group_bytes / each.per_group for name, each in programmed.items()}


def channels_map(form: PageFormat, layers: int, heads: int) -> EmbeddingMap:
    """Create the map of the embedding-indexed copy of K."""
    if form.bits < 16:
        return CodedEmbeddingMap(form, layers, heads)
    return (EmbeddingMap if form.rows.exact else CodecEmbeddingMap)(form, layers, heads)


__all__ = ["GroupMap", "PrimaryMap", "channels_map", "maps_of", "round_to_codec", "token_bytes"]
