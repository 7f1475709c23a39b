"""A journal record: what a commit says of sequences, as JSON and raw rows."""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

import numpy as np

from csd_spec import KvLayout
from csd_spec.arrays import U8
from ftl.kv.layouts import layout_of
from ftl.kv.map import KvMap
from ftl.kv.sequence import Sequence

_HEAD = struct.Struct("<II")  # bytes of JSON, bytes in all


def pack(head: dict[str, Any], rows: list[bytes], page_bytes: int) -> U8:
    """A record as pages (count, page_bytes)."""
    text, raw = zlib.compress(json.dumps(head).encode(), 1), b"".join(rows)
    record = _HEAD.pack(len(text), _HEAD.size + len(text) + len(raw)) + text + raw
    pages = np.zeros((-(-len(record) // page_bytes), page_bytes), np.uint8)
    pages.reshape(-1)[: len(record)] = np.frombuffer(record, np.uint8)
    return pages


def unpack(pages: U8) -> tuple[dict[str, Any], bytes]:
    """What `pack` has written."""
    record = pages.tobytes()
    text, size = _HEAD.unpack_from(record)
    head: dict[str, Any] = json.loads(zlib.decompress(record[_HEAD.size : _HEAD.size + text]))
    return head, record[_HEAD.size + text : size]


def describe(kv: KvMap, seq: Sequence) -> dict[str, Any]:
    """All of a sequence but its rows; where its full groups lie is not said, since tags say it."""
    form = seq.layout
    return {
        "handle": seq.handle,
        "shape": [seq.layers, seq.heads, form.head_dim, form.m, form.bits, *([form.kind] if form.kind else [])],
        "lengths": seq.lengths.tolist(),
        "owners": seq.owners,
        "newest": seq.newest,
        "born": {owner: kv.owners.first_write[owner] for owner in seq.all_owners},
        "failed": seq.failed,
        **({"label": seq.label} if seq.label else {}),
    }


def form_of(described: dict[str, Any], page_bytes: int) -> KvLayout:
    """The form of a sequence that `describe` has described."""
    _, _, head_dim, m, bits, *kind = described["shape"]
    return KvLayout(page_bytes=page_bytes, head_dim=head_dim, m=m, bits=bits, kind=kind[0] if kind else 0)


def tail_rows(kv: KvMap, seq: Sequence, layer: int) -> bytes:
    """Rows that wait in DRAM for their group to fill, of one primary map after the other; (t, H, d) each."""
    parts = []
    for mapped in seq.primary.values():
        count = int(seq.lengths[layer]) % mapped.per_group
        if count:
            blank = bytes(2 * count * seq.heads * seq.layout.head_dim)
            parts.append(mapped.waiting(kv.tails.content, layer, count).tobytes() if kv.store.nand.payload else blank)
    return b"".join(parts)


def tail_bytes(described: dict[str, Any], form: KvLayout) -> int:
    """Bytes of the rows of all layers of a described sequence."""
    primary = [mapped for mapped in layout_of(form).maps(form, 1, 1).values() if mapped.primary]
    tokens: int = sum(length % mapped.per_group for length in described["lengths"] for mapped in primary)
    heads: int = described["shape"][1]
    return 2 * heads * form.head_dim * tokens
