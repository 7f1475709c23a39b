"""Routes of the OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from weakref import WeakSet

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from transformers import PreTrainedTokenizerBase

from vcsd.endpoint.forms import ChatForm, CompletionForm, Json, encode, usage
from vcsd.endpoint.generation import Generation, Piece
from vcsd.endpoint.http import ERRORS, EventStream, Handler, JsonResponse, cancelling, check_key, read_body
from vcsd.endpoint.protocol import (
    COMPLETION_TOKENS,
    NOT_FOUND,
    UNAVAILABLE,
    ApiError,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    T,
    parse,
)
from vcsd.endpoint.text import TokenText
from vcsd.server import Server

MAX_BODY_BYTES = 4 << 20
DONE = b"[DONE]"
METRICS = "text/plain; version=0.0.4"


@dataclass(frozen=True, slots=True)
class EndpointConfig:
    """Configuration of an endpoint.

    Attributes:
        name: Name of the model for clients.
        api_key: Key that clients send; None: no key is needed.
        end_tokens: Token IDs that end a text.
        max_body_bytes: Maximum size of a request.
    """

    name: str
    api_key: str | None = None
    end_tokens: Collection[int] = ()
    max_body_bytes: int = MAX_BODY_BYTES


class ModelEndpoint:
    """An OpenAI-compatible HTTP application (ASGI) of a server."""

    def __init__(self, server: Server, tokenizer: PreTrainedTokenizerBase, config: EndpointConfig) -> None:
        self._server, self._tokenizer, self._config = server, tokenizer, config
        self._text, self._created = TokenText(tokenizer), int(time.time())
        self._generations = WeakSet[Generation]()
        self._tokenize("a")  # settles the tokenizer's state before threads share it

    def app(self) -> Starlette:
        """The application."""
        keyed = {
            "/v1/models": (self._models, "GET"),
            "/v1/models/{name:path}": (self._model, "GET"),
            "/v1/completions": (self._complete, "POST"),
            "/v1/chat/completions": (self._chat, "POST"),
            "/metrics": (self._metrics, "GET"),
        }
        routes = [Route(path, self._keyed(handler), methods=[method]) for path, (handler, method) in keyed.items()]
        app = Starlette(routes=[*routes, Route("/health", self._health)], exception_handlers=ERRORS)
        app.router.redirect_slashes = False
        return app

    def cancel(self) -> None:
        """Cancel all requests: their clients read an error."""
        for generation in list(self._generations):
            generation.cancel()

    def _keyed(self, handler: Handler) -> Handler:
        """A handler that checks the key first."""

        async def checked(request: Request) -> Response:
            check_key(request, self._config.api_key)
            return await handler(request)

        return checked

    async def _health(self, request: Request) -> Response:
        if not self._server.is_open:
            raise ApiError(UNAVAILABLE, "the server has ended: restart it", code="server_closed")
        return JsonResponse({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        return PlainTextResponse(self._server.counters.text(), media_type=METRICS)

    async def _models(self, request: Request) -> Response:
        return JsonResponse({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request) -> Response:
        self._check_name(request.path_params["name"])
        return JsonResponse(self._card())

    def _card(self) -> Json:
        shown = {"id": self._config.name, "object": "model", "created": self._created, "owned_by": "vcsd"}
        return shown | {"max_model_len": self._server.max_tokens}

    def _check_name(self, name: str) -> None:
        if name != self._config.name:
            message = f"there is no model {name[:200]!r}: this server has {self._config.name!r}"
            raise ApiError(NOT_FOUND, message, "model", "model_not_found")

    async def _complete(self, request: Request) -> Response:
        body = await self._read(request, CompletionRequest)
        prompts = await asyncio.to_thread(self._encode, body.prompts, body.n or 1)
        return await self._answer(request, body, prompts, body.max_tokens or COMPLETION_TOKENS)

    async def _chat(self, request: Request) -> Response:
        body = await self._read(request, ChatRequest)
        prompt = await asyncio.to_thread(self._render, body)
        return await self._answer(request, body, [prompt], body.max_completion_tokens or body.max_tokens)

    async def _read(self, request: Request, kind: type[T]) -> T:
        body = parse(kind, await read_body(request, self._config.max_body_bytes))
        self._check_name(body.model)
        return body

    def _encode(self, prompts: Sequence[str | list[int]], choices: int) -> list[list[int]]:
        """Token IDs of prompts."""
        most = self._server.max_waiting
        if len(prompts) * choices > most:
            message = f"{len(prompts)} prompts with n = {choices}: at most {most} answers are allowed"
            raise ApiError(400, message, "prompt")
        return [self._tokenize(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]

    def _tokenize(self, text: str, special: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        return ids

    def _render(self, body: ChatRequest) -> list[int]:
        """Token IDs of a chat by the model's template."""
        if not self._tokenizer.chat_template:
            message = "the model's tokenizer has no chat template: use /v1/completions"
            raise ApiError(400, message, "messages", "no_chat_template")
        messages = [message.values() for message in body.messages]
        try:
            text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # templates raise whatever they like
            message = f"the model's chat template refuses the messages: {' '.join(str(error).split())}"
            raise ApiError(400, message, "messages") from error
        return self._tokenize(str(text), special=False)

    async def _answer(
        self, request: Request, body: GenerationRequest, prompts: list[list[int]], max_tokens: int | None
    ) -> Response:
        generation = Generation(self._server, self._text, body, self._config.end_tokens)
        self._generations.add(generation)
        kind = ChatForm if isinstance(body, ChatRequest) else CompletionForm
        as_ids, has_logprobs = bool(body.return_tokens_as_token_ids), body.top_logprobs_count is not None
        form = kind(self._config.name, self._text, as_ids, has_logprobs)
        generation.submit(prompts, max_tokens)
        if body.stream:
            counts = body.stream_options is not None and bool(body.stream_options.include_usage)
            return EventStream(generation, _events(generation, form, counts))
        whole = [Piece(choice.index) for choice in generation.choices]
        async with cancelling(request.receive, generation):
            async for piece in generation.pieces():
                whole[piece.index].append(piece)
        return JsonResponse(form.answer(whole, generation))


async def _events(generation: Generation, form: CompletionForm, counts: bool) -> AsyncIterator[bytes]:
    """Events of a stream. `counts`: end with the numbers of tokens."""
    more = {"usage": None} if counts else {}
    try:
        for choice in generation.choices:
            if begin := form.begin(choice.index):
                yield encode(form.chunk(begin, **more))
        async for piece in generation.pieces():
            yield encode(form.chunk([form.delta(piece)], **more))
        if counts:
            yield encode(form.chunk([], usage=usage(generation)))
        yield DONE
    except ApiError as error:  # the status has been sent
        yield encode(error.body())
