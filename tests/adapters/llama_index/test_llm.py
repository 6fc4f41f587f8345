from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llama_index.core
import pytest
from llama_index.core import PromptTemplate, get_response_synthesizer
from llama_index.core.base.llms.types import AudioBlock, ImageBlock
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.extractors import KeywordExtractor
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.llms import ChatMessage, TextBlock
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.postprocessor import LLMRerank
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.tools import ToolMetadata
from pydantic import ValidationError

from graftlm.adapters.llama_index import GraftCallError, GraftLLM, GraftSelector
from graftlm.core.errors import RequestTooLong
from graftlm.core.runtime import Runtime
from tests.models import byte_tokenizer, tiny_model


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with Runtime(tiny_model(max_position_embeddings=8192), tokenizer=byte_tokenizer()) as runtime:
        yield runtime


@pytest.fixture
def llm(runtime: Runtime) -> GraftLLM:
    runtime.clear_cache()
    runtime.reset_stats()
    return GraftLLM(runtime=runtime, temperature=0, max_tokens=8)


def nodes(count: int, words: int = 80) -> list[NodeWithScore]:
    return [NodeWithScore(node=TextNode(text=f"chunk {i} " + "word " * words), score=1.0) for i in range(count)]


def synthesizer(llm: Any, mode: Any, window: int = 800, **options: Any) -> Any:
    helper = PromptHelper(context_window=window, num_output=8, tokenizer=lambda text: list(text.encode()))
    return get_response_synthesizer(llm=llm, response_mode=mode, prompt_helper=helper, **options)


# -- the object --------------------------------------------------------------------------------------------------


def test_it_is_a_function_calling_llm_with_a_name_of_its_own(llm: GraftLLM) -> None:
    assert isinstance(llm, FunctionCallingLLM)
    assert GraftLLM.class_name() == "GraftLLM"


def test_the_metadata_come_from_the_model(llm: GraftLLM) -> None:
    meta = llm.metadata
    assert (meta.context_window, meta.num_output) == (8192, 8)
    assert meta.is_chat_model and meta.is_function_calling_model
    assert GraftLLM(runtime=llm.runtime, context_window=1000).metadata.context_window == 1000


def test_it_goes_to_a_dict_and_back_without_weights_and_secrets() -> None:
    told = GraftLLM(model="sprout", temperature=0.5, api_key="secret").to_dict()
    assert "secret" not in str(told) and "runtime" not in told
    again = GraftLLM.from_dict(told)
    assert (again.model, again.temperature) == ("sprout", 0.5)


def test_a_deep_copy_shares_the_runtime(llm: GraftLLM) -> None:
    assert copy.deepcopy(llm).runtime_for() is llm.runtime_for()


def test_unknown_and_wrong_parameters_raise_where_they_are_given(llm: GraftLLM) -> None:
    with pytest.raises(ValidationError, match="'temprature'; did you mean 'temperature'"):
        GraftLLM(temprature=1)
    with pytest.raises(ValidationError, match="top_p is 3"):
        GraftLLM(model="sprout", top_p=3)
    with pytest.raises(GraftCallError, match="'max_token'; did you mean 'max_tokens'"):
        llm.complete("x", max_token=3)


def test_what_is_no_runtime_raises_and_says_what_to_give() -> None:
    with pytest.raises(ValidationError, match="runtime is 'sprout'; give a graftlm.Runtime"):
        GraftLLM(runtime="sprout")


def test_the_context_of_an_endpoint_is_llama_indexes_default() -> None:
    llm = GraftLLM(model="sprout", api_base="http://localhost:8000/v1", is_chat_model=True)
    assert llm.metadata.context_window == 3900


def test_what_is_no_message_raises(llm: GraftLLM) -> None:
    with pytest.raises(GraftCallError, match="message 1 is a dict; give a ChatMessage"):
        llm.chat([ChatMessage("x"), {"role": "user", "content": "y"}])


# -- the eight methods -------------------------------------------------------------------------------------------


async def test_all_eight_methods_say_the_same(llm: GraftLLM) -> None:
    messages = [ChatMessage("hello")]
    chat, complete = llm.chat(messages), llm.complete("hello")
    said = [
        complete.text,
        "".join(str(r.delta) for r in llm.stream_chat(messages)),
        "".join(str(r.delta) for r in llm.stream_complete("hello")),
        (await llm.achat(messages)).message.content,
        (await llm.acomplete("hello")).text,
        "".join([str(r.delta) async for r in await llm.astream_chat(messages)]),
        "".join([str(r.delta) async for r in await llm.astream_complete("hello")]),
    ]
    assert chat.message.content
    assert said == [chat.message.content] * 7


def test_streams_are_cumulative_and_end_with_the_usage(llm: GraftLLM) -> None:
    *rest, last = llm.stream_chat([ChatMessage("hello")])
    assert len(rest) > 2
    assert rest[1].message.content == f"{rest[0].delta}{rest[1].delta}"
    assert ["usage" in r.raw for r in [*rest, last]] == [False] * len(rest) + [True]


def test_usage_counts_prompt_answer_and_cached_tokens(llm: GraftLLM) -> None:
    first, second = (llm.chat([ChatMessage("hello")]).raw["usage"] for _ in range(2))
    assert first["completion_tokens"] == 8
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    assert second["prompt_tokens_details"] == {"cached_tokens": first["prompt_tokens"] - 1}


def test_the_token_counter_counts_what_the_engine_counts(llm: GraftLLM) -> None:
    counter = TokenCountingHandler(tokenizer=lambda text: [])
    counting = GraftLLM(runtime=llm.runtime, max_tokens=8, callback_manager=CallbackManager([counter]))
    counting.chat([ChatMessage("hello")])
    counting.complete("hello")
    list(counting.stream_chat([ChatMessage("hello")]))
    stats = llm.runtime_for().stats()
    assert counter.prompt_llm_token_count == stats.prompt_tokens
    assert counter.completion_llm_token_count == stats.completion_tokens


def test_parameters_of_a_call_take_effect(llm: GraftLLM) -> None:
    text = str(llm.complete("hello"))
    assert llm.complete("hello", max_tokens=3).raw["usage"]["completion_tokens"] == 3
    assert str(llm.complete("hello", stop=[text[2]])) == text[: text.index(text[2])]
    seeded = [llm.complete("hello", temperature=1.0, seed=3).text for _ in range(2)]
    assert seeded[0] == seeded[1]
    logprobs = llm.complete("hello", logprobs=True, top_logprobs=2, max_tokens=3).logprobs
    assert logprobs is not None and [len(token) for token in logprobs] == [3, 3, 3]


def test_bytes_of_a_part_of_a_character_used_to_be_those_of_the_mark_shown_for_it(llm: GraftLLM) -> None:
    logprobs = llm.complete("hello", logprobs=True, top_logprobs=1, max_tokens=2, logit_bias={0xF0: 100.0}).logprobs
    assert logprobs is not None and [token[0].bytes for token in logprobs] == [[0xF0], [0xF0]]


async def test_a_generation_leaves_the_event_loop_free(llm: GraftLLM) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    ticker = asyncio.create_task(tick())
    await llm.achat([ChatMessage("hello")], max_tokens=400, ignore_eos=True)
    ticker.cancel()
    assert ticks > 2  # a blocked loop would tick once at most


async def test_gathered_calls_share_one_engine_batch(llm: GraftLLM) -> None:
    await asyncio.gather(*(llm.acomplete(f"hello {i}", max_tokens=40, ignore_eos=True) for i in range(8)))
    assert llm.runtime_for().stats().largest_batch == 8


def test_one_object_serves_several_event_loops_and_threads(llm: GraftLLM) -> None:
    expected = str(llm.complete("hello"))
    assert [asyncio.run(llm.acomplete("hello")).text for _ in range(3)] == [expected] * 3
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: asyncio.run(llm.acomplete("hello")).text, range(8))) == [expected] * 8


async def test_sync_calls_work_while_a_loop_runs(llm: GraftLLM) -> None:
    tree = synthesizer(llm, "tree_summarize", use_async=True)
    expected = await tree.asynthesize("what?", nodes(4))
    assert str(tree.synthesize("what?", nodes(4))) == str(expected)


def test_closing_a_stream_frees_what_it_held(llm: GraftLLM) -> None:
    stream = llm.stream_chat([ChatMessage("hello")], max_tokens=3000)
    next(stream)
    stream.close()
    llm.complete("another")
    assert llm.runtime_for().stats().slots_in_use == 0


async def test_cancelling_an_async_stream_frees_what_it_held(llm: GraftLLM) -> None:
    async def read() -> None:
        async for _ in await llm.astream_chat([ChatMessage("hello")], max_tokens=3000):
            started.set()

    started = asyncio.Event()
    task = asyncio.create_task(read())
    await asyncio.wait([task, asyncio.create_task(started.wait())], return_when=asyncio.FIRST_COMPLETED)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await llm.acomplete("another")
    assert llm.runtime_for().stats().slots_in_use == 0


# -- prompts -----------------------------------------------------------------------------------------------------


def prompt_of(llm: GraftLLM, text: str, formatted: bool = False) -> str:
    request = llm._text_request(text, formatted, {})
    tokenizer = llm.runtime_for().tokenizer
    encoded = llm.runtime_for().processor.encode(request.prompt)
    return tokenizer.decode(encoded.ids, skip_special=False)


def test_a_completion_is_one_message_of_the_user_unless_it_is_formatted(llm: GraftLLM) -> None:
    assert prompt_of(llm, "hi") == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_of(llm, "hi", formatted=True) == "hi"


def test_prompt_functions_of_the_user_are_respected(llm: GraftLLM) -> None:
    own = GraftLLM(
        runtime=llm.runtime,
        completion_to_prompt=lambda text: f"Q: {text} A:",
        messages_to_prompt=lambda messages: "|".join(str(m.content) for m in messages),
    )
    assert prompt_of(own, "hi") == "Q: hi A:"
    assert own._chat_request([ChatMessage("a"), ChatMessage("b")], {})[0].prompt == "a|b"


def test_a_system_prompt_comes_first_in_predictions(llm: GraftLLM) -> None:
    seen: list[Any] = []

    class Spy(GraftLLM):
        def _chat_request(self, messages: Any, given: Any) -> Any:
            seen.extend(messages)
            return super()._chat_request(messages, given)

    Spy(runtime=llm.runtime, max_tokens=2, system_prompt="Be brief.").predict(PromptTemplate("{x}"), x="hi")
    assert [(m.role.value, m.content) for m in seen] == [("system", "Be brief."), ("user", "hi")]


def test_one_bos_stands_before_a_rendered_prompt() -> None:
    with Runtime(tiny_model(), tokenizer=byte_tokenizer(add_bos=True)) as runtime:
        assert prompt_of(GraftLLM(runtime=runtime), "hi").count("<|bos|>") == 1


@pytest.mark.parametrize("block", [ImageBlock(image=b"\x89PNG"), AudioBlock(audio=b"RIFF")])
def test_images_and_sounds_for_a_text_model_raise(llm: GraftLLM, block: Any) -> None:
    with pytest.raises(GraftCallError, match="reads? text"):
        llm.chat([ChatMessage(blocks=[TextBlock(text="what is this?"), block])])


def test_an_over_long_prompt_names_both_lengths(llm: GraftLLM) -> None:
    with pytest.raises(RequestTooLong, match=r"the prompt is 9,\d+ tokens, the context is 8,192"):
        llm.complete("x" * 9000)


# -- what LlamaIndex builds on it --------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "batch"), [("tree_summarize", 9), ("accumulate", 8), ("compact_accumulate", 8)])
def test_async_synthesizers_reach_full_batches_and_say_the_same(llm: GraftLLM, mode: Any, batch: int) -> None:
    llama_index.core.Settings.tokenizer = llm.tokenize
    expected = synthesizer(llm, mode, window=1000).synthesize("what?", nodes(8))
    llm.runtime_for().reset_stats()
    answer = synthesizer(llm, mode, window=1000, use_async=True).synthesize("what?", nodes(8))
    assert llm.runtime_for().stats().largest_batch == batch
    assert str(answer) == str(expected)


@pytest.mark.parametrize("mode", ["refine", "compact", "tree_summarize"])
def test_synthesizers_say_what_they_say_on_plain_transformers(llm: GraftLLM, mode: Any) -> None:
    plain = pytest.importorskip("llama_index.llms.huggingface").HuggingFaceLLM(
        model=tiny_model(max_position_embeddings=8192),
        tokenizer=byte_tokenizer(),
        context_window=8192,
        max_new_tokens=8,
        generate_kwargs={"do_sample": False},
    )
    text = GraftLLM(runtime=llm.runtime, temperature=0, max_tokens=8, is_chat_model=False)
    answers = [str(synthesizer(engine, mode, window=1800).synthesize("what?", nodes(4))) for engine in (text, plain)]
    assert answers[0] == answers[1] != ""


def test_a_tree_over_many_chunks_never_overruns_the_context(llm: GraftLLM) -> None:
    small = GraftLLM(runtime=llm.runtime, temperature=0, max_tokens=8, context_window=900)
    helper = PromptHelper.from_llm_metadata(small.metadata, tokenizer=small.tokenize)
    tree = get_response_synthesizer(llm=small, response_mode="tree_summarize", prompt_helper=helper, use_async=True)
    assert str(tree.synthesize("what?", nodes(50)))


def test_four_questions_over_one_context_compute_it_once(llm: GraftLLM) -> None:
    compact = get_response_synthesizer(llm=llm, response_mode="compact")
    for question in ["who?", "where?", "when?", "why?"]:
        before = llm.runtime_for().stats()
        compact.synthesize(question, nodes(4))
        after = llm.runtime_for().stats()
        hits = after.cached_tokens - before.cached_tokens, after.prompt_tokens - before.prompt_tokens
        assert question == "who?" or hits[0] / hits[1] > 0.9


def test_a_chat_engine_computes_only_what_is_new_in_each_turn(llm: GraftLLM) -> None:
    memory = ChatMemoryBuffer.from_defaults(token_limit=8000)  # the default one keeps a database open
    engine = SimpleChatEngine.from_defaults(llm=llm, memory=memory, system_prompt="You are a bot. " * 20)
    for turn in range(6):
        before = llm.runtime_for().stats().computed_tokens
        engine.chat("go on")
        computed = llm.runtime_for().stats().computed_tokens - before
        # the new message, its answer's own tokens where the template writes them otherwise, and the turn's marks
        assert turn == 0 or computed < 80


def test_a_chat_engine_that_forgets_its_first_turns_answers_as_without_a_cache(llm: GraftLLM) -> None:
    def chat(clear: bool) -> list[str]:
        engine = SimpleChatEngine.from_defaults(
            llm=llm, memory=ChatMemoryBuffer.from_defaults(token_limit=60, tokenizer_fn=llm.tokenize)
        )
        answers = []
        for turn in range(6):
            if clear:
                llm.runtime_for().clear_cache()
            answers.append(str(engine.chat(f"turn {turn}, go on")))
        return answers

    assert chat(clear=False) == chat(clear=True)
    assert llm.runtime_for().stats().cached_tokens > 0


def test_extractors_fill_the_batch_up_to_their_workers(llm: GraftLLM) -> None:
    extractor = KeywordExtractor(llm=llm, num_workers=4, show_progress=False)
    asyncio.run(extractor.aextract([node.node for node in nodes(8)]))
    assert llm.runtime_for().stats().largest_batch == 4


def test_rerank_shares_its_instructions(llm: GraftLLM) -> None:
    rerank = LLMRerank(llm=llm, choice_batch_size=2, top_n=2, parse_choice_select_answer_fn=lambda *_: ([1], [1.0]))
    rerank.postprocess_nodes(nodes(8, words=10), QueryBundle("what?"))
    assert llm.runtime_for().stats().hit_rate > 0.6


def test_queries_from_many_threads_do_not_disturb_each_other(llm: GraftLLM) -> None:
    compact = get_response_synthesizer(llm=llm, response_mode="compact")
    questions = [f"question {i}?" for i in range(8)]
    serial = [str(compact.synthesize(q, nodes(2))) for q in questions]
    with ThreadPoolExecutor(8) as pool:
        assert [str(r) for r in pool.map(lambda q: compact.synthesize(q, nodes(2)), questions)] == serial


def test_a_router_selects_by_probability(llm: GraftLLM) -> None:
    choices = [ToolMetadata(description=f"about topic {i}", name=f"tool_{i}") for i in range(5)]
    result = GraftSelector(llm).select(choices, "which topic?")
    again = asyncio.run(GraftSelector(llm).aselect(choices, "which topic?"))
    assert result.ind == again.ind in range(5)
    assert sum(result.probabilities) == pytest.approx(1)
    assert result.probabilities.index(max(result.probabilities)) == result.ind
    assert f"tool_{result.ind}" in result.reason


# -- events ------------------------------------------------------------------------------------------------------


class Events(BaseEventHandler):
    names: list[str] = []

    def handle(self, event: Any, **kwargs: Any) -> None:
        self.names.append(type(event).__name__.removesuffix("Event"))


@pytest.fixture
def events() -> Iterator[list[str]]:
    handler = Events(names=[])
    root = get_dispatcher()
    root.add_event_handler(handler)
    yield handler.names
    root.event_handlers.remove(handler)


def test_events_start_and_end_once_each(llm: GraftLLM, events: list[str]) -> None:
    llm.chat([ChatMessage("x")])
    assert events == ["LLMChatStart", "LLMChatEnd"]
    events.clear()
    asyncio.run(llm.acomplete("x"))
    assert events == ["LLMCompletionStart", "LLMCompletionEnd"]
    events.clear()
    list(llm.stream_chat([ChatMessage("x")]))
    assert [e for e in events if e != "LLMChatInProgress"] == ["LLMChatStart", "LLMChatEnd"]


def test_an_error_is_an_event_too(llm: GraftLLM, events: list[str]) -> None:
    with pytest.raises(RequestTooLong):
        list(llm.stream_chat([ChatMessage("x" * 9000)]))
    assert events[0] == "LLMChatStart" and "LLMChatEnd" not in events


def test_no_thread_is_left_behind(llm: GraftLLM) -> None:
    llm.complete("the first call starts the engine's thread")
    before = set(threading.enumerate())
    asyncio.run(llm.acomplete("x"))
    begun = set(threading.enumerate()) - before
    assert [t for t in begun if not t.name.startswith("graftlm grammar")] == []  # a load gets grammars ready beside
