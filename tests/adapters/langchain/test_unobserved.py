"""A batch that nobody observes gives what single calls give, without LangChain's frame around each."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler, get_usage_metadata_callback
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate

from graftlm.adapters.langchain import ChatGraftLM
from graftlm.core.errors import GraftError
from graftlm.testing import ScriptedModel

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
