"""Answers in the form of the OpenAI API: completions, chat completions, and their chunks in a stream."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

from vcsd.endpoint.generation import Generation, Piece, TokenEntry
from vcsd.endpoint.text import TokenText

Json = dict[str, Any]
LEAST_LOGPROB = -9999.0  # in place of minus infinity, which JSON does not have


class CompletionForm:
    """Form of /v1/completions.

    Attributes:
        whole, part: Names of the object that is an answer, and of a chunk.
    """

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, text: TokenText, as_ids: bool, has_logprobs: bool) -> None:
        """Create the form of one answer.

        Args:
            model: Served name of the model.
            text: Text of tokens.
            as_ids: Name tokens `token_id:N`.
            has_logprobs: Whether log-probabilities are asked for.
        """
        self._text, self._as_ids, self._has_logprobs = text, as_ids, has_logprobs
        self._head = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def answer(self, pieces: list[Piece], generation: Generation) -> Json:
        """A complete answer. `pieces`: one for each choice."""
        choices = [self.choice(piece) for piece in pieces]
        return self._head | {"object": self.whole, "choices": choices, "usage": usage(generation)}

    def chunk(self, choices: list[Json], **more: object) -> Json:
        """A chunk of a stream."""
        return self._head | {"object": self.part, "choices": choices} | more

    def choice(self, piece: Piece) -> Json:
        """A whole choice."""
        return self._choice(piece, {"text": piece.text})

    def begin(self, index: int) -> list[Json]:
        """The part with which a choice begins in a stream, if there is one."""
        return []

    def delta(self, piece: Piece) -> Json:
        """A part of a choice."""
        return self.choice(piece)

    def _choice(self, piece: Piece, content: Json) -> Json:
        logprobs = self.logprobs(piece.entries) if self._has_logprobs else None
        return {"index": piece.index, **content, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    def logprobs(self, entries: list[TokenEntry]) -> Json:
        """Log-probabilities of tokens."""
        return {
            "tokens": [self._name(entry.token) for entry in entries],
            "token_logprobs": [_finite(entry.logprob.logprob) for entry in entries],
            "top_logprobs": [
                {self._name(token): _finite(logprob) for token, logprob in entry.logprob.top} for entry in entries
            ],
            "text_offset": [entry.offset for entry in entries],
        }

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._text.name(token)


class ChatForm(CompletionForm):
    """Form of /v1/chat/completions."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, piece: Piece) -> Json:
        return self._choice(piece, {"message": {"role": "assistant", "content": piece.text}})

    def begin(self, index: int) -> list[Json]:
        return [self._choice(Piece(index), {"delta": {"role": "assistant", "content": ""}}) | {"logprobs": None}]

    def delta(self, piece: Piece) -> Json:
        return self._choice(piece, {"delta": {"content": piece.text} if piece.text else {}})

    def logprobs(self, entries: list[TokenEntry]) -> Json:
        content = []
        for entry in entries:
            top = [self._entry(token, logprob) for token, logprob in entry.logprob.top]
            content.append(self._entry(entry.token, entry.logprob.logprob) | {"top_logprobs": top})
        return {"content": content}

    def _entry(self, token: int, logprob: float) -> Json:
        return {"token": self._name(token), "logprob": _finite(logprob), "bytes": list(self._text.bytes_of(token))}


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB


def usage(generation: Generation) -> Json:
    """Numbers of tokens."""
    prompt, answer = generation.prompt_count, generation.count
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def encode(value: Json) -> bytes:
    """JSON in UTF-8, without spaces."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
