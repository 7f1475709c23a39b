"""HTTP of the endpoint: bounded bodies, keys, streams that end when the client disconnects, and errors as JSON."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from vcsd.endpoint.forms import Json, encode
from vcsd.endpoint.generation import Generation
from vcsd.endpoint.protocol import FAILED, NOT_FOUND, TOO_LARGE, TOO_MANY, UNAUTHORIZED, ApiError

DRAINED_BODIES = 16  # limits of a body that are read and discarded, so that the client reads the error
NO_CONTENT = 204
Receive = Callable[[], Awaitable[Any]]
Handler = Callable[[Request], Awaitable[Response]]


class JsonResponse(Response):
    """A JSON body."""

    media_type = "application/json"

    def render(self, content: Json) -> bytes:
        return encode(content)


class EventStream(Response):
    """Server-sent events of a generation, which is cancelled if the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, events: AsyncIterator[bytes]) -> None:
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._generation, self._events = generation, events

    async def __call__(self, scope: Any, receive: Receive, send: Any) -> None:
        async with cancelling(receive, self._generation):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in self._events:
                await send({"type": "http.response.body", "body": b"data: " + event + b"\n\n", "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


@asynccontextmanager
async def cancelling(receive: Receive, generation: Generation) -> AsyncIterator[None]:
    """Cancel a generation when the client disconnects, and when the block ends."""
    watcher = asyncio.create_task(_cancel_at_disconnect(receive, generation))
    try:
        yield
    finally:
        watcher.cancel()
        generation.cancel()


async def _cancel_at_disconnect(receive: Receive, generation: Generation) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.cancel()


async def read_body(request: Request, limit: int) -> bytes:
    """Read the body of a request.

    Raises:
        ApiError: It is longer than `limit` bytes.
    """
    parts, size = list[bytes](), 0
    async for part in request.stream():
        size += len(part)
        if size <= limit:
            parts.append(part)
        elif size > limit * DRAINED_BODIES:
            break
    if size > limit:
        raise ApiError(TOO_LARGE, f"the body is too large: at most {limit:,} bytes are allowed", code="body_too_large")
    return b"".join(parts)


def check_key(request: Request, key: str | None) -> None:
    """Raise ApiError unless the request has the key, if there is one."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if key and not (scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), key.encode())):
        message = "the API key is missing or wrong: send it as Authorization: Bearer KEY"
        raise ApiError(UNAUTHORIZED, message, code="invalid_api_key")


async def show_error(request: Request, error: Exception) -> Response:
    """Answer to an exception of a handler."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=NO_CONTENT)  # nobody reads it
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException):
        headers |= error.headers or {}
        code = "not_found" if error.status_code == NOT_FOUND else None
        message = f"{request.method} {request.url.path}: {error.detail}: see docs/server.md for the routes"
        error = ApiError(error.status_code, message, code=code)
    if not isinstance(error, ApiError):  # starlette raises it again, and uvicorn logs it
        error = ApiError(FAILED, f"internal error: {type(error).__name__}")
    if error.status == UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status == TOO_MANY:
        headers["Retry-After"] = "1"
    return JsonResponse(error.body(), error.status, headers)


ERRORS: dict[Any, Any] = dict.fromkeys((ApiError, HTTPException, ClientDisconnect, Exception), show_error)
