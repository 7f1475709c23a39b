"""Generation for one HTTP request: its requests to the server, and their tokens as text on an asyncio loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from vcsd.endpoint.protocol import FAILED, TOO_MANY, UNAVAILABLE, ApiError, GenerationRequest
from vcsd.endpoint.text import Detokenizer, StopStrings, TokenText
from vcsd.sampling import SamplingParams, TokenLogprob
from vcsd.server import QueueFullError, RequestHandle, Server, ServerClosedError


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A token of an answer with its log-probabilities. offset: characters of the answer before it."""

    token: int
    offset: int
    logprob: TokenLogprob


@dataclass(slots=True)
class Piece:
    """New text of a choice.

    Attributes:
        index: Number of the choice.
        text: The text.
        entries: Its tokens, if log-probabilities are asked for.
        finish_reason: `stop` or `length` with the last piece of a choice.
    """

    index: int
    text: str = ""
    entries: list[TokenEntry] = field(default_factory=list)
    finish_reason: str | None = None

    def append(self, other: Piece) -> None:
        """Append the next piece of the same choice."""
        self.text += other.text
        self.entries += other.entries
        self.finish_reason = other.finish_reason


class AnswerChoice:
    """Tokens of one request as text, up to an end token or a stop string.

    Attributes:
        count: Tokens so far, with an end token.
        finish_reason: `stop` or `length`; empty until the end.
    """

    def __init__(self, index: int, handle: RequestHandle, text: TokenText, stops: Sequence[str]) -> None:
        self.index, self.handle = index, handle
        self.count, self.finish_reason = 0, ""
        self._detokenizer, self._stops = Detokenizer(text, handle.prompt[-1]), StopStrings(stops)
        self._characters = 0  # decoded so far
        self._entries: list[TokenEntry] = []  # of tokens whose text is not complete

    def take(self) -> Piece | None:
        """Text of the tokens since the last call; None if none is complete.

        Raises:
            ApiError: The request has failed, or the server was closed.
        """
        reason = self.handle.finish_reason  # before its tokens are read: afterwards there are no new ones
        said = "".join(self._add(token) for token in self.handle.tokens[self.count :] if not self._stops.found)
        if reason and not self._stops.found:
            said += self._stops.add(self._detokenizer.flush())
        if self._stops.found:
            self.finish_reason = "stop"
            self.handle.cancel("stop")
        elif reason in ("stop", "length"):
            said += self._stops.flush()
            self.finish_reason = reason
        elif reason:
            error = self.handle.error
            status = FAILED if error else UNAVAILABLE
            raise ApiError(status, f"the request has failed: {error}" if error else "the server is stopping")
        if not said and not self.finish_reason:
            return None
        entries, self._entries = self._entries, []
        return Piece(self.index, said, entries, self.finish_reason or None)

    def _add(self, token: int) -> str:
        if self.handle.logprobs:
            self._entries.append(TokenEntry(token, self._characters, self.handle.logprobs[self.count]))
        self.count += 1
        if token in self.handle.stop:
            return ""
        text = self._detokenizer.add(token)
        self._characters += len(text)
        return self._stops.add(text)


class Generation:
    """The requests of one HTTP request. Created on the asyncio loop that reads it.

    Attributes:
        prompt_count: Tokens of the prompts.
    """

    def __init__(self, server: Server, text: TokenText, body: GenerationRequest, end_tokens: Collection[int]) -> None:
        self._server, self._text, self._body = server, text, body
        self._stop = () if body.ignore_eos else end_tokens
        self._loop, self._changed = asyncio.get_running_loop(), asyncio.Event()
        self.choices: list[AnswerChoice] = []
        self.prompt_count = 0

    def submit(self, prompts: Sequence[list[int]], max_tokens: int | None) -> None:
        """Submit the requests: all choices of the first prompt, then those of the next.

        Args:
            prompts: Token IDs.
            max_tokens: Maximum number of tokens of an answer; None: up to the server's maximum length.

        Raises:
            ApiError: The server does not accept one of them; the others are cancelled.
        """
        try:
            for prompt in prompts:
                longest = self._longest(prompt, max_tokens)
                self.prompt_count += len(prompt)
                for sampling in self._body.sampling():
                    self._submit(prompt, longest, sampling)
        except ApiError:
            self.cancel()
            raise

    def _longest(self, prompt: list[int], max_tokens: int | None) -> int:
        """Maximum number of tokens of an answer; raises ApiError if the request does not fit."""
        limit = self._server.max_tokens
        if not prompt:
            raise ApiError(400, "the prompt has no tokens: add text", "prompt")
        if len(prompt) + (max_tokens or 1) > limit:
            raise ApiError(
                400,
                f"the prompt has {len(prompt):,} tokens and max_tokens is {max_tokens or 1:,}: the context length is "
                f"{limit:,}: shorten the prompt or the answer",
                "max_tokens" if len(prompt) < limit else "prompt",
                "context_length_exceeded",
            )
        return max_tokens or limit - len(prompt)

    def _submit(self, prompt: list[int], longest: int, sampling: SamplingParams) -> None:
        try:
            handle = self._server.submit(prompt, longest, self._stop, sampling, self._wake)
        except QueueFullError as error:
            raise ApiError(TOO_MANY, str(error), code="queue_full") from error
        except ServerClosedError as error:
            raise ApiError(UNAVAILABLE, str(error), code="server_closed") from error
        except ValueError as error:
            raise ApiError(400, str(error), "prompt") from error
        self.choices.append(AnswerChoice(len(self.choices), handle, self._text, self._body.stops))

    def _wake(self) -> None:
        """Called in the server's thread after each token."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._changed.set)

    def cancel(self) -> None:
        """Cancel the requests that have not ended; their KV caches are freed before the next iteration."""
        for choice in self.choices:
            choice.handle.cancel()

    @property
    def count(self) -> int:
        """Tokens of the answers so far."""
        return sum(choice.count for choice in self.choices)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Pieces of all choices until all of them have ended; raises ApiError."""
        unfinished = list(self.choices)
        while unfinished:
            await self._changed.wait()
            self._changed.clear()
            for choice in unfinished:
                if (piece := choice.take()) is not None:
                    yield piece
            unfinished = [choice for choice in unfinished if not choice.finish_reason]
