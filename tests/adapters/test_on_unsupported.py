"""A schema with a keyword that no grammar can keep: every adapter raises, or leaves it out where it is told to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from dspy import lm15
from llama_index.core import PromptTemplate
from pydantic import BaseModel, Field, Json

import graftlm as gl
from graftlm.adapters.dspy import GraftLM
from graftlm.adapters.langchain import ChatGraftLM
from graftlm.adapters.llama_index import GraftLLM
from graftlm.testing import ScriptedModel


class Record(BaseModel):
    """A set inside a string, of which no grammar keeps that its items differ."""

    data: Json[set[int]]


@pytest.fixture(scope="module")
def runtime() -> Iterator[gl.Runtime]:
    def script(prompt: str) -> str:
        call = '<tool_call>{"name": "Record", "arguments": {"data": "[17]"}}</tool_call>'
        return call if "Tools:" in prompt else '{"data":"[17]"}'

    with ScriptedModel(script).runtime() as made:
        yield made


def langchain(runtime: gl.Runtime, kept: bool, **options: Any) -> Any:
    llm = ChatGraftLM(runtime=runtime)
    return llm.with_structured_output(Record, strict=None if kept else False, **options).invoke("x")


def langchain_settings(runtime: gl.Runtime, kept: bool) -> Any:
    llm = ChatGraftLM(runtime=runtime, on_unsupported="error" if kept else "warn")
    return llm.with_structured_output(Record).invoke("x")


def langchain_tool(runtime: gl.Runtime, kept: bool) -> Any:
    return langchain(runtime, kept, method="function_calling")


def llama_index(runtime: gl.Runtime, kept: bool) -> Any:
    llm = GraftLLM(runtime=runtime, on_unsupported="error" if kept else "warn")
    return llm.structured_predict(Record, PromptTemplate("x"))


def dspy_request(runtime: gl.Runtime, kept: bool) -> Any:
    lm = GraftLM(runtime=runtime, on_unsupported="error" if kept else "warn", cache=False)
    schema = {"type": "json_schema", "schema": Record.model_json_schema(), "name": "Record"}
    request = lm15.Request(lm.model, (lm15.Message.user("x"),), config=lm15.Config(response_format=schema))
    return Record.model_validate_json(lm(request).text)


CALLS = [langchain, langchain_settings, langchain_tool, llama_index, dspy_request]


@pytest.mark.parametrize("call", CALLS)
def test_it_is_left_out_where_that_is_asked_for(call: Callable[..., Any], runtime: gl.Runtime) -> None:
    with pytest.warns(UserWarning, match="not kept exactly.*uniqueItems"):
        assert call(runtime, kept=False).data == {17}


@pytest.mark.parametrize("call", CALLS)
def test_it_raises_otherwise(call: Callable[..., Any], runtime: gl.Runtime) -> None:
    with pytest.raises(Exception, match="contentMediaType"):
        call(runtime, kept=True)


class Steps(BaseModel):
    """A multiple that needs more states than any automaton gets."""

    by: int = Field(multiple_of=99991)


def of_langchain(runtime: gl.Runtime, max_retries: int) -> Any:
    llm = ChatGraftLM(runtime=runtime, on_unsupported="check", max_retries=max_retries)
    return llm.with_structured_output(Steps).invoke("x")


def of_langchain_tool(runtime: gl.Runtime, max_retries: int) -> Any:
    llm = ChatGraftLM(runtime=runtime, on_unsupported="check", max_retries=max_retries)
    return llm.with_structured_output(Steps, method="function_calling").invoke("x")


def of_llama_index(runtime: gl.Runtime, max_retries: int) -> Any:
    llm = GraftLLM(runtime=runtime, on_unsupported="check", max_retries=max_retries)
    return llm.structured_predict(Steps, PromptTemplate("x"))


def of_dspy(runtime: gl.Runtime, num_retries: int) -> Any:
    lm = GraftLM(runtime=runtime, on_unsupported="check", num_retries=num_retries, cache=False)
    schema = {"type": "json_schema", "schema": Steps.model_json_schema(), "name": "Steps"}
    request = lm15.Request(lm.model, (lm15.Message.user("x"),), config=lm15.Config(response_format=schema))
    return Steps.model_validate_json(lm(request).text)


CHECKED = [of_langchain, of_langchain_tool, of_llama_index, of_dspy]


@pytest.fixture
def stepping() -> Iterator[tuple[gl.Runtime, list[int]]]:
    """A runtime whose model writes 1, 2 and then always 99991; and how many answers it gave."""
    given: list[int] = []

    def script(prompt: str) -> str:
        given.append(len(given) + 1 if len(given) < 2 else 99991)
        call = f'<tool_call>{{"name": "Steps", "arguments": {{"by": {given[-1]}}}}}</tool_call>'
        return call if "Tools:" in prompt else f'{{"by":{given[-1]}}}'

    with ScriptedModel(script).runtime() as made:
        yield made, given


@pytest.mark.parametrize("call", CHECKED)
def test_it_is_checked_and_asked_for_again(call: Callable[..., Any], stepping: tuple[gl.Runtime, list[int]]) -> None:
    runtime, given = stepping
    assert call(runtime, 2).by == 99991
    assert len(given) == 3


@pytest.mark.parametrize("call", CHECKED)
def test_the_frameworks_own_retry_parameter_bounds_it(
    call: Callable[..., Any], stepping: tuple[gl.Runtime, list[int]]
) -> None:
    runtime, given = stepping
    with pytest.raises(Exception, match="asked 2 times"):
        call(runtime, 1)
    assert given == [1, 2]
