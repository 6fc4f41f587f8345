from __future__ import annotations

import asyncio
import copy
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import UsageMetadataCallbackHandler
from langchain_core.exceptions import ContextOverflowError, ModelError, ModelInvalidRequestError, ModelTimeoutError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField
from pydantic import ValidationError

from graftlm.adapters.langchain import ChatGraftLM, GraftLLM
from graftlm.core.errors import GraftError
from graftlm.core.runtime import Runtime
from tests.models import byte_tokenizer, tiny_model


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with Runtime(tiny_model(max_position_embeddings=4096), tokenizer=byte_tokenizer()) as runtime:
        yield runtime


@pytest.fixture
def llm(runtime: Runtime) -> ChatGraftLM:
    runtime.clear_cache()
    runtime.reset_stats()
    return ChatGraftLM(runtime=runtime, temperature=0, max_tokens=12)


# -- construction ------------------------------------------------------------------------------------------------


def test_constructing_loads_nothing_and_models_of_one_name_share_a_runtime() -> None:
    models = [ChatGraftLM(model="./no-such-folder") for _ in range(2)]
    assert models[0].runtime_for() is models[1].runtime_for()
    assert "not loaded" in repr(models[0].runtime_for())


def test_an_unknown_constructor_keyword_names_its_neighbour() -> None:
    with pytest.raises(ValidationError, match="'temprature'; did you mean 'temperature'"):
        ChatGraftLM(temprature=0.5)


def test_a_sampling_value_out_of_range_raises_where_the_object_is_built() -> None:
    with pytest.raises(ValidationError, match="top_p is 3"):
        ChatGraftLM(model="sprout", top_p=3)


def test_runtime_options_may_be_given_as_keywords() -> None:
    llm = ChatGraftLM(model="sprout", dtype="float32", max_batch=8)
    assert llm.runtime_options == {"dtype": "float32", "max_batch": 8}
    assert llm.runtime_for() is not ChatGraftLM(model="sprout").runtime_for()


def test_runtime_and_runtime_options_exclude_each_other(runtime: Runtime) -> None:
    with pytest.raises(ValidationError, match="set these where the Runtime is built"):
        ChatGraftLM(runtime=runtime, dtype="float32")


def test_what_is_no_runtime_and_no_url_raise_and_say_what_to_give() -> None:
    with pytest.raises(ValidationError, match="runtime is 'sprout'; give a graftlm.Runtime"):
        ChatGraftLM(runtime="sprout")
    with pytest.raises(ModelInvalidRequestError, match="without http:// or https:// and a host"):
        ChatGraftLM(model="sprout", base_url="localhost:8000/v1").invoke("hello")


def test_a_deep_copy_shares_the_runtime(llm: ChatGraftLM) -> None:
    assert copy.deepcopy(llm).runtime_for() is llm.runtime_for()
    assert llm.model_copy(deep=True).runtime_for() is llm.runtime_for()


def test_the_profile_names_the_context_and_structured_output(llm: ChatGraftLM) -> None:
    assert llm.profile is not None
    assert llm.profile["max_input_tokens"] == 4096
    assert llm.profile["structured_output"] and llm.profile["tool_calling"]


# -- one call ----------------------------------------------------------------------------------------------------


def test_invoke_ainvoke_stream_and_astream_say_the_same(llm: ChatGraftLM) -> None:
    async def collect() -> tuple[Any, list[Any]]:
        return (await llm.ainvoke("hello")).content, [c.content async for c in llm.astream("hello")]

    text = llm.invoke("hello").content
    streamed = [chunk.content for chunk in llm.stream("hello")]
    answer, astreamed = asyncio.run(collect())
    assert text
    assert "".join(streamed) == "".join(astreamed) == answer == text
    assert len(streamed) > 2


def test_the_last_chunk_alone_has_usage_and_says_that_it_is_the_last(llm: ChatGraftLM) -> None:
    *chunks, last = llm.stream("hello")
    assert [c.usage_metadata for c in chunks] == [None] * len(chunks)
    assert last.usage_metadata is not None and last.usage_metadata["output_tokens"] == 12
    assert last.chunk_position == "last"
    assert last.response_metadata["finish_reason"] == "length"


def test_usage_counts_the_rendered_prompt_and_the_cached_part_of_it(llm: ChatGraftLM) -> None:
    first, second = llm.invoke("hello there"), llm.invoke("hello there")
    assert first.usage_metadata is not None and second.usage_metadata is not None
    num_prompt = llm.get_num_tokens_from_messages([HumanMessage("hello there")])
    assert first.usage_metadata["input_tokens"] == second.usage_metadata["input_tokens"] == num_prompt
    assert first.usage_metadata["input_token_details"] == {"cache_read": 0}
    assert second.usage_metadata["input_token_details"] == {"cache_read": num_prompt - 1}


def test_the_usage_callback_sums_cache_reads_by_model(llm: ChatGraftLM) -> None:
    handler = UsageMetadataCallbackHandler()
    llm.invoke("hello", config={"callbacks": [handler]})
    llm.invoke("hello", config={"callbacks": [handler]})
    (usage,) = handler.usage_metadata.values()
    assert usage["input_token_details"]["cache_read"] > 0.45 * usage["input_tokens"]


def test_stop_strings_from_constructor_call_and_bind_are_cut_off(llm: ChatGraftLM) -> None:
    text = str(llm.invoke("hello").content)
    stop = text[3:5]
    cut = text[: text.index(stop)]
    by_constructor = ChatGraftLM(runtime=llm.runtime, temperature=0, max_tokens=12, stop=[stop]).invoke("hello")
    assert [by_constructor.content, by_constructor.response_metadata["finish_reason"]] == [cut, "stop"]
    assert llm.invoke("hello", stop=[stop]).content == cut
    assert llm.bind(stop=[stop]).invoke("hello").content == cut
    assert "".join(str(c.content) for c in llm.stream("hello", stop=[stop])) == cut
    assert [m.content for m in llm.batch(["hello"] * 2, stop=[stop])] == [cut, cut]


def test_parameters_of_a_call_override_those_of_the_object(llm: ChatGraftLM) -> None:
    short = llm.invoke("hello", max_tokens=3)
    assert short.usage_metadata is not None and short.usage_metadata["output_tokens"] == 3
    seeded = [llm.invoke("hello", temperature=1.0, seed=7).content for _ in range(2)]
    assert seeded[0] == seeded[1] != llm.invoke("hello", temperature=1.0, seed=8).content


def test_an_unknown_parameter_of_a_call_raises(llm: ChatGraftLM) -> None:
    with pytest.raises(ModelInvalidRequestError, match="'max_token'; did you mean 'max_tokens'"):
        llm.invoke("hello", max_token=3)


def test_n_answers_come_from_one_prefill_and_count_the_prompt_once(llm: ChatGraftLM) -> None:
    result = llm.generate([[HumanMessage("hello")]], n=4, temperature=1.0, ignore_eos=True)
    assert len(result.generations[0]) == 4
    assert len({g.text for g in result.generations[0]}) > 1
    num_prompt = llm.get_num_tokens_from_messages([HumanMessage("hello")])
    assert llm.runtime_for().stats().computed_tokens == num_prompt
    assert result.llm_output is not None
    assert result.llm_output["token_usage"]["prompt_tokens"] == num_prompt
    assert result.llm_output["token_usage"]["completion_tokens"] == 48


def test_logprobs_equal_those_of_the_model_itself(llm: ChatGraftLM) -> None:
    answer = llm.invoke("hello", logprobs=True, top_logprobs=3, max_tokens=4)
    content = answer.response_metadata["logprobs"]["content"]
    assert [len(item["top_logprobs"]) for item in content] == [3] * 4
    completion = llm.runtime_for().generate([{"role": "user", "content": "hello"}], temperature=0, max_tokens=4)
    prompt = llm.runtime_for().processor.encode([{"role": "user", "content": "hello"}]).ids
    with torch.inference_mode():
        logits = llm.runtime_for().model(torch.tensor([[*prompt.tolist(), *completion.token_ids]])).logits[0]
    expected = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)[range(4), completion.token_ids].sum()
    assert sum(item["logprob"] for item in content) == pytest.approx(expected.item(), abs=1e-3)


def test_bytes_of_a_part_of_a_character_used_to_be_those_of_the_mark_shown_for_it(llm: ChatGraftLM) -> None:
    answer = llm.invoke("hello", logprobs=True, top_logprobs=1, max_tokens=2, logit_bias={0xF0: 100.0})
    content = answer.response_metadata["logprobs"]["content"]
    assert [item["bytes"] for item in content] == [[0xF0], [0xF0]]
    chunks = list(llm.stream("hello", logprobs=True, max_tokens=2, logit_bias={0xF0: 100.0}))
    streamed = [item for c in chunks for item in c.response_metadata.get("logprobs", {}).get("content", ())]
    assert [item["bytes"] for item in streamed] == [[0xF0], [0xF0]]


def test_a_token_count_is_the_models_own(llm: ChatGraftLM) -> None:
    assert llm.get_num_tokens("héllo") == 6  # bytes


def test_chains_and_configurable_fields_work(llm: ChatGraftLM) -> None:
    prompt = ChatPromptTemplate.from_messages([("system", "You are {who}."), ("human", "{question}")])
    field = ConfigurableField(id="max_tokens")
    chain = prompt | llm.configurable_fields(max_tokens=field) | StrOutputParser()
    long = chain.invoke({"who": "a bot", "question": "hi"})
    short = chain.with_config(configurable={"max_tokens": 4}).invoke({"who": "a bot", "question": "hi"})
    assert 0 < len(short.encode()) < len(long.encode())


def test_closing_a_stream_frees_what_it_held(llm: ChatGraftLM) -> None:
    stream = llm.stream("hello", max_tokens=3000)
    next(stream)
    stream.close()
    llm.invoke("another")  # the engine has taken the cancellation before this answer
    assert llm.runtime_for().stats().slots_in_use == 0
    assert llm.runtime_for().stats().cancelled == 1


async def test_cancelling_a_task_frees_what_it_held(llm: ChatGraftLM) -> None:
    task = asyncio.create_task(llm.ainvoke("hello", max_tokens=3000))
    while not llm.runtime_for().stats().open:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await llm.ainvoke("another")
    assert llm.runtime_for().stats().slots_in_use == 0


def test_an_interrupt_leaves_the_engine_usable_and_frees_what_was_held(llm: ChatGraftLM) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.invoke("hello", max_tokens=3900, ignore_eos=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert llm.invoke("another").content
    assert llm.runtime_for().stats().slots_in_use == 0


def test_a_local_model_makes_no_connection(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)

    def refuse(*_: Any) -> None:
        raise AssertionError("a connection was made")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    local = ChatGraftLM(model=str(tmp_path), max_tokens=3, temperature=0)
    assert local.invoke("hello").usage_metadata is not None
    local.runtime_for().close()


# -- messages ----------------------------------------------------------------------------------------------------


def test_a_conversation_is_rendered_once_with_the_models_template(llm: ChatGraftLM) -> None:
    messages = [SystemMessage("be brief"), HumanMessage("hi"), AIMessage("hello"), HumanMessage("again")]
    call = llm._prepare(messages, None, {})
    text = llm.runtime_for().tokenizer.render(call.request.prompt)
    assert text == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tool_results_in_anthropics_form_become_tool_messages(llm: ChatGraftLM) -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "green"}]}
    asked = AIMessage([{"type": "tool_use", "id": "a", "name": "pick", "input": {}}])
    asked.tool_calls = [{"name": "pick", "args": {}, "id": "a", "type": "tool_call"}]
    messages = [HumanMessage("x"), asked, HumanMessage([result, {"type": "text", "text": "and?"}])]
    call = llm._prepare(messages, None, {})
    assert [m.role for m in call.request.prompt] == ["user", "assistant", "tool", "user"]


def test_an_image_for_a_text_model_raises_and_says_so(llm: ChatGraftLM) -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}
    with pytest.raises(ModelInvalidRequestError, match="reads text only"):
        llm.invoke([HumanMessage([{"type": "text", "text": "what is this"}, image])])


def test_an_audio_block_raises_and_names_its_message(llm: ChatGraftLM) -> None:
    with pytest.raises(ModelInvalidRequestError, match="message 1 holds a part of type 'audio'; models here read text"):
        llm.invoke([HumanMessage("x"), HumanMessage([{"type": "audio", "base64": "AA==", "mime_type": "audio/wav"}])])


def test_a_tool_message_that_failed_is_read_like_any_other(llm: ChatGraftLM) -> None:
    asked = AIMessage("", tool_calls=[{"name": "add", "args": {"a": 1}, "id": "a", "type": "tool_call"}])
    failed = ToolMessage("Error: no b", tool_call_id="a", name="add", status="error")
    assert isinstance(llm.invoke([HumanMessage("1+2?"), asked, failed]), AIMessage)


# -- errors ------------------------------------------------------------------------------------------------------


def test_kv_waits_for_the_tools_that_an_answer_calls(llm: ChatGraftLM) -> None:
    """Whole and streamed; the next turn ends the wait, whose length is the tool's expected pause from then on."""
    job = {"type": "function", "function": {"name": "job", "parameters": {"type": "object", "properties": {}}}}

    def waits() -> tuple[int, set[str]]:
        found: tuple[int, set[str]] = llm.runtime_for(None)._thread.call(
            lambda engine: (len(engine.cache.waits), set(engine.cache.waits.mean_s))
        )
        return found

    asked = HumanMessage("What is Mara?")
    answer = llm.bind(tools=[job], tool_choice="any", max_tokens=40).invoke([asked])
    assert waits() == (1, set())
    result = ToolMessage("baker", tool_call_id=answer.tool_calls[0]["id"])  # type: ignore[attr-defined]
    llm.bind(tools=[job], tool_choice="none", max_tokens=2).invoke([asked, answer, result])
    assert waits() == (0, {"job"})
    list(llm.bind(tools=[job], tool_choice="any", max_tokens=40).stream([asked]))
    assert waits()[0] == 1


def test_an_over_long_conversation_is_a_context_overflow_that_names_both_lengths(llm: ChatGraftLM) -> None:
    with pytest.raises(ContextOverflowError, match=r"the prompt is 5,\d+ tokens, the context is 4,096") as caught:
        llm.invoke("x" * 5000)
    assert isinstance(caught.value, GraftError)


def test_a_timeout_is_a_model_timeout_and_frees_the_sequence(llm: ChatGraftLM) -> None:
    with pytest.raises(ModelTimeoutError):
        llm.invoke("hello", timeout=0.001, max_tokens=3000)
    llm.invoke("another")
    assert llm.runtime_for().stats().slots_in_use == 0


def test_a_closed_runtime_raises_a_model_error() -> None:
    runtime = Runtime(tiny_model(), tokenizer=byte_tokenizer())
    runtime.close()
    with pytest.raises(ModelError, match="closed"):
        ChatGraftLM(runtime=runtime, max_tokens=2).invoke("hello")


def test_a_model_that_does_not_exist_is_a_model_error(tmp_path: Any) -> None:
    with pytest.raises(ModelError):
        ChatGraftLM(model=str(tmp_path), max_tokens=2).invoke("hello")


# -- caches ------------------------------------------------------------------------------------------------------


def test_an_llm_cache_answers_the_second_call_and_misses_other_parameters(llm: ChatGraftLM) -> None:
    cached = llm.model_copy(update={"cache": InMemoryCache()})
    first = cached.batch(["a", "b"])
    requests = llm.runtime_for().stats().requests
    assert [m.content for m in cached.batch(["a", "b"])] == [m.content for m in first]
    assert llm.runtime_for().stats().requests == requests
    cached.invoke("a", max_tokens=3)
    assert llm.runtime_for().stats().requests == requests + 1


# -- text --------------------------------------------------------------------------------------------------------


def test_the_text_model_answers_a_list_as_one_batch_without_the_prompts(runtime: Runtime) -> None:
    text = GraftLLM(runtime=runtime, temperature=0, max_tokens=6)
    alone = [text.invoke(f"prompt {i}") for i in range(8)]
    runtime.clear_cache()
    runtime.reset_stats()
    assert text.batch([f"prompt {i}" for i in range(8)]) == alone
    assert runtime.stats().largest_batch == 8
    assert not any(answer.startswith("prompt") for answer in alone)
    assert asyncio.run(text.abatch(["prompt 0", "prompt 1"])) == alone[:2]
    assert "".join(text.stream("prompt 0")) == alone[0]
    assert text.invoke("prompt 0", stop=[alone[0][2]]) == alone[0][: alone[0].index(alone[0][2])]


def test_one_bad_prompt_of_the_text_model_fails_alone(runtime: Runtime) -> None:
    text = GraftLLM(runtime=runtime, temperature=0, max_tokens=6)
    answers = text.batch(["a", "x" * 5000, "b"], return_exceptions=True)
    assert [type(a).__name__ for a in answers] == ["str", "GraftContextOverflowError", "str"]
    again = asyncio.run(text.abatch(["a", "x" * 5000, "b"], return_exceptions=True))
    assert [again[0], again[2]] == [answers[0], answers[2]]
