"""Splits commands that exceed a drive's limit into parts that are in flight concurrently and complete as one.

A drive behind a window takes at most `max_bytes` of payload and of data per command: the size of a slot. Devices split
commands whose size is known from their arrays (`submit_in_parts`); a host that reads KV data knows the bytes per token,
and splits by tokens (`submit_reads`). Commands that fit are not changed. Parts are carried out in order; if one is
rejected, others may have been carried out, as with several drives: the host truncates or frees such sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from threading import Lock
from typing import Any

import numpy as np

from csd_link.window import BLOCK_BYTES
from csd_spec import Attend, Command, Completion, Drive, FlashCounters, KvAppend, KvGather, KvRead, Status
from csd_spec.verbs import VERBS, AppendsRows, ArrayType, CommandSpec, FreesSequences, NamesPrefixes, TruncatesSequences

NO_LIMIT = 1 << 62
Submit = Callable[[Command, int], Future[Completion]]

_HANDLE_BYTES = ArrayType.HANDLES.value.itemsize
_COUNT_BYTES = ArrayType.COUNTS.value.itemsize


@dataclass(frozen=True, slots=True)
class SplitRead:
    """A command that reads KV data, with the sizes that it does not contain.

    Attributes:
        token_bytes: Bytes of keys and values of a token in a layer.
        lengths: Stored tokens of each sequence; not needed for KvGather, which has explicit ranges.
        max_bytes: Limit on the data of a part, if the host's is lower than the device's.
    """

    device: Drive
    command: KvRead | KvGather
    token_bytes: int
    lengths: Sequence[int] = ()
    max_bytes: int = NO_LIMIT


class Deferred(Future[Completion]):
    """A completion that is computed by the first thread that waits for it."""

    def __init__(self, make: Callable[[], Completion]) -> None:
        super().__init__()
        self._make, self._making = make, Lock()

    def result(self, timeout: float | None = None) -> Completion:
        self._settle()
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._settle()
        return super().exception(0)

    def _settle(self) -> None:
        with self._making:
            if self.done():
                return
            try:
                self.set_result(self._make())
            except Exception as error:  # noqa: BLE001 - raised by the caller of result()
                self.set_exception(error)


def max_bytes_of(device: Drive) -> int:
    """Limit on the payload and on the data of a command, bytes."""
    limit: int = getattr(device, "max_bytes", NO_LIMIT)
    return limit


def check_device(device: Drive, example: Command) -> None:
    """Raise ValueError if a device's limit is below the smallest part of a command of this kind.

    Args:
        example: A command on one sequence with one token.
    """
    limit, need = max_bytes_of(device), max(_bytes_of(VERBS[type(example)], example))
    if need > limit:
        raise ValueError(
            f"drive {device.name} takes {limit:,} bytes per command, one token of this model needs {need:,}: "
            f"serve it with larger slots (layout: slot_blocks: {-(-need // BLOCK_BYTES)} or more)"
        )


def submit_in_parts(submit: Submit, command: Command, submit_ns: int, max_bytes: int) -> Future[Completion]:
    """Submit a command through `submit`, in parts if it is too large."""
    return _join_parts(command, [submit(part, submit_ns) for part in parts_of(command, max_bytes)])


def submit_reads(reads: Sequence[SplitRead], submit_ns: int) -> list[Future[Completion]]:
    """Submit one read per device, in parts if necessary; all first parts go before second parts."""
    parts = [read_parts(read) for read in reads]
    submitted = [list[Future[Completion]]() for _ in reads]
    for number in range(max(map(len, parts))):
        for read, own_parts, futures in zip(reads, parts, submitted, strict=True):
            futures += [read.device.submit(part, submit_ns) for part in own_parts[number : number + 1]]
    return [_join_parts(read.command, futures) for read, futures in zip(reads, submitted, strict=True)]


def _join_parts(whole: Command, parts: list[Future[Completion]]) -> Future[Completion]:
    """Join the completions of parts that are in flight."""
    return parts[0] if len(parts) == 1 else Deferred(lambda: join_completions(whole, [part.result() for part in parts]))


def parts_of(command: Command, max_bytes: int) -> list[Command]:
    """Split a command into parts of at most `max_bytes`, if it exceeds that.

    Commands without such parts are returned unchanged: a row that is too large, SeqCreate, key look-ups, KvRead and
    KvGather; also invalid commands, which the drive rejects.
    """
    try:
        # Shortcut for decode steps: even with one head of one channel, the rest is less than 63 times q
        if isinstance(command, Attend) and 64 * command.q.nbytes < max_bytes:
            return [command]
        verb = VERBS[type(command)]
        if max(_bytes_of(verb, command)) <= max_bytes or not isinstance(
            verb.effect, AppendsRows | TruncatesSequences | FreesSequences | NamesPrefixes
        ):
            return [command]
        parts = _appends(command, max_bytes) if isinstance(command, KvAppend) else _by_rows(command, verb, max_bytes)
        return list(parts) or [command]
    except (AttributeError, KeyError, TypeError, ValueError):
        return [command]


def payload_bytes(command: Command) -> int:
    """Bytes of a command's arrays."""
    return _bytes_of(VERBS[type(command)], command)[0]


def _bytes_of(verb: CommandSpec, command: Command) -> tuple[int, int]:
    """Bytes of a command's payload, and of its completion's data as far as the command determines it."""
    nbytes = 0
    for array in verb.arrays:
        value = getattr(command, array.name)
        if array.kind is ArrayType.HANDLES:
            nbytes += len(value) * _HANDLE_BYTES
        elif array.kind is ArrayType.TEXT:
            nbytes += array.sized({})[0]
        elif value is not None:
            nbytes += value.nbytes
    return nbytes, verb.reply_bytes(verb.sizes(command)) if verb.reply else 0


def _by_rows(command: Any, verb: CommandSpec, max_bytes: int) -> Iterator[Command]:
    """Split by sequences, or by keys that are bound; yields nothing if a single row is too large."""
    axis = "N" if isinstance(verb.effect, NamesPrefixes) else "B"
    columns = {array.name: getattr(command, array.name) for array in verb.arrays if array.symbols[0] == axis}
    (rows,) = set(map(len, columns.values()))

    def part(first: int, end: int) -> Command:
        part: Command = replace(command, **{name: column[first:end] for name, column in columns.items()})
        return part

    (into, out), (into_one, out_one) = _bytes_of(verb, command), _bytes_of(verb, part(0, 1))
    row = (into - into_one) // (rows - 1) if rows > 1 else into
    most = min((max_bytes - into_one) // row + 1, max_bytes // out_one if out else rows)
    if most > 0 and _each_once(command):
        for at in range(0, rows, most):
            yield part(at, at + most)


def _appends(command: KvAppend, max_bytes: int) -> Iterator[Command]:
    """Split by tokens; yields nothing if a single token is too large."""
    token = max(1, (command.k.nbytes + command.v.nbytes) // max(1, len(command.k)))
    lengths = command.lengths.tolist()
    fits = _HANDLE_BYTES + _COUNT_BYTES + token <= max_bytes
    if fits and min(lengths) >= 0 and sum(lengths) == len(command.k) == len(command.v) and _each_once(command):
        first = 0
        for rows in _batch_rows(command.seqs, lengths, token, max_bytes):
            seqs, counts = zip(*rows, strict=True)
            end = first + sum(counts)
            yield KvAppend(seqs, command.layer, np.array(counts), command.k[first:end], command.v[first:end])
            first = end
        assert first == len(command.k), f"{first} of {len(command.k)} rows are in parts"


def _each_once(command: Any) -> bool:
    """Whether no sequence is named twice; the drive could not check this across parts."""
    return len(set(getattr(command, "seqs", ()))) == len(getattr(command, "seqs", ()))


def _batch_rows(
    seqs: Sequence[int], lengths: Sequence[int], token: int, max_bytes: int
) -> Iterator[list[tuple[int, int]]]:
    """Yield batches of (sequence, tokens) that fit `max_bytes`, with `token` bytes per token."""
    head = _HANDLE_BYTES + _COUNT_BYTES
    rows, left = list[tuple[int, int]](), max_bytes
    for seq, length in zip(seqs, lengths, strict=True):
        while (taken := min(length, (left - head) // token)) < length:
            if taken > 0:
                rows.append((seq, taken))
                length -= taken
            yield rows
            rows, left = [], max_bytes
        rows.append((seq, length))
        left -= head + length * token
    yield rows


def read_parts(read: SplitRead) -> list[Command]:
    """Split a read into parts whose data fits the limit."""
    command, limit = read.command, min(read.max_bytes, max_bytes_of(read.device))
    most, most_seqs = max(1, limit // read.token_bytes), max(1, limit // _HANDLE_BYTES)
    if isinstance(command, KvGather):
        return _gathers(command, most)
    ranges = [KvRead.of(length, command.first, command.tokens) for length in read.lengths]
    if sum(map(len, ranges)) <= most and len(ranges) <= most_seqs:
        return [command]
    parts, seqs, taken = list[Command](), list[int](), 0

    def end_part() -> None:
        if seqs:
            parts.append(replace(command, seqs=tuple(seqs)))
            seqs.clear()

    for seq, tokens in zip(command.seqs, ranges, strict=True):
        if taken + len(tokens) > most or len(seqs) == most_seqs:
            end_part()
            taken = 0
        if len(tokens) <= most:
            seqs.append(seq)
            taken += len(tokens)
        else:
            chunks = (tokens[at : at + most] for at in range(0, len(tokens), most))
            parts += [KvRead((seq,), command.layer, chunk.start, len(chunk)) for chunk in chunks]
    end_part()
    return parts


def _gathers(command: KvGather, most: int) -> list[Command]:
    """Split a KvGather by layers, or by tokens if a layer is too large."""
    total = int(command.tokens.sum())
    if layers := most // max(1, total):
        ends = command.layer + command.layers
        return [
            replace(command, layer=layer, layers=min(layers, ends - layer))
            for layer in range(command.layer, ends, layers)
        ]
    pieces = [
        (seq, first + at, min(most, tokens - at))
        for seq, first, tokens in zip(command.seqs, command.first.tolist(), command.tokens.tolist(), strict=True)
        for at in range(0, tokens, most)
    ]
    return [
        KvGather((seq,), np.array([first]), np.array([tokens]), layer, 1)
        for layer in range(command.layer, command.layer + command.layers)
        for seq, first, tokens in pieces
    ]


def join_completions(whole: Command, done: Sequence[Completion]) -> Completion:
    """Join the completions of a command's parts; a lost drive takes precedence over a rejected part."""
    failed = [completion for completion in done if completion.status is not Status.SUCCESS]
    if failed:
        lost = [completion for completion in failed if completion.status is Status.PATH_LOST]
        first = (lost or failed)[0]
        where = f" (part {done.index(first) + 1} of {len(done)} of this command)"
        return first if lost else replace(first, reason=first.reason + where)
    last = max(done, key=lambda completion: completion.finish_ns)
    return Completion(
        status=Status.SUCCESS,
        submit_ns=last.submit_ns,
        finish_ns=last.finish_ns,
        breakdown_ns=_sum_breakdowns(done),
        flash=reduce(add, (completion.flash for completion in done), FlashCounters()),
        link_bytes=sum(completion.link_bytes for completion in done),
        data=tuple(_data(whole, parts) for parts in zip(*(completion.data for completion in done), strict=True)),
    )


def _data(whole: Command, parts: Sequence[Any]) -> Any:
    """Join an array of a reply; parts of a KvGather are ordered by layer, then by token."""
    if not isinstance(whole, KvGather):
        return np.concatenate(parts)
    rows = np.concatenate([part.reshape(-1, *part.shape[2:]) for part in parts])
    return rows.reshape(whole.layers, -1, *rows.shape[1:])


def _sum_breakdowns(done: Sequence[Completion]) -> dict[str, int]:
    """Breakdown of the whole: of each part, the time after the end of the earlier parts. Sums to the total latency."""
    sums, before_ns = dict[str, int](), done[0].submit_ns
    for part in sorted(done, key=lambda completion: completion.finish_ns):
        over_ns = before_ns - part.submit_ns  # overlapped with earlier parts; queueing is overlapped first
        for unit, ns in sorted(part.breakdown_ns.items(), key=lambda item: item[0] != "queue"):
            under_ns = min(ns, over_ns)
            over_ns -= under_ns
            sums[unit] = sums.get(unit, 0) + ns - under_ns
        before_ns = part.finish_ns
    return sums
