"""Tasks that only retrieval solves: Repetition (SparQ, arXiv 2312.04985, section 5.1) and pass keys (Landmark
Attention, arXiv 2305.16300)."""

from __future__ import annotations

import random
from pathlib import Path

from vcsd_eval.accuracy.data import needs_file
from vcsd_eval.accuracy.tasks.files import read_text
from vcsd_eval.accuracy.tasks.haystack import DEPTHS, NOISE
from vcsd_eval.accuracy.tasks.task import Room, Sample, Score, Task

CONTEXT, PROMPT, NEXT = 6000, 128, 256  # characters
BREAK = "\n\n"
_TOLD = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. "
    "I will quiz you about the important information there."
)
_KEY, _ASKED = "The pass key is {}. Remember it. {} is the pass key.", "What is the pass key? The pass key is"


def _repetition(file: Path | None, room: Room, count: int, seed: int) -> tuple[list[Sample], str]:
    path = needs_file(file, "shakespeare", "a text, such as tinyshakespeare.txt")
    text, draw = read_text(path), random.Random(seed)
    rule = f"contexts of {CONTEXT} characters, or as many as leave {PROMPT + NEXT} of {room.tokens} tokens"
    if len(text) < CONTEXT:
        raise ValueError(f"{path}: {len(text)} characters, at least {CONTEXT} are needed")
    samples = []
    for _ in range(count):
        start = draw.randrange(len(text) - CONTEXT + 1)
        context = _shortened(text[start : start + CONTEXT], room.tokens - PROMPT - NEXT - len(room.encode(BREAK)), room)
        if len(context) < 2 * (PROMPT + NEXT):
            raise ValueError(f"--max-model-len = {room.tokens}: too few for a repetition, which needs 1,200 tokens")
        at = draw.randrange(len(context) - PROMPT - NEXT + 1)
        wanted = context[at + PROMPT : at + PROMPT + NEXT]
        prompt = room.encode(context + BREAK + context[at : at + PROMPT])
        samples.append(Sample(prompt, (wanted,), len(room.encode(wanted))))
    return samples, rule


def _shortened(text: str, tokens: int, room: Room) -> str:
    """Longest prefix of a text with at most `tokens` tokens, to within one token."""
    while (excess := len(room.encode(text)) - tokens) > 0 and text:
        text = text[: -max(1, excess)]
    return text


def _matched(sample: Sample, text: str) -> Score:
    """Number of correct characters before the first wrong one."""
    pairs = zip(sample.answers[0], text, strict=False)
    wrong = (index for index, (a, b) in enumerate(pairs) if a != b)
    return {"matched_characters": next(wrong, min(len(text), NEXT))}


def _parted(sample: Sample, text: str) -> bool:
    return len(text) >= NEXT or not sample.answers[0].startswith(text.rstrip("\ufffd"))


def _passkey(file: Path | None, room: Room, count: int, seed: int) -> tuple[list[Sample], str]:
    """Keys at every depth of three lengths; the filler is RULER's noise, or a file."""
    filler, draw, most = read_text(file) if file else f"{NOISE} ", random.Random(seed), 8
    lengths = [room.tokens // part for part in (4, 2, 1)]
    rule = f"lengths {', '.join(map(str, lengths))} tokens x depths {', '.join(map(str, DEPTHS))}, in turn"
    samples = []
    for number in range(count):
        length, depth = lengths[number % 3], DEPTHS[number // 3 % len(DEPTHS)]
        key = f"{draw.randrange(10_000, 100_000)}"
        told = _KEY.format(key, key)
        space = length - most - len(room.encode(f"{_TOLD}\n\n{told}\n\n{_ASKED}")) - 4  # tokens may join otherwise
        if space < 16:
            raise ValueError(f"--max-model-len = {room.tokens}: too few for a pass key; give 1,100 or more")
        text = _filled(filler, space, draw.randrange(len(filler)) if file else 0, room)
        cut = text.rfind(" ", 0, round(depth * len(text))) + 1 if depth < 1 else len(text)
        prompt = room.encode(f"{_TOLD}\n{text[:cut]}\n{told}\n{text[cut:]}\n{_ASKED}")
        samples.append(Sample(prompt, (key,), most, group=f"{length} tokens"))
    return samples, rule + (f", filler {file.name}" if file else ", filler of repeated noise")


def _filled(filler: str, tokens: int, start: int, room: Room) -> str:
    """As much of a text, from `start` on and again from its beginning, as `tokens` tokens hold."""
    turned = filler[start:] + filler[:start]
    return _shortened((turned * (8 * tokens // len(turned) + 1))[: 8 * tokens], tokens, room)


def _found(sample: Sample, text: str) -> Score:
    return {"accuracy": float(text.strip().startswith(sample.answers[0]))}


REPETITION = Task(_repetition, _matched, _parted, kind="shakespeare")
PASSKEY = Task(
    _passkey,
    _found,
    lambda sample, text: len(text.strip()) >= len(sample.answers[0]),
    binary=frozenset({"accuracy"}),
    samples=3 * len(DEPTHS),
)
