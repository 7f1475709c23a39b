"""Repetition and pass keys: source of the prompt, and scoring."""

import pytest

from vcsd_eval.accuracy.tasks import PASSKEY, REPETITION, Room, Sample


def as_bytes(text):
    return list(text.encode())


def in_words(text):
    """A tokenizer with several characters a token."""
    return [text[at : at + 4] for at in range(0, len(text), 4)]


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("".join(f"{number} sheep jump. " for number in range(2000)))
    return path


@pytest.mark.parametrize(("encode", "tokens", "shown"), [(as_bytes, 4096, 3710), (as_bytes, 8192, 6000)])
def test_repetition_answer_continues_its_context(book, encode, tokens, shown):
    samples, rule = REPETITION.make(book, Room(encode, tokens), 5, 1)
    assert str(tokens) in rule
    for sample in samples:
        text = bytes(sample.prompt).decode()
        context, asked = text[:shown], text[shown + 2 :]
        assert len(asked) == 128
        assert asked + sample.answers[0] in context
        assert len(sample.answers[0]) == sample.max_tokens == 256
        assert len(sample.prompt) + sample.max_tokens <= tokens


def test_a_coarser_tokenizer_keeps_more_characters(book):
    (sample,), _ = REPETITION.make(book, Room(in_words, 1400), 1, 1)
    assert len("".join(sample.prompt)) > 3500
    assert len(sample.prompt) + sample.max_tokens <= 1400


@pytest.mark.parametrize(("said", "matched"), [("", 0), ("abcX", 3), ("abcdefgh", 8), ("Xabc", 0)])
def test_characters_count_until_the_first_wrong_one(said, matched):
    sample = Sample([1], ("abcdefgh" * 32,), 256)
    assert REPETITION.score(sample, said) == {"matched_characters": matched}
    assert REPETITION.over(sample, said) == (matched < len(said))


def test_pass_keys_are_at_their_depth_in_every_length():
    samples, _ = PASSKEY.make(None, Room(as_bytes, 2048), 15, 3)
    depths = {}
    for sample in samples:
        text = bytes(sample.prompt).decode()
        assert text.count(sample.answers[0]) == 2
        assert 0 <= int(sample.group.split()[0]) - len(sample.prompt) - sample.max_tokens < 16
        depths.setdefault(sample.group, set()).add(round(4 * text.index(sample.answers[0]) / len(text)))
    assert list(depths) == ["512 tokens", "1024 tokens", "2048 tokens"]
    assert depths["2048 tokens"] == {0, 1, 2, 3, 4}
    assert len({sample.answers for sample in samples}) == 15


def test_incomplete_pass_key_scores_zero():
    sample = Sample([1], ("12345",), 8)
    assert PASSKEY.score(sample, " 12345.") == {"accuracy": 1.0}
    assert PASSKEY.score(sample, " 1234") == {"accuracy": 0.0}
    assert not PASSKEY.over(sample, " 1234")
    assert PASSKEY.over(sample, " 12345")


def test_invalid_copying_task_is_refused(book, tmp_path):
    with pytest.raises(ValueError, match="--data is needed"):
        REPETITION.make(None, Room(as_bytes, 4096), 1, 0)
    with pytest.raises(ValueError, match="--max-model-len = 800"):
        REPETITION.make(book, Room(as_bytes, 800), 1, 0)
    with pytest.raises(ValueError, match="--max-model-len = 256"):
        PASSKEY.make(None, Room(as_bytes, 256), 1, 0)
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(ValueError, match=r"short\.txt: 9 characters"):
        REPETITION.make(short, Room(as_bytes, 4096), 1, 0)
