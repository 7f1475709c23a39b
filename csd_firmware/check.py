"""Every command is checked in full before anything changes: here what its row in `csd_spec.verbs` says, and beside its
act what only that knows."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from attention_engine import all_finite
from csd_firmware.state import DriveState
from csd_link.wire import MAX_NS
from csd_spec import Command, KvRead
from csd_spec.verbs import DIMENSIONS, MAX_TOKENS, VERBS, Array, ArrayType, CommandSpec, Scalar, SequenceAccess
from ftl import Ftl, UnknownSequenceError
from ftl.flash.tag import MAX_LAYERS

NO_LIMIT = 1 << 62
MAX_TIME_NS = 2 * MAX_NS  # a host's time, counted from when its tenant attached


class Refused(Exception):
    """A command with a field that is out of its range."""


def require(ok: bool, reason: str) -> None:
    """Raise Refused unless it is so. The reason is made either way: what every decode step checks raises by itself."""
    if not ok:
        raise Refused(reason)


def check(state: DriveState, command: Command, max_bytes: int = NO_LIMIT) -> CommandSpec:
    """The verb of a command; raises Refused, or the FTL's UnknownSequenceError, where it must not be carried out.

    max_bytes: of data that its completion may have.
    """
    verb = VERBS.get(type(command))
    if verb is None:
        raise Refused(f"{type(command).__name__} is no command")
    fields = {name: getattr(command, name) for name in verb.command.__slots__}
    seqs_of(command)
    sizes = {"max_layers": MAX_LAYERS, "max_head_dim": state.spec.geometry.page_bytes // 2}
    if verb.access is not SequenceAccess.NONE:
        sizes |= _named(state.ftl, verb, fields["seqs"])
    for scalar in verb.scalars:
        _scalar(scalar, fields[scalar.name], sizes)
        sizes[scalar.name] = fields[scalar.name]
    for array in verb.modelled:
        if array.presence_symbol and fields[array.name] is None:
            continue
        _shape(array, fields[array.name], sizes)
        check_array(array, fields[array.name], sizes)
    if max_bytes < NO_LIMIT:
        _check_reply(state, verb, fields, sizes, max_bytes)
    return verb


def _check_reply(
    state: DriveState, verb: CommandSpec, fields: Mapping[str, Any], sizes: dict[str, int], max_bytes: int
) -> None:
    if any("stored" in array.symbols for array in verb.reply):
        lengths = (int(state.ftl.sequences[handle].lengths[fields["layer"]]) for handle in fields["seqs"])
        sizes["stored"] = sum(len(KvRead.of(length, fields["first"], fields["tokens"])) for length in lengths)
    nbytes = verb.reply_bytes(sizes)
    if nbytes > max_bytes:
        raise Refused(f"{nbytes:,} bytes to the host: this window's slots hold {max_bytes:,}")


def _named(ftl: Ftl, verb: CommandSpec, handles: Seq[int]) -> dict[str, int]:
    """What the sequences of a command say of sizes in it."""
    require(len(handles) > 0, "seqs: names no sequence")
    require(len(set(handles)) == len(handles), "seqs: names a sequence twice")
    if verb.access is SequenceAccess.ANY:  # nothing is left to do with those that lost data but this
        unknown = [handle for handle in handles if handle not in ftl.sequences]
        if unknown:
            raise UnknownSequenceError(f"no sequence {unknown[0]} on this drive")
        return {"B": len(handles)}
    first, *others = (ftl.sequence(handle) for handle in handles)
    shape = first.layers, first.heads, first.layout
    alike = all((each.layers, each.heads, each.layout) == shape for each in others)
    require(alike, "seqs: sequences of one command must have the same shape")
    form = first.layout
    sizes = {"B": len(handles), "H": first.heads, "d": form.head_dim, "opaque": form.opaque, "bf16": form.bf16}
    return sizes | {"dv": 0 if form.latent else form.head_dim, "last_layer": first.layers - 1}


def seqs_of(command: Any) -> tuple[int, ...]:
    """Handles that a command names; raises Refused unless they are a tuple of integers."""
    seqs: Any = getattr(command, "seqs", ())
    if not isinstance(seqs, tuple) or not all(map(_is_integer, seqs)):
        raise Refused(f"seqs: must be a tuple of integers, is {_shown(seqs)}")
    return seqs


def check_time(submit_ns: Any) -> None:
    """Raise Refused unless a time of submission is a number of nanoseconds that a command can have."""
    if not _is_integer(submit_ns) or not 0 <= submit_ns <= MAX_TIME_NS:
        raise Refused(f"submit_ns = {_shown(submit_ns)}: must be an integer from 0 to {MAX_TIME_NS}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    """A value on one line of an error message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else f"{text[:37]}..."


def _scalar(scalar: Scalar, value: Any, sizes: Mapping[str, int]) -> None:
    if not _is_integer(value):
        raise Refused(f"{scalar.name} = {_shown(value)}: must be an integer")
    if scalar.choices:
        choices = ", ".join(map(str, map(int, scalar.choices)))
        require(value in scalar.choices, f"{scalar.name} = {value}: must be one of {choices}")
        return
    high = sizes[scalar.high] if isinstance(scalar.high, str) else scalar.high
    if not scalar.low <= value <= high:
        raise Refused(f"{scalar.name} = {value}: must lie between {scalar.low} and {high}")


def _shape(array: Array, value: Any, sizes: dict[str, int]) -> None:
    """Check one array but for what it holds; what its shape tells is a size for those behind it."""
    name, dtype = array.name, array.dtype
    if not isinstance(value, np.ndarray):
        raise Refused(f"{name}: must be an array")
    if value.dtype != dtype:
        raise Refused(f"{name}: must be {dtype.name}, is {value.dtype}")
    if value.ndim == len(array.symbols):
        for symbol, size in zip(array.symbols, value.shape, strict=True):
            if isinstance(symbol, str) and symbol not in sizes:
                require(size > 0, f"{name}: has no {DIMENSIONS.get(symbol, symbol)}")
                sizes[symbol] = size
    shape = array.sized(sizes)
    if value.shape != shape:
        raise Refused(f"{name}: must have shape {shape}, has {value.shape}")
    if not value.flags.c_contiguous:
        raise Refused(f"{name}: must be contiguous")


def check_array(array: Array, value: Any, sizes: dict[str, int]) -> None:
    """Check what an array of the right shape holds; the sum of what it counts is a size for those behind it."""
    if array.kind is ArrayType.KEYS or array.kind is ArrayType.FLOATS:
        return
    if array.kind is not ArrayType.COUNTS:
        bf16 = bool(sizes.get("bf16"))
        if not sizes.get("opaque") and not all_finite(value, bf16):
            beyond = "BF16's range" if bf16 else "FP16's range of 65504"
            raise Refused(f"{array.name}: holds infinity or NaN, beyond {beyond}")
        return
    counts = value.tolist()
    if counts and not 0 <= min(counts) <= max(counts) <= MAX_TOKENS:
        raise Refused(f"{array.name}: from {min(counts)} to {max(counts)}: must lie between 0 and {MAX_TOKENS}")
    sizes[array.total] = sum(counts)
