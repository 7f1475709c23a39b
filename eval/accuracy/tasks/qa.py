"""Questions on a background, few-shot: SQuAD v1.1 (arXiv 1606.05250) and TriviaQA (arXiv 1705.03551).

Each shot has its own background. Confusing backgrounds around the right one, as in SparQ's prompt (arXiv 2312.04985,
appendix), are an option.
"""

from __future__ import annotations

import random
import re
import string
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from csd_spec.checked import lenient_value
from vcsd_eval.accuracy.data import needs_file
from vcsd_eval.accuracy.tasks.files import Text, read_json
from vcsd_eval.accuracy.tasks.task import Room, Sample, Score, Task

MAX_TOKENS = 32  # tokens of an answer


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its accepted answers, and their source."""

    question: str
    answers: tuple[str, ...]
    background: str


@lenient_value
class _Answer:
    text: Text


@lenient_value
class _Asked:
    question: Text
    answers: Annotated[tuple[_Answer, ...], Field(min_length=1)]


@lenient_value
class _Paragraph:
    context: Text
    qas: tuple[_Asked, ...]


@lenient_value
class _Article:
    paragraphs: Annotated[tuple[_Paragraph, ...], Field(min_length=1)]
    title: str = ""


@lenient_value
class _Squad:
    data: Annotated[tuple[_Article, ...], Field(min_length=1)]


def _squad(file: Path | None, room: Room, count: int, seed: int) -> tuple[list[Sample], str]:
    path = needs_file(file, "squad", "a file in the layout of SQuAD v1.1")
    questions = [
        Question(
            asked.question, tuple(answer.text for answer in asked.answers), _background(article.title, part.context)
        )
        for article in read_json(path, _Squad).data
        for part in article.paragraphs
        for asked in part.qas
    ]
    return _samples(questions, path, room, count, seed)


@lenient_value
class _Result:
    Title: str | None = None
    Description: str | None = None


@lenient_value
class _Answers:
    Value: Text
    Aliases: tuple[Text, ...]


@lenient_value
class _Trivia:
    Question: Text
    Answer: _Answers
    SearchResults: tuple[_Result, ...] | None = None


@lenient_value
class _TriviaQa:
    Data: Annotated[tuple[_Trivia, ...], Field(min_length=1)]


def _triviaqa(file: Path | None, room: Room, count: int, seed: int) -> tuple[list[Sample], str]:
    """Backgrounds are the search results' descriptions: the documents themselves are files of their own."""
    path = needs_file(file, "triviaqa", "a file in the layout of TriviaQA")
    questions = []
    for asked in read_json(path, _TriviaQa).Data:
        answers = tuple(dict.fromkeys((asked.Answer.Value, *asked.Answer.Aliases)))
        result = [(each.Title, each.Description) for each in asked.SearchResults or ()]
        background = "\n".join(_background(title, text) for title, text in result if title and text)
        questions.append(Question(asked.Question, answers, background))
    return _samples(questions, path, room, count, seed)


def _background(title: str, text: str) -> str:
    return f"Title: {title}. Background: {text}" if title else f"Background: {text}"


def _samples(questions: list[Question], path: Path, room: Room, count: int, seed: int) -> tuple[list[Sample], str]:
    """Questions in random order; if one does not fit, confusing backgrounds are dropped first, then shots.

    Shots are other questions on the same background, as in GPT-3's few-shot format (arXiv 2005.14165, section 2.4);
    questions on other backgrounds are used only if there are too few.
    """
    if not questions:
        raise ValueError(f"{path}: no question in it")
    draw, samples, used = random.Random(seed), [], []
    for number in draw.sample(range(len(questions)), k=min(count, len(questions))):
        asked = questions[number]
        same = [q for q in questions if q.background == asked.background and q.question != asked.question]
        shots = draw.sample(same, k=min(room.shots, len(same)))
        others = {q.background: q for q in questions if q.background != asked.background and q.background}
        lacking = room.shots - len(shots)
        drawn = draw.sample(list(others.values()), k=min(lacking + room.confusions, len(others)))
        shots, confusions = [*drawn[:lacking], *shots], [q.background for q in drawn[lacking:]]
        place = draw.random()
        while len(prompt := room.encode(_prompt(asked, shots, confusions, place))) + MAX_TOKENS > room.tokens:
            if not (confusions or shots):
                raise ValueError(
                    f"--max-model-len = {room.tokens}: question {number} of {path} has {len(prompt)} tokens without "
                    f"any shot or confusing background, and {MAX_TOKENS} more are generated"
                )
            confusions.pop() if confusions else shots.pop(0)
        used.append((len(shots), len(confusions)))
        samples.append(Sample(prompt, asked.answers, MAX_TOKENS))
    shown, confusing = (_range(each) for each in zip(*used, strict=True))
    return samples, f"{shown} shots, {confusing} confusing backgrounds, as {room.tokens} tokens hold"


def _range(counts: tuple[int, ...]) -> str:
    low, high = min(counts), max(counts)
    return f"{low}" if low == high else f"{low} to {high}"


def _prompt(asked: Question, shots: list[Question], confusions: list[str], place: float) -> str:
    """Shots on other backgrounds with these; then the question's own background among others, the shots on it, and the
    question."""
    told = list(confusions)
    if asked.background:
        told.insert(round(place * len(told)), asked.background)
    apart = [f"{shot.background}\n{_asked(shot)}" for shot in shots if shot.background != asked.background]
    same = [_asked(shot) for shot in shots if shot.background == asked.background]
    return "\n\n".join([*apart, *(["\n".join(told)] if told else []), *same, _asking(asked)])


def _asked(shot: Question) -> str:
    return f"{_asking(shot)} {shot.answers[0]}"


def _asking(asked: Question) -> str:
    return f"Question: {asked.question}\nAnswer:"


def _normal(text: str) -> list[str]:
    """Words as SQuAD's own measure compares them: lower case, without punctuation and articles."""
    plain = "".join(char for char in text.lower() if char not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def _overlap(said: list[str], wanted: list[str]) -> float:
    common = sum((Counter(said) & Counter(wanted)).values())
    return 2 * common / (len(said) + len(wanted)) if common else float(said == wanted)


def _answered(sample: Sample, text: str) -> Score:
    """Exact match, F1 and starts-with, each against the best of the answers; the first line counts."""
    said = _normal(text.strip().partition("\n")[0])
    wanted = [_normal(answer) for answer in sample.answers]
    return {
        "exact_match": float(said in wanted),
        "f1": max(_overlap(said, words) for words in wanted),
        "starts_with": float(any(said[: len(words)] == words for words in wanted)),
    }


def _line_ended(sample: Sample, text: str) -> bool:
    return "\n" in text.lstrip()


_BINARY = frozenset({"exact_match", "starts_with"})
SQUAD = Task(_squad, _answered, _line_ended, kind="squad", binary=_BINARY, samples=24)
TRIVIAQA = Task(_triviaqa, _answered, _line_ended, kind="triviaqa", binary=_BINARY)
