"""What a task is: samples made from a file, and a score for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Encode = Callable[[str], list[int]]
Score = dict[str, float]


@dataclass(frozen=True, slots=True)
class Room:
    """What a model leaves for a sample: its tokenizer's ids of a text, and how many tokens fit."""

    encode: Encode
    tokens: int


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and what should follow it.

    Tasks that generate have `answers`, the accepted texts, and `max_tokens`, how many are generated; tasks that force
    the true tokens have `forced`. group: a part of the samples that is shown by itself too, such as a length.
    """

    prompt: list[int]
    answers: tuple[str, ...] = ()
    max_tokens: int = 0
    forced: tuple[int, ...] = ()
    group: str = ""

    @property
    def steps(self) -> int:
        return self.max_tokens or len(self.forced)


@dataclass(frozen=True, slots=True)
class Task:
    """How samples are made from a public file and how text that a model has generated is scored.

    make(file, room, count, seed): the samples and the rule by which they fit the room, in words. Raises ValueError
    that names the file, the record and the field that is wrong.
    score(sample, text): figures of one sample. None: the true tokens are forced, and their likelihood counts.
    over(sample, text): nothing that follows can change the score.
    """

    make: Callable[[Path | None, Room, int, int], tuple[list[Sample], str]]
    score: Callable[[Sample, str], Score] | None = None
    over: Callable[[Sample, str], bool] = lambda sample, text: False


def needs_file(file: Path | None, what: str) -> Path:
    """The file, which this task cannot do without."""
    if file is None:
        raise ValueError(f"--data is needed: {what}")
    return file
