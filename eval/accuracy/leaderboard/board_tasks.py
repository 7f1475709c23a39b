"""Tasks of the leaderboard: the figure that ranks methods, its direction and its range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TaskName = Literal[
    "output-error",
    "perplexity",
    "passkey",
    "niah-single",
    "niah-multikey",
    "niah-multivalue",
    "niah-multiquery",
    "variable-tracking",
    "repetition",
]


@dataclass(frozen=True, slots=True)
class BoardTask:
    """A task of the leaderboard.

    Attributes:
        score: Name of the figure that ranks methods.
        metric: The same in rows of `vcsd_eval.accuracy`.
        source: Key of `vcsd_eval.accuracy.tasks.TASKS`; empty for recorded attention.
        worst: Meaning of the worst value.
        low_is_better: Whether a lower score is better.
        least, most: Range of the score; None if it has no limit.
        reads_text: Whether its samples are from the text of the run.
    """

    score: str
    metric: str
    source: str
    worst: str
    low_is_better: bool = False
    least: float | None = 0
    most: float | None = 1
    reads_text: bool = False

    def is_better(self, one: float, other: float) -> bool:
        """Whether a score is better than another one."""
        return one < other if self.low_is_better else one > other

    def is_possible(self, score: float) -> bool:
        """Whether a score is in the range."""
        return (self.least is None or score >= self.least) and (self.most is None or score <= self.most)


def _needles(name: str, metric: str = "recall") -> BoardTask:
    return BoardTask(metric, metric, name, "lowest mean of the samples of one length, depth or count")


BOARD_TASKS: dict[str, BoardTask] = {
    "output-error": BoardTask(
        "relative error of the attention output",
        "output_rel_error",
        "",
        "largest error of a query head in one step",
        low_is_better=True,
        most=None,
        reads_text=True,
    ),
    "perplexity": BoardTask(
        "increase of the perplexity over dense attention",
        "perplexity",
        "wikitext",
        "largest increase of a sample",
        low_is_better=True,
        least=None,
        most=None,
        reads_text=True,
    ),
    "passkey": _needles("passkey", "accuracy"),
    **{name: _needles(name) for name in ("niah-single", "niah-multikey", "niah-multivalue", "niah-multiquery")},
    "variable-tracking": _needles("variable-tracking"),
    "repetition": BoardTask(
        "matched characters of 256",
        "matched_characters",
        "repetition",
        "fewest matched characters of a sample",
        most=256,
        reads_text=True,
    ),
}


def board_tasks(text: str) -> list[str]:
    """Names of tasks from an option's text; raises ValueError for an unknown one."""
    names = list(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in BOARD_TASKS]:
        raise ValueError(f"task = {unknown[0]!r}: must be one of {', '.join(BOARD_TASKS)}")
    return names
