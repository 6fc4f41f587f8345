"""Agents and chains that others wrote, on an engine whose answers are written down: their mechanics, not their wit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ModelCallLimitMiddleware, SummarizationMiddleware, ToolRetryMiddleware
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from pydantic import BaseModel

from graftlm.adapters.langchain import ChatGraftLM
from graftlm.testing import ScriptedModel

CALL = '<tool_call>{"name": "home_of", "arguments": {"name": "Mara"}}</tool_call>'


class Home(BaseModel):
    """Where somebody lives."""

    town: str


@tool
def home_of(name: str) -> str:
    """Look a home up."""
    return f"{name} lives in Dorvik."


@pytest.fixture(scope="module")
def model() -> ScriptedModel:
    def script(prompt: str) -> str:
        if "summary" in prompt.lower():
            return "They spoke of Mara."
        if "lives in Dorvik" in prompt:
            return '{"town":"Dorvik"}' if "as JSON" in prompt else "In Dorvik."
        return CALL if "home_of" in prompt else "Hello."

    return ScriptedModel(script)


@pytest.fixture(scope="module")
def llm(model: ScriptedModel) -> Iterator[ChatGraftLM]:
    with model.runtime() as runtime:
        yield ChatGraftLM(runtime=runtime, temperature=0, max_tokens=200)


def ask(agent: Any, text: str, **config: Any) -> dict[str, Any]:
    answer: dict[str, Any] = agent.invoke({"messages": [HumanMessage(text)]}, config or None)
    return answer


def test_an_agent_calls_its_tool_and_answers(llm: ChatGraftLM) -> None:
    messages = ask(create_agent(llm, tools=[home_of]), "Where does Mara live?")["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
    assert messages[-1].content == "In Dorvik."


def test_an_agent_with_a_response_format_gives_the_object(llm: ChatGraftLM) -> None:
    agent = create_agent(llm, tools=[home_of], response_format=Home)
    assert ask(agent, "Where does Mara live? Answer as JSON.")["structured_response"] == Home(town="Dorvik")


def test_middlewares_see_the_calls_and_a_checkpoint_keeps_the_thread(llm: ChatGraftLM) -> None:
    middleware = [ModelCallLimitMiddleware(run_limit=4), ToolRetryMiddleware(max_retries=1)]
    agent = create_agent(llm, tools=[home_of], middleware=middleware, checkpointer=InMemorySaver())
    thread = {"configurable": {"thread_id": "1"}}
    first = agent.invoke({"messages": [HumanMessage("Where does Mara live?")]}, thread)
    second = agent.invoke({"messages": [HumanMessage("And again?")]}, thread)
    assert len(second["messages"]) > len(first["messages"]) and second["messages"][-1].content == "In Dorvik."


def test_the_summarization_middleware_reads_the_models_own_limit(llm: ChatGraftLM) -> None:
    assert llm.profile is not None and llm.profile["max_input_tokens"] == 8192
    middleware = SummarizationMiddleware(model=llm, trigger=("fraction", 0.02), keep=("messages", 1))
    agent = create_agent(llm, tools=[], middleware=[middleware])
    messages = [HumanMessage("We spoke of Mara. " * 100), HumanMessage("Hello?")]
    answer = agent.invoke({"messages": messages})
    assert any("They spoke of Mara." in str(message.content) for message in answer["messages"])


def test_branches_of_a_graph_share_the_engine(llm: ChatGraftLM, model: ScriptedModel) -> None:
    graph = StateGraph(MessagesState)
    for name in ("one", "two", "three"):
        graph.add_node(name, lambda state: {"messages": [llm.invoke(state["messages"])]})
        graph.add_edge(START, name)
        graph.add_edge(name, END)
    answer = graph.compile().invoke({"messages": [HumanMessage("Hi")]})
    assert [message.content for message in answer["messages"][1:]] == ["Hello."] * 3


async def test_messages_of_a_graph_are_streamed(llm: ChatGraftLM) -> None:
    agent = create_agent(llm, tools=[home_of])
    given = {"messages": [HumanMessage("Where does Mara live?")]}
    chunks = [chunk async for chunk, _ in agent.astream(given, stream_mode="messages")]
    assert "".join(str(c.content) for c in chunks if c.type == "AIMessageChunk").endswith("In Dorvik.")
