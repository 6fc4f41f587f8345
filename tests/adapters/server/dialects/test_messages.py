"""`/v1/messages`, asked by the anthropic SDK over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.served import Served

ASK: list[Any] = [{"role": "user", "content": "Mara is 20 years old and lives in Oslo. How old is Mara?"}]
GREEDY = {"temperature": 0}
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture(scope="module")
def claude(server: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def ask(claude: anthropic.Anthropic, messages: list[Any] = ASK, **options: Any) -> Any:
    extra = {"temperature": 0, **options.pop("extra_body", {})}  # the SDK's current version has no such argument
    body: dict[str, Any] = {"model": "sprout", "messages": messages, "max_tokens": 48, **options}
    return claude.messages.create(**body, extra_body=extra)


def test_a_message_is_the_answer_of_chat_completions(claude: anthropic.Anthropic, client: openai.OpenAI) -> None:
    answer = ask(claude, system="Answer briefly.")
    messages: list[Any] = [{"role": "system", "content": "Answer briefly."}, *ASK]
    same = client.chat.completions.create(model="sprout", messages=messages, max_tokens=48, temperature=0)
    assert answer.content[0].text == same.choices[0].message.content
    assert answer.stop_reason == ("end_turn" if same.choices[0].finish_reason == "stop" else "max_tokens")
    assert same.usage is not None
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == same.usage.prompt_tokens
    assert answer.usage.output_tokens == same.usage.completion_tokens


def test_a_stream_is_accumulated_by_the_sdk(claude: anthropic.Anthropic) -> None:
    whole = ask(claude)
    with claude.messages.stream(model="sprout", messages=ASK, max_tokens=24, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text  # type: ignore[union-attr]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_a_stop_sequence_is_named(claude: anthropic.Anthropic) -> None:
    answer = ask(claude, max_tokens=60, stop_sequences=["20", "0"])
    assert (answer.stop_reason, answer.stop_sequence) in (("stop_sequence", "20"), ("stop_sequence", "0"))


def test_a_tool_is_called_and_its_result_read(claude: anthropic.Anthropic) -> None:
    turn = [{"role": "user", "content": "Weather in Oslo?"}]
    given: dict[str, Any] = {"tools": [WEATHER], "max_tokens": 60}
    first = ask(claude, turn, tool_choice={"type": "tool", "name": "weather"}, **given)
    (call,) = [block for block in first.content if block.type == "tool_use"]
    assert (first.stop_reason, call.name, set(call.input)) == ("tool_use", "weather", {"city"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sun"}]}
    turns = [*turn, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = ask(claude, turns, tool_choice={"type": "none"}, **given)
    assert second.content[0].type == "text"
    streamed = claude.messages.stream(
        model="sprout", messages=turn, extra_body=GREEDY, tool_choice={"type": "any"}, **given
    )
    with streamed as stream:
        (same,) = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    assert same.input == call.input


def test_a_tool_that_anthropics_servers_run_is_left_out_and_named(claude: anthropic.Anthropic) -> None:
    hosted: Any = {"type": "web_search_20250305", "name": "web_search"}
    managed = {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}
    given: dict[str, Any] = {"model": "sprout", "max_tokens": 60, "extra_body": managed, "messages": ASK}
    raw = claude.messages.with_raw_response.create(tools=[hosted, WEATHER], tool_choice={"type": "any"}, **given)
    assert raw.headers["x-ignored-fields"] == "tools[0].web_search_20250305, context_management"
    assert [block.name for block in raw.parse().content if block.type == "tool_use"] == ["weather"]


def test_the_assistants_last_turn_is_continued(claude: anthropic.Anthropic) -> None:
    begun = [*ASK, {"role": "assistant", "content": "Mara is"}]
    assert ask(claude, begun, max_tokens=4).content[0].text


def test_tokens_are_counted(claude: anthropic.Anthropic) -> None:
    counted = claude.messages.count_tokens(model="sprout", messages=ASK, system="Be brief.", tools=[WEATHER])  # type: ignore[list-item]
    usage = ask(claude, system="Be brief.", tools=[WEATHER]).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"tools": [{"type": "web_surf_20250305", "name": "web_surf"}]}, "web_surf"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "document"),
        ({"extra_body": {"temperature": -1}}, "temperature"),
        ({"extra_body": {"n": 2}}, "n"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_in_the_apis_form(
    claude: anthropic.Anthropic, given: dict[str, Any], named: str
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=named) as caught:
        ask(claude, given.pop("messages", ASK), **given)
    assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    with pytest.raises(anthropic.NotFoundError, match="no-model"):
        ask(claude, model="no-model")
