"""Every command is checked here, in full, before anything changes."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from attention_engine import METHODS
from csd_spec import (
    Attend,
    Command,
    DriveSpec,
    Flush,
    GetLog,
    KvAppend,
    KvCrop,
    KvFree,
    KvLayout,
    KvRead,
    LogPage,
    SeqCreate,
)
from ftl import Ftl, OutOfSpace, UnknownSequence
from ftl.flash.tag import MAX_LAYERS, MAX_STREAMS
from ftl.kv.sequence import Sequence

MAX_HEADS, MAX_TOKENS = 1024, 1 << 24


class Refused(Exception):
    """A command with a field that is out of its range."""


def _require(ok: bool, reason: str) -> None:
    if not ok:
        raise Refused(reason)


def _array(name: str, array: object, dtype: type, shape: tuple[int, ...]) -> None:
    _require(isinstance(array, np.ndarray), f"{name}: must be an array")
    assert isinstance(array, np.ndarray)
    _require(array.dtype == dtype, f"{name}: must be {dtype.__name__}, is {array.dtype}")
    _require(array.shape == shape, f"{name}: must have shape {shape}, has {array.shape}")
    _require(array.flags.c_contiguous, f"{name}: must be contiguous")


def _finite(name: str, array: NDArray[np.float16]) -> None:
    _require(bool(np.isfinite(array).all()), f"{name}: holds infinity or NaN, beyond FP16's range of 65504")


def _distinct(handles: Seq[int]) -> None:
    _require(len(handles) > 0, "seqs: names no sequence")
    _require(len(set(handles)) == len(handles), "seqs: names a sequence twice")


def _sequences(ftl: Ftl, handles: Seq[int], layer: int) -> list[Sequence]:
    _distinct(handles)
    seqs = [ftl.sequence(handle) for handle in handles]
    first = seqs[0]
    _require(
        all((seq.layers, seq.heads, seq.layout) == (first.layers, first.heads, first.layout) for seq in seqs),
        "seqs: sequences of one command must have the same shape",
    )
    _require(0 <= layer < first.layers, f"layer = {layer}: sequence {first.handle} has {first.layers}")
    return seqs


def layout_of(spec: DriveSpec, command: SeqCreate) -> KvLayout:
    """How the sequences of a command will lie in pages."""
    page_bytes = spec.geometry.page_bytes
    return KvLayout.for_context(page_bytes, command.head_dim, command.max_tokens, command.embedding_bits)


def check(ftl: Ftl, command: Command) -> None:
    """Raise Refused, or the FTL's UnknownSequence, for a command that must not be carried out."""
    match command:
        case SeqCreate():
            limits = [
                ("count", command.count, 1 << 16),
                ("layers", command.layers, MAX_LAYERS),
                ("kv_heads", command.kv_heads, MAX_HEADS),
                ("max_tokens", command.max_tokens, MAX_TOKENS),
                ("head_dim", command.head_dim, ftl.spec.geometry.page_bytes // 2),
            ]
            for name, value, limit in limits:
                _require(1 <= value <= limit, f"{name} = {value}: must lie between 1 and {limit}")
            bits = command.embedding_bits
            _require(bits in (16, 8, 4), f"embedding_bits = {bits}: must be 16, 8 or 4")
            try:
                layout = layout_of(ftl.spec, command)
            except ValueError as error:
                raise Refused(str(error)) from error
            pages = command.kv_heads * layout.embedding_pages
            _require(pages <= MAX_STREAMS, f"kv_heads = {command.kv_heads}: {pages} streams, at most {MAX_STREAMS}")
            _check_tables(ftl, command, layout)
        case KvAppend():
            first = _sequences(ftl, command.seqs, command.layer)[0]
            _array("lengths", command.lengths, np.int64, (len(command.seqs),))
            _require(bool((command.lengths >= 0).all()), "lengths: must not be negative")
            rows = (int(command.lengths.sum()), first.heads, first.layout.head_dim)
            for name, array in (("k", command.k), ("v", command.v)):
                _array(name, array, np.float16, rows)
                _finite(name, array)
        case Attend():
            _check_attend(command, _sequences(ftl, command.seqs, command.layer))
        case KvCrop():
            _sequences(ftl, command.seqs, command.layer)
            _array("lengths", command.lengths, np.int64, (len(command.seqs),))
            _require(bool((command.lengths >= 0).all()), "lengths: must not be negative")
        case KvRead():
            _sequences(ftl, command.seqs, command.layer)
        case KvFree():  # also of sequences that lost data: nothing else is left to do with them
            unknown = [handle for handle in command.seqs if handle not in ftl.sequences]
            if unknown:
                raise UnknownSequence(f"no sequence {unknown[0]} on this drive")
            _distinct(command.seqs)
        case GetLog():
            _require(command.page in set(LogPage), f"log page {command.page:#04x}: there is none")
        case Flush():
            pass
        case _:
            raise Refused(f"{type(command).__name__} is no command")


def _check_tables(ftl: Ftl, command: SeqCreate, layout: KvLayout) -> None:
    """Raise OutOfSpace where the tables of all sequences, still without tokens, would not fit drive DRAM."""
    heads = [(seq.layers * seq.heads, seq.layout) for seq in ftl.sequences.values()]
    wanted = command.count * _table_bytes(command.layers * command.kv_heads, layout)
    used = sum(_table_bytes(*each) for each in heads)
    if wanted + used > ftl.spec.dram_bytes:
        raise OutOfSpace(f"{command.count} sequences need tables of {wanted} bytes, {used} of drive DRAM are taken")


def _table_bytes(heads: int, layout: KvLayout) -> int:
    """Of one sequence: a sum of V, and a slot and a buffer for each stream."""
    return heads * (4 * layout.head_dim + 12 * (2 + layout.embedding_pages))


def _check_attend(command: Attend, seqs: list[Sequence]) -> None:
    B, H, d = len(seqs), seqs[0].heads, seqs[0].layout.head_dim
    queries = command.q.shape[2] if isinstance(command.q, np.ndarray) and command.q.ndim == 4 else 1
    _require(queries >= 1, "q: has no query head")
    for name, array, shape in (
        ("q", command.q, (B, H, queries, d)),
        ("k", command.k, (B, H, d)),
        ("v", command.v, (B, H, d)),
    ):
        _array(name, array, np.float16, shape)
        _finite(name, array)
    _require(command.method in METHODS, f"method = {command.method!r}: must be one of {', '.join(METHODS)}")
    _require(1 <= command.r <= d, f"r = {command.r}: must lie between 1 and the {d} channels of a head")
    _array("top_k", command.top_k, np.int64, (B,))
    _array("recent", command.recent, np.int64, (B,))
    for seq, k, recent in zip(seqs, command.top_k, command.recent, strict=True):
        stored = int(seq.lengths[command.layer]) + 1
        _require(1 <= k <= stored, f"top_k = {k}: sequence {seq.handle} has {stored} tokens")
        _require(0 <= recent <= k, f"recent = {recent}: must lie between 0 and top_k = {k}")
