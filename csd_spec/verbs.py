"""Command table: one row per KV command, with everything that host, link and drive need except how to carry it out.

From a row follow the encoding (`csd_link.wire`), the structural check and the sizes in both directions
(`csd_firmware.check`), the sequences that it may name (`csd_firmware.tenants`), the state that a host keeps for replay
(`csd_link.recovery`), and an example for the fuzzer and the tests. `csd_firmware.handlers` has one function for it.

Shapes and limits are symbolic: B sequences, H KV heads with d channels, G query heads per KV head; X is 1 if the
optional field is present; sum(NAME) is the sum of the array NAME; `stored` is the number of requested tokens that the
layer has; last_layer, max_layers and max_head_dim are those of the sequences and the drive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

import numpy as np

from csd_spec._derived import derive, derived
from csd_spec.arrays import KEY
from csd_spec.commands import (
    METHOD_BYTES,
    Attend,
    Command,
    Flush,
    GetLog,
    KvAppend,
    KvCrop,
    KvDrop,
    KvExist,
    KvFree,
    KvGather,
    KvList,
    KvName,
    KvRead,
    LogPage,
    SeqCreate,
    SeqFork,
    SeqSweep,
)

MAX_SEQUENCES = 1 << 16  # per command
MAX_TOKENS = 1 << 24  # per sequence
MAX_HEADS = 1024
ENTRY_BYTES = 64  # of a command without its arrays

OMITTED = "d - dv"  # channels that V lacks compared with K; 0 from hosts that do not know the field
DIMENSIONS = {"B": "sequence", "N": "key", "H": "KV head", "G": "query head", "d": "channel"}


class ArrayType(Enum):
    """Element type of an array. Wide items are sent first, so that each is aligned."""

    HANDLES = np.dtype(np.uint64)  # sequences; a tuple of int in a command
    COUNTS = np.dtype(np.int64)  # tokens, 0 to MAX_TOKENS
    KEYS = KEY  # names of prefixes, 16 bytes each
    TEXT = np.dtype(np.uint8)  # padded with zeros; str in a command
    VALUES = np.dtype(np.float16)  # finite
    FLOATS = np.dtype(np.float32)  # range depends on the command

    @property
    def modelled(self) -> bool:
        """Whether its bytes count as link traffic; handles and names are part of a command's fixed cost."""
        return self in (ArrayType.COUNTS, ArrayType.KEYS, ArrayType.VALUES, ArrayType.FLOATS)


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number in the entry. Limits are `low` and `high` (a number or a symbol), or `choices`."""

    name: str
    low: int = 0
    high: int | str = (1 << 32) - 1
    choices: tuple[int, ...] = ()
    example: int | str = 0


@dataclass(frozen=True, slots=True)
class Array:
    """An array in the payload or in a reply.

    Attributes:
        shape: Symbols and numbers, separated by spaces.
        presence_symbol: Symbol that is 1 if the optional field is present and 0 if it is None; "" if it is required.
    """

    name: str
    kind: ArrayType
    shape: str
    example: Any = 1
    presence_symbol: str = ""
    symbols: tuple[str | int, ...] = derived()
    dtype: np.dtype[Any] = derived()
    total: str = derived()  # symbol of its sum

    def __post_init__(self) -> None:
        symbols = tuple(int(symbol) if symbol.isdigit() else symbol for symbol in self.shape.split())
        derive(self, symbols=symbols, dtype=self.kind.value, total=f"sum({self.name})")

    def sized(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape with these sizes of the symbols; unknown symbols count as 1."""
        return tuple([symbol if isinstance(symbol, int) else sizes.get(symbol, 1) for symbol in self.symbols])


class SequenceAccess(Enum):
    """Sequences that a command may name."""

    NONE = 0
    ALIKE = 1  # sequences of the same shape that have not lost data
    ANY = 2  # including sequences that lost data


@dataclass(frozen=True, slots=True)
class CreatesSequences:
    """The reply has the handles of `count` new sequences with `layers` layers."""


@dataclass(frozen=True, slots=True)
class ForksSequences:
    """The reply has the handles of new sequences, copies of the first `lengths` tokens of those named."""


@dataclass(frozen=True, slots=True)
class NamesPrefixes:
    """Binds `keys` to prefixes of the sequence, of `tokens` tokens; unbinds them if no sequence is named."""


@dataclass(frozen=True, slots=True)
class AppendsRows:
    """Rows k and v are appended to the layer: `lengths` rows per sequence, or one if it is None."""

    lengths: str | None = None


@dataclass(frozen=True, slots=True)
class TruncatesSequences:
    """The layer is truncated to its first `lengths` tokens."""


@dataclass(frozen=True, slots=True)
class FreesSequences:
    """The sequences are freed."""


@dataclass(frozen=True, slots=True)
class FreesUnnamed:
    """Sequences without keys are freed."""


@dataclass(frozen=True, slots=True)
class MakesDurable:
    """All earlier commands survive a power loss."""


Effect = (
    CreatesSequences
    | ForksSequences
    | NamesPrefixes
    | AppendsRows
    | TruncatesSequences
    | FreesSequences
    | FreesUnnamed
    | MakesDurable
    | None
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSpec:
    """Description of a command."""

    command: type[Any]
    opcode: int
    parameters: tuple[Scalar | str, ...] = ()  # scalars and symbols in the entry, in order
    arrays: tuple[Array, ...] = ()  # in the payload, in order
    reply: tuple[Array, ...] = ()  # in the completion, in order
    access: SequenceAccess = SequenceAccess.NONE  # sequences that it may name
    effect: Effect = None  # change of state
    overlaps: bool = False  # does not need the engine: neither waits for earlier commands nor delays later ones
    name: str = derived()
    scalars: tuple[Scalar, ...] = derived()
    modelled: tuple[Array, ...] = derived()  # arrays whose bytes cross the link
    counted: tuple[Array, ...] = derived()  # trailing arrays whose rows are counted by others
    reads: bool = derived()  # whether KV data or attention is returned
    writes: bool = derived()  # whether the command carries keys and values

    def __post_init__(self) -> None:
        scalars = tuple(parameter for parameter in self.parameters if isinstance(parameter, Scalar))
        derive(
            self,
            name=self.command.__name__,
            scalars=scalars,
            modelled=tuple(array for array in self.arrays if array.kind.modelled),
            counted=tuple(array for array in self.arrays if "sum(" in array.shape),
            reads=any(array.kind is ArrayType.VALUES for array in self.reply),
            writes=isinstance(self.effect, AppendsRows),
        )
        names = {scalar.name for scalar in scalars} | {array.name for array in self.arrays}
        if names != set(self.command.__slots__) or not 0 <= self.opcode <= 0xFF:
            raise ValueError(f"verb {self.command.__name__} {self.opcode:#x}: has {names}, not its command's fields")

    def sizes(self, command: Command) -> dict[str, int]:
        """Sizes of the symbols in a command, as given by its arrays."""
        sizes: dict[str, int] = {}
        for array in self.arrays:
            value = getattr(command, array.name)
            if array.presence_symbol:
                sizes[array.presence_symbol] = int(value is not None)
                continue
            shape = value.shape if isinstance(value, np.ndarray) else (len(value),)
            for symbol, size in zip(array.symbols, shape, strict=False):
                if isinstance(symbol, str):
                    sizes.setdefault(symbol, size)
        if "dv" in sizes:
            sizes[OMITTED] = sizes["d"] - sizes["dv"]
        return sizes

    def bytes_in(self, command: Command) -> int:
        """Bytes that the command sends over the link, including its entry."""
        arrays = [getattr(command, array.name) for array in self.modelled]
        nbytes: int = sum([array.nbytes for array in arrays if array is not None])
        return ENTRY_BYTES + nbytes

    def reply_bytes(self, sizes: Mapping[str, int]) -> int:
        """Bytes of a completion's data with these sizes of the symbols; a log page has its own length field."""
        arrays = (array for array in self.reply if array.shape != "bytes")
        return sum(prod(array.sized(sizes)) * array.dtype.itemsize for array in arrays)

    def example(self, seqs: tuple[int, ...] = (1,), **sizes: int) -> Any:
        """Return a valid command on sequences with B, H, G and d from `sizes`."""
        sizes = {"B": len(seqs), "H": 2, "G": 2, "d": 16} | sizes
        sizes.setdefault("dv", sizes["d"])
        fields: dict[str, Any] = {}
        for scalar in self.scalars:
            fields[scalar.name] = sizes[scalar.example] if isinstance(scalar.example, str) else scalar.example
        for array in self.arrays:
            if array.presence_symbol:
                fields[array.name] = None
            elif array.kind is ArrayType.HANDLES:
                fields[array.name] = seqs
            elif array.kind is ArrayType.KEYS:
                fields[array.name] = np.frombuffer(bytes(range(16)) * sizes.get("N", 1), KEY)
            elif array.kind is ArrayType.TEXT:
                fields[array.name] = array.example
            else:
                value = np.full(array.sized(sizes), array.example, array.dtype)
                fields[array.name] = value
                sizes[f"sum({array.name})"] = int(value.sum()) if array.kind is ArrayType.COUNTS else 0
        return self.command(**fields)


_SEQS = Array("seqs", ArrayType.HANDLES, "B")
_KEYS = Array("keys", ArrayType.KEYS, "N")
_LAYER = Scalar("layer", high="last_layer")
_LENGTHS = Array("lengths", ArrayType.COUNTS, "B")

ROWS = (
    CommandSpec(command=Flush, opcode=0x00, effect=MakesDurable()),
    CommandSpec(
        command=SeqCreate,
        opcode=0xC4,
        parameters=(
            Scalar("count", 1, MAX_SEQUENCES, example=1),
            Scalar("layers", 1, "max_layers", example=2),
            Scalar("kv_heads", 1, MAX_HEADS, example="H"),
            Scalar("head_dim", 1, "max_head_dim", example="d"),
            Scalar("max_tokens", 1, MAX_TOKENS, example=64),
            Scalar("layout", example=16),
        ),
        reply=(Array("handles", ArrayType.HANDLES, "count"),),
        effect=CreatesSequences(),
    ),
    CommandSpec(
        command=SeqFork,
        opcode=0xD0,
        parameters=("B",),
        arrays=(_SEQS, _LENGTHS),
        reply=(Array("handles", ArrayType.HANDLES, "B"),),
        access=SequenceAccess.ALIKE,
        effect=ForksSequences(),
    ),
    CommandSpec(
        command=KvAppend,
        opcode=0xC1,
        parameters=("B", _LAYER, "H", "d", OMITTED),
        arrays=(
            _SEQS,
            _LENGTHS,
            Array("k", ArrayType.VALUES, "sum(lengths) H d"),
            Array("v", ArrayType.VALUES, "sum(lengths) H dv"),
        ),
        access=SequenceAccess.ALIKE,
        effect=AppendsRows("lengths"),
    ),
    CommandSpec(
        command=Attend,
        opcode=0xC5,
        parameters=("B", _LAYER, "H", "G", "d", Scalar("r", 1, "d", example=4), "X", OMITTED),
        arrays=(
            _SEQS,
            Array("top_k", ArrayType.COUNTS, "B", 8),
            Array("recent", ArrayType.COUNTS, "B", 2),
            Array("method", ArrayType.TEXT, str(METHOD_BYTES), "sparf"),
            Array("terms", ArrayType.FLOATS, "H G 4", presence_symbol="X"),
            Array("q", ArrayType.VALUES, "B H G d"),
            Array("k", ArrayType.VALUES, "B H d"),
            Array("v", ArrayType.VALUES, "B H dv"),
        ),
        reply=(Array("output", ArrayType.VALUES, "B H G d"), Array("rows", ArrayType.FLOATS, "B H G 2")),
        access=SequenceAccess.ALIKE,
        effect=AppendsRows(),
    ),
    CommandSpec(
        command=KvRead,
        opcode=0xC2,
        parameters=("B", _LAYER, Scalar("first", high=MAX_TOKENS), Scalar("tokens", high=MAX_TOKENS)),
        arrays=(_SEQS,),
        reply=(Array("k", ArrayType.VALUES, "stored H d"), Array("v", ArrayType.VALUES, "stored H d")),
        access=SequenceAccess.ALIKE,
        overlaps=True,
    ),
    CommandSpec(
        command=KvGather,
        opcode=0xCE,
        parameters=("B", Scalar("layer", high="last_layer"), Scalar("layers", 1, "max_layers", example=1)),
        arrays=(_SEQS, Array("first", ArrayType.COUNTS, "B", 2), Array("tokens", ArrayType.COUNTS, "B", 3)),
        reply=(
            Array("k", ArrayType.VALUES, "layers sum(tokens) H d"),
            Array("v", ArrayType.VALUES, "layers sum(tokens) H d"),
        ),
        access=SequenceAccess.ALIKE,
        overlaps=True,
    ),
    CommandSpec(
        command=KvCrop,
        opcode=0xCC,
        parameters=("B", _LAYER),
        arrays=(_SEQS, Array("lengths", ArrayType.COUNTS, "B", 20)),
        access=SequenceAccess.ALIKE,
        effect=TruncatesSequences(),
    ),
    CommandSpec(
        command=KvFree,
        opcode=0xC8,
        parameters=("B",),
        arrays=(_SEQS,),
        access=SequenceAccess.ANY,
        effect=FreesSequences(),
    ),
    CommandSpec(
        command=KvName,
        opcode=0xD5,
        parameters=("B", "N"),
        arrays=(_KEYS, _SEQS, Array("tokens", ArrayType.COUNTS, "N", 4)),
        access=SequenceAccess.ALIKE,
        effect=NamesPrefixes(),
    ),
    CommandSpec(
        command=KvExist,
        opcode=0xD9,
        parameters=("N",),
        arrays=(_KEYS,),
        reply=(Array("handles", ArrayType.HANDLES, "N"), Array("tokens", ArrayType.COUNTS, "N")),
    ),
    CommandSpec(command=KvDrop, opcode=0xE1, parameters=("N",), arrays=(_KEYS,), effect=NamesPrefixes()),
    CommandSpec(command=SeqSweep, opcode=0xDC, reply=(Array("swept", ArrayType.COUNTS, "1"),), effect=FreesUnnamed()),
    CommandSpec(
        command=KvList,
        opcode=0xDD,
        parameters=(Scalar("count", 1, MAX_SEQUENCES, example=2),),
        arrays=(Array("after", ArrayType.KEYS, "1"),),
        reply=(
            Array("keys", ArrayType.KEYS, "count"),
            Array("handles", ArrayType.HANDLES, "count"),
            Array("tokens", ArrayType.COUNTS, "count"),
        ),
    ),
    CommandSpec(
        command=GetLog,
        opcode=0xCA,
        parameters=(Scalar("page", choices=tuple(LogPage), example=LogPage.SMART),),
        reply=(Array("text", ArrayType.TEXT, "bytes"),),
    ),
)
"""Opcodes are vendor specific NVMe I/O commands; bits 1:0 are the direction: 0 none, 1 to the drive, 2 to the host. C6h
is kept for the output of an attention that was submitted by passthrough, where a command has one buffer one way."""

VERBS: dict[type[Any], CommandSpec] = {row.command: row for row in ROWS}


def verb_of(opcode: int) -> CommandSpec | None:
    """Return the command with an opcode."""
    return next((verb for verb in VERBS.values() if verb.opcode == opcode), None)
