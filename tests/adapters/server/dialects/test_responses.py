"""`/v1/responses`, asked by the openai SDK over HTTP."""

from __future__ import annotations

import json
import time
from typing import Any

import openai
import pytest

from graftlm.adapters.server.dialects.response_store import ResponseStore, Stored
from graftlm.adapters.server.http.errors import ApiError

ASK = "Mara is 20 years old and lives in Oslo. How old is Mara?"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def ask(client: openai.OpenAI, given: Any = ASK, **options: Any) -> Any:
    body: dict[str, Any] = {"model": "sprout", "input": given, "temperature": 0, "max_output_tokens": 24, **options}
    return client.responses.create(**body)


def chat(client: openai.OpenAI, messages: list[Any], **options: Any) -> Any:
    body: dict[str, Any] = {"model": "sprout", "messages": messages, "temperature": 0, "max_tokens": 24, **options}
    return client.chat.completions.create(**body)


def test_a_response_is_the_answer_of_chat_completions(client: openai.OpenAI) -> None:
    answer = ask(client, instructions="Answer briefly.")
    same = chat(client, [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": ASK}])
    assert answer.output_text == same.choices[0].message.content
    assert answer.status == ("completed" if same.choices[0].finish_reason == "stop" else "incomplete")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (
        same.usage.prompt_tokens,
        same.usage.completion_tokens,
    )
    assert answer.instructions == "Answer briefly."


def test_a_response_that_max_output_tokens_cuts_is_incomplete(client: openai.OpenAI) -> None:
    answer = ask(client, "Count from one to one hundred.", max_output_tokens=2)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"


def test_a_stream_says_the_same_in_numbered_events(client: openai.OpenAI) -> None:
    whole = ask(client)
    events = list(ask(client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [events[0].type, events[1].type] == ["response.created", "response.in_progress"]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    last = events[-1].response
    assert last.output_text == whole.output_text
    assert last.usage.total_tokens == whole.usage.total_tokens
    order = [event.type for event in events]
    for name in ("output_item.added", "content_part.added", "output_text.done", "content_part.done"):
        assert order.count(f"response.{name}") == 1


def test_the_sdk_accumulates_a_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(model="sprout", input=ASK, temperature=0, max_output_tokens=24) as stream:
        final = stream.get_final_response()
    assert final.output_text == ask(client).output_text


def test_a_schema_is_kept(client: openai.OpenAI) -> None:
    answer = ask(client, max_output_tokens=60, text={"format": {"type": "json_schema", "name": "p", "schema": PERSON}})
    assert set(json.loads(answer.output_text)) == {"name", "age"}


def test_a_tool_is_called_and_its_output_read_in_the_next_turn(client: openai.OpenAI) -> None:
    first = ask(client, "Weather in Oslo?", tools=[WEATHER], tool_choice="required", max_output_tokens=60)
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert set(json.loads(call.arguments)) == {"city"}
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    second = ask(client, [output], previous_response_id=first.id, tools=[WEATHER], tool_choice="none")
    by_hand = ask(
        client, [{"role": "user", "content": "Weather in Oslo?"}, call, output], tools=[WEATHER], tool_choice="none"
    )
    assert second.output_text == by_hand.output_text
    assert second.usage.input_tokens == by_hand.usage.input_tokens > first.usage.input_tokens


def test_the_tools_of_coding_agents_are_called_in_their_own_form_and_hosted_ones_left_out(
    client: openai.OpenAI,
) -> None:
    inside = {"type": "namespace", "name": "sky", "description": "of the sky", "tools": [WEATHER]}
    given: dict[str, Any] = {"tool_choice": "required", "max_output_tokens": 60}
    tools: list[Any] = [inside, {"type": "web_search", "external_web_access": False}]
    body = {"client_metadata": {"agent": "one"}}
    asked: dict[str, Any] = {"model": "sprout", "input": "Weather in Oslo?", "tools": tools, "extra_body": body}
    raw = client.responses.with_raw_response.create(**asked, **given)
    assert raw.headers["x-ignored-fields"] == "tools[1].web_search"
    response: Any = raw.parse()
    (call,) = response.output
    assert (call.type, call.namespace, call.name) == ("function_call", "sky", "weather")
    assert [tool.type for tool in response.tools] == ["namespace"]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    assert ask(client, [output], previous_response_id=response.id, tools=tools).output_text

    tools = [{"type": "custom", "name": "shell", "description": "runs a command"}]
    events = list(ask(client, "List the files.", stream=True, tools=tools, **given))
    (done,) = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    (custom,) = events[-1].response.output
    assert (custom.type, custom.name, custom.input) == ("custom_tool_call", "shell", done.input)
    output = {"type": "custom_tool_call_output", "call_id": custom.call_id, "output": "a.txt"}
    assert ask(client, [{"role": "user", "content": "List the files."}, custom, output], tools=tools).output_text


def test_a_streamed_call_arrives_in_pieces(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "required", "max_output_tokens": 60}
    events = list(ask(client, "Weather in Oslo?", stream=True, **given))
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert "".join(pieces) == done.arguments
    assert events[-1].response.output[0].arguments == done.arguments


def test_a_conversation_goes_on_without_its_instructions(client: openai.OpenAI) -> None:
    first = ask(client, instructions="Answer briefly.")
    second = ask(client, "And where does she live?", previous_response_id=first.id)
    messages = [{"role": "user", "content": ASK}, {"role": "assistant", "content": first.output_text}]
    same = chat(client, [*messages, {"role": "user", "content": "And where does she live?"}])
    assert second.output_text == same.choices[0].message.content


def test_a_stored_response_is_found_until_it_is_deleted(client: openai.OpenAI) -> None:
    made = ask(client)
    assert client.responses.retrieve(made.id).output_text == made.output_text
    (item,) = client.responses.input_items.list(made.id).data
    assert item.content == ASK  # type: ignore[union-attr]
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError, match="was dropped"):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        ask(client, previous_response_id=ask(client, store=False).id)


def test_a_background_response_is_polled_and_one_is_cancelled(client: openai.OpenAI) -> None:
    made = ask(client, background=True)
    assert made.status == "queued"
    while (now := client.responses.retrieve(made.id)).status == "queued":
        time.sleep(0.02)
    assert now.output_text == ask(client).output_text
    long = ask(client, "Tell a long story.", background=True, max_output_tokens=3000)
    assert client.responses.cancel(long.id).status == "cancelled"
    assert client.responses.retrieve(long.id).status == "cancelled"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"tools": [{"type": "websearch"}]}, "websearch"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "does not run"),
        ({"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar"}}]}, "format"),
        ({"input": [{"type": "computer_call"}]}, "computer_call"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input_file"),
        ({"temperature": -1}, "temperature"),
        ({"extra_body": {"max_tokens": 3}}, "max_tokens"),
        ({"previous_response_id": "resp_none"}, "resp_none"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_by_name(
    client: openai.OpenAI, given: dict[str, Any], named: str
) -> None:
    with pytest.raises(openai.APIStatusError, match=named):
        ask(client, given.pop("input", ASK), **given)


def test_the_store_is_bounded_and_keeps_callers_apart() -> None:
    store = ResponseStore(max_responses=3, max_bytes=10_000)
    for number in range(5):
        store.put(f"r{number}", Stored("a", {"id": number}, []))
    assert len(store) == 3
    with pytest.raises(ApiError):
        store.get("r1", "a")
    with pytest.raises(ApiError):
        store.get("r4", "b")
    store.put("large", Stored("a", {"text": "x" * 9_990}, []))
    assert store.num_bytes <= 10_000
