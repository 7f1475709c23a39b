"""Requests of the OpenAI API: their fields, the checks of these, and errors in the API's form."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError

from csd_spec.checked import Count, adapter, lenient_value
from vcsd.sampling import MAX_LOGPROBS, SamplingParams

MAX_STOPS, MAX_STOP_CHARACTERS = 4, 1000
MAX_CHOICES = 16
COMPLETION_TOKENS = 16  # default of max_tokens of a completion, as in OpenAI's API
SEEDS = 1 << 63
UNAUTHORIZED, NOT_FOUND, TOO_LARGE, TOO_MANY, FAILED, UNAVAILABLE = 401, 404, 413, 429, 500, 503

Fraction = Annotated[float, Field(gt=0, le=1)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Tokens = Annotated[list[int], Field(min_length=1)]
Seed = Annotated[int, Field(ge=-SEEDS, lt=SEEDS)]
Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
T = TypeVar("T", bound="GenerationRequest")


class ApiError(Exception):
    """An error of a request, with its HTTP status.

    Attributes:
        status: HTTP status.
        param: Field of the request that is invalid, if it is one.
        code: Short name of the error, for programs.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's form."""
        server = self.status >= FAILED
        kind = "rate_limit_error" if self.status == TOO_MANY else "server_error" if server else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@lenient_value
class StreamOptions:
    """Options of a stream. include_usage: end with a chunk that has the numbers of tokens."""

    include_usage: bool | None = None


@lenient_value
class GenerationRequest:
    """Fields that completions and chat completions share; unknown ones are ignored, null is the default.

    Attributes:
        ignore_eos: Continue after an end-of-text token, as vLLM does.
        return_tokens_as_token_ids: Name tokens in log-probabilities `token_id:N`, as vLLM does.
    """

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 31)] | None = None
    seed: Seed | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Count | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Any = None

    @property
    def stops(self) -> list[str]:
        """Stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def top_logprobs_count(self) -> int | None:
        """Most probable tokens to report for each token; None: no log-probabilities."""
        raise NotImplementedError

    def sampling(self) -> list[SamplingParams]:
        """Sampling parameters of each choice; without a seed, of random ones."""
        seed = secrets.randbelow(SEEDS) if self.seed is None else self.seed
        return [
            SamplingParams(
                temperature=1.0 if self.temperature is None else self.temperature,
                top_k=max(0, self.top_k or 0),
                top_p=self.top_p or 1.0,
                seed=(seed + choice) % SEEDS,
                logprobs=self.top_logprobs_count,
            )
            for choice in range(self.n or 1)
        ]

    def check(self) -> None:
        """Raise ApiError for a field that is known but not supported, unless it has no effect."""
        for name, harmless in _UNSUPPORTED.items():
            value = getattr(self, name, None)
            if value is not None and value not in harmless:
                raise ApiError(400, f"{name} is not supported: leave it out", name, "unsupported_parameter")


@lenient_value
class CompletionRequest(GenerationRequest):
    """A request of /v1/completions."""

    prompt: str | Annotated[list[str], Field(min_length=1)] | Tokens | Annotated[list[Tokens], Field(min_length=1)]
    logprobs: Logprobs | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    @property
    def top_logprobs_count(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts, as texts or token IDs."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


@lenient_value
class ContentPart:
    """A part of a message's content."""

    type: Literal["text"]
    text: str


@lenient_value
class ChatMessage:
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None

    def values(self) -> dict[str, str]:
        """The message for a chat template, which knows no role `developer`."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


@lenient_value
class ChatRequest(GenerationRequest):
    """A request of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tools: Any = None
    functions: Any = None
    response_format: Any = None

    @property
    def top_logprobs_count(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    def check(self) -> None:
        GenerationRequest.check(self)  # super() does not know the class that has slots
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs has no effect without logprobs: set logprobs to true", "top_logprobs")


_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {  # and values that ask for nothing
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "functions": ([],),
    "response_format": ({"type": "text"},),
}
_ALLOWED = {
    "prompt": "must be text, a list of texts, token IDs, or a list of lists of token IDs, none of them empty",
    "stop": f"must be text or a list of at most {MAX_STOPS} texts, each of 1 to {MAX_STOP_CHARACTERS} characters",
}


def parse(kind: type[T], body: bytes) -> T:
    """Read a request from JSON.

    Raises:
        ApiError: It is not JSON, or a field has a wrong type or value.
    """
    try:
        request: T = adapter(kind).validate_json(body)  # type: ignore[arg-type]  # a class is hashable
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        param = str(first["loc"][0]) if first["loc"] else None
        where = ".".join(str(part) for part in first["loc"])
        reason = _ALLOWED.get(param or "") if first["type"] != "missing" else None
        message = f"{param}: {reason}" if reason else f"{where or 'the body'}: {first['msg']}"
        raise ApiError(400, message, param) from None
    request.check()
    return request
