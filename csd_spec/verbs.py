"""The KV verbs, one row each: all that host, link and drive need to know of a command but how a drive carries it out.

From a row follow its bytes on the wire and back (`csd_link.wire`), the structural check and the sizes in and out
(`csd_firmware.check`), whose sequences it may name (`csd_firmware.tenants`), what a host keeps of it for a drive that
dies (`csd_link.recovery`), and an example for the fuzzer and for tests. How it is carried out is one function in
`csd_firmware.acts`.

Shapes and limits are written with symbols: B sequences, H KV heads and d channels of each, G query heads for a KV head,
X is 1 where the field that may be left out is there, sum(NAME) tokens where the array NAME counts them, `stored` tokens
of the layer, as far as they are asked for; last_layer, max_layers and max_head_dim are the sequences' and the drive's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from typing import Any

import numpy as np

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

MAX_SEQUENCES = 1 << 16  # of a command
MAX_TOKENS = 1 << 24  # of a sequence
MAX_HEADS = 1024
ENTRY_BYTES = 64  # of a command, without its arrays

OMITTED = "d - dv"  # channels that rows of V lack of those of K: 0 to hosts that know of none
DIMENSIONS = {"B": "sequence", "N": "key", "H": "KV head", "G": "query head", "d": "channel"}


class Kind(Enum):
    """What an array holds. Wide items travel first, so that each is aligned."""

    HANDLES = np.dtype(np.uint64)  # of sequences; a tuple of int in a command
    COUNTS = np.dtype(np.int64)  # of tokens, 0 to MAX_TOKENS
    KEYS = KEY  # names of prefixes, 16 bytes each
    TEXT = np.dtype(np.uint8)  # padded with zeros; str in a command
    VALUES = np.dtype(np.float16)  # finite
    FLOATS = np.dtype(np.float32)  # which of them are good, the command says

    @property
    def modelled(self) -> bool:
        """Whether its bytes cross the link by themselves; handles and names are part of a command's fixed cost."""
        return self in (Kind.COUNTS, Kind.KEYS, Kind.VALUES, Kind.FLOATS)


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number that is a parameter of the entry. low, high: its limits, or `choices`; a symbol or a number."""

    name: str
    low: int = 0
    high: int | str = (1 << 32) - 1
    choices: tuple[int, ...] = ()
    example: int | str = 0


@dataclass(frozen=True, slots=True)
class Array:
    """A field that is in the payload, or one of a reply. shape: symbols and numbers with spaces between them.

    given: the symbol that is 1 where the field is there, and 0 where it is None; empty for one that always is.
    """

    name: str
    kind: Kind
    shape: str
    example: Any = 1
    given: str = ""
    symbols: tuple[str | int, ...] = field(init=False)
    dtype: np.dtype[Any] = field(init=False)
    total: str = field(init=False)  # the symbol of its sum

    def __post_init__(self) -> None:
        symbols = tuple(int(each) if each.isdigit() else each for each in self.shape.split())
        object.__setattr__(self, "symbols", symbols)
        object.__setattr__(self, "dtype", self.kind.value)
        object.__setattr__(self, "total", f"sum({self.name})")

    def sized(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Its shape where symbols have these sizes; what is not known yet is 1."""
        return tuple([each if isinstance(each, int) else sizes.get(each, 1) for each in self.symbols])


class Names(Enum):
    """Which sequences a command may name."""

    NONE = 0
    ALIKE = 1  # of the same shape, whose data is there
    ANY = 2  # also those that lost data


@dataclass(frozen=True, slots=True)
class Creates:
    """The reply is handles of new sequences, as many as `count`, with as many layers as `layers` says."""


@dataclass(frozen=True, slots=True)
class Forks:
    """The reply is handles of new sequences, which begin as those named, with as many tokens as `lengths` counts."""


@dataclass(frozen=True, slots=True)
class Binds:
    """`keys` name prefixes of the sequence from now on, of as many tokens as `tokens` counts; or nothing any more,
    where no sequence is named."""


@dataclass(frozen=True, slots=True)
class Stores:
    """Rows k and v are added to the layer: as many of each sequence as `lengths` counts, or one where that is None."""

    lengths: str | None = None


@dataclass(frozen=True, slots=True)
class Crops:
    """The layer keeps its first tokens, as many as `lengths` counts."""


@dataclass(frozen=True, slots=True)
class Frees:
    """The sequences are gone."""


@dataclass(frozen=True, slots=True)
class Sweeps:
    """Sequences of which nothing has a name are gone."""


@dataclass(frozen=True, slots=True)
class Settles:
    """What came before survives a loss of power."""


Effect = Creates | Forks | Binds | Stores | Crops | Frees | Sweeps | Settles | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """parameters: of the entry, in order, scalars and symbols. arrays: of the payload, in order.

    overlaps: whether it needs nothing of the engine, so that it waits for no command before it, and none for it.
    """

    command: type[Any]
    opcode: int
    parameters: tuple[Scalar | str, ...] = ()
    arrays: tuple[Array, ...] = ()
    reply: tuple[Array, ...] = ()
    names: Names = Names.NONE
    effect: Effect = None
    overlaps: bool = False
    scalars: tuple[Scalar, ...] = field(init=False)
    modelled: tuple[Array, ...] = field(init=False)  # arrays whose bytes cross the link
    counted: tuple[Array, ...] = field(init=False)  # arrays, the last ones, that have as many rows as others count
    reads: bool = field(init=False)  # whether K, V or attention goes to the host

    def __post_init__(self) -> None:
        scalars = tuple(each for each in self.parameters if isinstance(each, Scalar))
        object.__setattr__(self, "scalars", scalars)
        object.__setattr__(self, "modelled", tuple(each for each in self.arrays if each.kind.modelled))
        object.__setattr__(self, "counted", tuple(each for each in self.arrays if "sum(" in each.shape))
        object.__setattr__(self, "reads", any(each.kind is Kind.VALUES for each in self.reply))
        mine = {each.name for each in scalars} | {each.name for each in self.arrays}
        if mine != set(self.command.__slots__) or not 0 <= self.opcode <= 0xFF:
            raise ValueError(f"verb {self.command.__name__} {self.opcode:#x}: has {mine}, not its command's fields")

    @property
    def name(self) -> str:
        return self.command.__name__

    @property
    def writes(self) -> bool:
        """Whether K and V come from the host."""
        return isinstance(self.effect, Stores)

    def sizes(self, command: Command) -> dict[str, int]:
        """What the symbols are in a command, as far as its arrays tell."""
        found: dict[str, int] = {}
        for array in self.arrays:
            value = getattr(command, array.name)
            if array.given:
                found[array.given] = int(value is not None)
                continue
            shape = value.shape if isinstance(value, np.ndarray) else (len(value),)
            for symbol, size in zip(array.symbols, shape, strict=False):
                if isinstance(symbol, str):
                    found.setdefault(symbol, size)
        if "dv" in found:
            found[OMITTED] = found["d"] - found["dv"]
        return found

    def bytes_in(self, command: Command) -> int:
        """Bytes that a command brings to the drive over the link, its entry included."""
        arrays = [getattr(command, array.name) for array in self.modelled]
        nbytes: int = sum([array.nbytes for array in arrays if array is not None])
        return ENTRY_BYTES + nbytes

    def reply_bytes(self, sizes: Mapping[str, int]) -> int:
        """Of a completion's data where symbols have these sizes; a log page says itself how long it is."""
        known = (array for array in self.reply if array.shape != "bytes")
        return sum(prod(array.sized(sizes)) * array.dtype.itemsize for array in known)

    def example(self, seqs: tuple[int, ...] = (1,), **sizes: int) -> Any:
        """A command of this kind on sequences with B, H, G and d as `sizes` say: good on a drive that has them."""
        sizes = {"B": len(seqs), "H": 2, "G": 2, "d": 16} | sizes
        sizes.setdefault("dv", sizes["d"])
        fields: dict[str, Any] = {}
        for scalar in self.scalars:
            fields[scalar.name] = sizes[scalar.example] if isinstance(scalar.example, str) else scalar.example
        for array in self.arrays:
            if array.given:
                fields[array.name] = None
            elif array.kind is Kind.HANDLES:
                fields[array.name] = seqs
            elif array.kind is Kind.KEYS:
                fields[array.name] = np.frombuffer(bytes(range(16)) * sizes.get("N", 1), KEY)
            elif array.kind is Kind.TEXT:
                fields[array.name] = array.example
            else:
                value = np.full(array.sized(sizes), array.example, array.dtype)
                fields[array.name] = value
                sizes[f"sum({array.name})"] = int(value.sum()) if array.kind is Kind.COUNTS else 0
        return self.command(**fields)


_SEQS = Array("seqs", Kind.HANDLES, "B")
_KEYS = Array("keys", Kind.KEYS, "N")
_LAYER = Scalar("layer", high="last_layer")
_LENGTHS = Array("lengths", Kind.COUNTS, "B")

ROWS = (
    Verb(command=Flush, opcode=0x00, effect=Settles()),
    Verb(
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
        reply=(Array("handles", Kind.HANDLES, "count"),),
        effect=Creates(),
    ),
    Verb(
        command=SeqFork,
        opcode=0xD0,
        parameters=("B",),
        arrays=(_SEQS, _LENGTHS),
        reply=(Array("handles", Kind.HANDLES, "B"),),
        names=Names.ALIKE,
        effect=Forks(),
    ),
    Verb(
        command=KvAppend,
        opcode=0xC1,
        parameters=("B", _LAYER, "H", "d", OMITTED),
        arrays=(
            _SEQS,
            _LENGTHS,
            Array("k", Kind.VALUES, "sum(lengths) H d"),
            Array("v", Kind.VALUES, "sum(lengths) H dv"),
        ),
        names=Names.ALIKE,
        effect=Stores("lengths"),
    ),
    Verb(
        command=Attend,
        opcode=0xC5,
        parameters=("B", _LAYER, "H", "G", "d", Scalar("r", 1, "d", example=4), "X", OMITTED),
        arrays=(
            _SEQS,
            Array("top_k", Kind.COUNTS, "B", 8),
            Array("recent", Kind.COUNTS, "B", 2),
            Array("method", Kind.TEXT, str(METHOD_BYTES), "sparf"),
            Array("terms", Kind.FLOATS, "H G 4", given="X"),
            Array("q", Kind.VALUES, "B H G d"),
            Array("k", Kind.VALUES, "B H d"),
            Array("v", Kind.VALUES, "B H dv"),
        ),
        reply=(Array("output", Kind.VALUES, "B H G d"), Array("rows", Kind.FLOATS, "B H G 2")),
        names=Names.ALIKE,
        effect=Stores(),
    ),
    Verb(
        command=KvRead,
        opcode=0xC2,
        parameters=("B", _LAYER, Scalar("first", high=MAX_TOKENS), Scalar("tokens", high=MAX_TOKENS)),
        arrays=(_SEQS,),
        reply=(Array("k", Kind.VALUES, "stored H d"), Array("v", Kind.VALUES, "stored H d")),
        names=Names.ALIKE,
        overlaps=True,
    ),
    Verb(
        command=KvGather,
        opcode=0xCE,
        parameters=("B", Scalar("layer", high="last_layer"), Scalar("layers", 1, "max_layers", example=1)),
        arrays=(_SEQS, Array("first", Kind.COUNTS, "B", 2), Array("tokens", Kind.COUNTS, "B", 3)),
        reply=(
            Array("k", Kind.VALUES, "layers sum(tokens) H d"),
            Array("v", Kind.VALUES, "layers sum(tokens) H d"),
        ),
        names=Names.ALIKE,
        overlaps=True,
    ),
    Verb(
        command=KvCrop,
        opcode=0xCC,
        parameters=("B", _LAYER),
        arrays=(_SEQS, Array("lengths", Kind.COUNTS, "B", 20)),
        names=Names.ALIKE,
        effect=Crops(),
    ),
    Verb(command=KvFree, opcode=0xC8, parameters=("B",), arrays=(_SEQS,), names=Names.ANY, effect=Frees()),
    Verb(
        command=KvName,
        opcode=0xD5,
        parameters=("B", "N"),
        arrays=(_KEYS, _SEQS, Array("tokens", Kind.COUNTS, "N", 4)),
        names=Names.ALIKE,
        effect=Binds(),
    ),
    Verb(
        command=KvExist,
        opcode=0xD9,
        parameters=("N",),
        arrays=(_KEYS,),
        reply=(Array("handles", Kind.HANDLES, "N"), Array("tokens", Kind.COUNTS, "N")),
    ),
    Verb(command=KvDrop, opcode=0xE1, parameters=("N",), arrays=(_KEYS,), effect=Binds()),
    Verb(command=SeqSweep, opcode=0xDC, reply=(Array("swept", Kind.COUNTS, "1"),), effect=Sweeps()),
    Verb(
        command=KvList,
        opcode=0xDD,
        parameters=(Scalar("count", 1, MAX_SEQUENCES, example=2),),
        arrays=(Array("after", Kind.KEYS, "1"),),
        reply=(
            Array("keys", Kind.KEYS, "count"),
            Array("handles", Kind.HANDLES, "count"),
            Array("tokens", Kind.COUNTS, "count"),
        ),
    ),
    Verb(
        command=GetLog,
        opcode=0xCA,
        parameters=(Scalar("page", choices=tuple(LogPage), example=LogPage.SMART),),
        reply=(Array("text", Kind.TEXT, "bytes"),),
    ),
)
"""Opcodes are vendor specific NVMe I/O commands; bits 1:0 are the direction: 0 none, 1 to the drive, 2 to the host. C6h
is kept for the output of an attention that was submitted by passthrough, where a command has one buffer one way."""

VERBS: dict[type[Any], Verb] = {row.command: row for row in ROWS}


def verb_of(opcode: int) -> Verb | None:
    """The verb of an opcode."""
    return next((verb for verb in VERBS.values() if verb.opcode == opcode), None)
