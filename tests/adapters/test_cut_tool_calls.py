"""A stop string inside the arguments of a tool call: no adapter makes a call of it, streamed or not."""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, message_chunk_to_message
from llama_index.core.tools import FunctionTool
from starlette.testclient import TestClient

import graftlm as gl
from graftlm.adapters.langchain import ChatGraftLM
from graftlm.adapters.llama_index import GraftLLM
from graftlm.adapters.server.app import Server
from graftlm.testing import ScriptedModel
from tests.core.remote.models import answers
from tests.core.remote.server import Server as EndpointServer

TEXT = 'I ask.\n<tool_call>{"name": "weather", "arguments": {"city": "In Oslo, Norway"}}</tool_call>'
CUT = '{"city": "In '
STOP = ["Oslo"]  # max_tokens cuts no call of a local model: its grammar closes the arguments in time


def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"sun in {city}"


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.fixture(scope="module")
def runtime() -> Iterator[gl.Runtime]:
    with ScriptedModel(lambda prompt: TEXT).runtime() as made:
        yield made


def invalid(message: BaseMessage) -> tuple[list[Any], list[tuple[str, str, bool]], Any]:
    """The calls of a message, the unreadable ones with whether the reason is told, and why it ended."""
    assert isinstance(message, AIMessage)
    unread = [
        (c["name"] or "", c["args"] or "", "inside the call" in (c["error"] or "")) for c in message.invalid_tool_calls
    ]
    return message.tool_calls, unread, message.response_metadata["finish_reason"]


def test_a_cut_call_used_to_be_a_valid_one_in_a_sum_of_langchains_chunks(runtime: gl.Runtime) -> None:
    llm = ChatGraftLM(runtime=runtime, temperature=0).bind_tools([weather])
    whole = llm.invoke("x", stop=STOP)
    chunks: list[Any] = list(llm.stream("x", stop=STOP))
    added = functools.reduce(operator.add, chunks)
    assert "".join(c["args"] or "" for chunk in chunks for c in chunk.tool_call_chunks) == CUT
    expected: Any = ([], [("weather", CUT, True)], "stop")
    for message in (whole, added, chunks[0] + chunks[1:], message_chunk_to_message(added)):
        assert invalid(message) == expected
    assert type(message_chunk_to_message(added)) is AIMessage
    typed = ChatGraftLM(runtime=runtime, temperature=0, output_version="v1").bind_tools([weather])
    blocks = functools.reduce(operator.add, typed.stream("x", stop=STOP)).content_blocks
    assert [block["type"] for block in blocks if "tool" in block["type"]] == ["invalid_tool_call"]


def test_the_calls_of_a_sum_of_chunks_are_those_of_the_message(runtime: gl.Runtime) -> None:
    llm = ChatGraftLM(runtime=runtime, temperature=0).bind_tools([weather])
    added = functools.reduce(operator.add, llm.stream("x"))
    assert [c["args"] for c in added.tool_calls] == [c["args"] for c in llm.invoke("x").tool_calls]
    assert added.tool_calls and added.invalid_tool_calls == []


@pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecationWarning")  # LlamaIndex's own
def test_a_cut_call_raises_in_llama_index(runtime: gl.Runtime) -> None:
    llm, tool = GraftLLM(runtime=runtime, temperature=0), FunctionTool.from_defaults(weather)
    whole = llm.chat_with_tools([tool], "x", stop=STOP)
    *_, streamed = llm.stream_chat_with_tools([tool], "x", stop=STOP)
    for response in (whole, streamed):
        assert response.message.content == "I ask." and response.raw is not None
        assert response.raw["finish_reason"] == "stop"
        with pytest.raises(ValueError, match=r"'weather'.* ends inside the call.* it is '\{\"city\": \"In '"):
            llm.get_tool_calls_from_response(response)


def test_an_endpoints_cut_call_is_invalid_in_a_stream_too() -> None:
    with EndpointServer(answers({"x": ""}), calls=lambda body: [("weather", CUT)]) as server:
        llm = ChatGraftLM(model="m", base_url=server.url).bind_tools([weather])
        for message in (llm.invoke("x"), functools.reduce(operator.add, llm.stream("x"))):
            assert invalid(message)[:2] == ([], [("weather", CUT, True)])


@pytest.fixture(scope="module")
def client(runtime: gl.Runtime) -> Iterator[TestClient]:
    with TestClient(Server(runtime), base_url="http://127.0.0.1") as client:
        yield client


def events(client: TestClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects of a streamed answer."""
    text = client.post(path, json={**body, "stream": True}).text
    lines = (line.removeprefix("data: ") for line in text.splitlines() if not line.startswith("event:"))
    return [json.loads(line) for line in lines if line and line != "[DONE]"]


def test_no_dialect_says_that_a_cut_call_calls_a_tool(client: TestClient) -> None:
    say = [{"role": "user", "content": "x"}]
    function = {"name": "weather", "parameters": SCHEMA}
    base = {"model": client.get("/v1/models").json()["data"][0]["id"], "temperature": 0}

    body = {**base, "messages": say, "tools": [{"type": "function", "function": function}], "stop": STOP}
    (choice,) = client.post("/v1/chat/completions", json=body).json()["choices"]
    deltas = [event["choices"][0] for event in events(client, "/v1/chat/completions", body)]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == CUT
    parts = [part for delta in deltas for part in delta["delta"].get("tool_calls", ())]
    assert "".join(part["function"].get("arguments") or "" for part in parts) == CUT
    assert choice["finish_reason"] == deltas[-1]["finish_reason"] == "stop"

    tool = {"name": "weather", "input_schema": SCHEMA}
    body = {**base, "messages": say, "tools": [tool], "stop_sequences": STOP, "max_tokens": 500}
    whole = client.post("/v1/messages", json=body).json()
    stops = [event["delta"] for event in events(client, "/v1/messages", body) if event["type"] == "message_delta"]
    for told in (whole, *stops):
        assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", "Oslo")
    assert whole["content"][-1]["input"] == {"INVALID_JSON": CUT}

    tools = [{"type": "function", "function": function}]
    body = {"model": base["model"], "messages": say, "tools": tools, "options": {"stop": STOP}}
    whole = client.post("/api/chat", json={**body, "stream": False}).json()
    lines = [json.loads(line) for line in client.post("/api/chat", json=body).text.splitlines()]
    streamed = [call for line in lines for call in line["message"].get("tool_calls", ())]
    for (call,) in (whole["message"]["tool_calls"], streamed):
        assert call["function"]["arguments"] == {"INVALID_JSON": CUT}
