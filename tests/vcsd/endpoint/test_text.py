"""Incremental decoding, stop strings and bytes of tokens, with byte-level and SentencePiece tokenizers."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.vcsd.endpoint.running import byte_tokenizer, tiny_model
from vcsd.endpoint.text import UNKNOWN, Detokenizer, StopStrings, TokenText, end_tokens

TEXT = "Ünïcode: 数据在硬盘里 \U0001f600 \U0001f468\u200d\U0001f469 end"


@pytest.fixture(scope="module")
def byte_level() -> TokenText:
    return TokenText(byte_tokenizer())


@pytest.fixture(scope="module")
def sentencepiece() -> TokenText:
    """Words with a leading space mark, and single bytes for everything else."""
    words = ["<unk>", "</s>", *(f"<0x{each:02X}>" for each in range(256)), "\u2581the", "\u2581drive", "s", "\u2581"]
    tokenizer = Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, [], unk_token="<unk>"))
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return TokenText(PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>"))


def test_characters_over_tokens_arrive_whole(byte_level) -> None:
    stream = Detokenizer(byte_level)
    pieces = [stream.add(each) for each in TEXT.encode()]
    assert "".join(pieces) == TEXT and not stream.flush()
    assert [piece for piece in pieces if piece] == list(TEXT)


def test_random_tokens_give_text_of_all(byte_level) -> None:
    draw = random.Random(3)
    for _ in range(200):
        tokens = [draw.randrange(256) for _ in range(draw.randrange(1, 60))]
        stream = Detokenizer(byte_level)
        assert "".join(map(stream.add, tokens)) + stream.flush() == byte_level.decode(tokens)


def test_invalid_bytes_are_not_held_forever(byte_level) -> None:
    stream = Detokenizer(byte_level)
    assert sum(len(stream.add(0xFF)) for _ in range(50)) == 47 and stream.flush() == UNKNOWN * 3


def test_leading_space_follows_prompt(sentencepiece) -> None:
    known = sentencepiece.tokenizer.convert_tokens_to_ids
    the, drive, s = (known(word) for word in ("\u2581the", "\u2581drive", "s"))
    after = Detokenizer(sentencepiece, the)
    assert [after.add(drive), after.add(s), after.add(the)] == [" drive", "s", " the"]
    first = Detokenizer(sentencepiece)
    assert [first.add(the), first.add(drive)] == ["the", " drive"]


def test_byte_tokens_of_sentencepiece_arrive_whole(sentencepiece) -> None:
    stream = Detokenizer(sentencepiece)
    pieces = [stream.add(2 + each) for each in "a数b".encode()]
    assert pieces == ["a", "", "", "数", "b"]


def test_bytes_of_tokens_join_to_text(byte_level, sentencepiece) -> None:
    data = TEXT.encode()
    assert b"".join(map(byte_level.bytes_of, data)) == data
    assert sentencepiece.bytes_of(2 + 0xE6) == b"\xe6" and sentencepiece.name(2 + 0xE6) == "bytes:\\xe6"
    assert byte_level.name(ord("a")) == "a"


@pytest.mark.parametrize("stops", [["END"], ["xEN", "END"], ["NEVER", "D"], ["ENDING", "ND"]])
@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_text_ends_before_earliest_stop_string(stops, size) -> None:
    text = "ENEENx ENDED"
    stream, said = StopStrings(stops), ""
    for at in range(0, len(text), size):
        said += stream.add(text[at : at + size])
    wanted = min(text.index(stop) for stop in stops if stop in text)
    assert said == text[:wanted] and stream.found and not stream.flush() and not stream.add("more")


def test_held_start_of_stop_string_is_returned_at_end() -> None:
    stream = StopStrings(["abc"])
    assert [stream.add("xa"), stream.add("b"), stream.add("abab")] == ["x", "", "abab"]
    assert stream.flush() == "ab" and not stream.found


def test_end_tokens_are_of_model_and_tokenizer(sentencepiece) -> None:
    model = tiny_model()
    model.generation_config.eos_token_id = [5, 6]
    assert end_tokens(model, sentencepiece.tokenizer) == {1, 5, 6}
    model.generation_config.eos_token_id = None
    assert end_tokens(model, byte_tokenizer()) == set()
