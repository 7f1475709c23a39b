"""A task: samples made from a file, and a score for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Encode = Callable[[str], list[int]]
Score = dict[str, float]


@dataclass(frozen=True, slots=True)
class Room:
    """Limits of a sample.

    Attributes:
        encode: Token ids of a text, by the model's tokenizer.
        tokens: Longest sample, prompt and answer, tokens.
        shots: Solved examples before the question, at most.
        confusions: Backgrounds without the answer, at most.
    """

    encode: Encode
    tokens: int
    shots: int = 4
    confusions: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and what should follow it.

    Tasks that generate have `answers` and `max_tokens`, the number of tokens to generate; tasks that force the true
    tokens have `forced`.

    Attributes:
        prompt: Token ids.
        answers: Accepted texts, or all texts that are expected.
        max_tokens: Tokens to generate at most.
        forced: Token ids of the true text.
        group: A part of the samples that has rows of its own too, such as a length.
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

    Attributes:
        make: (file, room, count, seed) to the samples and the rule by which they fit the room, in words. Raises
            ValueError with the file, the record and the field that is wrong.
        score: (sample, text) to the figures of one sample. None: the true tokens are forced and their likelihood is
            the figure.
        over: (sample, text): no further text can change the score.
        kind: Kind of its file, a key of `vcsd_eval.accuracy.data.NAMES`; empty for a task without one.
        binary: Figures that are 0 or 1 in every sample.
        samples: Default number of samples: with a model of 135M parameters minutes on two cores.
    """

    make: Callable[[Path | None, Room, int, int], tuple[list[Sample], str]]
    score: Callable[[Sample, str], Score] | None = None
    over: Callable[[Sample, str], bool] = lambda sample, text: False
    kind: str = ""
    binary: frozenset[str] = frozenset()
    samples: int = 8
