"""Ranks of methods: at the same model, task, data and context, among rows that read at most the same bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vcsd_eval.accuracy.leaderboard.board_tasks import BOARD_TASKS, BoardTask
from vcsd_eval.accuracy.leaderboard.submission import CountedBy, LeaderboardRow, Submission

LIMITS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)  # of bytes read, as fractions of the KV data in FP16
TOLERANCE = 1.02  # of a limit: pages are whole; as `vcsd_eval.accuracy.errors.TOLERANCE`
FEW_SAMPLES = 5  # fewer give a bootstrap interval that is too narrow
DENSE = "dense"


@dataclass(frozen=True, slots=True)
class BoardEntry:
    """A row, and the run that it is from.

    Attributes:
        row: The row.
        run: The run.
        is_measured: Whether the row was measured here, and not submitted.
    """

    row: LeaderboardRow
    run: Submission
    is_measured: bool

    @property
    def origin(self) -> str:
        """Where the row is from, for tables."""
        return "measured" if self.is_measured else f"submitted by {self.run.submitter}"


@dataclass(frozen=True, slots=True)
class RankedEntry:
    """An entry within a limit of bytes.

    Attributes:
        entry: The entry.
        rank: 1 and the number of entries that are better by intervals that do not overlap.
        is_tied: Whether another entry has this rank.
        caveats: What makes its comparison with the others unequal, in words; empty if nothing does.
    """

    entry: BoardEntry
    rank: int
    is_tied: bool
    caveats: str


@dataclass(frozen=True, slots=True)
class BoardKey:
    """What ranked rows have in common."""

    model: str
    task: str
    context_tokens: int
    data: str
    counted_by: CountedBy


@dataclass(frozen=True, slots=True)
class RankedGroup:
    """All rows of a key, by limit of the bytes.

    Attributes:
        key: What they have in common.
        dense: Score of dense attention, if it was measured.
        by_limit: Ranked entries for each limit, a fraction of the KV data in FP16; limits that add no row are left out.
    """

    key: BoardKey
    dense: LeaderboardRow | None
    by_limit: dict[float, list[RankedEntry]]


def board_entries(measured: Iterable[Submission], submitted: Iterable[Submission]) -> list[BoardEntry]:
    """Entries of all rows."""
    runs = [(run, True) for run in measured] + [(run, False) for run in submitted]
    return [BoardEntry(row, run, is_measured) for run, is_measured in runs for row in run.rows]


def rank_groups(entries: Sequence[BoardEntry]) -> list[RankedGroup]:
    """Groups in the order of model, task, context and unit of the bytes."""
    groups: dict[BoardKey, list[BoardEntry]] = {}
    for entry in entries:
        row = entry.row
        key = BoardKey(entry.run.model, row.task, row.context_tokens, row.data, row.counted_by)
        groups.setdefault(key, []).append(entry)
    names = list(BOARD_TASKS)
    order = sorted(
        groups, key=lambda k: (k.model, names.index(k.task), k.context_tokens, k.data, k.counted_by == "element")
    )
    return [_ranked(key, groups[key], _dense(groups, key)) for key in order]


def _dense(groups: dict[BoardKey, list[BoardEntry]], key: BoardKey) -> LeaderboardRow | None:
    """Row of dense attention for a key; that of the page-counted rows also serves those counted by element."""
    pages = BoardKey(key.model, key.task, key.context_tokens, key.data, "page")
    found = [entry.row for entry in groups.get(pages, []) if entry.row.method == DENSE and entry.is_measured]
    return found[0] if found else None


def _ranked(key: BoardKey, entries: list[BoardEntry], dense: LeaderboardRow | None) -> RankedGroup:
    task, by_limit, before = BOARD_TASKS[key.task], dict[float, list[RankedEntry]](), set[int]()
    for limit in LIMITS:
        chosen = _largest_of_each(each for each in entries if each.row.bytes_fetched_share <= limit * TOLERANCE)
        if {id(each) for each in chosen} != before:
            by_limit[limit] = rank_entries(task, chosen, limit)
            before = {id(each) for each in chosen}
    return RankedGroup(key, dense, by_limit)


def _largest_of_each(entries: Iterable[BoardEntry]) -> list[BoardEntry]:
    """Entry with the most bytes of each method and origin: a choice by score would favour noise."""
    largest = {
        (entry.row.label, entry.origin): entry
        for entry in sorted(entries, key=lambda each: (each.row.bytes_fetched_share, each.row.budget))
    }
    return list(largest.values())


def rank_entries(task: BoardTask, entries: Sequence[BoardEntry], limit: float) -> list[RankedEntry]:
    """Rank entries that read at most `limit` of the KV data, best first.

    A rank counts only entries whose 95 % intervals do not overlap with the entry's. So entries of one rank overlap, and
    entries of different ranks may.
    """
    ranks = [1 + sum(_is_clearly_better(task, other.row, entry.row) for other in entries) for entry in entries]
    counts = Counter(ranks)
    samples = Counter(entry.row.samples for entry in entries).most_common(1)
    made = [
        RankedEntry(entry, rank, counts[rank] > 1, _caveats(entry, limit, samples[0][0]))
        for entry, rank in zip(entries, ranks, strict=True)
    ]
    sign = 1 if task.low_is_better else -1
    return sorted(made, key=lambda each: (each.rank, sign * each.entry.row.score, each.entry.row.bytes_read))


def _is_clearly_better(task: BoardTask, one: LeaderboardRow, other: LeaderboardRow) -> bool:
    return one.high < other.low if task.low_is_better else one.low > other.high


def _caveats(entry: BoardEntry, limit: float, samples: int) -> str:
    """Reasons why a comparison within a limit is unequal; samples: number that most entries have."""
    row, found = entry.row, []
    if row.bytes_fetched_share < limit / 2 and row.method != DENSE:
        found.append(f"reads {row.bytes_fetched_share / limit:.2f} of the limit")
    if row.samples != samples:
        found.append(f"{row.samples} samples, others {samples}")
    if row.samples < FEW_SAMPLES:
        found.append(f"{row.samples} samples give too narrow an interval")
    if not entry.is_measured:
        found.append(f"not measured here: {entry.run.machine}, vcsd {entry.run.vcsd_version}")
    return "; ".join(found)
