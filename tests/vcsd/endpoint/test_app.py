"""The endpoint as the openai client sees it: answers, streams, errors, and what remains after them.

partner of: vcsd/endpoint/forms.py, vcsd/endpoint/generation.py, vcsd/endpoint/http.py, vcsd/endpoint/run.py
"""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import openai
import pytest
import torch

from tests.served import HANG_S
from tests.vcsd.endpoint.running import NAME, VOCABULARY, Running, byte_tokenizer, client_of, running, tiny_model
from vcsd.config import ServingConfig

PROMPT = "The drive attends."
MALFORMED = 1000


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def spare():
    """The same model again, for servers of single tests."""
    return tiny_model()


@pytest.fixture(scope="module")
def endpoint(model) -> Iterator[Running]:
    with running(model, byte_tokenizer(), ServingConfig(max_batch_size=6)) as result:
        yield result


@pytest.fixture
def client(endpoint) -> Iterator[openai.OpenAI]:
    with client_of(endpoint) as result:
        yield result


def greedy(model, prompt: list[int], count: int) -> list[int]:
    with torch.inference_mode():
        options = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        return model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


def text_of(tokens: list[int]) -> str:
    return byte_tokenizer().decode(tokens, skip_special_tokens=True)


def test_20_streams_at_once_equal_generate(model, endpoint) -> None:
    """Token by token, with the tokens' numbers from the log-probabilities."""
    draw = random.Random(1)
    prompts = [[draw.randrange(1, VOCABULARY) for _ in range(3 + 4 * number)] for number in range(20)]
    more = {"logprobs": 0, "temperature": 0, "extra_body": {"return_tokens_as_token_ids": True}}

    async def stream(client: openai.AsyncOpenAI, number: int) -> tuple[list[int], str]:
        asked = {"model": NAME, "prompt": prompts[number], "max_tokens": 10 + number, "stream": True}
        tokens, text = list[int](), ""
        async for chunk in await client.completions.create(**asked, **more):
            (choice,) = chunk.choices
            tokens += [int(name.removeprefix("token_id:")) for name in choice.logprobs.tokens]
            text += choice.text
        return tokens, text

    async def stream_all() -> list[tuple[list[int], str]]:
        async with openai.AsyncOpenAI(**endpoint.options) as client:
            return await asyncio.gather(*(stream(client, number) for number in range(20)))

    for number, (tokens, text) in enumerate(asyncio.run(stream_all())):
        assert tokens == greedy(model, prompts[number], 10 + number), number
        assert text == text_of(tokens)
    assert endpoint.holds_nothing()


def test_answer_equals_stream_and_counts_tokens(model, client) -> None:
    asked: Any = {"model": NAME, "prompt": [PROMPT, "b"], "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**asked)
    wanted = [text_of(greedy(model, list(each.encode()), 12)) for each in asked["prompt"]]
    assert [choice.text for choice in whole.choices] == wanted
    assert {choice.finish_reason for choice in whole.choices} == {"length"}
    counts = len(PROMPT) + 1, 24, len(PROMPT) + 25
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == counts
    texts, usages = ["", ""], []
    for chunk in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
        usages.append(chunk.usage)
    assert texts == wanted and usages[-1] == whole.usage and set(usages[:-1]) == {None}


def test_chat_uses_template_of_model(model, client) -> None:
    said: Any = [{"role": "developer", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "u"}]}]
    asked: Any = {"model": NAME, "messages": said, "max_completion_tokens": 9, "temperature": 0}
    tokens = greedy(model, list(b"<system>s<user>u<a>"), 9)
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.content == text_of(tokens) and whole.choices[0].message.role == "assistant"
    entries = whole.choices[0].logprobs.content
    assert [bytes(entry.bytes) for entry in entries if entry.token != "\u0100"] == [bytes([t]) for t in tokens if t]
    assert all(entry.top_logprobs[0].logprob == entry.logprob and len(entry.top_logprobs) == 2 for entry in entries)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices[0].finish_reason == "length"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text_of(tokens)
    unlimited = client.chat.completions.create(model=NAME, messages=said, temperature=0)
    assert unlimited.usage.total_tokens == 512


def test_chat_without_template_is_refused(spare) -> None:
    refused = pytest.raises(openai.BadRequestError, match="no chat template: use /v1/completions")
    with running(spare, byte_tokenizer(None)) as endpoint, client_of(endpoint) as client, refused:
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "x"}])


def test_template_that_raises_is_400(spare) -> None:
    template = "{{ raise_exception('only users speak') }}"
    refused = pytest.raises(openai.BadRequestError, match="only users speak")
    with running(spare, byte_tokenizer(template)) as endpoint, client_of(endpoint) as client, refused:
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "x"}])


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_over_tokens_ends_text_before_it(model, endpoint, client, stream) -> None:
    whole = text_of(greedy(model, list(PROMPT.encode()), 60))
    stop = whole[20:23]
    asked: Any = {"model": NAME, "prompt": PROMPT, "max_tokens": 400, "temperature": 0, "stop": ["never", stop]}
    if stream:
        chunks = list(client.completions.create(**asked, stream=True))
        text, reason = "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason
    else:
        choice = client.completions.create(**asked).choices[0]
        text, reason = choice.text, choice.finish_reason
    assert (text, reason) == (whole[: whole.index(stop)], "stop")
    endpoint.wait_until_idle()


def test_end_token_ends_answer_unless_ignored(spare) -> None:
    tokens = greedy(spare, list(PROMPT.encode()), 20)
    end = tokens[9]
    with running(spare, byte_tokenizer(), end_tokens=[end]) as endpoint, client_of(endpoint) as client:
        asked: Any = {"model": NAME, "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
        result = client.completions.create(**asked)
        before = tokens[: tokens.index(end)]
        assert (result.choices[0].text, result.choices[0].finish_reason) == (text_of(before), "stop")
        assert result.usage.completion_tokens == len(before) + 1
        assert client.completions.create(**asked, extra_body={"ignore_eos": True}).usage.completion_tokens == 20


def test_seed_reproduces_answer_and_choices_differ(client) -> None:
    asked: Any = {"model": NAME, "prompt": PROMPT, "max_tokens": 30, "top_p": 0.99}
    first, second = (client.completions.create(**asked, seed=-5, n=3) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices] and len(set(texts)) == 3
    assert first.usage.prompt_tokens == len(PROMPT) and first.usage.completion_tokens == 90
    assert client.completions.create(**asked).choices[0].text != client.completions.create(**asked).choices[0].text


def test_logprobs_equal_log_softmax_of_logits(model, client) -> None:
    result = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=8, temperature=0, logprobs=3)
    tokens = greedy(model, list(PROMPT.encode()), 8)
    with torch.inference_mode():
        logits = model(torch.tensor([list(PROMPT.encode()) + tokens])).logits[0, len(PROMPT) - 1 : -1]
    wanted = logits.log_softmax(-1)
    logprobs = result.choices[0].logprobs
    assert logprobs.token_logprobs == pytest.approx(wanted[range(8), tokens].tolist(), abs=1e-4)
    for row, top in zip(wanted, logprobs.top_logprobs, strict=True):
        assert sorted(top.values()) == pytest.approx(sorted(row.topk(3).values.tolist()), abs=1e-4)
    assert logprobs.text_offset[0] == 0 and len(logprobs.tokens) == 8


REFUSED = [
    ({"prompt": 1}, "prompt", "must be text, a list of texts"),
    ({"prompt": [VOCABULARY]}, "prompt", "is not a token ID"),
    ({"prompt": ""}, "prompt", "no tokens"),
    ({"prompt": ["a"] * 200}, "prompt", "at most 128 answers"),
    ({"max_tokens": 600}, "max_tokens", "context length is 512"),
    ({"max_tokens": "5"}, "max_tokens", "valid integer"),
    ({"temperature": 3}, "temperature", "less than or equal to 2"),
    ({"stop": ["a"] * 5}, "stop", "at most 4 texts"),
    ({"echo": True}, "echo", "echo is not supported"),
    ({"n": 99}, "n", "less than or equal to 16"),
]


@pytest.mark.parametrize(("given", "param", "reason"), REFUSED, ids=lambda value: str(value)[:20])
def test_invalid_field_is_400_with_its_name(client, given, param, reason) -> None:
    with pytest.raises(openai.BadRequestError, match=reason) as caught:
        client.completions.create(**{"model": NAME, "prompt": "a"} | given)
    assert caught.value.param == param and caught.value.type == "invalid_request_error"


def test_errors_have_status_and_code(endpoint, client) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="other", prompt="a")
    assert caught.value.code == "model_not_found"
    assert client.models.list().data[0].id == client.models.retrieve(NAME).id == NAME
    with openai.OpenAI(**endpoint.options | {"api_key": "wrong"}) as other, pytest.raises(openai.AuthenticationError):
        other.models.list()
    for method, path, status in (("GET", "/v1/completions", 405), ("POST", "/v1/nothing", 404), ("GET", "/v1/x", 404)):
        result, body = endpoint.request(method, path)
        assert result == status and body["error"]["type"] == "invalid_request_error"
    result, body = endpoint.request("POST", "/v1/completions", b"x" * (5 << 20))
    assert result == 413 and body["error"]["code"] == "body_too_large"
    assert endpoint.request("GET", "/metrics", key="wrong")[0] == 401
    assert endpoint.request("GET", "/health", key="wrong") == (200, {"status": "ok"})


def test_full_queue_is_429(spare) -> None:
    with running(spare, byte_tokenizer(), ServingConfig(max_queued_requests=1)) as endpoint:
        asked = {"model": NAME, "prompt": "a", "max_tokens": 2}
        result = list[int]()

        def ask() -> None:
            result.append(endpoint.request("POST", "/v1/completions", asked)[0])

        with endpoint.server._busy:  # no iteration runs
            waiting = threading.Thread(target=ask)
            waiting.start()
            while not endpoint.server._incoming:
                pass
            status, body = endpoint.request("POST", "/v1/completions", asked)
        waiting.join()
        assert result == [200] and (status, body["error"]["code"]) == (429, "queue_full")


def test_failed_request_is_500_and_others_continue(spare) -> None:
    with running(spare, byte_tokenizer()) as endpoint, client_of(endpoint) as client:
        forward = endpoint.server._rows.forward

        def failing(given, homes):  # type: ignore[no-untyped-def]
            if any(len(tokens) == 7 for tokens in given.values()):
                raise OSError("no space")
            return forward(given, homes)

        endpoint.server._rows.forward = failing  # type: ignore[method-assign]
        with pytest.raises(openai.InternalServerError, match="the request has failed: no space"):
            client.completions.create(model=NAME, prompt="a" * 7)
        with pytest.raises(openai.APIError, match="the request has failed: no space"):
            list(client.completions.create(model=NAME, prompt="a" * 7, stream=True))
        assert client.completions.create(model=NAME, prompt="a").usage.completion_tokens == 16


def test_closed_server_is_503(spare) -> None:
    with running(spare, byte_tokenizer()) as endpoint:
        endpoint.server.close()
        assert endpoint.request("GET", "/health")[0] == 503
        status, body = endpoint.request("POST", "/v1/completions", {"model": NAME, "prompt": "a"})
        assert (status, body["error"]["code"]) == (503, "server_closed")


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_frees_kv_within_one_iteration(spare, stream) -> None:
    """KV data is there at most after the iteration that runs when the disconnection is noticed."""
    with running(spare, byte_tokenizer()) as endpoint:
        server, left, cancelled = endpoint.server, list[int](), list[int]()
        step, cancel, begun = server._step, server.cancel, threading.Event()

        def counted() -> bool:
            done = step()
            left.append(len(server.kv.requests()))
            if len(left) > 5:
                begun.set()
            return done

        def noticed(handle, reason="cancelled") -> None:  # type: ignore[no-untyped-def]
            cancelled.append(len(left))
            cancel(handle, reason)

        server._step, server.cancel = counted, noticed  # type: ignore[method-assign]
        asked = {"model": NAME, "prompt": PROMPT, "max_tokens": 480, "stream": stream}
        with closing(http.client.HTTPConnection("127.0.0.1", endpoint.port)) as line:
            line.request("POST", "/v1/completions", json.dumps(asked), {"Authorization": "Bearer key"})
            assert begun.wait(HANG_S)
            closed = len(left)
        endpoint.wait_until_idle()
        assert cancelled and left[cancelled[0] + 1 :] == [0] * len(left[cancelled[0] + 1 :])
        assert left[-1] == 0 and len(left) < 480
        print(f"iterations from close to free: {left.index(0, closed) - closed}")
        text = endpoint.request("GET", "/metrics")[1]
        assert 'vcsd_requests_total{how="cancelled"} 1.0' in text and "vcsd_requests_served 0.0" in text


def malformed(draw: random.Random) -> tuple[str, bytes]:
    """Path and body of a request that must be refused."""
    chat = draw.random() < 0.5
    good: dict[str, Any] = {"model": NAME, "max_tokens": 4}
    good |= {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    wrong = draw.choice([[], {}, {"a": [1]}, [[[]]], "\0" * 3, -(10**30), 10**400, 1.5e300, True, [True]])
    match draw.randrange(7):
        case 0:
            return path, b"\xff" + draw.randbytes(draw.randrange(2000))
        case 1:
            text = json.dumps(good).encode()
            return path, text[: draw.randrange(len(text))]
        case 2:
            del good[draw.choice([name for name in good if name != "max_tokens"])]
        case 3:
            good[draw.choice(["temperature", "top_p", "seed"])] = draw.choice([[], {}, "1", 10**400, -(10**30), [1.0]])
        case 4:
            good[draw.choice(["max_tokens", "stream", "model", "stop"])] = {"a": wrong}
        case 5:
            depth = draw.choice([5_000, 100_000])
            return path, json.dumps(good).encode()[:-1] + b', "more": ' + draw.choice([b"[", b'{"a":']) * depth
        case _:
            good["messages" if chat else "prompt"] = draw.choice(
                [None, 5, {}, [], [[]], [None], [{"role": 1}], [-1], [1.5]]
            )
    return path, json.dumps(good).encode()


def test_1000_malformed_requests_are_4xx_leave_nothing(endpoint, client) -> None:
    draw = random.Random(7)
    for number in range(MALFORMED):
        path, body = malformed(draw)
        status, said = endpoint.request("POST", path, body)
        assert 400 <= status < 500, (number, body[:300], said)
        assert set(said["error"]) == {"message", "type", "param", "code"} and len(said["error"]["message"]) < 1000
    assert endpoint.holds_nothing()
    assert client.completions.create(model=NAME, prompt="a").usage.completion_tokens == 16


def test_metrics_count_requests(endpoint, client) -> None:
    client.completions.create(model=NAME, prompt="a", max_tokens=3)
    _, text = endpoint.request("GET", "/metrics")
    assert "vcsd_ttft_seconds_bucket" in text and 'vcsd_requests_total{how="length"}' in text
