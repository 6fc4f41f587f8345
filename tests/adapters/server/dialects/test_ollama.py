"""Ollama's API, asked by the ollama SDK over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import ollama
import openai
import pytest

from tests.served import Served

ASK: list[Any] = [{"role": "user", "content": "Mara is 20 years old and lives in Oslo. How old is Mara?"}]
OPTIONS = {"temperature": 0, "num_predict": 24, "num_ctx": 4096}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


@pytest.fixture(scope="module")
def local(server: Served) -> Iterator[ollama.Client]:
    with ollama.Client(server.url) as client:
        yield client


def test_a_chat_is_the_answer_of_chat_completions(local: ollama.Client, client: openai.OpenAI) -> None:
    answer = local.chat("sprout:latest", ASK, options=OPTIONS)
    same = client.chat.completions.create(model="sprout", messages=ASK, max_tokens=24, temperature=0)
    assert answer.message.content == same.choices[0].message.content
    assert answer.done_reason == same.choices[0].finish_reason
    assert same.usage is not None
    assert (answer.prompt_eval_count, answer.eval_count) == (same.usage.prompt_tokens, same.usage.completion_tokens)


def test_a_stream_says_the_same(local: ollama.Client) -> None:
    whole = local.chat("sprout", ASK, options=OPTIONS).message.content
    parts = list(local.chat("sprout", ASK, options=OPTIONS, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    generated = local.generate("sprout", ASK[0]["content"], options=OPTIONS)
    assert generated.response == whole


def test_a_schema_is_kept(local: ollama.Client) -> None:
    answer = local.chat("sprout", ASK, format=PERSON, options={**OPTIONS, "num_predict": 60})
    assert set(json.loads(answer.message.content or "")) == {"name", "age"}


def test_a_tool_is_called_streamed_and_not_and_its_result_read(local: ollama.Client) -> None:
    turn: list[Any] = [{"role": "user", "content": "Call weather for Oslo."}]
    options = {**OPTIONS, "num_predict": 60}
    first = local.chat("sprout", turn, tools=[WEATHER], options=options)
    parts = list(local.chat("sprout", turn, tools=[WEATHER], options=options, stream=True))
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    whole = list(first.message.tool_calls or ())
    assert [call.function for call in calls] == [call.function for call in whole]
    assert [call.function.name for call in whole] in ([], ["weather"])
    given: list[Any] = [{"function": {"name": "weather", "arguments": {"city": "Oslo"}}}]
    turns = [*turn, {"role": "assistant", "content": "", "tool_calls": given}]
    result: Any = {"role": "tool", "tool_name": "weather", "content": "sun"}
    assert local.chat("sprout", [*turns, result], tools=[WEATHER], options=OPTIONS).done


def test_the_model_is_described(local: ollama.Client) -> None:
    (card,) = local.list().models
    assert card.model == "sprout"
    shown = local.show("sprout")
    assert shown.modelinfo is not None
    length = shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"]
    assert length > 0
    assert "tools" in (shown.capabilities or ())
    assert local.generate("sprout").done_reason == "load"


@pytest.mark.parametrize(
    ("given", "named"), [({"options": {"mirostat": 1}}, "mirostat"), ({"options": {"temperature": -1}}, "temperature")]
)
def test_a_request_that_cannot_be_served_is_refused_in_the_apis_form(
    local: ollama.Client, given: dict[str, Any], named: str
) -> None:
    with pytest.raises(ollama.ResponseError, match=named) as caught:
        local.chat("sprout", ASK, **given)
    assert caught.value.status_code == 400
