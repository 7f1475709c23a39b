"""Tables of the site that are made from the program: commands with their options, fields of YAML files."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, get_type_hints

from typer._click.core import Context

from csd_link.driveset import DriveOptions
from csd_link.hosting import HostingOptions
from csd_spec import DriveSpec
from vcsd.config import AttachConfig, AttentionOptions, CacheOptions, ServingConfig
from vcsd.options import ServingLimits
from vcsd_cli.main import app

_BOUNDS = re.compile(r"\s*\[((?:default|required|env|[-\d.]+<|x)[^\[\]]*(?:\[[^\]]*\][^\[\]]*)*)\]$")
_LIMITS = re.compile(r"([-\d.]+)<=x<=([-\d.]+)$")
_MODULES = re.compile(r"\b(?:\w+\.)+(?=\w)")  # in front of the name of a type
_ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n        .*)*)", re.MULTILINE)


def _cell(text: str) -> str:
    """Text in a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def table(title: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [title, ["---"] * len(title), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines) + "\n"


def _bound(part: str) -> str:
    """A default or a range, as in `[default: 8; 1<=x<=64]`."""
    limits = _LIMITS.match(part)
    return f"{limits[1]} to {limits[2]}" if limits else _code(part.removeprefix("default: "))


def option_row(record: tuple[str, str]) -> tuple[str, str, str, str]:
    """A row of a command's table, of a record of its help: option, value, meaning, default and range."""
    declared, text = record
    declared, _, kind = declared.partition(" <")
    *names, last = declared.split(", ")
    last, _, form = last.partition(" ") if last.startswith("-") and " / " not in last else (last, "", "")
    bounds = _BOUNDS.search(text)
    parts = bounds[1].split("; ") if bounds else []
    text = text[: bounds.start()] if bounds else text
    value = form or kind.removesuffix(">").replace(" range", "")
    return (
        ", ".join(_code(name) for name in [*names, last]),
        _cell(value),
        _cell(text),
        "; ".join(_bound(part) for part in parts),
    )


def options_of(command: Any, words: tuple[str, ...]) -> list[tuple[str | None, list[tuple[str, ...]]]]:
    """Rows of a command by panel, in the order of its help text."""
    context = Context(command, info_name=" ".join(words))
    panels: dict[str | None, list[tuple[str, ...]]] = {}
    for param in command.params:
        record = None if getattr(param, "hidden", False) else param.get_help_record(context)
        if record and "--help" not in record[0]:
            panels.setdefault(getattr(param, "rich_help_panel", None), []).append(option_row(record))
    return list(panels.items())


def commands(root: Path) -> str:
    """Every command of the program with its options, defaults, ranges and units."""
    text: list[str] = []
    leaves = list(app.leaf_commands())
    groups = dict.fromkeys(words[0] if len(words) > 1 else "" for words, _ in leaves)
    for group in groups:
        text.append(f"## vcsd {group}" if group else "## Single commands")
        for words, command in leaves:
            if (words[0] if len(words) > 1 else "") != group:
                continue
            usage = command.get_usage(Context(command, info_name=f"vcsd {' '.join(words)}"))
            text += [f"### vcsd {' '.join(words)}", command.help or "", f"```\n{usage.removeprefix('Usage: ')}\n```"]
            for panel, rows in options_of(command, words):
                text += [f"**{panel}**"] if panel else []
                text.append(table(("option", "value", "meaning", "default, range"), rows))
    return "\n\n".join(text) + "\n"


def _reference(value: Mapping[str, Any]) -> str:
    return str(value["$ref"]).rpartition("/")[2]


def kind_of(value: Mapping[str, Any]) -> str:
    """The type of a field, with links to the sections of structures."""
    if "$ref" in value:
        name = _reference(value)
        return f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf"):
        if key in value:
            return " or ".join(dict.fromkeys(kind_of(option) for option in value[key]))
    if "enum" in value:
        return ", ".join(f"`{option}`" for option in value["enum"])
    if value.get("type") == "array":
        return f"list of {kind_of(value['items'])}"
    if value.get("type") == "object":
        return f"map from names to {kind_of(value['additionalProperties'])}"
    return "none" if value.get("type") == "null" else value.get("format", value.get("type", ""))


def range_of(value: Mapping[str, Any]) -> str:
    """The allowed range of a number."""
    for option in value.get("anyOf", []):
        if range_of(option):
            return range_of(option)
    low = value.get("minimum", value.get("exclusiveMinimum"))
    high = value.get("maximum", value.get("exclusiveMaximum"))
    if low is None and high is None:
        return ""
    begin = ("above " if "exclusiveMinimum" in value else "") + f"{low:,}"
    end = ("below " if "exclusiveMaximum" in value else "") + f"{high:,}"
    multiple = f", multiples of {value['multipleOf']}" if "multipleOf" in value else ""
    return f"{begin} to {end}{multiple}"


def _default(value: Mapping[str, Any]) -> str:
    return "" if value.get("default") is None else json.dumps(value["default"])


def structure(name: str, given: Mapping[str, Any]) -> Iterator[str]:
    """The section of one structure: what it is, and its fields."""
    about, _, attributes = given.get("description", "").partition("\n\nAttributes:\n")
    meanings = dict(_ATTRIBUTE.findall(attributes))
    required = given.get("required", [])
    rows = [
        (
            _code(field),
            kind_of(value),
            range_of(value),
            "required" if field in required else _code(_default(value)),
            _cell(meanings.get(field, value.get("description", ""))),
        )
        for field, value in given["properties"].items()
    ]
    yield f"### {name}"
    yield about
    yield table(("field", "type", "range", "default", "meaning"), rows)


def schema(root: Path, name: str) -> dict[str, Any]:
    """A schema of docs/."""
    loaded: dict[str, Any] = json.loads((root / "docs" / f"{name}.schema.json").read_text(encoding="utf-8"))
    return loaded


def serve_file(root: Path) -> str:
    """Fields of the file of `vcsd drive serve`, without those of a drive's description."""
    serve, one = schema(root, "drives"), schema(root, "drive")
    text = [*structure("ServeFile", serve)]
    for name, definition in serve["$defs"].items():
        if name not in (*one["$defs"], "DriveSpec"):
            text += structure(name, definition)
    return "\n\n".join(text)


def drive(root: Path) -> str:
    """Fields of the description of a drive."""
    whole = schema(root, "drive")
    text = [*structure("DriveSpec", whole)]
    for name, definition in whole["$defs"].items():
        text += structure(name, definition)
    return "\n\n".join(text)


def keywords(root: Path) -> str:
    """Keywords of `vcsd.attach` and, in the last two tables, of `vcsd.serve`: fields of some dataclasses."""
    text: list[str] = []
    for kind in (
        AttentionOptions,
        CacheOptions,
        AttachConfig,
        DriveOptions,
        HostingOptions,
        ServingLimits,
        ServingConfig,
    ):
        hints, plain = get_type_hints(kind, include_extras=True), get_type_hints(kind)
        meanings, rows = dict(_ATTRIBUTE.findall(inspect.cleandoc(kind.__doc__ or ""))), []
        for field in dataclasses.fields(kind):
            if field.name in vars(kind)["__annotations__"]:
                notes = getattr(hints[field.name], "__metadata__", ())
                help_text = next((note.description for note in notes if getattr(note, "description", None)), "")
                default = "" if isinstance(field.default, DriveSpec) else _code(repr(field.default))
                of = plain[field.name]
                type_text = of.__name__ if isinstance(of, type) else _MODULES.sub("", str(of))
                rows.append((_code(field.name), _cell(type_text), default, _cell(meanings.get(field.name, help_text))))
        text.append(table(("keyword", "type", "default", "meaning"), rows))
    return "\n\n".join(text)


def report(root: Path) -> Path:
    """The page that `./dev docs --report` writes with `vcsd report`."""
    return root / "build" / "report" / "index.html"


def report_link(root: Path) -> str:
    """A link to the papers' report, or the command that adds it to the site."""
    if report(root).is_file():
        day = date.fromtimestamp(report(root).stat().st_mtime).isoformat()
        return f"[All papers' claims and charts on one page](report/index.html), as `vcsd report` wrote it on {day}."
    return "`./dev docs --report` adds the page that `vcsd report` writes to this site."


MADE: dict[str, Callable[[Path], str]] = {
    "commands": commands,
    "serve-file": serve_file,
    "drive": drive,
    "keywords": keywords,
    "report": report_link,
}
