"""Likelihood of true text on the decode path: a prefix is prefilled, then the true tokens are forced one by one."""

from __future__ import annotations

import platform
import random
import sysconfig
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from csd_spec.checked import lenient_value
from vcsd_eval.accuracy.data import needs_file
from vcsd_eval.accuracy.tasks.files import read_json, read_text
from vcsd_eval.accuracy.tasks.task import Room, Sample, Task

FORCED = 64  # tokens
MIN_TOKENS = 32  # tokens of a dialogue that can be used


def _wikitext(file: Path | None, room: Room, count: int, seed: int) -> tuple[list[Sample], str]:
    """Windows at equal distances, each as long as fits."""
    path = needs_file(file, "wikitext", "a text, such as WikiText-2's wiki.test.raw")
    ids, length = room.encode(read_text(path)), room.tokens
    if length < 2 * FORCED:
        raise ValueError(f"--max-model-len = {length}: at least {2 * FORCED} tokens are needed")
    if len(ids) < length + count:
        raise ValueError(f"{path}: {len(ids)} tokens, too few for {count} windows of {length}")
    starts = np.linspace(0, len(ids) - length, count).astype(int)
    cut = length - FORCED
    samples = [Sample(ids[at : at + cut], forced=tuple(ids[at + cut : at + length])) for at in starts]
    return samples, f"prefix of {cut} tokens, the next {FORCED} forced"


@lenient_value
class _Turn:
    sender: Annotated[str, Field(alias="from")]
    value: str


@lenient_value
class _Dialogue:
    conversations: tuple[_Turn, ...]


def _sharegpt(file: Path | None, room: Room, count: int, seed: int) -> tuple[list[Sample], str]:
    """Dialogues in a drawn order: the first half is the prefix."""
    path = needs_file(file, "sharegpt", "a file in the layout of ShareGPT_V3")
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


def _code(file: Path | None, room: Room, count: int, seed: int) -> tuple[list[Sample], str]:
    """A window of each of some top-level modules of the standard library, in a drawn order."""
    if file is not None:
        raise ValueError(f"--data = {file}: has no effect on code, which reads the standard library; leave it out")
    folder, length, draw = Path(sysconfig.get_path("stdlib")), room.tokens, random.Random(seed)
    if length < 2 * FORCED:
        raise ValueError(f"--max-model-len = {length}: at least {2 * FORCED} tokens are needed")
    files = sorted(folder.glob("*.py"))
    samples: list[Sample] = []
    for path in draw.sample(files, k=len(files)):
        ids = room.encode(read_text(path)) if len(samples) < count else []
        if len(ids) >= length:
            at = draw.randrange(len(ids) - length + 1)
            cut = at + length - FORCED
            samples.append(Sample(ids[at:cut], forced=tuple(ids[cut : at + length])))
    if not samples:
        raise ValueError(f"--max-model-len = {length}: no file of {folder} has that length: choose a smaller one")
    source = f"modules of Python {platform.python_version()}'s standard library"
    return samples, f"{source}, a window each: prefix of {length - FORCED} tokens, the next {FORCED} forced"


WIKITEXT = Task(_wikitext, kind="wikitext")
SHAREGPT = Task(_sharegpt, kind="sharegpt")
CODE = Task(_code)
