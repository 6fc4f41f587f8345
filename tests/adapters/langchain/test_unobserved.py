"""Calls that nobody observes, alone or in a batch, give what LangChain's give, without its frame around each."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler, get_usage_metadata_callback
from langchain_core.globals import set_debug, set_llm_cache
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.rate_limiters import InMemoryRateLimiter

from graftlm.adapters.langchain import ChatGraftLM
from graftlm.core.errors import GraftError
from graftlm.testing import ScriptedModel

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CHATS = [[HumanMessage(f"question {i}")] for i in range(4)]


class Subclass(ChatGraftLM):
    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._generate(*args, **kwargs)
        result.generations[0].message.content += "!"
        return result


@pytest.fixture
def model() -> ScriptedModel:
    return ScriptedModel(lambda prompt: "ok")


def plain(message: AIMessage) -> dict[str, Any]:
    return message.model_dump(exclude={"id"})


def test_messages_of_a_batch_are_those_of_invoke(model: ScriptedModel) -> None:
    with model.runtime() as runtime:
        llm = ChatGraftLM(runtime=runtime, temperature=0, logprobs=True)
        alone = [llm.invoke(chat) for chat in CHATS]
        runtime.clear_cache()
        together = llm.batch(CHATS)
        assert model.batches == [1, 1, 1, 1, 4]
    for message in [*alone, *together]:  # what was cached depends on who came before
        assert message.usage_metadata is not None
        message.usage_metadata["input_token_details"] = {}
        message.response_metadata["token_usage"]["cached_tokens"] = 0
    assert list(map(plain, together)) == list(map(plain, alone))
    assert all(str(message.id).startswith("lc_run-") for message in together)
    assert len({message.id for message in together}) == 4


async def test_messages_of_abatch_are_those_of_ainvoke(model: ScriptedModel) -> None:
    with model.runtime() as runtime:
        llm = ChatGraftLM(runtime=runtime, temperature=0)
        together = await llm.abatch(CHATS)
        assert model.batches == [4]
        alone = await llm.ainvoke(CHATS[0])
    assert [message.content for message in together] == ["ok"] * 4
    assert together[0].response_metadata.keys() == alone.response_metadata.keys()


def test_a_callback_hears_of_every_call(model: ScriptedModel) -> None:
    class Counter(BaseCallbackHandler):
        starts = ends = 0

        def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
            self.starts += 1

        def on_llm_end(self, *args: Any, **kwargs: Any) -> None:
            self.ends += 1

    counter = Counter()
    with model.runtime() as runtime:
        llm = ChatGraftLM(runtime=runtime)
        llm.batch(CHATS, {"callbacks": [counter]})
        ((ChatPromptTemplate.from_messages([("human", "{q}")])) | llm).batch(
            [{"q": "a"}, {"q": "b"}], {"callbacks": [counter]}
        )
        with get_usage_metadata_callback() as usage:
            llm.batch(CHATS)
    assert (counter.starts, counter.ends) == (6, 6)
    assert sum(one["output_tokens"] for one in usage.usage_metadata.values()) > 0
    assert model.batches == [4, 2, 4]


def test_an_overridden_method_takes_part(model: ScriptedModel) -> None:
    with model.runtime() as runtime:
        assert [m.content for m in Subclass(runtime=runtime).batch(CHATS)] == ["ok!"] * 4


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_errors_are_raised_or_returned_in_their_place(asynchronous: bool) -> None:
    def script(prompt: str) -> str:
        if "question 2" in prompt:
            raise GraftError("not this one")
        return "ok"

    with ScriptedModel(script).runtime() as runtime:
        llm = ChatGraftLM(runtime=runtime)
        answers = (
            await llm.abatch(CHATS, return_exceptions=True)
            if asynchronous
            else llm.batch(CHATS, return_exceptions=True)
        )
        assert [getattr(answer, "content", None) for answer in answers] == ["ok", "ok", None, "ok"]
        assert "not this one" in str(answers[2])
        with pytest.raises(GraftError, match="not this one"):
            await llm.abatch(CHATS) if asynchronous else llm.batch(CHATS)


def test_run_ids_of_configs_name_the_messages(model: ScriptedModel) -> None:
    import uuid

    first = uuid.uuid4()
    with model.runtime() as runtime:
        answers = ChatGraftLM(runtime=runtime).batch(CHATS, [{"run_id": first}, {}, {}, {}])
    assert answers[0].id == f"lc_run--{first}-0"


class Observer(BaseCallbackHandler):
    """Hears of every call and changes nothing."""


def test_an_invoke_that_nobody_observes_returns_what_an_observed_one_returns(model: ScriptedModel) -> None:
    with model.runtime() as runtime:
        for options in ({}, {"stop": ["k"]}, {"logprobs": True}, {"max_tokens": 1}, {"tools": [TOOL]}, {"n": 2}):
            llm = ChatGraftLM(runtime=runtime, temperature=0)
            for asked in ("question", CHATS[0], [("system", "s"), ("human", [{"type": "text", "text": "q"}])]):
                runtime.clear_cache()
                alone = llm.invoke(asked, **options)
                runtime.clear_cache()
                observed = llm.invoke(asked, {"callbacks": [Observer()]}, **options)
                assert plain(alone) == plain(observed)
                assert type(alone) is type(observed)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that LangChain itself makes."""
    calls: list[str] = []
    generate = BaseChatModel.generate

    def noted(self: Any, messages: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(str(messages[0][0].content))
        return generate(self, messages, *args, **kwargs)

    monkeypatch.setattr(BaseChatModel, "generate", noted)
    return calls


def test_a_call_is_made_by_langchain_only_where_something_takes_part(model: ScriptedModel, made: list[str]) -> None:
    with model.runtime() as runtime:
        settings: dict[str, Any] = {"runtime": runtime, "temperature": 0}
        plain_llm = ChatGraftLM(**settings)
        plain_llm.invoke("nobody")
        (ChatPromptTemplate.from_messages([("human", "{q}")]) | plain_llm).invoke({"q": "nobody in a chain"})
        assert made == []
        plain_llm.invoke("callback", {"callbacks": [Observer()]})
        (ChatPromptTemplate.from_messages([("human", "{q}")]) | plain_llm).invoke(
            {"q": "chain"}, {"callbacks": [Observer()]}
        )
        ChatGraftLM(**settings, callbacks=[Observer()]).invoke("own callback")
        with get_usage_metadata_callback():
            plain_llm.invoke("context")
        ChatGraftLM(**settings, rate_limiter=InMemoryRateLimiter(requests_per_second=1000)).invoke("limit")
        ChatGraftLM(**settings, cache=InMemoryCache()).invoke("own cache")
        ChatGraftLM(**settings, streaming=True).invoke("streaming")
        ChatGraftLM(**settings, output_version="v1").invoke("blocks")
        ChatGraftLM(**settings, verbose=True).invoke("verbose")
        plain_llm.invoke([HumanMessage("two answers")], n=2)
        assert Subclass(**settings).invoke("subclass").content == "ok!"
    assert made == [
        "callback", "chain", "own callback", "context", "limit", "own cache", "streaming", "blocks", "verbose",
        "two answers", "subclass",
    ]  # fmt: skip


def test_a_global_cache_and_debugging_take_part(
    model: ScriptedModel, made: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with model.runtime() as runtime:
        llm = ChatGraftLM(runtime=runtime, temperature=0)
        set_llm_cache(InMemoryCache())
        try:
            assert llm.invoke("twice").content == llm.invoke("twice").content
        finally:
            set_llm_cache(None)
        set_debug(True)
        try:
            llm.invoke("debug")
        finally:
            set_debug(False)
    assert made == ["twice", "twice", "debug"]
    assert model.batches == [1, 1]
    assert "debug" in capsys.readouterr().out


async def test_an_ainvoke_that_nobody_observes_returns_what_invoke_returns(model: ScriptedModel) -> None:
    with model.runtime() as runtime:
        llm = ChatGraftLM(runtime=runtime, temperature=0)
        alone = llm.invoke("question")
        runtime.clear_cache()
        assert plain(await llm.ainvoke("question")) == plain(alone)


def test_an_error_is_the_one_that_an_observed_call_raises() -> None:
    def script(prompt: str) -> str:
        raise GraftError("not this one")

    with ScriptedModel(script).runtime() as runtime:
        llm = ChatGraftLM(runtime=runtime)
        for asked, options in (("a", {}), ([], {}), ("a", {"temprature": 1}), (7, {})):
            met = []
            for config in ({}, {"callbacks": [Observer()]}):
                with pytest.raises(Exception) as raised:
                    llm.invoke(asked, config, **options)  # type: ignore[arg-type]
                met.append((type(raised.value), str(raised.value)))
            assert met[0] == met[1]


def test_an_invoke_names_its_message_after_its_run(model: ScriptedModel) -> None:
    import uuid

    run = uuid.uuid4()
    with model.runtime() as runtime:
        llm = ChatGraftLM(runtime=runtime)
        assert llm.invoke("a", {"run_id": run}).id == f"lc_run--{run}-0"
        assert str(llm.invoke("a").id).startswith("lc_run--")
