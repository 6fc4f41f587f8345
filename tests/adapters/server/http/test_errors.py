"""What is wrong with a request is said in OpenAI's form: a status, the field, and what to do."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.served import Served

CHAT: dict[str, Any] = {"model": "sprout", "messages": [{"role": "user", "content": "hello"}]}

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("given", "param", "part"),
    [
        ({"temprature": 1}, "temprature", "did you mean 'temperature'"),
        ({"temperature": -1}, "temperature", "must be 0"),
        ({"temperature": "warm"}, "temperature", "valid number"),
        ({"top_p": 0}, "top_p", "(0, 1]"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": None}, "messages", "missing"),
        ({"messages": "hi"}, "messages", "valid array"),
        ({"max_tokens": -2}, "max_tokens", "greater than or equal to -1"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "less than or equal to 20"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs=true"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema", "shema": {}}}, "response_format.shema", "mean 'schema'"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "jschema": {}}}},
            "response_format.json_schema.jschema",
            "mean 'schema'",
        ),
        ({"response_format": {"type": "text", "indent": 2}}, "response_format.indent", "known: type"),
        ({"regex": "a", "guided_choice": ["b"]}, "guided_choice", "both given"),
        ({"regex": "a(("}, "regex", "a(("),
        ({"stop_token_ids": [10**9]}, "stop_token_ids", "1,000,000,000"),
        ({"tool_choice": "required"}, "tool_choice", "none were given"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]}, None, "give a JSON schema"),
        ({"tools": [TOOL, {"type": "function", "function": {"name": "f"}}]}, "tools", "2 tools named 'f'"),
        ({"tools": [TOOL, TOOL], "tool_choice": "none", "stream": True}, "tools", "a name of its own"),
        ({"tools": [{"type": "function", "function": {"name": "f", "paramters": {}}}]}, "tools", "mean 'parameters'"),
        ({"guided_json": "{"}, "guided_json", "no JSON"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "no JSON"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn", "unknown"),
    ],
)
def test_a_bad_field_is_named(client: openai.OpenAI, given: dict[str, Any], param: str | None, part: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/chat/completions", cast_to=object, body={**CHAT, **given})
    assert part in str(caught.value)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_a_prompt_that_is_too_long_has_its_own_code(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "word " * 5000}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="the context is 4,096") as caught:
            client.chat.completions.create(model="sprout", messages=messages, stream=stream)
        assert caught.value.code == "context_length_exceeded"


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt-5' does not exist here; use sprout") as caught:
        client.post("/chat/completions", cast_to=object, body={**CHAT, "model": "gpt-5"})
    assert caught.value.code == "model_not_found"


def test_bodies_that_are_not_json_and_routes_that_are_none(server: Served) -> None:
    url = f"{server.url}/v1/chat/completions"
    broken = httpx.post(url, content=b'{"model": ', headers={"content-type": "application/json"})
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_json")
    bare = httpx.post(url, json=[])
    assert (bare.status_code, bare.json()["error"]["message"]) == (400, "the body is []: Input should be an object")
    form = httpx.post(url, data={"a": "b"})
    assert (form.status_code, form.json()["error"]["code"]) == (415, "unsupported_media_type")
    long = httpx.post(url, content=b" " * (33 << 20), headers={"content-type": "application/json"})
    assert (long.status_code, long.json()["error"]["code"]) == (413, "body_too_large")
    assert httpx.get(url).status_code == 405
    assert httpx.get(f"{server.url}/v1/nothing").json()["error"]["code"] == "not_found"


def test_a_request_id_comes_back(server: Served) -> None:
    given = httpx.get(f"{server.url}/v1/models", headers={"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    assert len(httpx.get(f"{server.url}/v1/models").headers["x-request-id"]) == 24


@pytest.mark.parametrize(
    "given",
    [
        {
            "stream": None,
            "skip_special_tokens": None,
            "return_token_ids": None,
            "add_generation_prompt": None,
            "n": None,
        },
        {"logprobs": False, "top_logprobs": 0},
        {"max_tokens": 3, "max_completion_tokens": 5},
        {"max_tokens": -1, "max_completion_tokens": 3},
        {"structured_outputs": {"regex": "[ab]+", "json": None, "disable_any_whitespace": None}},
        {"stream_options": None, "tools": None, "tool_choice": None},
    ],
)
def test_what_asks_for_nothing_is_taken(client: openai.OpenAI, given: dict[str, Any]) -> None:
    answer: Any = client.post("/chat/completions", cast_to=object, body={**CHAT, "max_tokens": 3, **given})
    assert answer["usage"]["completion_tokens"] <= 3


def test_nulls_of_a_completion_are_absent(client: openai.OpenAI) -> None:
    body = {"prompt": "The sea", "max_tokens": 2, "echo": None, "stream": None, "logprobs": None, "suffix": None}
    answer: Any = client.post("/completions", cast_to=object, body=body)
    assert answer["usage"]["completion_tokens"] == 2


UNIQUE: dict[str, Any] = {"type": "object", "properties": {"ids": {"type": "array", "uniqueItems": True}}}


def test_a_keyword_of_a_tool_that_no_mask_keeps_is_checked(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "pick", "parameters": UNIQUE}}
    answer = client.chat.completions.create(
        model="sprout", messages=[{"role": "user", "content": "hello"}], tools=[tool], max_tokens=40, temperature=0
    )
    assert answer.choices


def test_the_tool_at_fault_is_named(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "pick", "parameters": {"properties": {"a": {"type": "x"}}}}}
    with pytest.raises(openai.BadRequestError, match="parameters of 'pick'"):
        client.chat.completions.create(
            model="sprout", messages=[{"role": "user", "content": "hello"}], tools=[tool], max_tokens=40
        )


def test_an_unknown_path_lists_the_known_ones(server: Served) -> None:
    message = httpx.get(f"{server.url}/v1/nothing").json()["error"]["message"]
    assert "/v1/chat/completions" in message


WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALLED = {**CHAT, "messages": [{"role": "user", "content": "Mara is a baker. What is the weather in Rome?"}]}
NAMED = {"name": "weather", "description": "the weather of a city"}
FUNCTION = {"type": "function", "function": {**NAMED, "parameters": WEATHER}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": WEATHER}}


@pytest.mark.parametrize(
    ("path", "body", "limit"),
    [
        ("/v1/chat/completions", CALLED | {"response_format": FORMAT, "max_tokens": 2}, "max_tokens"),
        ("/v1/chat/completions", CALLED | {"tools": [FUNCTION], "max_tokens": 2}, "max_tokens"),
        ("/v1/chat/completions", CALLED | {"tools": [FUNCTION], "max_completion_tokens": 2}, "max_completion_tokens"),
        ("/v1/chat/completions", CALLED | {"tools": [FUNCTION], "max_tokens": 2, "stream": True}, "max_tokens"),
        ("/v1/completions", {"prompt": "x", "json_schema": WEATHER, "max_tokens": 2}, "max_tokens"),
        (
            "/v1/responses",
            {
                "input": CALLED["messages"],
                "tools": [{"type": "function", **FUNCTION["function"]}],
                "max_output_tokens": 2,
            },
            "max_output_tokens",
        ),
        (
            "/v1/messages",
            {"messages": CALLED["messages"], "tools": [{**NAMED, "input_schema": WEATHER}], "max_tokens": 2},
            "max_tokens",
        ),
        (
            "/api/chat",
            {"messages": CALLED["messages"], "tools": [FUNCTION], "options": {"num_predict": 2}, "stream": False},
            "options.num_predict",
        ),
    ],
)
def test_tokens_that_allow_no_valid_answer_are_refused_alike_everywhere(
    server: Served, path: str, body: dict[str, Any], limit: str
) -> None:
    """An answer under a schema and one with tools used to differ: the second was empty, with status 200."""
    greedy = {"options": {**body["options"], "temperature": 0}} if "options" in body else {"temperature": 0}
    response = httpx.post(f"{server.url}{path}", json={"model": "sprout", **body, **greedy}, timeout=60)
    assert response.status_code == 400
    assert f"{limit} is 2, but " in response.text
    assert f"raise {limit}" in response.text
