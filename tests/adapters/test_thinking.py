"""Models that think: every adapter returns the thinking apart from the answer."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

import graftlm as gl
from graftlm.core.chat import thinking
from graftlm.core.chat.thinking import split_thinking
from tests.core.chat.test_thinking import TEMPLATE

QUESTION = "Mara is 20. How old is Mara?"


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module")
def runtime() -> Iterator[gl.Runtime]:
    before = list(thinking._MARKERS)
    thinking.register_markers("[", "]")
    hf = copy.deepcopy(gl.Runtime.shared("sprout", dtype="float32").tokenizer.complete)
    hf.chat_template = TEMPLATE
    with gl.Runtime("sprout", tokenizer=hf, dtype="float32") as runtime:
        yield runtime
    thinking._MARKERS[:] = before


@pytest.fixture
def parts(runtime: gl.Runtime) -> tuple[str, str]:
    """The thinking and the content of the model's own text."""
    whole = runtime.generate([{"role": "user", "content": QUESTION}], temperature=0, max_tokens=40).text
    form = thinking.learn_thinking(runtime.tokenizer)
    return split_thinking(form, whole)


def test_langchain_has_a_reasoning_block(runtime: gl.Runtime, parts: tuple[str, str]) -> None:
    from graftlm.adapters.langchain import ChatGraftLM

    model = ChatGraftLM(runtime=runtime, temperature=0, max_tokens=40)
    answer = model.invoke(QUESTION)
    assert (answer.additional_kwargs.get("reasoning_content", ""), answer.content) == parts
    assert [block["type"] for block in answer.content_blocks][:1] == ["reasoning"]
    chunks = list(model.stream(QUESTION))
    assert "".join(chunk.additional_kwargs.get("reasoning_content", "") for chunk in chunks) == parts[0]
    assert "".join(str(chunk.content) for chunk in chunks) == parts[1]
    assert isinstance(model.with_structured_output(Person).invoke(QUESTION), Person)
    plain = ChatGraftLM(runtime=runtime, temperature=0, max_tokens=8, chat_template_kwargs={"enable_thinking": False})
    assert "reasoning_content" not in plain.invoke(QUESTION).additional_kwargs


def test_llama_index_has_a_thinking_block(runtime: gl.Runtime, parts: tuple[str, str]) -> None:
    from llama_index.core.base.llms.types import ThinkingBlock
    from llama_index.core.llms import ChatMessage
    from llama_index.core.prompts import PromptTemplate

    from graftlm.adapters.llama_index import GraftLLM

    model = GraftLLM(runtime=runtime, temperature=0, max_tokens=40)
    messages = [ChatMessage(role="user", content=QUESTION)]
    answer = model.chat(messages).message
    thought = [block.content for block in answer.blocks if isinstance(block, ThinkingBlock)]
    assert (thought, answer.content or "") == ([parts[0]], parts[1])
    *_, last = model.stream_chat(messages)
    assert [block.content for block in last.message.blocks if isinstance(block, ThinkingBlock)] == [parts[0]]
    assert model.complete(QUESTION).text == parts[1]
    assert isinstance(model.structured_predict(Person, PromptTemplate(QUESTION)), Person)


def test_dspy_has_a_thinking_part(runtime: gl.Runtime) -> None:
    import dspy

    from graftlm.adapters.dspy import Engine

    engine = Engine(runtime)
    lm = dspy.LM(engine.model_string, engine=engine, temperature=0, max_tokens=60, cache=False)
    with dspy.context(lm=lm):
        answer = dspy.Predict("text -> age: int")(text=QUESTION)
    assert isinstance(answer.age, int)
    (said,) = lm(QUESTION) if isinstance(lm(QUESTION), list) else [lm(QUESTION)]
    text: Any = said["text"] if isinstance(said, dict) else said
    assert "[" not in text
