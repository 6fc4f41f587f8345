from __future__ import annotations

import dataclasses
from threading import Lock

import dspy
import numpy as np
import pytest
import torch
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from llama_index.core.base.llms.types import CompletionResponse
from llama_index.core.base.response.schema import Response
from llama_index.core.schema import NodeWithScore, TextNode
from pydantic import BaseModel

from graftlm.ab.measure.answers import as_json, as_text


class City(BaseModel):
    name: str


class Talk(BaseModel):
    last: AIMessage


@dataclasses.dataclass
class Held:
    city: City
    lock: object


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


@pytest.mark.parametrize("of", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_long_arrays_differ_in_their_middle(of: type) -> None:
    """Their text, which leaves out the middle, was compared."""
    numbers = [0.5] * 3000
    assert as_json(of(numbers)) == numbers
    assert as_json({"n": of(7)}) == {"n": 7}


def test_sets_have_one_order() -> None:
    one, other = {8, 0}, {0, 8}  # whose own order is that of insertion
    assert as_json([one, frozenset(other)]) == [[0, 8], [0, 8]]


def test_an_error_as_an_answer_is_told_with_its_type() -> None:
    assert as_json([KeyError(), ValueError("no city")]) == ["KeyError: ", "ValueError: no city"]


def test_messages_within_objects_are_compared_without_their_ids() -> None:
    assert as_json(Talk(last=AIMessage("Paris", id="run-1"))) == {"last": "Paris"}
    held = as_json(Held(City(name="Paris"), Lock()))  # which cannot be copied, as `dataclasses.asdict` wants
    assert held["city"] == {"name": "Paris"}


def test_objects_whose_text_is_their_address_are_named() -> None:
    """All objects of one class were the same answer, and nothing was said."""
    unread: set[str] = set()
    assert as_json(["text at 0x1f", {"a": (object(),)}], unread) == ["text at 0x1f", {"a": ["<object object>"]}]
    assert unread == {"object"}
