"""The reader of request traces: files of publishers, load generators, pandas and spreadsheets (docs/traces.md)."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kv_cache.trace import ORBITFLOW_BLOCK, Request, Trace

MAX_TOKENS = 1 << 24  # of a prompt or an output
MAX_SECONDS = 1e9  # from the first arrival to the last

# Names of columns in lower case, letters and digits only. If a file has several of a role, the first one is read.
ARRIVALS = (
    "arrivedat", "arrivaltime", "arrivaltimestamp", "arrival", "timestamp", "requeststarttime", "requeststart",
    "starttime", "requesttime", "sendtime", "time", "datetime", "date", "created", "createdat", "ts", "arrivalstep",
)  # fmt: skip
INPUTS = (
    "numprefilltokens", "prefilltokens", "contexttokens", "requesttokens", "inputlength", "inputsequencelength",
    "inputtokens", "inputtokencount", "inputlen", "inputlens", "numinputtokens", "isl", "prompttokens",
    "prompttokencount", "promptlength", "promptlen", "promptlens", "numprompttokens",
)  # fmt: skip
OUTPUTS = (
    "numdecodetokens", "decodetokens", "generatedtokens", "responsetokens", "outputlength", "outputsequencelength",
    "outputtokens", "outputtokencount", "outputlen", "outputlens", "numoutputtokens", "osl", "completiontokens",
    "completiontokencount", "numcompletiontokens", "numgeneratedtokens", "generationtokens",
)  # fmt: skip
HASHES = ("hashids",)
EXAMPLES = {
    "arrival": "arrived_at, timestamp or start_time",
    "prompt": "input_length, num_prefill_tokens or prompt_tokens",
    "output": "output_length, num_decode_tokens or output_tokens",
}
# Units that the name of the arrivals' column may end with, such as timestamp_ms or `Start time [ns]`
UNITS_S = {
    "": 1.0, "s": 1.0, "sec": 1.0, "secs": 1.0, "seconds": 1.0, "ms": 1e-3, "msec": 1e-3, "milliseconds": 1e-3,
    "us": 1e-6, "usec": 1e-6, "microseconds": 1e-6, "ns": 1e-9, "nanoseconds": 1e-9,
}  # fmt: skip
EPOCH_UNITS = ((1e17, "ns", 1e-9), (1e14, "us", 1e-6), (1e11, "ms", 1e-3))  # least value since 1970 in each unit
ISO, STEPS = "ISO dates", "engine steps"


class Format(NamedTuple):
    """A published format whose numbers have a meaning of their own.

    Attributes:
        name: Its name.
        columns: Columns that only this format has.
        unit: Unit of its column `timestamp`.
        block_tokens: Tokens of a block of `hash_ids`.
    """

    name: str
    columns: frozenset[str]
    unit: str
    block_tokens: int


FORMATS = (
    Format("Qwen-Bailian", frozenset({"chatid", "timestamp", "inputlength"}), "s", 16),
    Format("Mooncake", frozenset({"timestamp", "inputlength", "outputlength"}), "ms", 512),
)
OTHER = Format("", frozenset(), "s", 512)

_NUMBER = re.compile(r"[+-]?(\d+|\d*\.\d+|\d+\.)([eE][+-]?\d+)?", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class _Row(NamedTuple):
    where: str  # place in the file, for messages
    values: Mapping[str, Any] | None  # None: the request failed


@dataclass(frozen=True, slots=True)
class _Columns:
    """The columns that are read, by their names in the file."""

    arrival: str
    prompt: str
    output: str
    hashes: str
    unit: str
    block_tokens: int


def load(path: Path, name: str = "", arrivals: bool = True) -> Trace:
    """Load a trace from CSV, JSON lines or JSON, plain or gzip; docs/traces.md has the columns and their units.

    Requests are sorted by arrival, and arrivals start at 0. Rows without output tokens are left out: published traces
    mark failed requests so. `Trace.source` says what was read.

    Args:
        path: File.
        name: Name, or part of the name, of one of several traces in a file of OrbitFlow; default: the first one.
        arrivals: False: only lengths are needed, the order is the file's, and all arrivals are 0.

    Raises:
        ValueError: Columns are missing, or a value is. The message has one line, with file, line and columns.
    """
    try:
        rows, title, slo_tokens = _records(path, _text(path), name)
        return _trace(rows, title or _stem(path), slo_tokens, arrivals)
    except RecursionError:
        raise ValueError(f"trace {path}: is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"trace {path}: {error}") from None


def _stem(path: Path) -> str:
    return Path(path.stem).stem if path.suffix == ".gz" else path.stem


def _text(path: Path) -> str:
    """Text of a file. Spreadsheets write UTF-8 with a byte order mark, or UTF-16."""
    if path.is_char_device():  # such as /dev/zero, which never ends
        raise ValueError("is a device, not a file")
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        text = data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise ValueError("is a damaged gzip file") from None
    except UnicodeDecodeError:
        raise ValueError("is not a text file: save it as CSV or JSON lines") from None
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None
    if not text.strip():
        raise ValueError("is empty")
    return text


def _records(path: Path, text: str, name: str) -> tuple[Iterator[_Row], str, int | None]:
    """Rows of a file, the name of the trace, and its `slo_tokens`; the latter two only OrbitFlow's have."""
    suffixes, start = path.suffixes, text.lstrip()[:1]
    if ".csv" in suffixes or ".tsv" in suffixes or start not in ("{", "["):
        return _csv_rows(text), "", None
    if not {".jsonl", ".ndjson"} & set(suffixes):
        try:
            return _document(json.loads(text), name)
        except json.JSONDecodeError as error:
            if error.msg != "Extra data":  # more than one value: JSON lines
                raise ValueError(f"line {error.lineno}: is not valid JSON: {error.msg}") from None
    return _json_lines(text), "", None


def _csv_rows(text: str) -> Iterator[_Row]:
    """Rows of a table. The separator is the one that the header has most of."""
    if text.startswith("sep="):  # a line for Excel
        text = text.partition("\n")[2]
    text = text.lstrip("\r\n")
    header = text.partition("\n")[0]
    separator = max(",;\t|", key=header.count)
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True, strict=True)
    try:
        names = next(lines)
        if all(_NUMBER.fullmatch(name.strip()) for name in names):
            raise ValueError(f"line 1: has no names of columns, but {header.strip()!r}: add a header")
        for cells in lines:
            if not any(cell.strip() for cell in cells):
                continue
            if len(cells) < len(names) or any(cells[len(names) :]):
                raise ValueError(f"line {lines.line_num}: has {len(cells)} cells, the header {len(names)}")
            if separator == ";":  # as spreadsheets write where a comma stands before fractions
                cells = [cell if cell.startswith("[") else cell.replace(",", ".") for cell in cells]
            yield _Row(f"line {lines.line_num}", dict(zip(names, cells, strict=False)))
    except csv.Error as error:
        raise ValueError(f"line {lines.line_num}: is not CSV: {error}") from None


def _json_lines(text: str) -> Iterator[_Row]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield from _json_row(f"line {number}", json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number}: is not valid JSON: {error.msg}") from None


def _document(document: Any, name: str) -> tuple[Iterator[_Row], str, int | None]:
    """Rows of a JSON document: a list, GuideLLM's report, vLLM's lists by column, pandas' columns, OrbitFlow's."""
    if isinstance(document, list):
        return _json_rows("record", document), "", None
    if isinstance(document.get("benchmarks"), list):
        return _guidellm_rows(document["benchmarks"]), "", None
    if isinstance(document.get("requests"), list):
        return _json_rows("requests", document["requests"]), "", None
    if {_plain(key) for key in document} & {*INPUTS, *OUTPUTS}:
        return _columnar_rows(document), "", None
    return _orbitflow(document, name)


def _columnar_rows(document: Mapping[str, Any]) -> Iterator[_Row]:
    """Rows of one object with a list for each column, or pandas' object of values by row; or the object is a row."""
    columns = {key: list(value.values()) if isinstance(value, dict) else value for key, value in document.items()}
    lists = {key: value for key, value in columns.items() if isinstance(value, list) and _plain(key) not in HASHES}
    if not lists:
        return _json_rows("record", [document])
    length = next((len(value) for key, value in lists.items() if _plain(key) in (*INPUTS, *OUTPUTS)), 0)
    whole = {key: value for key, value in columns.items() if isinstance(value, list) and len(value) == length}
    return _json_rows("record", [dict(zip(whole, row, strict=True)) for row in zip(*whole.values(), strict=True)])


def _json_rows(where: str, values: Sequence[Any]) -> Iterator[_Row]:
    for number, value in enumerate(values):
        yield from _json_row(f"{where}[{number}]", value)


def _json_row(where: str, value: Any) -> Iterator[_Row]:
    """A record with the values of nested objects. AIPerf's `error` marks a request that failed."""
    if not isinstance(value, dict):
        raise ValueError(f"{where}: must be an object with columns, not {json.dumps(value)[:40]}")
    yield _Row(where, None if value.get("error") else _flat(value))


def _flat(value: Mapping[str, Any]) -> dict[str, Any]:
    """Values of an object and of objects inside it; the outer ones come first. AIPerf's are `{"value": 1, ...}`."""
    flat = {key: part for key, part in value.items() if not isinstance(part, dict)}
    for key, part in value.items():
        if isinstance(part, dict):
            for name, inner in ({key: part["value"]} if "value" in part else _flat(part)).items():
                flat.setdefault(name, inner)
    return flat


def _guidellm_rows(benchmarks: Sequence[Any]) -> Iterator[_Row]:
    """Successful requests of all benchmarks of a GuideLLM report."""
    for number, benchmark in enumerate(benchmarks):
        requests = benchmark.get("requests") if isinstance(benchmark, dict) else None
        successful = requests.get("successful") if isinstance(requests, dict) else requests
        if not isinstance(successful, list):
            raise ValueError(f"benchmarks[{number}]: has no list requests.successful")
        yield from _json_rows(f"benchmarks[{number}].requests.successful", successful)


def _orbitflow(document: Mapping[str, Any], name: str) -> tuple[Iterator[_Row], str, int | None]:
    named = {key: value for key, value in document.items() if isinstance(value, dict)}
    if not named:
        raise ValueError(f"must be a list of requests, or an object of traces by name; has {_listed(document)}")
    title = next((key for key in named if name in key), None)
    if title is None:
        raise ValueError(f"{name!r}: must be one of {', '.join(named)}")
    trace = named[title]
    if not isinstance(trace.get("requests"), list):
        raise ValueError(f"{title}: has no list `requests`")
    blocks = trace.get("slo_base_blocks")
    if blocks is not None and (not isinstance(blocks, int) or blocks < 1):
        raise ValueError(f"{title}: slo_base_blocks = {blocks!r}: must be a whole number, at least 1")
    return _json_rows(f"{title}: requests", trace["requests"]), title, blocks and blocks * ORBITFLOW_BLOCK


def _plain(name: object) -> str:
    """A name of a column in lower case, letters and digits only."""
    return "".join(letter for letter in str(name).lower() if letter.isalnum())


def _listed(names: Any) -> str:
    shown = [str(name).strip() or "(unnamed)" for name in names][:12]
    return ", ".join(shown) or "no columns"


def _columns(where: str, values: Mapping[str, Any], arrivals: bool) -> _Columns:
    """The columns to read; raises ValueError with all that are missing and those that are there."""
    names = {_plain(name): name for name in reversed(list(values))}
    arrival, suffix = next(
        ((base, unit) for base in ARRIVALS for unit in UNITS_S if base + unit in names), ("", "")
    )  # the longest list is a few hundred look-ups, once for each file
    roles = {"arrival": names.get(arrival + suffix, "") if arrival else ""}
    for role, columns in (("prompt", INPUTS), ("output", OUTPUTS), ("hashes", HASHES)):
        roles[role] = next((names[base] for base in columns if base in names), "")
    needed = [role for role in EXAMPLES if arrivals or role != "arrival"]
    if missing := [f"{role} ({EXAMPLES[role]})" for role in needed if not roles[role]]:
        raise ValueError(f"{where}: no column for {', '.join(missing)}; there are: {_listed(values)}")
    kind = next((kind for kind in FORMATS if kind.columns <= names.keys()), OTHER)
    unit = STEPS if arrival == "arrivalstep" else suffix
    if not suffix and arrival != "arrivalstep":
        value = values[roles["arrival"]] if arrivals else 0
        unit = _unit(where, roles["arrival"], value, kind if arrival == "timestamp" else OTHER)
    return _Columns(**roles, unit=unit, block_tokens=kind.block_tokens)


def _unit(where: str, name: str, value: Any, kind: Format) -> str:
    """Unit of arrivals whose column does not name it: by the first value, else as the format has it."""
    if isinstance(value, str) and value.strip() and not _NUMBER.fullmatch(value.strip()):
        return ISO
    number = _number(where, name, value)
    return next((unit for least, unit, _ in EPOCH_UNITS if number >= least), kind.unit)


def _number(where: str, name: str, value: Any) -> int | float:
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        text = value.strip()
        value = int(text) if text.lstrip("+-").isdigit() and len(text) < 20 else float(text)
    if value is None or value == "":
        raise ValueError(f"{where}: {name} is empty")
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e300 < value < 1e300:
        raise ValueError(f"{where}: {name} = {_short(value)}: must be a number")
    return value


def _short(value: Any) -> str:
    return repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."


def _arrival(where: str, value: Any, columns: _Columns) -> int | float:
    """Arrival in the column's unit; ISO dates as microseconds since 1970, without an offset in UTC."""
    if columns.unit != ISO:
        return _number(where, columns.arrival, value)
    try:
        at = datetime.fromisoformat(str(value).strip().removesuffix(" UTC").replace("/", "-"))
    except ValueError:
        reason = "must be an ISO date such as 2024-05-10 00:00:00.5, or a number in each line"
        raise ValueError(f"{where}: {columns.arrival} = {_short(value)}: {reason}") from None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return (at - _EPOCH) // timedelta(microseconds=1)


def _tokens(where: str, name: str, value: Any, least: int) -> int:
    number = _number(where, name, value)
    if number != int(number) or not least <= number <= MAX_TOKENS:
        limits = f"must be a whole number of tokens, {least} to {MAX_TOKENS:,}"
        raise ValueError(f"{where}: {name} = {_short(value)}: {limits}")
    return int(number)


def _hashes(where: str, name: str, value: Any) -> tuple[int, ...]:
    with suppress(json.JSONDecodeError):  # a table has them as text
        value = json.loads(value or "[]") if isinstance(value, str) else value or []
    if not isinstance(value, list) or not all(isinstance(part, int) and not isinstance(part, bool) for part in value):
        raise ValueError(f"{where}: {name} = {_short(value)}: must be a list of whole numbers")
    return tuple(value)


def _request(where: str, values: Mapping[str, Any], columns: _Columns, arrivals: bool) -> Request | None:
    """The request of a row; None without output tokens."""
    output = _tokens(where, columns.output, values.get(columns.output), 0)
    if not output:
        return None
    return Request(
        number=0,
        arrival=_arrival(where, values.get(columns.arrival), columns) if arrivals else 0,
        input_tokens=_tokens(where, columns.prompt, values.get(columns.prompt), 1),
        output_tokens=output,
        hashes=_hashes(where, columns.hashes, values.get(columns.hashes)) if columns.hashes else (),
    )


def _trace(rows: Iterator[_Row], title: str, slo_tokens: int | None, arrivals: bool) -> Trace:
    columns, requests, failed = None, list[Request](), 0
    for where, values in rows:
        request = None
        if values is not None:
            columns = columns or _columns(where, values, arrivals)
            request = _request(where, values, columns, arrivals)
        failed += request is None
        requests += [request] if request else []
    if not requests or columns is None:
        raise ValueError(f"has no requests{' with output tokens' if failed else ''}")
    ordered = sorted(requests, key=lambda request: request.arrival)
    first, scale = ordered[0].arrival, 1e-6 if columns.unit == ISO else UNITS_S.get(columns.unit, 1.0)
    if (duration := (ordered[-1].arrival - first) * scale) > MAX_SECONDS:
        raise ValueError(f"{columns.arrival}: covers {duration:.3g} {columns.unit}: the unit is wrong, or an arrival")
    unit: Literal["s", "steps"] = "steps" if columns.unit == STEPS else "s"
    return Trace(
        name=title,
        requests=[
            replace(request, number=number, arrival=(request.arrival - first) * scale)
            for number, request in enumerate(ordered)
        ],
        unit=unit,
        block_tokens=columns.block_tokens if any(request.hashes for request in requests) else 0,
        slo_tokens=slo_tokens,
        source=_source(columns, arrivals, failed, ordered != requests),
    )


def _source(columns: _Columns, arrivals: bool, failed: int, was_sorted: bool) -> str:
    """The columns and units that were read, and what was done to the rows."""
    read = f"{columns.arrival.strip()} ({columns.unit}), " if arrivals else ""
    done = [f"read {read}{columns.prompt.strip()}, {columns.output.strip()}"]
    done += ["sorted by arrival"] if was_sorted else []
    done += [f"left out {failed:,} failed requests (no output tokens)"] if failed else []
    return "; ".join(done)
