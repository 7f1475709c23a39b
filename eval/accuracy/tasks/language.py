"""Likelihood of true text on the decode path: a prefix is prefilled, then the true tokens are forced one by one."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from csd_spec.checked import record
from eval.accuracy.tasks.files import read_json, read_text
from eval.accuracy.tasks.task import Room, Sample, Task, needs_file

FORCED = 256  # tokens
MIN_TOKENS = 32  # tokens of a dialogue that can be used


def _wikitext(file: Path | None, room: Room, count: int, seed: int) -> tuple[list[Sample], str]:
    """Windows at equal distances, each as long as fits."""
    path = needs_file(file, "a text, such as WikiText-2's wiki.test.raw")
    ids, length = room.encode(read_text(path)), room.tokens
    if length < 2 * FORCED:
        raise ValueError(f"--max-context = {length}: at least {2 * FORCED} tokens are needed")
    if len(ids) < length + count:
        raise ValueError(f"{path}: {len(ids)} tokens, too few for {count} windows of {length}")
    starts = np.linspace(0, len(ids) - length, count).astype(int)
    cut = length - FORCED
    samples = [Sample(ids[at : at + cut], forced=tuple(ids[at + cut : at + length])) for at in starts]
    return samples, f"prefix of {cut} tokens, the next {FORCED} forced"


@record
class _Turn:
    sender: Annotated[str, Field(alias="from")]
    value: str


@record
class _Dialogue:
    conversations: tuple[_Turn, ...]


def _sharegpt(file: Path | None, room: Room, count: int, seed: int) -> tuple[list[Sample], str]:
    """Dialogues in a drawn order: the first half is the prefix."""
    path = needs_file(file, "a file in the layout of ShareGPT_V3")
    dialogues = read_json(path, tuple[_Dialogue, ...])
    samples: list[Sample] = []
    for dialogue in random.Random(seed).sample(dialogues, k=len(dialogues)):
        said = [f"{turn.sender}: {turn.value}" for turn in dialogue.conversations]
        ids = room.encode("\n\n".join(said))[: room.tokens]
        if len(ids) < MIN_TOKENS or len(samples) == count:
            continue
        forced = min(FORCED, len(ids) // 2)
        samples.append(Sample(ids[: len(ids) - forced], forced=tuple(ids[-forced:])))
    if not samples:
        raise ValueError(f"{path}: no dialogue has {MIN_TOKENS} tokens")
    return samples, f"dialogues of {MIN_TOKENS} to {room.tokens} tokens, the last half forced, at most {FORCED}"


WIKITEXT = Task(_wikitext)
SHAREGPT = Task(_sharegpt)
