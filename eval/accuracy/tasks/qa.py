"""Questions on a background, one shot: SQuAD v1.1 (arXiv 1606.05250) and TriviaQA (arXiv 1705.03551).

The prompt is SparQ's (arXiv 2312.04985, appendix): backgrounds of which one holds the answer, an example, the question.
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

from csd_spec.checked import record
from eval.accuracy.tasks.files import Text, read_json
from eval.accuracy.tasks.task import Room, Sample, Score, Task, needs_file

CONFUSION = 7  # backgrounds beside the right one
MAX_TOKENS = 64  # tokens of an answer


@dataclass(frozen=True, slots=True)
class Question:
    """A question, the answers that count, and where they are found."""

    question: str
    answers: tuple[str, ...]
    background: str


@record
class _Answer:
    text: Text


@record
class _Asked:
    question: Text
    answers: Annotated[tuple[_Answer, ...], Field(min_length=1)]


@record
class _Paragraph:
    context: Text
    qas: tuple[_Asked, ...]


@record
class _Article:
    paragraphs: Annotated[tuple[_Paragraph, ...], Field(min_length=1)]
    title: str = ""


@record
class _Squad:
    data: Annotated[tuple[_Article, ...], Field(min_length=1)]


def _squad(file: Path | None, room: Room, count: int, seed: int) -> tuple[list[Sample], str]:
    path = needs_file(file, "a file in the layout of SQuAD v1.1")
    questions = [
        Question(
            asked.question, tuple(answer.text for answer in asked.answers), _background(article.title, part.context)
        )
        for article in read_json(path, _Squad).data
        for part in article.paragraphs
        for asked in part.qas
    ]
    return _samples(questions, path, room, count, seed)


@record
class _Result:
    Title: str | None = None
    Description: str | None = None


@record
class _Answers:
    Value: Text
    Aliases: tuple[Text, ...]


@record
class _Trivia:
    Question: Text
    Answer: _Answers
    SearchResults: tuple[_Result, ...] | None = None


@record
class _TriviaQa:
    Data: Annotated[tuple[_Trivia, ...], Field(min_length=1)]


def _triviaqa(file: Path | None, room: Room, count: int, seed: int) -> tuple[list[Sample], str]:
    """Backgrounds are the search results' descriptions: the documents themselves are files of their own."""
    path = needs_file(file, "a file in the layout of TriviaQA")
    questions = []
    for asked in read_json(path, _TriviaQa).Data:
        answers = tuple(dict.fromkeys((asked.Answer.Value, *asked.Answer.Aliases)))
        found = [(each.Title, each.Description) for each in asked.SearchResults or ()]
        background = "\n".join(_background(title, text) for title, text in found if title and text)
        questions.append(Question(asked.Question, answers, background))
    return _samples(questions, path, room, count, seed)


def _background(title: str, text: str) -> str:
    return f"Title: {title}. Background: {text}" if title else f"Background: {text}"


def _samples(questions: list[Question], path: Path, room: Room, count: int, seed: int) -> tuple[list[Sample], str]:
    """Questions in a drawn order; each has as many confusion contexts as fit, at most CONFUSION."""
    if not questions:
        raise ValueError(f"{path}: no question in it")
    draw, samples, confusions = random.Random(seed), [], []
    for number in draw.sample(range(len(questions)), k=min(count, len(questions))):
        asked = questions[number]
        others = [q for q in questions if q.background != asked.background]
        draw.shuffle(others)
        backgrounds = list(dict.fromkeys(q.background for q in others if q.background))[:CONFUSION]
        shot = next(iter(others), None)
        place = draw.random()
        while True:
            prompt = room.encode(_prompt(asked, shot, backgrounds, place))
            if len(prompt) + MAX_TOKENS <= room.tokens:
                break
            if not backgrounds:
                raise ValueError(
                    f"--max-context = {room.tokens}: question {number} of {path} has {len(prompt)} tokens without any "
                    f"confusion context, and {MAX_TOKENS} more are generated"
                )
            backgrounds.pop()
        confusions.append(len(backgrounds))
        samples.append(Sample(prompt, asked.answers, MAX_TOKENS))
    fewest, most = min(confusions), max(confusions)
    return samples, f"1 shot, {CONFUSION} confusion contexts or as many as fit {room.tokens} tokens: {fewest} to {most}"


def _prompt(asked: Question, shot: Question | None, backgrounds: list[str], place: float) -> str:
    told = list(backgrounds)
    if asked.background:
        told.insert(round(place * len(told)), asked.background)
    example = f"Question: {shot.question}\nAnswer: {shot.answers[0]}\n" if shot else ""
    return "\n".join([*told, f"{example}Question: {asked.question}\nAnswer:"])


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


SQUAD = Task(_squad, _answered, _line_ended)
TRIVIAQA = Task(_triviaqa, _answered, _line_ended)
