"""Tables of the leaderboard, for the terminal and for the page docs/leaderboard.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.markup import escape

from vcsd.tables import table
from vcsd_eval.accuracy.leaderboard.board_tasks import BOARD_TASKS
from vcsd_eval.accuracy.leaderboard.ranking import BoardEntry, RankedEntry, RankedGroup
from vcsd_eval.accuracy.leaderboard.submission import Submission

PLACE = "leaderboard"  # name of the tables in a page, see `vcsd_eval.doc_tables.with_table`
COLUMNS = (
    "limit",
    "rank",
    "method",
    "budget",
    "used",
    "fetched",
    "MiB read",
    "score",
    "95 %",
    "worst",
    "samples",
    "origin",
    "caveats",
)
TEXT_COLUMNS = ("limit", "method", "origin", "caveats")
RUN_COLUMNS = ("rows", "by", "date", "model", "machine", "vcsd", "command")


def title_of(group: RankedGroup) -> str:
    """Title of a group's table."""
    key, task = group.key, BOARD_TASKS[group.key.task]
    better = "lower is better" if task.low_is_better else "higher is better"
    counted = "" if key.counted_by == "page" else ", bytes counted by element"
    return f"{key.model}, {key.context_tokens:,} tokens, {key.task}{counted}: {task.score}, {better}"


def note_of(group: RankedGroup) -> str:
    """Data, worst value and dense attention of a group, in one line."""
    dense = "" if group.dense is None else f"; dense attention: {_figure(group.dense.score)}"
    return f"Data: {group.key.data}; worst: {BOARD_TASKS[group.key.task].worst}{dense}"


def cells_of(group: RankedGroup) -> list[tuple[str, ...]]:
    """Cells of a group's table, a row for each ranked entry."""
    return [_cells(limit, each) for limit, entries in group.by_limit.items() for each in entries]


def _cells(limit: float, ranked: RankedEntry) -> tuple[str, ...]:
    row = ranked.entry.row
    return (
        f"1/{1 / limit:g}" if limit < 1 else "all",
        f"{ranked.rank}{' =' if ranked.is_tied else ''}",
        row.label,
        f"{row.budget:.3g}",
        f"{row.bytes_used_share:.3f}",
        f"{row.bytes_fetched_share:.3f}",
        f"{row.bytes_read / (1 << 20):,.2f}",
        _figure(row.score),
        f"{_figure(row.low)} to {_figure(row.high)}",
        _figure(row.worst),
        str(row.samples),
        ranked.entry.origin,
        ranked.caveats,
    )


def _figure(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 10_000 else f"{value:.3e}"


def terminal_tables(groups: Iterable[RankedGroup]) -> list[Any]:
    """A table for each group, in which text of others has no meaning to Rich."""
    return [
        table(
            escape(f"{title_of(group)}; {note_of(group)}"),
            COLUMNS,
            [tuple(map(escape, cells)) for cells in cells_of(group)],
            left=TEXT_COLUMNS,
        )
        for group in groups
    ]


def group_values(group: RankedGroup) -> dict[str, Any]:
    """A group as JSON types."""
    key = group.key
    return {
        "model": key.model,
        "task": key.task,
        "context_tokens": key.context_tokens,
        "data": key.data,
        "counted_by": key.counted_by,
        "ranks": [
            {
                "limit": limit,
                "rank": each.rank,
                "tied": each.is_tied,
                "method": each.entry.row.label,
                "budget": each.entry.row.budget,
                "bytes_fetched_share": each.entry.row.bytes_fetched_share,
                "score": each.entry.row.score,
                "low": each.entry.row.low,
                "high": each.entry.row.high,
                "worst": each.entry.row.worst,
                "origin": each.entry.origin,
                "caveats": each.caveats,
            }
            for limit, entries in group.by_limit.items()
            for each in entries
        ],
    }


def markdown(groups: Sequence[RankedGroup], entries: Sequence[BoardEntry]) -> str:
    """Runs and tables of the page."""
    runs = list({id(entry.run): entry for entry in entries}.values())
    lines = ["### Runs", "", *_markdown_table(RUN_COLUMNS, [_run_cells(entry) for entry in runs])]
    lines += ["", *_markdown_table(("method", "source"), _sources(entry.run for entry in runs))]
    for group in groups:
        lines += ["", f"### {_escaped(title_of(group))}", "", f"{_escaped(note_of(group))}.", ""]
        lines += _markdown_table(COLUMNS, [tuple(map(_escaped, cells)) for cells in cells_of(group)])
    return "\n".join(lines)


def _run_cells(entry: BoardEntry) -> tuple[str, ...]:
    run = entry.run
    origin = "measured" if entry.is_measured else "submitted, not measured here"
    parts = (origin, run.submitter, run.date, run.model, run.machine, run.vcsd_version)
    return (*map(_escaped, parts), f"`{_escaped(run.command).replace('`', '')}`")


def _sources(runs: Iterable[Submission]) -> list[tuple[str, str]]:
    found = dict.fromkeys((method.name, method.source) for run in runs for method in run.methods)
    return [(_escaped(name), _link(source)) for name, source in found]


def _link(source: str) -> str:
    """A source, as a link if it is one."""
    is_link = source.startswith(("https://", "http://")) and not set(source) & set(" ()<>|`\"'\\")
    return f"<{source}>" if is_link else _escaped(source)


def _escaped(text: str) -> str:
    """Text of others without a meaning in Markdown or HTML."""
    for char, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(char, entity)
    return "".join(f"\\{char}" if char in "|[]*_#!" else char for char in text)


def _markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]
