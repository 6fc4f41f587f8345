"""The frameworks' own public calls, on an endpoint."""

from __future__ import annotations

from typing import Any

import dspy
import pytest
from llama_index.core.llms import ChatMessage
from pydantic import BaseModel

from graftlm.adapters.dspy import GraftAdapter, GraftLM
from graftlm.adapters.langchain import ChatGraftLM
from graftlm.adapters.llama_index import GraftLLM
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


def test_tools_at_an_endpoint_are_an_error_that_says_so() -> None:
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    with Server(answers({"hello": "Hi."})) as server:
        llm = ChatGraftLM(model="m", base_url=server.url).bind_tools([add])
        with pytest.raises(Exception, match="tools are for models in this process so far"):
            llm.invoke("hello")
        assert server.requests == []


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
