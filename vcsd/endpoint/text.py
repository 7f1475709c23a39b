"""Text of tokens as they arrive: incremental decoding, stop strings, and the bytes of single tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

UNKNOWN = "\ufffd"  # replacement of incomplete or invalid UTF-8
INCOMPLETE = 3  # most bytes of an incomplete character


class TokenText:
    """Decoding of tokens by a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        """Text of tokens. `special`: include special tokens."""
        options: Any = {"skip_special_tokens": not special, "clean_up_tokenization_spaces": False}
        text: str = self.tokenizer.decode(list(tokens), **options)
        return text

    def bytes_of(self, token: int) -> bytes:
        """UTF-8 bytes of one token, also if they are part of a character."""
        text = self.decode([token], special=True)
        if UNKNOWN not in text:
            return text.encode()
        name: Any = self.tokenizer.convert_ids_to_tokens(token)
        if len(name) == len("<0x00>") and name.startswith("<0x"):
            return bytes([int(name[3:5], 16)])
        byte_of = _byte_of_character()
        if all(character in byte_of for character in name):
            return bytes(byte_of[character] for character in name)
        return text.encode()

    def name(self, token: int) -> str:
        """Text of one token; `bytes:` and its bytes in hexadecimal if it is part of a character."""
        raw = self.bytes_of(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


@cache
def _byte_of_character() -> dict[str, int]:
    """Bytes by the characters that stand for them in the vocabularies of byte-level tokenizers."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [code for code in range(0x100) if code not in printable]
    return {chr(code): code for code in printable} | {chr(0x100 + at): other for at, other in enumerate(others)}


class Detokenizer:
    """Decodes the tokens of one answer. A character is returned only when all of its bytes have arrived.

    It decodes a window of tokens: those since the last complete character, and the tokens before these since the one
    before, since tokenizers drop a space at the start of a text.
    """

    def __init__(self, text: TokenText, before: int | None = None) -> None:
        """Create a detokenizer. `before`: last token of the prompt."""
        self._text = text
        self._window: list[int] = []
        self._begin = 0  # tokens of the window that are complete
        self._sent = 0  # characters of the window that were returned
        if before is not None and not (lead := text.decode([before])).endswith(UNKNOWN):
            self._window, self._begin, self._sent = [before], 1, len(lead)

    def add(self, token: int) -> str:
        """Add a token; returns the text that is complete with it."""
        self._window.append(token)
        text = self._text.decode(self._window)
        complete = len(text)
        while complete > max(0, len(text) - INCOMPLETE) and text[complete - 1] == UNKNOWN:
            complete -= 1
        new = text[self._sent : complete]
        self._sent = max(self._sent, complete)
        if new and complete == len(text):
            self._window = self._window[self._begin :]
            self._begin, self._sent = len(self._window), len(self._text.decode(self._window))
        return new

    def flush(self) -> str:
        """Text of the incomplete character at the end."""
        text = self._text.decode(self._window)
        new, self._sent = text[self._sent :], len(text)
        return new


class StopStrings:
    """Ends a text before the first stop string, which may arrive in parts.

    Attributes:
        found: Whether a stop string was found.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""  # text that may be the start of a stop string
        self.found = False

    def add(self, text: str) -> str:
        """Add text; returns the text that no stop string can include."""
        if self.found:
            return ""
        text = self._held + text
        places = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        held = max((_start_at_end(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """The held text, if the answer ends without a stop string."""
        held, self._held = self._held, ""
        return held


def _start_at_end(text: str, stop: str) -> int:
    """Characters at the end of a text with which a stop string begins."""
    longest = min(len(stop) - 1, len(text))
    return next((count for count in range(longest, 0, -1) if text.endswith(stop[:count])), 0)


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Tokens that end a text, of the model's generation config and of its tokenizer."""
    config: Any = model.generation_config
    configured = config.eos_token_id if config is not None else None
    ids = set(configured if isinstance(configured, list | tuple) else [configured])
    return {int(token) for token in ids | {tokenizer.eos_token_id} if token is not None}
