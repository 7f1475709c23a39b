"""Five tasks of RULER (arXiv 2404.06654): needles in a haystack, and variable tracking.

The prompts have the published form. Keys are adjectives and nouns of our own list, values have 7 digits. The haystack
is RULER's repeated noise, or lines of the shipped passage in place of its essays. The figure is RULER's: the share of
the expected strings that are in the generated text.
"""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from pathlib import Path

from vcsd_eval.accuracy.tasks.haystack import DEPTHS, NOISE, cyclic, fitted, hidden, passage
from vcsd_eval.accuracy.tasks.task import Room, Sample, Score, Task

HOPS = (1, 2, 4)
EXAMPLE_LINES = 4  # of noise in the solved example of variable tracking
_ADJECTIVES = ("amber", "brave", "calm", "dusty", "eager", "faint", "gentle", "hollow", "icy", "jolly", "keen", "loud")
_NOUNS = (
    "anchor",
    "basket",
    "candle",
    "dolphin",
    "engine",
    "feather",
    "garden",
    "hammer",
    "island",
    "jacket",
    "kettle",
)
_KEYS = tuple(f"{adjective}-{noun}" for adjective, noun in product(_ADJECTIVES, _NOUNS))
_NEEDLE = "One of the special magic numbers for {} is: {}."
_TOLD = (
    "{} special magic {} hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {} afterwards."
)
_TRACK = "Memorize and track the chain(s) of variable assignment hidden in the following text."


@dataclass(frozen=True, slots=True)
class Niah:
    """A needle task.

    Attributes:
        essay: Whether the haystack is the passage; else it is noise.
        keys: Keys with a needle; those that are not asked for are distractors.
        asked: Numbers of needles that are asked for, in turn over the samples.
        one_key: Whether these are values of one key; else each has a key of its own.
    """

    essay: bool
    keys: int
    asked: tuple[int, ...]
    one_key: bool = False

    @property
    def rule(self) -> str:
        """The task in words."""
        if self.asked == (1,):
            wanted = f"{self.keys} needles, 1 asked" if self.keys > 1 else "1 needle"
            wanted += f" at depth {', '.join(map(str, DEPTHS))} in turn"
        else:
            what = "values of one key" if self.one_key else "keys"
            wanted = f"{' and '.join(map(str, self.asked))} {what} asked in turn, needles at drawn depths"
        return f"haystack of {'the shipped passage' if self.essay else 'repeated noise'}, {wanted}"


def _niah(task: Niah, file: Path | None, room: Room, count: int, seed: int) -> tuple[list[Sample], str]:
    _no_file(file)
    draw = random.Random(seed)
    samples = [_niah_sample(task, number, room, draw) for number in range(count)]
    return samples, f"{task.rule}; {room.tokens} tokens"


def _niah_sample(task: Niah, number: int, room: Room, draw: random.Random) -> Sample:
    asked = task.asked[number % len(task.asked)]
    keys = draw.sample(_KEYS, 1 if task.one_key else max(task.keys, asked))
    values = [f"{draw.randrange(10**6, 10**7)}" for _ in range(asked if task.one_key else len(keys))]
    needles = [_NEEDLE.format(keys[0] if task.one_key else keys[n], value) for n, value in enumerate(values)]
    depths, group = [draw.random() for _ in needles], f"{asked} {'values' if task.one_key else 'keys'}"
    if asked == 1:
        depths[0] = DEPTHS[number % len(DEPTHS)]
        group = f"depth {depths[0]}"
    query = _listed(keys[:1] if task.one_key else keys[:asked])
    one = asked == 1
    what, verb = ("number", "is") if one else ("numbers", "are")
    told = _TOLD.format("A" if one else "Some", f"{what} {verb}", what)
    question = f"What {verb if one else 'are all'} the special magic {what} for {query} mentioned in the provided text?"
    ending = f"{question} The special magic {what} for {query} mentioned in the provided text {verb}"
    lines = partial(cyclic, passage(draw) if task.essay else [NOISE])
    answers = tuple(values[:asked])
    most = 2 * len(room.encode(_listed(list(answers)))) + 8
    prompt = fitted(lambda n: f"{told}\n{hidden(lines(n), needles, depths)}\n{ending}", room, most)
    return Sample(prompt, answers, most, group=group)


def _tracking(file: Path | None, room: Room, count: int, seed: int) -> tuple[list[Sample], str]:
    """One chain of assignments in noise, after a solved example of three letters a name, as in the paper."""
    _no_file(file)
    draw = random.Random(seed)
    samples = [_tracking_sample(HOPS[number % len(HOPS)], room, draw) for number in range(count)]
    hops = ", ".join(map(str, HOPS))
    return samples, f"1 chain of {hops} hops in turn in repeated noise, 1 solved example; {room.tokens} tokens"


def _tracking_sample(hops: int, room: Room, draw: random.Random) -> Sample:
    solved, names = _chain(hops, 3, draw)
    depths = sorted(draw.random() for _ in solved)
    example = f"{_tracked([NOISE] * EXAMPLE_LINES, solved, depths)} {' '.join(names)}\n\n"
    chain, names = _chain(hops, 5, draw)
    depths = sorted(draw.random() for _ in chain)
    most = 2 * len(room.encode(" ".join(names))) + 8
    prompt = fitted(lambda n: example + _tracked([NOISE] * n, chain, depths), room, most)
    return Sample(prompt, tuple(names), most, group=f"{hops} hop{'s' * (hops > 1)}")


def _chain(hops: int, letters: int, draw: random.Random) -> tuple[list[str], list[str]]:
    """Assignments of a chain, the first of a number; and the names of its variables."""
    names: list[str] = []
    while len(names) <= hops:
        name = "".join(draw.choices(string.ascii_uppercase, k=letters))
        names += [name] * (name not in names)
    first = f"VAR {names[0]} = {draw.randrange(10_000, 100_000)}"
    return [first, *(f"VAR {new} = VAR {old}" for old, new in pairwise(names))], names


def _tracked(lines: list[str], chain: list[str], depths: list[float]) -> str:
    """The question on a chain whose assignments are at these depths, in rising order."""
    value = chain[0].rpartition(" ")[2]
    question = f"Question: Find all variables that are assigned the value {value} in the text above."
    answer = (
        "Answer: According to the chain(s) of variable assignment in the text above, "
        f"{len(chain)} variables are assigned the value {value}, they are:"
    )
    return f"{_TRACK}\n\n{hidden(lines, chain, depths)}\n{question} {answer}"


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:-1])}, and {names[-1]}" if len(names) > 1 else names[0]


def _no_file(file: Path | None) -> None:
    if file is not None:
        raise ValueError(f"--data = {file}: has no effect on this task, which makes its own text; leave it out")


def _recall(sample: Sample, text: str) -> Score:
    said = text.lower()
    return {"recall": sum(answer.lower() in said for answer in sample.answers) / len(sample.answers)}


def _all_found(sample: Sample, text: str) -> bool:
    return _recall(sample, text)["recall"] == 1


_ONE = frozenset({"recall"})
RULER = {
    "niah-single": Task(partial(_niah, Niah(False, 1, (1,))), _recall, _all_found, binary=_ONE),
    "niah-multikey": Task(partial(_niah, Niah(False, 4, (1,))), _recall, _all_found, binary=_ONE),
    "niah-multivalue": Task(partial(_niah, Niah(False, 1, (2, 4), one_key=True)), _recall, _all_found),
    "niah-multiquery": Task(partial(_niah, Niah(False, 4, (2, 4))), _recall, _all_found),
    "variable-tracking": Task(_tracking, _recall, _all_found),
}
