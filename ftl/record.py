"""Journal record: the state of sequences in a commit, as JSON and raw rows.

| bytes | field |
|---|---|
| 4, 2, 2, 8 | magic "vjrn", version, type, number |
| 4 | chain: digest of the previous record |
| 4, 4 | bytes of text, bytes of rows (2^32 - 1: this copy has no rows) |
| | text: deflated JSON; rows of all described sequences, FP16; sums of V if they are kept, FP32 |
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from csd_spec import PageFormat
from csd_spec.arrays import F32, U8
from csd_spec.layouts import LAYOUTS, layout_of
from ftl.errors import FtlError
from ftl.kv.layouts import maps_of
from ftl.kv.map import KvMap
from ftl.kv.sequence import Sequence

MAGIC, VERSION = b"vjrn", 2
_HEAD = struct.Struct("<4sHHQIII")  # magic, version, type, number, chain, bytes of text, bytes of rows
_NO_ROWS = (1 << 32) - 1
_BITS_AND_KIND = {16: (16, 0), 8: (8, 0), 4: (4, 0), 72: (8, 3), 68: (4, 3)}  # as journals have these layouts' codes
_CODES = {recorded: code for code, recorded in _BITS_AND_KIND.items()}


class RecordType(IntEnum):
    """Kind of a record."""

    CHECKPOINT = 1  # all sequences: supersedes earlier records
    CHANGES = 2  # changed and freed sequences


@dataclass(frozen=True, slots=True)
class Record:
    """A commit.

    Attributes:
        chain: Digest of the previous record, to detect a missing record.
        text: Deflated JSON.
        rows: Rows in DRAM and sums of V of all its sequences; None if only the text is left.
    """

    type: RecordType
    number: int
    chain: int
    text: bytes
    rows: bytes | None

    @classmethod
    def of(cls, type_: RecordType, number: int, chain: int, head: dict[str, Any], rows: bytes) -> Record:
        """Create a record with this head."""
        return cls(type_, number, chain, zlib.compress(json.dumps(head).encode(), 1), rows)

    def head(self) -> dict[str, Any]:
        """Decoded JSON."""
        values: dict[str, Any] = json.loads(zlib.decompress(self.text))
        return values

    @property
    def digest(self) -> int:
        """CRC-32 of the text and the header."""
        return zlib.crc32(self.text, zlib.crc32(self._numbers(0)))

    def follows(self, other: Record) -> bool:
        """Whether this record directly follows another."""
        return self.number == other.number + 1 and self.chain == other.digest

    def _numbers(self, rows: int) -> bytes:
        return _HEAD.pack(MAGIC, VERSION, self.type, self.number, self.chain, len(self.text), rows)

    def pack(self, page_bytes: int) -> U8:
        """Encode as pages (count, page_bytes)."""
        rows = self.rows or b""
        assert len(self.text) < _NO_ROWS and len(rows) < _NO_ROWS
        record = self._numbers(_NO_ROWS if self.rows is None else len(rows)) + self.text + rows
        pages = np.zeros((-(-len(record) // page_bytes), page_bytes), np.uint8)
        pages.reshape(-1)[: len(record)] = np.frombuffer(record, np.uint8)
        return pages

    @classmethod
    def unpack(cls, pages: U8) -> Record:
        """Decode a record; raises FtlError for what is none, and for an unknown version or type."""
        raw = pages.tobytes()
        if not raw.startswith(MAGIC):
            raise FtlError(f"no journal record begins with {raw[: len(MAGIC)]!r}: use the vcsd that wrote it")
        _, version, kind, number, chain, size, rows = _HEAD.unpack_from(raw)
        if version != VERSION or kind not in set(RecordType):
            raise FtlError(f"journal record {number} of version {version}, type {kind}: use the vcsd that wrote it")
        text, rest = raw[_HEAD.size : _HEAD.size + size], raw[_HEAD.size + size :]
        return cls(RecordType(kind), number, chain, text, None if rows == _NO_ROWS else rest[:rows])


def describe(kv: KvMap, seq: Sequence) -> dict[str, Any]:
    """Describe a sequence without its rows; locations of full groups are not included, since tags identify them."""
    names = {"names": {key.hex(): tokens for key, tokens in seq.names.items()}} if seq.names else {}
    if seq.kept:  # all but what may have changed: a key may be another sequence's now
        same = {field: value for field, value in seq.kept.described.items() if field not in ("names", "failed")}
        return same | {"failed": seq.failed} | names
    form = seq.layout
    is_built_in = LAYOUTS.get(form.layout.name) is form.layout
    bits, kind = _BITS_AND_KIND.get(form.layout.code, (form.bits, form.layout.code))
    return {
        "handle": seq.handle,
        "shape": [seq.layers, seq.heads, form.head_dim, form.m, bits, *([kind] if kind else [])],
        "lengths": seq.lengths.tolist(),
        "owners": seq.owners,
        "newest": seq.newest,
        "born": {owner: kv.owners.first_write[owner] for owner in seq.all_owners},
        "failed": seq.failed,
        **({"label": seq.label} if seq.label else {}),
        **names,
        **({"sums": True} if seq.v_sums is not None else {}),
        **({} if is_built_in else {"row_bytes": sum(len(tail_rows(kv, seq, layer)) for layer in range(seq.layers))}),
    }


def form_of(described: dict[str, Any], page_bytes: int) -> PageFormat | None:
    """Page format of a described sequence; None if its layout is not loaded."""
    _, _, head_dim, m, bits, *rest = described["shape"]
    kind = rest[0] if rest else 0
    try:
        return layout_of(_CODES.get((bits, kind), kind)).paged(page_bytes, head_dim, m)
    except ValueError:
        return None


def tail_rows(kv: KvMap, seq: Sequence, layer: int) -> bytes:
    """Rows of unfinished groups in DRAM, one primary map after the other; (t, H, d) each."""
    if seq.kept:
        return b"" if layer else seq.kept.rows
    parts = []
    for mapped in seq.primary.values():
        count = int(seq.lengths[layer]) % mapped.per_group
        if count:
            assert mapped.buffered(layer), f"sequence {seq.handle}, layer {layer}: {count} rows are nowhere"
            blank = bytes(2 * count * seq.heads * seq.layout.head_dim)
            parts.append(
                mapped.buffered_rows(kv.open_groups.content, layer, count).tobytes() if kv.store.nand.payload else blank
            )
    return b"".join(parts)


def tail_bytes(described: dict[str, Any], form: PageFormat | None) -> int:
    """Bytes of the recorded rows of all layers of a described sequence."""
    if form is None:
        return int(described["row_bytes"])
    primary = [mapped for mapped in maps_of(form, 1, 1).values() if mapped.primary]
    tokens: int = sum(length % mapped.per_group for length in described["lengths"] for mapped in primary)
    heads: int = described["shape"][1]
    return 2 * heads * form.head_dim * tokens


def sums_of(described: dict[str, Any], raw: bytes) -> tuple[F32 | None, int]:
    """Sums of V of a described sequence at the start of `raw` (None if absent or truncated), and their bytes."""
    layers, heads, head_dim, *_ = described["shape"]
    size = 4 * layers * heads * head_dim * described.get("sums", False)
    if not size or len(raw) < size:
        return None, size
    return np.frombuffer(raw, np.float32, size // 4).reshape(layers, heads, head_dim).copy(), size
