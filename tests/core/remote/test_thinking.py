"""Endpoints that report thinking beside their text: it is kept apart, in streams too, and reaches every adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pydantic import BaseModel

import graftlm as gl
from graftlm.core.chat.tool_parser import AnswerReader, parse_completion
from tests.core.remote.models import answers
from tests.core.remote.server import Server

QUESTION = "How old is Mara?"
THOUGHT = "She says 20."


def thinks(field: str) -> Callable[[dict[str, Any]], Any]:
    """Add thinking to each body, and to the first piece of each stream, with its count."""

    def edit(body: dict[str, Any]) -> dict[str, Any]:
        for choice in body.get("choices") or ():
            if choice.get("message"):
                choice["message"][field] = THOUGHT
            elif (choice.get("delta") or {}).get("content") == "":
                choice["delta"] = {"role": "assistant", field: THOUGHT}
        if body.get("usage"):
            body["usage"]["completion_tokens_details"] = {"reasoning_tokens": 4}
        return body

    return edit


@pytest.fixture(params=["reasoning_content", "reasoning"])
def runtime(request: pytest.FixtureRequest) -> Iterator[gl.Runtime]:
    said = answers({QUESTION: "20.", "As JSON": '{"age": 20}'})
    with Server(said, edit=thinks(request.param)) as server, gl.Runtime("m", base_url=server.url) as runtime:
        yield runtime


def test_thinking_is_beside_the_text_whole_and_streamed(runtime: gl.Runtime) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    done = runtime.generate(messages, max_tokens=8)
    assert (done.text, done.thinking, done.usage.reasoning_tokens) == ("20.", THOUGHT, 4)
    parsed = parse_completion(None, done)
    assert (parsed.thinking, parsed.content) == (THOUGHT, "20.")
    reader = AnswerReader(None)
    thought = content = ""
    for chunk in runtime.stream(messages, max_tokens=8):
        content += "".join(delta.text for delta in reader.read(chunk))
        thought += reader.thought
    assert (thought, content) == (THOUGHT, "20.")


def test_every_adapter_has_its_block(runtime: gl.Runtime) -> None:
    import dspy
    from llama_index.core.base.llms.types import ChatMessage, ThinkingBlock

    from graftlm.adapters.dspy import Engine
    from graftlm.adapters.langchain import ChatGraftLM
    from graftlm.adapters.llama_index import GraftLLM

    model = ChatGraftLM(runtime=runtime, max_tokens=8)
    answer = model.invoke(QUESTION)
    assert [(b["type"], b.get("reasoning") or b.get("text")) for b in answer.content_blocks] == [
        ("reasoning", THOUGHT),
        ("text", "20."),
    ]
    chunks = list(model.stream(QUESTION))
    assert "".join(chunk.additional_kwargs.get("reasoning_content", "") for chunk in chunks) == THOUGHT
    llm = GraftLLM(runtime=runtime, max_tokens=8)
    said = llm.chat([ChatMessage(role="user", content=QUESTION)]).message
    assert [block.content for block in said.blocks if isinstance(block, ThinkingBlock)] == [THOUGHT]
    *_, last = llm.stream_chat([ChatMessage(role="user", content=QUESTION)])
    assert [block.content for block in last.message.blocks if isinstance(block, ThinkingBlock)] == [THOUGHT]
    assert llm.complete(QUESTION).text == "20."
    engine = Engine(runtime)
    lm = dspy.LM(engine.model_string, engine=engine, cache=False, max_tokens=8)
    assert lm(QUESTION)[0] in ("20.", {"text": "20.", "reasoning_content": THOUGHT})


def test_a_constraint_holds_beside_the_thinking(runtime: gl.Runtime) -> None:
    class Age(BaseModel):
        age: int

    done = runtime.generate([{"role": "user", "content": "As JSON"}], json_schema=Age, max_tokens=20)
    assert Age.model_validate_json(done.text).age == 20
    assert done.thinking == THOUGHT


def test_an_answer_of_nothing_but_thinking_keeps_it() -> None:
    def cut(body: dict[str, Any]) -> dict[str, Any]:
        for choice in body.get("choices") or ():
            choice["message"] = {"role": "assistant", "content": None, "reasoning_content": THOUGHT}
            choice["finish_reason"] = "length"
        return body

    with Server(answers({QUESTION: "20."}), edit=cut) as server, gl.Runtime("m", base_url=server.url) as runtime:
        done = runtime.generate([{"role": "user", "content": QUESTION}], max_tokens=8)
    assert (done.text, done.thinking, done.finish_reason) == ("", THOUGHT, "length")
