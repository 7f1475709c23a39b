"""Requests of the OpenAI API: defaults, ignored fields, and the field that an error names."""

from __future__ import annotations

import json

import pytest

from vcsd.endpoint.protocol import ApiError, ChatRequest, CompletionRequest, parse

COMPLETION = {"model": "m", "prompt": "x"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x", "name": "ignored"}]}


def completion(**given: object) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps(COMPLETION | given).encode())


def chat(**given: object) -> ChatRequest:
    return parse(ChatRequest, json.dumps(CHAT | given).encode())


def test_defaults_are_those_of_openai() -> None:
    (sampling,) = completion(user="ignored", metadata={"a": 1}).sampling()
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.logprobs) == (1.0, 1.0, 0, None)
    assert (
        completion(temperature=None, stop=None).stops == [] and completion(temperature=0).sampling()[0].temperature == 0
    )
    assert completion().sampling()[0].seed != completion().sampling()[0].seed


def test_prompt_has_four_forms() -> None:
    forms = "x", ["x", "y"], [1, 2], [[1], [2, 3]]
    assert [completion(prompt=form).prompts for form in forms] == [["x"], ["x", "y"], [[1, 2]], [[1], [2, 3]]]


def test_choices_have_seeds_in_order() -> None:
    assert [each.seed for each in completion(seed=7, n=3).sampling()] == [7, 8, 9]
    assert completion(seed=-1).sampling()[0].seed == (1 << 63) - 1


def test_logprobs_of_both_apis() -> None:
    assert completion(logprobs=3).sampling()[0].logprobs == 3
    assert chat(logprobs=True).sampling()[0].logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).sampling()[0].logprobs == 4
    assert chat(logprobs=False).sampling()[0].logprobs is None
    with pytest.raises(ApiError, match="set logprobs to true"):
        chat(top_logprobs=4)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": "1"}, "top_p"),
        ({"n": 1.5}, "n"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x" * 1001]}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"stream_options": []}, "stream_options"),
    ],
)
def test_wrong_field_is_named(given, param) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**given)
    assert (caught.value.status, caught.value.param) == (400, param) and param in str(caught.value)


def test_known_fields_without_effect_are_accepted() -> None:
    completion(echo=False, best_of=1, logit_bias={}, presence_penalty=0, frequency_penalty=0.0)
    chat(tools=[], response_format={"type": "text"}, tool_choice="none")
    with pytest.raises(ApiError, match="tools is not supported: leave it out"):
        chat(tools=[{"type": "function"}])


def test_error_has_form_of_openai() -> None:
    body = ApiError(429, "later", code="queue_full").body()["error"]
    assert body == {"message": "later", "type": "rate_limit_error", "param": None, "code": "queue_full"}
    assert ApiError(500, "x").body()["error"]["type"] == "server_error"
