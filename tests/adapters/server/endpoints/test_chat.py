"""`/v1/chat/completions`, asked by the openai SDK over HTTP, beside the same requests in process."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

import graftlm as gl

ASK = [{"role": "user", "content": "Mara is 20 years old and lives in Oslo. How old is Mara?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def runtime() -> gl.Runtime:
    return gl.Runtime.shared("sprout", dtype="float32")


def ask(client: openai.OpenAI, **given: Any) -> Any:
    body: dict[str, Any] = {"model": "sprout", "messages": ASK, "temperature": 0, "max_tokens": 24, **given}
    return client.chat.completions.create(**body)


def joined(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    return "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices if c.index == index)


def test_an_answer_is_the_one_of_the_runtime_in_process(client: openai.OpenAI, runtime: gl.Runtime) -> None:
    answer, own = ask(client), runtime.generate(ASK, temperature=0, max_tokens=24)
    assert answer.choices[0].message.content == own.text
    assert answer.choices[0].finish_reason == own.finish_reason
    assert answer.usage.prompt_tokens == own.usage.prompt_tokens
    assert answer.usage.completion_tokens == own.usage.completion_tokens


def test_a_stream_says_the_same_in_pieces_of_one_id(client: openai.OpenAI) -> None:
    whole = ask(client)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert joined(chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
    assert len(chunks) >= 4  # pieces that a busy loop has not sent yet go out together


def test_each_chunk_counts_tokens_where_that_is_asked_as_guidellm_does(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    whole = ask(client).usage
    *chunks, last = ask(client, stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[-1], last.usage.completion_tokens) == (whole.completion_tokens, whole.completion_tokens)
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {whole.prompt_tokens}


def test_a_repeated_prompt_comes_from_the_cache_and_usage_says_so(client: openai.OpenAI) -> None:
    ask(client)
    usage = ask(client).usage
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


def test_n_answers_are_choices_in_order_and_seeds_repeat_them(client: openai.OpenAI) -> None:
    first, second = (ask(client, n=3, temperature=1.5, seed=7) for _ in range(2))
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert [c.message.content for c in first.choices] == [c.message.content for c in second.choices]
    chunks = list(ask(client, n=3, temperature=1.5, seed=7, stream=True))
    assert [joined(chunks, i) for i in range(3)] == [c.message.content for c in first.choices]


def test_logprobs_have_the_form_of_the_api(client: openai.OpenAI) -> None:
    answer = ask(client, logprobs=True, top_logprobs=3, max_tokens=4)
    tokens = answer.choices[0].logprobs.content
    assert "".join(token.token for token in tokens).strip() == answer.choices[0].message.content
    assert all(token.top_logprobs[0].logprob == token.logprob for token in tokens)  # greedy
    assert all(len(token.top_logprobs) == 3 for token in tokens)
    chunks = list(ask(client, logprobs=True, top_logprobs=3, max_tokens=4, stream=True))
    streamed = [t for chunk in chunks for c in chunk.choices if c.logprobs for t in c.logprobs.content]
    assert [t.token for t in streamed] == [t.token for t in tokens]


def test_a_stop_string_ends_the_text_and_is_named(client: openai.OpenAI) -> None:
    whole = ask(client).choices[0].message.content
    choice = ask(client, stop=[whole[1]]).choices[0]
    assert choice.message.content == whole[:1]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", whole[1])


def test_a_stream_holds_whole_characters_only(client: openai.OpenAI) -> None:
    chunks = list(ask(client, extra_body={"regex": "(🌍|é|中){12}"}, stream=True, temperature=1, max_tokens=200))
    assert "\ufffd" not in joined(chunks)
    assert len(joined(chunks)) == 12


@pytest.mark.parametrize(
    "given",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}},
        {"response_format": {"type": "json_schema", "name": "n", "strict": True, "schema": {"type": "object"}}},
        {"extra_body": {"structured_outputs": {"json": {"type": "object"}}}},
        {"extra_body": {"guided_json": '{"type": "object"}'}},
        {"extra_body": {"json_schema": {"type": "object"}}},
    ],
)
def test_a_json_constraint_holds_under_each_of_its_names(client: openai.OpenAI, given: dict[str, Any]) -> None:
    assert isinstance(json.loads(ask(client, **given).choices[0].message.content), dict)


def test_a_schema_beside_json_object_is_kept(client: openai.OpenAI) -> None:
    given = {"response_format": {"type": "json_object", "schema": {"enum": [{"a": 12}]}}}
    assert ask(client, **given).choices[0].message.content == '{"a":12}'


@pytest.mark.parametrize(
    "given",
    [
        {"structured_outputs": {"regex": "[0-9]{3}"}},
        {"guided_regex": "[0-9]{3}"},
        {"regex": "[0-9]{3}"},
        {"ebnf": "start: /[0-9]{3}/"},
        {"guided_grammar": "start: /[0-9]{3}/"},
        {"structured_outputs": {"choice": ["123", "456"]}},
        {"guided_choice": ["123", "456"]},
    ],
)
def test_a_text_constraint_holds_under_each_of_its_names(client: openai.OpenAI, given: dict[str, Any]) -> None:
    text = ask(client, extra_body=given).choices[0].message.content
    assert len(text) == 3
    assert text.isdigit()


def test_forced_tokens_are_counted(client: openai.OpenAI) -> None:
    usage = ask(client, extra_body={"regex": "the answer is known: [0-9]"}).usage
    assert usage.model_extra["graftlm"]["forced_tokens"] > 3


def test_a_forced_tool_call_is_valid_whole_and_streamed(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 60}
    choice = ask(client, **given).choices[0]
    (call,) = choice.message.tool_calls
    assert (call.function.name, choice.finish_reason, choice.message.content) == ("weather", "tool_calls", None)
    assert set(json.loads(call.function.arguments)) == {"city"}
    assert call.function.arguments == '{"city":"Oslo"}'  # as the model writes it
    deltas = [c.delta for chunk in ask(client, **given, stream=True) for c in chunk.choices]
    parts = [part for delta in deltas for part in delta.tool_calls or []]
    assert parts[0].function.name == "weather"
    assert parts[0].id is not None
    assert all(part.id is None for part in parts[1:])
    assert "".join(part.function.arguments for part in parts) == call.function.arguments


def test_a_named_tool_is_called_and_none_calls_nothing(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    choice = ask(client, tools=[WEATHER], tool_choice=named, max_tokens=60).choices[0]
    assert choice.message.tool_calls[0].function.name == "weather"
    assert ask(client, tools=[WEATHER], tool_choice="none").choices[0].message.tool_calls is None


def test_only_allowed_tools_are_called(client: openai.OpenAI) -> None:
    other = {"type": "function", "function": {"name": "news", "parameters": {"type": "object", "properties": {}}}}
    for name in ("weather", "news"):
        tools = [{"type": "function", "function": {"name": name}}]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools}}
        calls = ask(client, tools=[WEATHER, other], tool_choice=choice, max_tokens=60).choices[0].message.tool_calls
        assert {call.function.name for call in calls} == {name}


def test_a_final_assistant_message_is_continued(client: openai.OpenAI, runtime: gl.Runtime) -> None:
    messages = [*ASK, {"role": "assistant", "content": "Mara is"}]
    given = {"add_generation_prompt": False, "continue_final_message": True}
    text = ask(client, messages=messages, extra_body=given).choices[0].message.content
    prompt = runtime.tokenizer.render(messages, continue_final_message=True)
    assert text == runtime.generate(prompt, temperature=0, max_tokens=24).text


def test_parse_reads_a_pydantic_class(client: openai.OpenAI) -> None:
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    messages: Any = ASK
    answer = client.chat.completions.parse(model="sprout", messages=messages, response_format=Person, max_tokens=60)
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_bytes_of_a_part_of_a_character_used_to_be_those_of_the_mark_shown_for_it(client: openai.OpenAI) -> None:
    given = {"logprobs": True, "top_logprobs": 1, "max_tokens": 8, "extra_body": {"guided_regex": "👍"}}
    tokens = ask(client, **given).choices[0].logprobs.content
    assert bytes(byte for token in tokens for byte in token.bytes) == "👍".encode()
    assert all(token.top_logprobs[0].bytes == token.bytes for token in tokens if token.top_logprobs)
    chunks = list(ask(client, stream=True, **given))
    streamed = [t for chunk in chunks for c in chunk.choices if c.logprobs for t in c.logprobs.content]
    assert [token.bytes for token in streamed] == [token.bytes for token in tokens]
