from __future__ import annotations

import dspy
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from llama_index.core.base.llms.types import CompletionResponse
from llama_index.core.base.response.schema import Response
from llama_index.core.schema import NodeWithScore, TextNode
from pydantic import BaseModel

from graftlm.ab.answers import as_json, as_text


class City(BaseModel):
    name: str


def test_answers_of_the_frameworks_become_values_that_can_be_compared() -> None:
    call = {"name": "add", "args": {"a": 1}, "id": "x1", "type": "tool_call"}
    assert as_json(AIMessage("Paris", id="run-1")) == "Paris"
    assert as_json([HumanMessage("Where?", id="1"), ToolMessage("Paris", tool_call_id="2")]) == ["Where?", "Paris"]
    assert as_json(AIMessage("", tool_calls=[call])) == {
        "content": "",
        "tool_calls": [{"name": "add", "args": {"a": 1}}],
    }
    assert as_json([City(name="Paris"), {1: (True, None)}]) == [{"name": "Paris"}, {"1": [True, None]}]
    assert as_json(dspy.Prediction(answer="Paris")) == {"answer": "Paris"}
    node = NodeWithScore(node=TextNode(text="about Paris"), score=1.0)  # numbered anew each time
    assert as_json(Response("Paris", source_nodes=[node])) == "Paris"
    assert as_json(CompletionResponse(text="Paris", raw={"id": "cmpl-7"})) == "Paris"
    assert as_json([object()]) == ["<object object>"]
    assert as_text({"name": "Zürich"}) == '{"name": "Zürich"}'


def test_numbers_that_json_does_not_have_become_texts_that_are_equal_to_themselves() -> None:
    assert as_json({"a": float("nan"), "b": [float("-inf")], "c": 1.5}) == {"a": "nan", "b": ["-inf"], "c": 1.5}
