"""Validates commands completely before anything changes: here by their row in `csd_spec.verbs`; handlers have further
checks."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
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
MAX_TIME_NS = 2 * MAX_NS  # includes the time before the tenant attached


class InvalidFieldError(Exception):
    """A command with a field that is out of range."""


def require(ok: bool, reason: str) -> None:
    """Raise InvalidFieldError unless `ok`. The reason is always formatted, so hot paths raise the error themselves."""
    if not ok:
        raise InvalidFieldError(reason)


def check(state: DriveState, command: Command, max_bytes: int = NO_LIMIT) -> CommandSpec:
    """Validate a command; returns its row in the command table.

    Args:
        max_bytes: Limit on the data of its completion.

    Raises:
        InvalidFieldError: A field is invalid.
        UnknownSequenceError: A sequence does not exist.
    """
    verb = VERBS.get(type(command))
    if verb is None:
        raise InvalidFieldError(f"{type(command).__name__} is not a command")
    fields = {name: getattr(command, name) for name in verb.command.__slots__}
    seqs_of(command)
    sizes = {"max_layers": MAX_LAYERS, "max_head_dim": state.spec.geometry.page_bytes // 2}
    if verb.access is not SequenceAccess.NONE:
        sizes |= _sequence_sizes(state.ftl, verb, fields["seqs"])
    for scalar in verb.scalars:
        _check_scalar(scalar, fields[scalar.name], sizes)
        sizes[scalar.name] = fields[scalar.name]
    for array in verb.modelled:
        if array.presence_symbol and fields[array.name] is None:
            continue
        _check_shape(array, fields[array.name], sizes)
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
        raise InvalidFieldError(f"{nbytes:,} bytes to the host: this window's slots hold {max_bytes:,}")


def _sequence_sizes(ftl: Ftl, verb: CommandSpec, handles: Seq[int]) -> dict[str, int]:
    """Sizes of symbols that follow from a command's sequences."""
    require(len(handles) > 0, "seqs: names no sequence")
    require(len(set(handles)) == len(handles), "seqs: names a sequence twice")
    if verb.access is SequenceAccess.ANY:  # allowed for sequences that lost data
        unknown = [handle for handle in handles if handle not in ftl.sequences]
        if unknown:
            raise UnknownSequenceError(f"no sequence {unknown[0]} on this drive")
        return {"B": len(handles)}
    first, *others = (ftl.sequence(handle) for handle in handles)
    shape = first.layers, first.heads, first.layout
    alike = all((other.layers, other.heads, other.layout) == shape for other in others)
    require(alike, "seqs: sequences of one command must have the same shape")
    form = first.layout
    sizes = {"B": len(handles), "H": first.heads, "d": form.head_dim, "opaque": form.opaque, "bf16": form.bf16}
    return sizes | {"dv": 0 if form.latent else form.head_dim, "last_layer": first.layers - 1}


def seqs_of(command: Any) -> tuple[int, ...]:
    """Return the handles in a command; raises InvalidFieldError unless they are a tuple of integers."""
    seqs: Any = getattr(command, "seqs", ())
    if not isinstance(seqs, tuple) or not all(map(_is_integer, seqs)):
        raise InvalidFieldError(f"seqs: must be a tuple of integers, is {_shown(seqs)}")
    return seqs


def with_plain_integers(command: Command) -> Command:
    """Return the command with Python's integers in place of NumPy's, which a journal's JSON cannot hold."""
    changed: dict[str, Any] = {}
    for name in getattr(type(command), "__slots__", ()):
        value = getattr(command, name)
        if isinstance(value, np.integer):
            changed[name] = int(value)
        elif type(value) is tuple and not set(map(type, value)) <= {int, bytes}:
            changed[name] = tuple(int(part) if isinstance(part, np.integer) else part for part in value)
    return replace(command, **changed) if changed else command


def check_time(submit_ns: Any) -> None:
    """Raise InvalidFieldError unless the submission time is a valid number of nanoseconds."""
    if not _is_integer(submit_ns) or not 0 <= submit_ns <= MAX_TIME_NS:
        raise InvalidFieldError(f"submit_ns = {_shown(submit_ns)}: must be an integer from 0 to {MAX_TIME_NS}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    """Format a value for an error message, on one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else f"{text[:37]}..."


def _check_scalar(scalar: Scalar, value: Any, sizes: Mapping[str, int]) -> None:
    if not _is_integer(value):
        raise InvalidFieldError(f"{scalar.name} = {_shown(value)}: must be an integer")
    if scalar.choices:
        choices = ", ".join(map(str, map(int, scalar.choices)))
        require(value in scalar.choices, f"{scalar.name} = {value}: must be one of {choices}")
        return
    high = sizes[scalar.high] if isinstance(scalar.high, str) else scalar.high
    if not scalar.low <= value <= high:
        raise InvalidFieldError(f"{scalar.name} = {value}: must be from {scalar.low} to {high}")


def _check_shape(array: Array, value: Any, sizes: dict[str, int]) -> None:
    """Check one array except for its content; its shape defines sizes for later arrays."""
    name, dtype = array.name, array.dtype
    if not isinstance(value, np.ndarray):
        raise InvalidFieldError(f"{name}: must be an array")
    if value.dtype != dtype:
        raise InvalidFieldError(f"{name}: must be {dtype.name}, is {value.dtype}")
    if value.ndim == len(array.symbols):
        for symbol, size in zip(array.symbols, value.shape, strict=True):
            if isinstance(symbol, str) and symbol not in sizes:
                require(size > 0, f"{name}: has no {DIMENSIONS.get(symbol, symbol)}")
                sizes[symbol] = size
    shape = array.sized(sizes)
    if value.shape != shape:
        raise InvalidFieldError(f"{name}: must have shape {shape}, has {value.shape}")
    if not value.flags.c_contiguous:
        raise InvalidFieldError(f"{name}: must be contiguous")


def check_array(array: Array, value: Any, sizes: dict[str, int]) -> None:
    """Check the content of an array of valid shape; the sum of token counts is a size for later arrays."""
    if array.kind is ArrayType.KEYS or array.kind is ArrayType.FLOATS:
        return
    if array.kind is not ArrayType.COUNTS:
        bf16 = bool(sizes.get("bf16"))
        if not sizes.get("opaque") and not all_finite(value, bf16):
            beyond = "BF16's range" if bf16 else "FP16's range of 65504"
            raise InvalidFieldError(f"{array.name}: holds infinity or NaN, beyond {beyond}")
        return
    counts = value.tolist()
    if counts and not 0 <= min(counts) <= max(counts) <= MAX_TOKENS:
        raise InvalidFieldError(f"{array.name}: from {min(counts)} to {max(counts)}: must be from 0 to {MAX_TOKENS}")
    sizes[array.total] = sum(counts)
