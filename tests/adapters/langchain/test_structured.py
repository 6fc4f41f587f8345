from __future__ import annotations

import asyncio
import enum
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Literal, TypedDict

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.exceptions import ModelInvalidRequestError
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_tests.utils import stream_lifecycle
from pydantic import BaseModel, Field

from graftlm.adapters.langchain import ChatGraftLM
from graftlm.core.errors import GraftError
from graftlm.core.runtime import Runtime
from tests.models import byte_tokenizer, tiny_model


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Place(BaseModel):
    city: str = Field(max_length=8)
    zip: int


class Ticket(BaseModel):
    """A support ticket."""

    label: Literal["bug", "question"]
    colour: Colour
    urgent: bool
    place: Place
    tags: list[Literal["a", "b"]] = Field(max_length=3)
    note: str | None = None


class Review(TypedDict):
    """A review."""

    stars: int
    good: bool


class Branch(BaseModel):
    """A part of a tree."""

    name: str = Field(max_length=2)
    price: Decimal = Field(max_digits=3, decimal_places=1)
    parts: list[Branch] = Field(max_length=2)


DICT = {
    "title": "Point",
    "description": "A point.",
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "number"}},
    "required": ["x", "y"],
}


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def shout(text: Literal["hey", "ho"]) -> str:
    """Say it loudly."""
    return text.upper()


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with Runtime(tiny_model(max_position_embeddings=16384), tokenizer=byte_tokenizer()) as runtime:
        yield runtime


@pytest.fixture
def llm(runtime: Runtime) -> ChatGraftLM:
    runtime.clear_cache()
    runtime.reset_stats()
    return ChatGraftLM(runtime=runtime, temperature=1.0, max_tokens=150)


# -- structured output -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_random_weights_give_valid_objects_every_time(llm: ChatGraftLM, method: Any) -> None:
    tickets = llm.with_structured_output(Ticket, method=method, max_tokens=400).batch([f"{i}" for i in range(67)])
    assert {type(ticket) for ticket in tickets} == {Ticket}
    assert len({str(ticket) for ticket in tickets}) == 67
    assert llm.runtime_for().stats().forced_tokens > 67 * 30
    assert llm.runtime_for().stats().largest_batch >= 64  # max_batch


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_class_that_contains_itself_is_kept_all_the_way_down(llm: ChatGraftLM, method: Any) -> None:
    for seed in range(6):
        tree = llm.with_structured_output(Branch, method=method).invoke("grow", temperature=1.5, seed=seed)
        assert isinstance(tree, Branch)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_schema_that_is_a_reference_is_kept(llm: ChatGraftLM, method: Any) -> None:
    found = llm.with_structured_output(Branch.model_json_schema(), method=method).invoke("grow", max_tokens=300)
    assert set(found) == {"name", "price", "parts"}


def test_arguments_of_a_tool_may_contain_themselves(llm: ChatGraftLM) -> None:
    @tool
    def plant(branch: Branch) -> str:
        """Plant it."""
        return branch.name

    answer = llm.bind_tools([plant], tool_choice="any").invoke("grow", temperature=1.5, seed=1)
    (call,) = answer.tool_calls
    assert plant.invoke(call["args"]) == call["args"]["branch"]["name"]


def test_a_response_format_of_openai_is_a_schema(llm: ChatGraftLM) -> None:
    inner = {"name": "point", "schema": {name: value for name, value in DICT.items() if name != "title"}}
    for schema in (inner, {"type": "json_schema", "json_schema": inner}):
        assert set(llm.with_structured_output(schema).invoke("Where?")) == {"x", "y"}


def test_typed_dicts_and_schemas_give_dicts(llm: ChatGraftLM) -> None:
    review = llm.with_structured_output(Review).invoke("rate it")
    assert set(review) == {"stars", "good"} and isinstance(review["stars"], int)
    point = llm.with_structured_output(DICT, method="function_calling").invoke("where")
    assert set(point) == {"x", "y"}
    nameless = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    assert set(llm.with_structured_output(nameless).invoke("fine?")) == {"ok"}


def test_include_raw_gives_all_three_and_still_batches(llm: ChatGraftLM) -> None:
    results = llm.with_structured_output(Review, include_raw=True).batch([f"{i}" for i in range(32)])
    assert llm.runtime_for().stats().largest_batch == 32
    for result in results:
        assert isinstance(result["raw"], AIMessage) and result["parsing_error"] is None
        assert set(result["parsed"]) == {"stars", "good"}


def test_include_raw_shows_what_a_validator_of_the_class_refuses(llm: ChatGraftLM) -> None:
    class Never(BaseModel):
        """Cannot be satisfied."""

        n: int

        def model_post_init(self, context: Any) -> None:
            raise ValueError("never")

    result = asyncio.run(llm.with_structured_output(Never, include_raw=True).ainvoke("x"))
    assert result["parsed"] is None and "never" in str(result["parsing_error"])
    assert result["raw"].content.startswith('{"n":')


def test_a_short_budget_ends_the_json_instead_of_cutting_it(llm: ChatGraftLM) -> None:
    point = llm.with_structured_output(DICT, max_tokens=20).invoke("where")
    assert set(point) == {"x", "y"}


def test_a_budget_below_the_shortest_object_raises(llm: ChatGraftLM) -> None:
    with pytest.raises(GraftError, match="raise max_tokens"):
        llm.with_structured_output(DICT, max_tokens=5).invoke("where")


def test_streaming_gives_growing_dicts_and_the_whole_object_last(llm: ChatGraftLM) -> None:
    *partial, last = llm.with_structured_output(DICT).stream("where")
    assert partial and all(set(p) <= {"x", "y"} for p in partial)
    assert set(last) == {"x", "y"}
    assert isinstance(list(llm.with_structured_output(Ticket).stream("x"))[-1], Ticket)


def test_native_constraints_may_be_bound(llm: ChatGraftLM) -> None:
    assert llm.bind(choices=["left", "right"]).invoke("which").content in ("left", "right")
    answers = llm.bind(regex=r"[a-c]{3}").batch(["a", "b"])
    assert all(len(str(a.content)) == 3 for a in answers)


def test_json_object_mode_gives_some_json_object(llm: ChatGraftLM) -> None:
    answer = llm.bind(response_format={"type": "json_object"}, max_tokens=60).invoke("x")
    assert str(answer.content).startswith("{") and str(answer.content).endswith("}")


def test_a_schema_that_cannot_be_kept_names_the_keyword(llm: ChatGraftLM) -> None:
    schema = {"title": "A", "type": "object", "properties": {"x": {"type": "string", "pattern": r"^(.)\1"}}}
    with pytest.raises(ModelInvalidRequestError, match="pattern"):
        llm.with_structured_output(schema).invoke("x")


def test_what_has_no_schema_and_an_unknown_method_raise(llm: ChatGraftLM) -> None:
    with pytest.raises(ModelInvalidRequestError, match="no JSON schema"):
        llm.with_structured_output(42)  # type: ignore[arg-type]
    with pytest.raises(ModelInvalidRequestError, match="is no object; give a pydantic class"):
        llm.with_structured_output(Colour)
    with pytest.raises(ValueError, match="use 'json_schema'"):
        llm.with_structured_output(Review, method="xml")  # type: ignore[arg-type]
    with pytest.raises(ModelInvalidRequestError, match="response_format is"):
        llm.invoke("x", response_format={"type": "yaml"})


# -- tools -------------------------------------------------------------------------------------------------------


def test_any_always_gives_valid_calls_with_ids_of_their_own(llm: ChatGraftLM) -> None:
    answers = llm.bind_tools([add, shout], tool_choice="any").batch([f"{i}" for i in range(20)])
    ids = [call["id"] for answer in answers for call in answer.tool_calls]
    assert len(ids) >= 20 and len(set(ids)) == len(ids)
    for answer in answers:
        assert answer.tool_calls and answer.response_metadata["finish_reason"] == "tool_calls"
        for call in answer.tool_calls:
            {"add": add, "shout": shout}[call["name"]].invoke(call["args"])


def test_a_named_tool_is_called_exactly_once(llm: ChatGraftLM) -> None:
    for answer in llm.bind_tools([add, shout], tool_choice="shout").batch(["a", "b", "c"]):
        (call,) = answer.tool_calls
        assert call["name"] == "shout" and call["args"]["text"] in ("hey", "ho")


def test_auto_gives_text_or_whole_calls(llm: ChatGraftLM) -> None:
    answers = llm.bind_tools([add, shout], tool_choice="auto", seed=3).batch([f"{i}" for i in range(20)])
    for answer in answers:
        assert bool(answer.tool_calls) == (answer.response_metadata["finish_reason"] == "tool_calls")
        assert not answer.invalid_tool_calls
    assert sum(bool(answer.tool_calls or answer.content) for answer in answers) > 10  # random weights may end at once


def test_a_choice_of_tools_without_tools_raises(llm: ChatGraftLM) -> None:
    with pytest.raises(ModelInvalidRequestError, match="tool_choice is 'any'.*none were given"):
        llm.invoke("hello", tool_choice="any")
    assert llm.invoke("hello", tool_choice="auto").tool_calls == []


def test_none_never_calls(llm: ChatGraftLM) -> None:
    answer = llm.bind_tools([add], tool_choice="none", seed=1).invoke("x", max_tokens=30)
    assert not answer.tool_calls and answer.content


def test_streamed_calls_equal_those_of_invoke(llm: ChatGraftLM) -> None:
    bound = llm.bind_tools([add], tool_choice="add", parallel_tool_calls=False)
    whole = bound.invoke("x", temperature=0)
    first, *rest = bound.stream("x", temperature=0)
    streamed: Any = sum(rest, first)
    assert len(rest) > 2 and sum(bool(c.tool_call_chunks) for c in rest) > 2
    assert [c["args"] for c in streamed.tool_calls] == [c["args"] for c in whole.tool_calls]
    assert streamed.response_metadata["finish_reason"] == "tool_calls"


def test_tools_and_a_response_format_give_a_call_or_the_object(llm: ChatGraftLM) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "Point", "schema": DICT}}
    bound = llm.bind_tools([shout], response_format=form)
    answers = bound.batch([f"{i}" for i in range(30)])
    assert all(bool(a.tool_calls) != str(a.content).startswith('{"x":') for a in answers)


def test_something_that_is_no_tool_raises(llm: ChatGraftLM) -> None:
    with pytest.raises(ModelInvalidRequestError, match="web_search_preview.*give"):
        llm.bind_tools([{"type": "web_search_preview"}])
    with pytest.raises(ModelInvalidRequestError, match="is no tool"):
        llm.bind_tools([42])  # type: ignore[list-item]
    with pytest.raises(ModelInvalidRequestError, match="name of a tool"):
        llm.bind_tools([add], tool_choice="subtract")


def test_an_agent_loop_computes_only_what_is_new_in_each_turn(llm: ChatGraftLM) -> None:
    bound = llm.bind_tools([add], tool_choice="add", seed=3)
    messages: list[Any] = [("system", "You add numbers, one call at a time. " * 20), ("human", "Go on.")]
    computed = []
    for _ in range(5):
        before = llm.runtime_for().stats()
        answer = bound.invoke(messages)
        after = llm.runtime_for().stats()
        computed.append((after.computed_tokens - before.computed_tokens) / (after.prompt_tokens - before.prompt_tokens))
        (call,) = answer.tool_calls
        messages += [answer, ToolMessage(str(add.invoke(call["args"])), tool_call_id=call["id"])]
    assert all(share < 0.2 for share in computed[1:]), computed


# -- agents and events -------------------------------------------------------------------------------------------


def test_create_agent_uses_native_structured_output_and_returns_the_object(llm: ChatGraftLM) -> None:
    agent = create_agent(llm, tools=[], response_format=Place)
    result = agent.invoke({"messages": [HumanMessage("where?")]})
    assert isinstance(result["structured_response"], Place)
    assert not any(isinstance(m, ToolMessage) for m in result["messages"])  # no detour over a tool


def test_an_agents_messages_can_be_streamed(llm: ChatGraftLM) -> None:
    agent = create_agent(llm, tools=[], response_format=Place)
    pieces = [chunk for chunk, _ in agent.stream({"messages": [HumanMessage("x")]}, stream_mode="messages")]
    assert len(pieces) > 3
    assert sum(bool(getattr(piece, "usage_metadata", None)) for piece in pieces) == 1


def test_a_conversation_is_summarised_at_a_fraction_of_the_context(llm: ChatGraftLM) -> None:
    short = llm.model_copy(update={"max_tokens": 20})
    middleware = SummarizationMiddleware(short, trigger=("fraction", 0.04), keep=("messages", 1))
    agent = create_agent(short, tools=[], middleware=[middleware])
    history = [message for i in range(4) for message in (HumanMessage("word " * 150), AIMessage(f"yes {i}"))]
    result = agent.invoke({"messages": [*history, HumanMessage("and now?")]})
    assert "summary" in str(result["messages"][0].content)
    assert len(result["messages"]) == 3


@pytest.mark.filterwarnings("ignore:The method:langchain_core._api.LangChainBetaWarning")
def test_version_3_events_follow_the_lifecycle(llm: ChatGraftLM) -> None:
    async def collect() -> list[Any]:
        return [event async for event in await llm.astream_events("hello", version="v3", max_tokens=5)]

    stream_lifecycle.assert_valid_event_stream(list(llm.stream_events("hello", version="v3", max_tokens=5)))
    stream_lifecycle.assert_valid_event_stream(asyncio.run(collect()))
    bound = llm.bind_tools([add], tool_choice="add")
    stream_lifecycle.assert_valid_event_stream(list(bound.stream_events("x", version="v3")))


def test_content_blocks_tell_text_and_calls_apart(llm: ChatGraftLM) -> None:
    blocks = llm.bind_tools([add], tool_choice="add").invoke("x").content_blocks
    assert [block["type"] for block in blocks] == ["tool_call"]
    v1 = llm.model_copy(update={"output_version": "v1"})
    assert [block["type"] for block in v1.invoke("x", regex="[a-z]{4}").content_blocks] == ["text"]
