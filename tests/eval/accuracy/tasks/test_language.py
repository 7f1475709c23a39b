"""WikiText and ShareGPT: prefixes, and the forced tokens after them."""

import json
import platform
import sysconfig
from pathlib import Path

import pytest

from vcsd_eval.accuracy.tasks import CODE, SHAREGPT, WIKITEXT, Room
from vcsd_eval.accuracy.tasks.language import FORCED

ROOM = Room(lambda text: list(text.encode()), 1024)


def test_windows_are_spread_over_the_text(tmp_path):
    path = tmp_path / "wiki.txt"
    path.write_bytes(bytes(32 + n % 90 for n in range(10_000)))
    samples, rule = WIKITEXT.make(path, ROOM, 4, 0)
    assert rule == f"prefix of {1024 - FORCED} tokens, the next {FORCED} forced"
    text = list(path.read_bytes())
    for sample, start in zip(samples, (0, 2992, 5984, 8976), strict=True):
        assert [*sample.prompt, *sample.forced] == text[start : start + 1024]
    with pytest.raises(ValueError, match=r"wiki\.txt: 10000 tokens, too few"):
        WIKITEXT.make(path, Room(ROOM.encode, 20_000), 4, 0)
    with pytest.raises(ValueError, match="--max-model-len = 100"):
        WIKITEXT.make(path, Room(ROOM.encode, 100), 4, 0)


def dialogue(*values):
    return {"id": "x", "conversations": [{"from": "human", "value": value} for value in values]}


def test_dialogue_split_in_middle_short_ones_skipped(tmp_path):
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([dialogue("hi"), dialogue("a" * 60, "b" * 25), dialogue("c" * 3000)]))
    samples, _ = SHAREGPT.make(path, ROOM, 9, 0)
    by_length = sorted(samples, key=lambda sample: len(sample.prompt))
    assert [(len(s.prompt), len(s.forced)) for s in by_length] == [(51, 50), (1024 - FORCED, FORCED)]
    whole = bytes([*by_length[0].prompt, *by_length[0].forced]).decode()
    assert whole == f"human: {'a' * 60}\n\nhuman: {'b' * 25}"


def test_unused_records_are_checked_too(tmp_path):
    path = tmp_path / "sharegpt.json"
    good, bad = dialogue("x" * 100), {"id": "y", "conversations": [{"from": "gpt"}]}
    path.write_text(json.dumps([good, bad, good]))
    with pytest.raises(ValueError, match=r"\[1\]\.conversations\[0\]\.value: is missing"):
        SHAREGPT.make(path, ROOM, 1, 0)
    path.write_text(json.dumps([dialogue("short")]))
    with pytest.raises(ValueError, match="no dialogue has 32 tokens"):
        SHAREGPT.make(path, ROOM, 1, 0)


def test_code_is_standard_library_and_states_version():
    samples, rule = CODE.make(None, ROOM, 5, 3)
    assert f"Python {platform.python_version()}'s standard library" in rule
    texts = [path.read_bytes() for path in Path(sysconfig.get_path("stdlib")).glob("*.py")]
    result = [bytes([*sample.prompt, *sample.forced]) for sample in samples]
    assert [(len(s.prompt), len(s.forced)) for s in samples] == [(1024 - FORCED, FORCED)] * 5
    files = [[n for n, text in enumerate(texts) if window in text] for window in result]
    assert all(files)
    assert len({each[0] for each in files}) == 5
    assert CODE.make(None, ROOM, 5, 3)[0] == samples
    assert CODE.make(None, ROOM, 5, 4)[0] != samples


def test_invalid_code_task_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"x\.py: has no effect on code"):
        CODE.make(tmp_path / "x.py", ROOM, 1, 0)
    with pytest.raises(ValueError, match="--max-model-len = 100: at least 128"):
        CODE.make(None, Room(ROOM.encode, 100), 1, 0)
    with pytest.raises(ValueError, match=r"no file of .* has that length"):
        CODE.make(None, Room(ROOM.encode, 10**8), 1, 0)
