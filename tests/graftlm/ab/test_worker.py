from __future__ import annotations

import dspy
import psutil
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from llama_index.core.base.llms.types import CompletionResponse
from llama_index.core.base.response.schema import Response
from llama_index.core.schema import NodeWithScore, TextNode
from pydantic import BaseModel

from graftlm.ab.worker import as_json, as_text, lost_share, machine_cpu_seconds


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


def test_threads_lack_the_cores_that_others_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    used = [(0.0, 2.0), (2.0, 2.0), (3.0, 1.0), (3.5, 0.5)]  # by others, by this process
    assert [lost_share(others, own) for others, own in used] == [-2.0, 0.0, 0.5, 0.75]
    assert lost_share(3.0, 0.0) == 0.0  # it wanted no core: one was idle


def test_the_machine_has_used_at_least_what_this_process_has() -> None:
    before, own = machine_cpu_seconds(), psutil.Process().cpu_times().user
    while psutil.Process().cpu_times().user < own + 0.2:
        pass
    assert machine_cpu_seconds() - before >= 0.15
