from __future__ import annotations

import dspy
from langchain_core.messages import AIMessage
from pydantic import BaseModel

from graftlm.ab.worker import as_json, as_text


class City(BaseModel):
    name: str


def test_answers_of_the_frameworks_become_values_that_can_be_compared() -> None:
    call = {"name": "add", "args": {"a": 1}, "id": "x1", "type": "tool_call"}
    assert as_json(AIMessage("Paris", id="run-1")) == "Paris"
    assert as_json(AIMessage("", tool_calls=[call])) == {
        "content": "",
        "tool_calls": [{"name": "add", "args": {"a": 1}}],
    }
    assert as_json([City(name="Paris"), {1: (True, None)}]) == [{"name": "Paris"}, {"1": [True, None]}]
    assert as_json(dspy.Prediction(answer="Paris")) == {"answer": "Paris"}
    assert as_text({"name": "Zürich"}) == '{"name": "Zürich"}'
