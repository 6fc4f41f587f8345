from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_core.runnables import RunnableLambda, RunnableParallel

from graftlm.adapters.langchain import ChatGraftLM
from graftlm.core.errors import RequestTooLong
from graftlm.core.runtime import Runtime
from graftlm.testing import ScriptedModel
from tests.models import byte_tokenizer, tiny_model

SYSTEM = "You answer questions about a very long text. " * 10


ANSWER = {"title": "Answer", "type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}


class Recorder(BaseCallbackHandler):
    def __init__(self) -> None:
        self.started: list[UUID] = []
        self.ended: list[UUID] = []
        self.tags: list[Any] = []

    def on_chat_model_start(self, serialized: Any, messages: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self.started.append(run_id)
        self.tags.append(kwargs.get("tags"))

    def on_llm_end(self, response: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self.ended.append(run_id)


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with Runtime(tiny_model(max_position_embeddings=2048), tokenizer=byte_tokenizer()) as runtime:
        yield runtime


@pytest.fixture
def llm(runtime: Runtime) -> ChatGraftLM:
    runtime.clear_cache()
    runtime.reset_stats()
    return ChatGraftLM(runtime=runtime, temperature=0, max_tokens=6)


def texts(messages: list[Any]) -> list[str]:
    return [str(message.content) for message in messages]


def test_a_batch_of_64_is_one_engine_batch_in_order_with_its_callbacks(llm: ChatGraftLM) -> None:
    recorder = Recorder()
    answers = llm.batch([f"{SYSTEM}{i}" for i in range(64)], {"callbacks": [recorder], "tags": ["a"]})
    stats = llm.runtime_for().stats()
    assert (stats.largest_batch, stats.requests) == (64, 64)
    assert len(set(recorder.started)) == len(set(recorder.ended)) == 64
    assert recorder.tags == [["a"]] * 64
    assert texts(answers[:3]) == [str(llm.invoke(f"{SYSTEM}{i}").content) for i in range(3)]


def test_a_shared_system_prompt_is_computed_once(llm: ChatGraftLM) -> None:
    chats = [[("system", SYSTEM), ("human", f"question {i}")] for i in range(8)]
    answers = texts(llm.batch(chats))
    stats = llm.runtime_for().stats()
    suffixes = stats.prompt_tokens - 8 * (len(SYSTEM) + 20)
    assert stats.computed_tokens <= (len(SYSTEM) + 40 + suffixes) * 1.01
    for chat, answer in zip(chats[-2:], answers[-2:], strict=True):
        llm.runtime_for().clear_cache()
        assert llm.invoke(chat).content == answer


def test_an_async_batch_is_one_engine_batch_and_starts_no_threads(llm: ChatGraftLM) -> None:
    llm.invoke("warm up")
    expected = texts(llm.batch([f"{i}" for i in range(64)]))
    llm.runtime_for().reset_stats()
    before = threading.active_count()

    async def run() -> tuple[list[Any], int]:
        answers = asyncio.create_task(llm.abatch([f"{i}" for i in range(64)]))
        await asyncio.sleep(0.01)
        return await answers, threading.active_count()

    answers, during = asyncio.run(run())
    assert during <= before + 2
    assert llm.runtime_for().stats().largest_batch == 64
    assert texts(answers) == expected


def test_generate_and_agenerate_hand_the_list_over_at_once(llm: ChatGraftLM) -> None:
    prompts = [[HumanMessage(f"{i}")] for i in range(8)]
    expected = [g[0].text for g in llm.generate(prompts).generations]
    assert llm.runtime_for().stats().largest_batch == 8
    result = asyncio.run(llm.agenerate(prompts))
    assert [g[0].text for g in result.generations] == expected
    assert llm.runtime_for().stats().requests == 16


def test_a_chain_passes_the_whole_batch_on(llm: ChatGraftLM) -> None:
    chain = ChatPromptTemplate.from_messages([("human", "{q}")]) | llm.bind(max_tokens=4) | StrOutputParser()
    assert len(chain.batch([{"q": str(i)} for i in range(16)])) == 16
    assert llm.runtime_for().stats().largest_batch == 16


def test_max_concurrency_is_kept(llm: ChatGraftLM) -> None:
    llm.batch([f"{i}" for i in range(8)], {"max_concurrency": 2})
    assert llm.runtime_for().stats().largest_batch <= 2
    asyncio.run(llm.abatch([f"{i}" for i in range(8)], {"max_concurrency": 2}))
    assert llm.runtime_for().stats().largest_batch <= 2


def test_a_rate_limiter_is_asked_for_every_call(llm: ChatGraftLM) -> None:
    class Counting(InMemoryRateLimiter):
        count = 0

        def acquire(self, *, blocking: bool = True) -> bool:
            Counting.count += 1
            return True

    limited = llm.model_copy(update={"rate_limiter": Counting()})
    limited.batch(["a", "b", "c"])
    limited.generate([[HumanMessage("a")], [HumanMessage("b")]])
    assert Counting.count == 5


def test_one_bad_input_fails_alone(llm: ChatGraftLM) -> None:
    answers = llm.batch(["a", "x" * 3000, "b"], return_exceptions=True)
    assert [type(a).__name__ for a in answers] == ["AIMessage", "GraftContextOverflowError", "AIMessage"]
    again = asyncio.run(llm.abatch(["a", "x" * 3000, "b"], return_exceptions=True))
    assert [type(a).__name__ for a in again] == ["AIMessage", "GraftContextOverflowError", "AIMessage"]


def test_when_one_input_raises_the_others_leave_nothing_running(llm: ChatGraftLM) -> None:
    with pytest.raises(RequestTooLong, match="3,"):
        llm.batch(["a", "x" * 3000, "b"])
    llm.invoke("another")
    assert llm.runtime_for().stats().slots_in_use == 0


def test_batches_as_completed_answer_every_input_once(llm: ChatGraftLM) -> None:
    async def collect() -> list[Any]:
        return [item async for item in llm.abatch_as_completed([f"{i}" for i in range(16)])]

    expected = dict(enumerate(texts(llm.batch([f"{i}" for i in range(16)]))))
    llm.runtime_for().reset_stats()
    done: list[Any] = list(llm.batch_as_completed([f"{i}" for i in range(16)]))
    assert {index: message.content for index, message in done} == expected
    assert {index: message.content for index, message in asyncio.run(collect())} == expected
    assert llm.runtime_for().stats().largest_batch == 16
    assert llm.runtime_for().stats().requests == 32


def test_parallel_branches_meet_in_the_engine(llm: ChatGraftLM) -> None:
    branches = RunnableParallel(
        **{name: RunnableLambda(lambda q, name=name: f"{SYSTEM}{name} {q}") | llm for name in "abcd"}
    )
    answers = branches.batch([{"q": i} for i in range(8)])
    assert llm.runtime_for().stats().requests == 32
    alone = branches.invoke({"q": 3})
    assert {name: message.content for name, message in answers[3].items()} == {
        name: message.content for name, message in alone.items()
    }


def test_streaming_callbacks_get_their_tokens_in_a_batch(llm: ChatGraftLM) -> None:
    streaming = llm.model_copy(update={"streaming": True})
    streaming.__pydantic_fields_set__.add("streaming")
    tokens: list[str] = []

    class Tokens(BaseCallbackHandler):
        def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
            tokens.append(token)

    streaming.batch(["a", "b"], {"callbacks": [Tokens()]})
    assert len(tokens) > 8
    assert llm.runtime_for().stats().requests == 2


def test_threads_that_mix_all_kinds_of_calls_do_not_disturb_each_other(llm: ChatGraftLM) -> None:
    def one(i: int) -> str:
        match i % 4:
            case 3:
                return str(llm.with_structured_output(ANSWER).invoke(f"call {i % 8}", max_tokens=30))
            case 0:
                return str(llm.invoke(f"call {i % 8}").content)
            case 1:
                return "".join(str(c.content) for c in llm.stream(f"call {i % 8}"))
            case _:
                return texts(llm.batch([f"call {i % 8}", f"other {i}"]))[0]

    serial = [one(i) for i in range(8)]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(one, range(400))) == serial * 50


def test_a_batch_is_invoked_in_the_calling_thread_with_a_context_of_each_call() -> None:
    threads: set[int] = set()

    class Watcher(BaseCallbackHandler):
        def on_llm_end(self, response: Any, **kwargs: Any) -> None:
            threads.add(threading.get_ident())

    def script(prompt: str) -> str:
        if "bad" in prompt:
            raise RequestTooLong("too long", length=9, limit=8)
        return "fine"

    model = ScriptedModel(script)
    with model.runtime() as runtime:
        llm = ChatGraftLM(runtime=runtime)
        good, bad, other = llm.batch(["a", "bad", "b"], {"callbacks": [Watcher()]}, return_exceptions=True)
    assert (good.content, other.content) == ("fine", "fine") and isinstance(bad, RequestTooLong)
    assert model.batches == [3] and threads == {threading.get_ident()}
