"""The frameworks' own public calls, on an endpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import dspy
import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage, ToolMessage
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel

from graftlm.adapters.dspy import GraftAdapter, GraftLM
from graftlm.adapters.langchain import ChatGraftLM
from graftlm.adapters.llama_index import GraftLLM
from graftlm.core.errors import ConfigError
from tests.core.remote.models import answers
from tests.core.remote.server import Fault, Server


class Person(BaseModel):
    name: str
    age: int


JSON = '{"name": "Ann", "age": 31}'
FORM = "[[ ## answer ## ]]\nParis\n\n[[ ## completed ## ]]"


def test_langchain_answers_streams_and_batches() -> None:
    with Server(answers({"hello": "Hi there."})) as server:
        llm = ChatGraftLM(model="m", base_url=server.url, temperature=0)
        assert llm.invoke("hello").content == "Hi there."
        assert "".join(str(chunk.content) for chunk in llm.stream("hello")) == "Hi there."
        assert [m.content for m in llm.batch(["hello"] * 5)] == ["Hi there."] * 5
        assert len(server.calls) == 7


async def test_langchain_answers_on_an_event_loop() -> None:
    with Server(answers({"hello": "Hi."})) as server:
        assert (await ChatGraftLM(model="m", base_url=server.url).ainvoke("hello")).content == "Hi."


def test_langchain_structured_output_is_checked() -> None:
    with Server(answers({"Ann": JSON, "Say hello": "hello"})) as server:
        llm = ChatGraftLM(model="m", base_url=server.url, temperature=0).with_structured_output(Person)
        assert llm.invoke("Ann is 31.") == Person(name="Ann", age=31)


def test_the_retry_knob_of_a_framework_sets_the_one_loop() -> None:
    broken = [Fault(500, headers={"retry-after-ms": "1"})] * 9
    with Server(answers({"hello": "Hi."}), faults=broken) as server:
        with pytest.raises(Exception, match="answered 500"):
            ChatGraftLM(model="m", base_url=server.url, max_retries=1).invoke("hello")
        assert len(server.requests) == 2
        with pytest.raises(Exception, match="answered 500"):
            GraftLLM(model="m", api_base=server.url, max_retries=2).complete("hello")
        assert len(server.requests) == 5
        with pytest.raises(Exception, match="answered 500"):
            GraftLM("m", base_url=server.url, num_retries=0, cache=False)("hello")
        assert len(server.requests) == 6


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def adds(body: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Calls `add` once, then says what it gave."""
    return [] if any(m["role"] == "tool" for m in body["messages"]) else [("add", '{"a": 2, "b": 3}')]


def test_langchain_tools_are_native_at_an_endpoint() -> None:
    with Server(answers({"2 + 3": "It is 5."}), calls=adds) as server:
        llm = ChatGraftLM(model="m", base_url=server.url).bind_tools([add], tool_choice="add")
        asked = llm.invoke("2 + 3?")
        assert [(call["name"], call["args"]) for call in asked.tool_calls] == [("add", {"a": 2, "b": 3})]
        assert asked.response_metadata["finish_reason"] == "tool_calls" and asked.content == ""
        body = server.calls[0].body
        assert (body["tools"][0]["function"]["name"], body["tool_choice"], body["parallel_tool_calls"]) == (
            "add", "required", False,
        )  # fmt: skip
        result = ToolMessage("5", tool_call_id=asked.tool_calls[0]["id"])
        assert llm.invoke([HumanMessage("2 + 3?"), asked, result]).content == "It is 5."
        sent = server.calls[1].body["messages"]
        assert sent[1]["tool_calls"][0]["id"] == sent[2]["tool_call_id"] == asked.tool_calls[0]["id"]
        assert json.loads(sent[1]["tool_calls"][0]["function"]["arguments"]) == {"a": 2, "b": 3}
        whole = None
        for chunk in llm.stream("2 + 3?"):
            whole = chunk if whole is None else whole + chunk
        assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("add", {"a": 2, "b": 3})]


def test_only_allowed_tools_are_sent_to_an_endpoint() -> None:
    def other(a: int) -> int:
        """Another one."""
        return a

    tools = [{"type": "function", "function": {"name": "add"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}
    with Server(answers({"2 + 3": "It is 5."}), calls=adds) as server:
        ChatGraftLM(model="m", base_url=server.url).bind_tools([add, other], tool_choice=choice).invoke("2 + 3?")
        body = server.calls[0].body
    assert ([tool["function"]["name"] for tool in body["tools"]], body["tool_choice"]) == (["add"], "auto")


def test_a_langchain_agent_runs_at_an_endpoint() -> None:
    with Server(answers({"2 + 3": "It is 5."}), calls=adds) as server:
        agent = create_agent(ChatGraftLM(model="m", base_url=server.url), [add])
        done = agent.invoke({"messages": [("user", "2 + 3?")]})["messages"]
        assert [m.content for m in done if m.type in ("tool", "ai")] == ["", "5", "It is 5."]


def test_arguments_that_are_no_json_are_an_invalid_call_that_says_so() -> None:
    with Server(answers({"2": ""}), calls=lambda body: [("add", '{"a": 2,,}')]) as server:
        done = ChatGraftLM(model="m", base_url=server.url).bind_tools([add]).invoke("2 + 3?")
        assert done.tool_calls == [] and "not JSON" in done.invalid_tool_calls[0]["error"]


TRAILING = '{"a": 2} trailing'
LITERAL = 'Write <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call> to call it.'


@pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecationWarning")  # LlamaIndex's own
def test_arguments_that_are_no_json_used_to_be_shown_in_a_text_that_was_never_sent() -> None:
    with Server(answers({"2": ""}), calls=lambda body: [("add", TRAILING)]) as server:
        llm = ChatGraftLM(model="m", base_url=server.url).bind_tools([add])
        done = llm.invoke("2 + 3?")
        (invalid,) = done.invalid_tool_calls
        assert (done.content, done.tool_calls, invalid["args"]) == ("", [], TRAILING)
        assert "Extra data" in (invalid["error"] or "")
        chunks = list(llm.stream("2 + 3?"))
        assert [c["args"] for chunk in chunks for c in chunk.tool_call_chunks if c["args"]] == [TRAILING]
        assert "".join(str(chunk.content) for chunk in chunks) == ""
        index = GraftLLM(model="m", api_base=server.url)
        asked = index.chat_with_tools([FunctionTool.from_defaults(add)], "2 + 3?")
        assert asked.message.content is None
        with pytest.raises(ValueError, match="not JSON"):
            index.get_tool_calls_from_response(asked)


@pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecationWarning")  # LlamaIndex's own
def test_content_that_shows_a_call_used_to_become_one() -> None:
    with Server(answers({"how": LITERAL}), calls=lambda body: []) as server:
        llm = ChatGraftLM(model="m", base_url=server.url)
        for bound in (llm.bind_tools([add]), llm.bind_tools([add], tool_choice="none")):
            done = bound.invoke("how?")
            assert (done.content, done.tool_calls) == (LITERAL, [])
            assert "".join(str(chunk.content) for chunk in bound.stream("how?")) == LITERAL
        index = GraftLLM(model="m", api_base=server.url)
        asked = index.chat_with_tools([FunctionTool.from_defaults(add)], "how?")
        assert asked.message.content == LITERAL
        assert index.get_tool_calls_from_response(asked, error_on_no_tool_call=False) == []


def test_a_choice_of_tools_without_tools_raises_at_an_endpoint_too() -> None:
    with Server(answers({"hello": "Hi."})) as server, pytest.raises(ConfigError, match="none were given"):
        ChatGraftLM(model="m", base_url=server.url).invoke("hello", tool_choice="any")
    assert server.requests == []


def test_an_answer_beside_tools_is_checked_against_its_schema() -> None:
    with Server(answers({"hello": "Hi.", "Say hello": "x"}), calls=lambda body: []) as server:
        llm = ChatGraftLM(model="m", base_url=server.url)
        schema = {"type": "json_schema", "json_schema": {"name": "p", "schema": Person.model_json_schema()}}
        with pytest.raises(Exception, match="called no tool and wrote 'Hi.', which is not of"):
            llm.bind_tools([add]).bind(response_format=schema).invoke("hello")


@pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecationWarning")  # LlamaIndex's own
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
async def test_llama_index_agents_call_tools_at_an_endpoint() -> None:
    with Server(answers({"2 + 3": "It is 5."}), calls=adds) as server:
        llm = GraftLLM(model="m", api_base=server.url)
        asked = llm.chat_with_tools([FunctionTool.from_defaults(add)], "2 + 3?")
        calls = llm.get_tool_calls_from_response(asked)
        assert [(call.tool_name, call.tool_kwargs) for call in calls] == [("add", {"a": 2, "b": 3})]
        agent = FunctionAgent(tools=[add], llm=llm, streaming=False)
        assert str(await agent.run("2 + 3?")) == "It is 5."
        assert [m["role"] for m in server.calls[-1].body["messages"]][-2:] == ["assistant", "tool"]


def test_dspy_calls_tools_natively_at_an_endpoint() -> None:
    class Ask(dspy.Signature):
        """Answer with a tool."""

        question: str = dspy.InputField()
        tools: list[dspy.Tool] = dspy.InputField()
        calls: dspy.ToolCalls = dspy.OutputField()

    with Server(answers({"2 + 3": "x"}), calls=adds) as server:
        lm = GraftLM("m", base_url=server.url, cache=False)
        with dspy.context(lm=lm, adapter=dspy.ChatAdapter(use_native_function_calling=True)):
            done = dspy.Predict(Ask)(question="2 + 3?", tools=[dspy.Tool(add)])
        assert [(call.name, call.args) for call in done.calls.tool_calls] == [("add", {"a": 2, "b": 3})]
        assert server.calls[0].body["tools"][0]["function"]["name"] == "add"


def test_dspy_react_runs_at_an_endpoint() -> None:
    def field(name: str, value: str) -> str:
        return f"[[ ## {name} ## ]]\n{value}\n\n"

    step = field("next_thought", "add") + field("next_tool_name", "add") + field("next_tool_args", '{"a": 2, "b": 3}')
    last = field("next_thought", "done") + field("next_tool_name", "finish") + field("next_tool_args", "{}")
    end = "[[ ## completed ## ]]"
    told = answers(
        {
            "2 + 3": step + end,
            "observation_0": last + end,
            "observation_1": field("reasoning", "r") + field("answer", "5") + end,
        }
    )
    with Server(told) as server:
        lm = GraftLM("m", base_url=server.url, cache=False)
        with dspy.context(lm=lm, adapter=dspy.ChatAdapter()):
            done = dspy.ReAct("question -> answer", tools=[add])(question="2 + 3?")
        assert (done.trajectory["observation_0"], done.answer, len(server.calls)) == (5, "5", 3)


def test_llama_index_chats_completes_and_fills_objects() -> None:
    with Server(answers({"hello": "Hi.", "Ann": JSON, "Say hello": "hello"})) as server:
        llm = GraftLLM(model="m", api_base=server.url, temperature=0.0)
        assert llm.chat([ChatMessage(role="user", content="hello")]).message.content == "Hi."
        assert llm.complete("hello").text == "Hi."
        assert [chunk.delta for chunk in llm.stream_complete("hello")][:2] == ["Hi", "."]
        done = llm.as_structured_llm(Person).complete("Ann is 31.")
        assert done.raw == Person(name="Ann", age=31)


def test_dspy_predicts_and_asks_for_n_at_once() -> None:
    with Server(answers({"capital": FORM})) as server:
        lm = GraftLM("m", base_url=server.url, cache=False, temperature=0.5)
        with dspy.context(lm=lm, adapter=dspy.ChatAdapter()):
            assert dspy.Predict("question -> answer")(question="The capital?").answer == "Paris"
            assert len(server.calls) == 1
            done = dspy.Predict("question -> answer", n=3)(question="The capital?")
            assert done.completions.answer == ["Paris"] * 3


def test_dspy_tells_errors_of_the_endpoint_apart() -> None:
    def failing(status: int, code: str | None = None) -> Any:
        body = {"error": {"message": "no", "code": code}}
        with Server(answers({}), faults=[Fault(status, body=body)]) as server:
            with pytest.raises(Exception) as caught:
                GraftLM("m", base_url=server.url, num_retries=0, cache=False)("hello")
            return type(caught.value).__name__

    assert failing(401) == "LMAuthError"
    assert failing(429) == "LMRateLimitError"
    assert failing(429, "insufficient_quota") == "LMBillingError"


def test_what_needs_the_models_own_tokens_says_what_to_use_at_an_endpoint() -> None:
    with Server(answers({"capital": FORM})) as server:
        lm = GraftLM("m", base_url=server.url, cache=False)
        with dspy.context(lm=lm, adapter=GraftAdapter()), pytest.raises(Exception, match="use dspy.ChatAdapter"):
            dspy.Predict("question -> answer")(question="The capital?")
        assert server.requests == []
