"""Haystacks: noise or lines of the shipped passage with needles in them, as long as fits a model."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from vcsd_eval.accuracy.tasks.files import read_text
from vcsd_eval.accuracy.tasks.task import Room

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."  # RULER's
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of a needle, as shares of the haystack
_PASSAGE = Path(__file__).parent.parent / "passage.txt"


def hidden(lines: list[str], needles: list[str], depths: list[float]) -> str:
    """Lines with needles after the shares `depths` of them; needles of the same place stay in order."""
    text = list(lines)
    for before, (needle, depth) in enumerate(sorted(zip(needles, depths, strict=True), key=lambda each: each[1])):
        text.insert(round(depth * len(lines)) + before, needle)
    return "\n".join(text)


def fitted(write: Callable[[int], str], room: Room, most: int) -> list[int]:
    """Token ids of the longest prompt that leaves `most` tokens; write(n): the prompt with n lines of haystack."""
    low, high = 1, room.tokens  # a line has at least one token
    if len(room.encode(write(low))) > room.tokens - most:
        raise ValueError(f"--max-model-len = {room.tokens}: too few for this task; give 1,024 or more")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if len(room.encode(write(middle))) <= room.tokens - most else (low, middle)
    return room.encode(write(low))


def passage(draw: random.Random) -> list[str]:
    """Lines of the passage from a drawn one on, and again from its beginning."""
    lines = [line for line in read_text(_PASSAGE).splitlines() if line.strip()]
    start = draw.randrange(len(lines))
    return lines[start:] + lines[:start]


def cyclic(lines: list[str], count: int) -> list[str]:
    return (lines * (count // len(lines) + 1))[:count]
