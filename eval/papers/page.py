"""Elements of a page that needs no network: tables, parts with headings, contents and style."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vcsd_eval.papers.paper import Rows

_STYLE = """
:root { color-scheme: light dark; --text: #1c1e21; --back: #fff; --line: #d5d8dd; --quiet: #5b6470; --link: #0b5cad; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e8eb; --back: #15181c; --line: #3a4048; --quiet: #a3acb8; --link: #7db8f5; }
}
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0; padding: 1rem; color: var(--text); background: var(--back);
  overflow-wrap: anywhere; }
main { max-width: 64rem; min-width: 0; }
a { color: var(--link); }
h1, h2, h3 { line-height: 1.25; scroll-margin-top: .5rem; }
h2 { margin-top: 3rem; border-top: 1px solid var(--line); padding-top: 1rem; }
h3 { margin-top: 2rem; }
.quiet { color: var(--quiet); }
nav ul { list-style: none; margin: 0; padding: 0; }
nav ul ul { display: none; }
.scroll { overflow-x: auto; margin: .5rem 0 1rem; }
.chart { width: 100%; }
table { border-collapse: collapse; font-size: 14px; overflow-wrap: normal; }
td, th { border-bottom: 1px solid var(--line); padding: .2rem .5rem; text-align: right; vertical-align: top; }
th { color: var(--quiet); font-weight: 600; }
.text { text-align: left; }
td.long { min-width: 16rem; }
.pinned :is(td, th):first-child { position: sticky; left: 0; background: var(--back); }
.commands td:first-child { white-space: nowrap; font-family: ui-monospace, monospace; }
summary { cursor: pointer; }
@media (min-width: 70rem) {
  body { display: grid; grid-template-columns: 15rem minmax(0, 1fr); gap: 2rem; }
  nav { position: sticky; top: 1rem; align-self: start; max-height: calc(100vh - 2rem); overflow-y: auto;
    font-size: 14px; }
  nav ul ul { display: block; padding-left: 1rem; }
}
"""
UNITS = {"s": "s", "us": "us", "ns": "ns", "percent": "%", "bytes": "bytes", "mib": "MiB", "gib": "GiB", "gb": "GB"}
MAX_SHOWN_VALUES = 24  # longer tables of values are closed
_NO_FORMATS: Mapping[str, str] = {}
LONG_CHARACTERS = 40  # a text cell with more gets a minimum width, so that its lines are not short


@dataclass(frozen=True, slots=True)
class PagePart:
    """A heading of the page, its content (HTML), and the parts below it."""

    title: str
    content: str = ""
    parts: Sequence[PagePart] = ()


def whole_page(title: str, introduction: str, parts: Sequence[PagePart], scripts: str) -> str:
    """A page with contents. It forbids its own network access.

    Args:
        title: Text.
        introduction: HTML before the first part.
        parts: Parts with unique titles.
        scripts: HTML at the end.
    """
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>"
        f'<nav aria-label="Contents">{_contents(parts)}</nav><main><h1>{html.escape(title)}</h1>{introduction}'
        f"{''.join(_part(part) for part in parts)}</main>{scripts}</body></html>"
    )


def anchor(*titles: str) -> str:
    """Id of a part, by its title and those of the parts around it, outermost first."""
    return re.sub(r"[^a-z0-9]+", "-", " ".join(titles).lower()).strip("-")


def _contents(parts: Sequence[PagePart], *above: str) -> str:
    if not parts:
        return ""
    links = (
        f'<li><a href="#{anchor(*above, part.title)}">{html.escape(part.title)}</a>'
        f"{_contents(part.parts, *above, part.title)}</li>"
        for part in parts
    )
    return f"<ul>{''.join(links)}</ul>"


def _part(part: PagePart, *above: str) -> str:
    tag = f"h{len(above) + 2}"
    inner = "".join(_part(inner_part, *above, part.title) for inner_part in part.parts)
    return f'<{tag} id="{anchor(*above, part.title)}">{html.escape(part.title)}</{tag}>{part.content}{inner}'


def table(rows: Rows, columns: Mapping[str, str], formats: Mapping[str, str] = _NO_FORMATS, kind: str = "") -> str:
    """A table that scrolls in its own container.

    Args:
        rows: Rows with at least the columns.
        columns: Title of each column.
        formats: Format of a column's numbers, if it is not that of `as_text`.
        kind: Class of the table: `pinned` for a first column that stays visible, or `commands`.
    """
    texts = {name for name in columns if any(isinstance(row[name], str) for row in rows)}
    head = "".join(_element("th", title, name in texts and "text") for name, title in columns.items())
    lines = ("".join(_cell(row[name], formats.get(name), name in texts) for name in columns) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    shown = f"<thead><tr>{head}</tr></thead>" if any(columns.values()) else ""
    return f'<div class="scroll"><table class="{kind}">{shown}<tbody>{body}</tbody></table></div>'


def _cell(value: Any, number_format: str | None, is_text: bool) -> str:
    text = as_text(value) if value is None or number_format is None else format(value, number_format)
    return _element("td", text, is_text and "text", len(text) > LONG_CHARACTERS and "long")


def _element(tag: str, text: str, *classes: str | bool) -> str:
    """An element with text; classes that are False are left out."""
    names = " ".join(name for name in classes if isinstance(name, str))
    return f'<{tag} class="{names}">{html.escape(text)}</{tag}>' if names else f"<{tag}>{html.escape(text)}</{tag}>"


def as_text(value: Any) -> str:
    """A value of a table; numbers have four digits, and more if they are whole."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(as_text, value))
    if isinstance(value, float):
        is_whole = value.is_integer() or abs(value) >= 1e3
        return f"{value:,.0f}" if is_whole and abs(value) < 1e9 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def label(name: str) -> str:
    """A name with a unit as its suffix, for readers: `step_s` is "step, s", `tokens_per_s` is "tokens/s"."""
    *words, last = name.split("_")
    if len(words) > 1 and words[-1] == "per":
        *words, counted, _ = words
        unit = f"{UNITS.get(counted, counted)}/{last}"
    elif words and last in UNITS:
        unit = UNITS[last]
    else:
        return " ".join([*words, last])
    return f"{' '.join(words)}, {unit}" if words else unit


def values_table(values: Mapping[str, Any]) -> str:
    """Values with parts: a table of names and values, and one for each list of rows."""
    flat_values = list(_flat(values))
    single = [{"name": name, "value": as_text(value)} for name, value in flat_values if not _is_rows(value)]
    tables = [table(single, {"name": "", "value": ""})] if single else []
    if len(single) > MAX_SHOWN_VALUES:
        tables = [f"<details><summary>{len(single)} values</summary>{tables[0]}</details>"]
    for name, rows in flat_values:
        if _is_rows(rows):
            flat_rows = [dict(_flat(row)) for row in rows]
            columns = {column: column for row in flat_rows for column in row}
            whole = [{column: row.get(column) for column in columns} for row in flat_rows]
            tables.append(f"<h4>{html.escape(name)}</h4>{table(whole, columns)}")
    return "".join(tables)


def _is_rows(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(row, Mapping) for row in value)


def _flat(values: Mapping[str, Any], *above: str) -> Iterator[tuple[str, Any]]:
    """Names and values of all parts; a part's name begins with those around it."""
    for name, value in values.items():
        path = *above, label(str(name))
        if isinstance(value, Mapping):
            yield from _flat(value, *path)
        else:
            yield ": ".join(path), value
