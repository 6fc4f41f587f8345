"""The runtime through its public calls, on tiny random models: the same tokens as transformers, whatever the load."""

import asyncio
import copy
import os
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import numpy as np
import pytest

from graftlm.core.config import CacheConfig, SamplingParams, SchedulerConfig
from graftlm.core.errors import ConfigError, EngineError, ModelError, PluginError, RequestTimeout, RequestTooLong
from graftlm.core.prompt_input import PromptInput
from graftlm.core.request import Chunk, Request
from graftlm.core.runtime import Runtime
from tests.models import byte_tokenizer, greedy_reference, random_prompt, tiny_model

SHAPES = ["llama", "qwen3", "mistral", "gemma3", "phi3", "gpt2"]
NEW = 12
GREEDY = {"temperature": 0, "max_tokens": NEW, "ignore_eos": True}


def runtime(kind: str = "llama", **options: object) -> Runtime:
    options.setdefault("cache", CacheConfig(max_tokens=2048))
    return Runtime(tiny_model(kind), tokenizer=byte_tokenizer(), **options)


@pytest.fixture(scope="module")
def rt() -> Iterator[Runtime]:
    with runtime() as made:
        yield made


def family(num: int, shared: int = 40, own: int = 9) -> list[list[int]]:
    """Prompts that share a beginning, of different lengths."""
    start = random_prompt(shared, seed=1)
    return [start + random_prompt(own + i % 5, seed=100 + i) for i in range(num)]


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cache": CacheConfig(max_tokens=2048, enabled=False)},
        {"max_step_tokens": 16, "max_batch": 8},
        {"cache": CacheConfig(max_tokens=160), "max_batch": 4},
        {"cache": CacheConfig(max_tokens=2048, page_size=16)},
    ],
    ids=["plain", "no cache", "chunked", "evicting", "pages of 16"],
)
def test_greedy_tokens_equal_transformers(kind: str, options: dict[str, object]) -> None:
    prompts = family(7) + [random_prompt(23, seed=5)]
    model = tiny_model(kind)
    with runtime(kind, **options) as rt:
        alone = rt.generate(prompts[0], **GREEDY)
        batch = rt.generate(prompts, **GREEDY)
        again = rt.generate(prompts, **GREEDY)
        rt._thread.call(lambda engine: engine.check_integrity())
    expected = [greedy_reference(model, p, NEW) for p in prompts]
    assert alone.token_ids == expected[0]
    assert [c.token_ids for c in batch] == expected
    assert [c.token_ids for c in again] == expected


def test_prepared_prompts_are_taken_alone_and_in_a_list(rt: Runtime) -> None:
    ids = random_prompt(9, seed=3)
    prepared = PromptInput(np.array(ids, np.int32))
    alone = rt.generate(ids, **GREEDY).token_ids
    assert [one.token_ids for one in rt.generate([prepared, prepared], **GREEDY)] == [alone, alone]
    assert rt.generate(prepared, **GREEDY).token_ids == alone


def test_sixteen_threads_get_the_tokens_that_one_gets(rt: Runtime) -> None:
    prompts = family(16, shared=60)
    expected = [rt.generate(p, **GREEDY).token_ids for p in prompts]
    rt.clear_cache()
    answers: dict[int, list[int]] = {}

    def ask(i: int) -> None:
        answers[i] = rt.generate(prompts[i], **GREEDY).token_ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[i] for i in range(16)] == expected


def test_a_cold_batch_computes_its_shared_prefix_once() -> None:
    prompts = family(32, shared=200, own=10)
    with runtime(cache=CacheConfig(max_tokens=4096)) as rt:
        rt.generate(prompts, **GREEDY)
        stats = rt.stats()
    unique = 200 + sum(len(p) - 200 for p in prompts)
    assert stats.computed_tokens <= unique * 1.01
    assert stats.largest_batch == 32


def test_a_workload_five_times_the_pool_finishes_with_the_same_tokens() -> None:
    prompts = [random_prompt(60, seed=i) for i in range(20)]
    with runtime(cache=CacheConfig(max_tokens=320)) as rt:
        answers = rt.generate(prompts, temperature=0, max_tokens=24, ignore_eos=True)
        stats = rt.stats()
    model = tiny_model("llama")
    assert [c.token_ids for c in answers] == [greedy_reference(model, p, 24) for p in prompts]
    assert stats.slots_free + stats.slots_cached + stats.slots_in_use == stats.slots_total == 320


def test_retracted_sequences_lose_nothing() -> None:
    prompts = [random_prompt(8, seed=i) for i in range(6)]
    with runtime(cache=CacheConfig(max_tokens=300)) as rt:
        answers = rt.generate(prompts, temperature=0, max_tokens=120, ignore_eos=True)
        stats = rt.stats()
    assert stats.retracted > 0
    model = tiny_model("llama")
    assert [c.token_ids for c in answers] == [greedy_reference(model, p, 120) for p in prompts]


def test_n_answers_come_from_one_prefill(rt: Runtime) -> None:
    rt.clear_cache()
    rt.reset_stats()
    prompt = random_prompt(50, seed=77)
    done = rt.generate(prompt, n=4, max_tokens=8, seed=3, temperature=1.0, ignore_eos=True)
    assert len(done.completions) == 4
    assert len({tuple(c.token_ids) for c in done.completions}) > 1
    assert rt.stats().computed_tokens == 50
    assert done.usage.prompt_tokens == 50 and done.usage.completion_tokens == 32


def test_a_seeded_answer_does_not_depend_on_the_batch(rt: Runtime) -> None:
    prompts = family(9)
    options = {"temperature": 1.0, "seed": 11, "max_tokens": 10, "ignore_eos": True}
    alone = rt.generate(prompts[4], **options)
    assert rt.generate(prompts, **options)[4].token_ids == alone.token_ids


def test_stop_strings_cut_the_text_before_them(rt: Runtime) -> None:
    free = rt.generate("some prompt", temperature=0, max_tokens=20, ignore_eos=True)
    stop = free.text[3:5]
    cut = rt.generate("some prompt", temperature=0, max_tokens=20, ignore_eos=True, stop=stop)
    assert cut.text == free.text[: free.text.index(stop)]
    assert (cut.finish_reason, cut.stop) == ("stop", stop)


def test_a_stream_joins_to_the_completion_and_ends_with_usage(rt: Runtime) -> None:
    whole = rt.generate("stream me", **GREEDY)
    chunks = list(rt.stream("stream me", **GREEDY))
    assert "".join(c.text for c in chunks) == whole.text
    assert [i for c in chunks for i in c.token_ids] == whole.token_ids
    assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == NEW


def test_closing_a_stream_frees_its_slots(rt: Runtime) -> None:
    stream = rt.stream("never mind", temperature=0, max_tokens=400, ignore_eos=True)
    next(stream)
    stream.close()
    assert rt._thread.call(lambda engine: engine.stats()).slots_in_use == 0


@pytest.mark.parametrize("n", [1, 3])
def test_a_callback_that_raises_ends_its_own_request_only(rt: Runtime, n: int) -> None:
    def fail(chunk: Chunk) -> None:
        raise RuntimeError("the caller's own")

    sampling = SamplingParams(max_tokens=40, ignore_eos=True, n=n)
    failing = rt.submit(Request(random_prompt(30), sampling, stream=True, on_chunk=fail))
    other = rt.submit(Request(random_prompt(40), sampling))
    with pytest.raises(RuntimeError, match="the caller's own"):
        failing.result()
    assert len(other.result().token_ids) == 40
    assert rt._thread.call(lambda engine: engine.stats()).slots_in_use == 0


def test_cancelling_a_future_frees_its_slots(rt: Runtime) -> None:
    future = rt.submit(Request(random_prompt(30), SamplingParams(max_tokens=400, ignore_eos=True)))
    assert future.cancel()
    with pytest.raises(CancelledError):
        future.result()
    assert rt._thread.call(lambda engine: engine.stats()).slots_in_use == 0


def test_cancelling_a_task_frees_its_slots(rt: Runtime) -> None:
    async def cancel_soon() -> None:
        task = asyncio.create_task(rt.agenerate("never mind", max_tokens=400, ignore_eos=True))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_soon())
    assert rt._thread.call(lambda engine: engine.stats()).slots_in_use == 0


def test_three_event_loops_in_succession_may_use_one_runtime(rt: Runtime) -> None:
    async def ask() -> str:
        streamed = [c.text async for c in rt.astream("loop", **GREEDY)]
        assert "".join(streamed) == (await rt.agenerate("loop", **GREEDY)).text
        return "".join(streamed)

    assert len({asyncio.run(ask()) for _ in range(3)}) == 1


def test_a_timeout_ends_the_request_and_frees_its_slots(rt: Runtime) -> None:
    with pytest.raises(RequestTimeout, match=r"within its 0\.001 s"):
        rt.generate("slow", max_tokens=400, ignore_eos=True, timeout=0.001)
    assert rt._thread.call(lambda engine: engine.stats()).slots_in_use == 0


def test_closing_fails_what_is_running_and_what_comes_later() -> None:
    made = runtime()
    future = made.submit(Request("x", SamplingParams(max_tokens=400, ignore_eos=True)))
    made.close()
    with pytest.raises(EngineError, match="closed before"):
        future.result(timeout=120)
    with pytest.raises(EngineError, match="closed"):
        made.generate("y")


def test_logprobs_are_those_of_the_model(rt: Runtime) -> None:
    import torch

    prompt = random_prompt(20)
    done = rt.generate(prompt, **GREEDY, logprobs=True, top_logprobs=3)
    ids = torch.tensor([prompt + done.token_ids])
    reference = tiny_model("llama")(ids).logits[0].log_softmax(-1)
    for i, entry in enumerate(done.logprobs or []):
        expected = reference[len(prompt) - 1 + i]
        assert entry.logprob == pytest.approx(float(expected[entry.token_id].detach()), abs=1e-4)
        assert len(entry.top) == 3 and entry.top[0][0] == entry.token_id


def test_scores_are_the_log_probabilities_of_given_tokens(rt: Runtime) -> None:
    import torch

    prompt, rest = random_prompt(20), random_prompt(6, seed=9)
    reference = tiny_model("llama")(torch.tensor([prompt + rest])).logits[0].log_softmax(-1)
    expected = [float(reference[19 + i, token].detach()) for i, token in enumerate(rest)]
    assert rt.score(prompt, rest).logprobs == pytest.approx(expected, abs=1e-4)
    assert rt.score(prompt, rest).logprobs == pytest.approx(expected, abs=1e-4)  # from the cache


def test_logits_after_given_tokens_are_the_models(rt: Runtime) -> None:
    import torch

    prompt = random_prompt(20)
    reference = tiny_model("llama")(torch.tensor([prompt])).logits[0, -1].detach().numpy()
    assert rt.logits(prompt).result() == pytest.approx(reference, abs=1e-4)


def test_a_warmed_prefix_survives_pressure_until_it_is_unpinned() -> None:
    prefix = random_prompt(64)
    with runtime(cache=CacheConfig(max_tokens=256)) as rt:
        pin = rt.warm(prefix)
        rt.generate([random_prompt(60, seed=i) for i in range(12)], **GREEDY)
        assert rt.generate([*prefix, 7], **GREEDY).usage.cached_tokens == 64
        pin.unpin()
        rt.clear_cache()
        assert rt.stats().slots_free == 256


def test_explain_names_the_first_text_that_differed(rt: Runtime) -> None:
    rt.clear_cache()
    rt.generate("Today is Monday. Answer briefly.", **GREEDY)
    report = rt.explain(rt.generate("Today is Friday. Answer briefly.", **GREEDY))
    assert report.cached_tokens == len("Today is ")
    assert report.cached_text.startswith("Monday") and report.prompt_text.startswith("Friday")


def test_namespaces_share_no_kv(rt: Runtime) -> None:
    prompt = random_prompt(30, seed=31)
    for namespace in ("a", "b"):
        request = Request(prompt, SamplingParams(**GREEDY), namespace=namespace)
        assert rt.submit(request).result().usage.cached_tokens == 0


def test_copies_share_the_engine() -> None:
    shared = Runtime.shared("sprout", max_batch=3)
    assert copy.deepcopy(shared) is shared is Runtime.shared("sprout", max_batch=3)


@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "words"),
    [
        ("", {}, ConfigError, "empty"),
        ([], {}, ConfigError, "empty"),
        ("x", {"max_tokens": 0}, ConfigError, "max_tokens is 0"),
        ("x", {"temperature": -1}, ConfigError, "temperature is -1"),
        ("x", {"temprature": 1}, ConfigError, "did you mean 'temperature'"),
        ("x", {"choices": []}, ConfigError, "choices is empty"),
        ("x", {"choices": ["a", "a"]}, ConfigError, "duplicates"),
        ([7] * 600, {}, RequestTooLong, r"600 tokens, the context is 512"),
        ([7, 99_999], {}, ConfigError, r"token id 99,999, the model knows 272 ids"),
        (b"text", {}, ConfigError, "the prompt is bytes; decode it to text"),
        ("so \ud800", {}, ConfigError, "lone surrogate .* character 3"),
        ([{"role": "user", "content": "\ud800"}], {}, ConfigError, "lone surrogate"),
        (
            "x",
            {"stop_token_ids": [99_999]},
            ConfigError,
            "stop_token_ids has token id 99,999, the model knows 0 to 271",
        ),
    ],
)
def test_bad_input_names_value_limit_and_remedy(
    rt: Runtime, prompt: object, sampling: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        rt.generate(prompt, **sampling)
    assert rt.generate("x", **GREEDY).finish_reason == "length"  # others go on


def test_ids_to_score_that_no_token_has_are_refused(rt: Runtime) -> None:
    for ids in ([-7], [3, -7, 4], [3, 272]):
        with pytest.raises(ConfigError, match="token id (-7|272)"):
            rt.submit(Request([7], score_ids=ids)).result(60)


def test_a_tokenizer_may_have_more_ids_than_the_model() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"<more {i}>" for i in range(60)])
    with Runtime(tiny_model(), tokenizer=tokenizer) as rt:
        assert rt.generate("x", choices=("one two", "one three"), max_tokens=20).text in ("one two", "one three")
        assert rt.generate("x", regex="[a-f]{3}", max_tokens=20).token_ids[-1] < 272
        with pytest.raises(EngineError, match="token id 303|index out of range"):  # forced, and then run
            rt.generate("x", regex="a<more 39>b[c-f]{3}", max_tokens=20)


def test_one_bad_prompt_of_a_batch_fails_alone(rt: Runtime) -> None:
    requests = [Request("fine", SamplingParams(**GREEDY)), Request([7] * 600), Request("\udfff")]
    good, long, unwritable = rt.submit_many(requests)
    assert good.result().finish_reason == "length"
    with pytest.raises(RequestTooLong):
        long.result()
    with pytest.raises(ConfigError, match="surrogate"):
        unwritable.result()


def test_a_request_larger_than_the_pool_is_refused() -> None:
    with runtime(cache=CacheConfig(max_tokens=64)) as rt, pytest.raises(RequestTooLong, match="pool has 64"):
        rt.generate(random_prompt(60), max_tokens=20)


def test_an_unknown_model_fails_every_request_with_its_cause() -> None:
    made = Runtime("./no-such-folder")
    with pytest.raises(ModelError, match="no-such-folder"):
        made.generate("x")


def test_a_runtime_from_before_a_fork_refuses_to_work_in_the_child(
    rt: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(EngineError, match="forked"):
        rt.generate("x")


def test_a_failing_forward_fails_its_requests_and_the_next_ones_run(
    rt: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = rt.load()._thread.engine
    runner = engine.runner
    with monkeypatch.context() as patched:
        patched.setattr(runner, "forward", lambda plan: 1 / 0)
        with pytest.raises(EngineError, match="ZeroDivisionError") as caught:
            rt.generate("x", **GREEDY)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert rt.generate("x", **GREEDY).finish_reason == "length"
    rt._thread.call(lambda engine: engine.check_integrity())


def test_memory_is_given_back_when_much_was_run_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[int] = []
    monkeypatch.setattr("graftlm.core.engine.give_back", lambda: times.append(rt.stats().steps))
    with runtime() as rt:
        rt.generate([random_prompt(400, seed=i) for i in range(6)], max_tokens=2, temperature=0, ignore_eos=True)
        rt.reset_stats()  # waits until the engine rests
        assert len(times) == 1
        rt.generate(random_prompt(400, seed=7), **GREEDY)
        rt.reset_stats()
        assert len(times) == 1


def test_an_engine_that_breaks_ends_every_request_whatever_state_it_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("broken on purpose")

    with runtime() as rt:
        engine = rt.load()._thread.engine
        sampling = SamplingParams(max_tokens=400, ignore_eos=True)
        stream = rt.submit_stream(Request(random_prompt(30), sampling))
        next(stream)
        futures = rt.submit_many([Request(random_prompt(40 + i), sampling) for i in range(3)])
        monkeypatch.setattr(engine.scheduler, "remove", broken)
        monkeypatch.setattr(engine.scheduler, "schedule", broken)
        for future in futures:
            with pytest.raises(EngineError, match="the engine stopped: RuntimeError: broken on purpose"):
                future.result(timeout=120)
        with pytest.raises(EngineError, match="broken on purpose"):
            list(stream)
        with pytest.raises(EngineError):
            rt.generate("x")
        assert rt.closed and rt.stats().slots_in_use == 0


@pytest.mark.parametrize("policy", ["lpm", "fcfs", "random"])
def test_every_policy_gives_the_same_tokens(policy: str) -> None:
    prompts = family(6)
    with runtime(schedule=SchedulerConfig(policy=policy), max_batch=2) as rt:
        answers = rt.generate(prompts, **GREEDY)
    model = tiny_model("llama")
    assert [c.token_ids for c in answers] == [greedy_reference(model, p, NEW) for p in prompts]


def test_an_unknown_attention_lists_the_known_ones() -> None:
    with runtime(attention="flashy") as made, pytest.raises(PluginError, match="'flashy'; known: .*torch"):
        made.generate("x")


def test_a_loaded_runtime_states_its_precision() -> None:
    with runtime() as rt:
        assert "not loaded" in repr(rt)
        rt.load()
        assert "weights in float32, KV in float32, loaded" in repr(rt)


def cached(runtime: Runtime, prompt: list[int], **options: str) -> int:
    done = runtime.generate(prompt, **GREEDY, **options)
    assert done.token_ids == runtime.generate(prompt, **GREEDY, **options).token_ids
    return done.usage.cached_tokens


def test_namespaces_of_one_engine_share_no_kv() -> None:
    prompt = random_prompt(40, seed=77)
    with runtime(namespace="a") as first:
        second = first.in_namespace("b")
        assert cached(first, prompt) == 0
        assert cached(second, prompt) == cached(first, prompt, namespace="c") == 0
        assert cached(first, prompt) == cached(second, prompt, namespace="a") == cached(first, prompt, namespace="b")
        assert cached(first, prompt) > 30
        given = Request(prompt, SamplingParams(**GREEDY))
        assert first.complete(given).usage.cached_tokens and given.namespace == ""
        waiting = first.in_namespace("d").submit(Request(prompt, SamplingParams(max_tokens=1500, ignore_eos=True)))
        assert waiting.cancel()
        second.close()
        assert first.closed
    with pytest.raises(ConfigError, match="namespace is 3"):
        runtime(namespace=3)


def test_shared_runtimes_of_two_namespaces_have_one_engine() -> None:
    plain, one, other = (Runtime.shared("sprout", namespace=name) for name in ("", "a", "b"))
    assert one is Runtime.shared("sprout", namespace="a") and one is not other
    assert one._thread is other._thread is plain._thread
    assert pickle.loads(pickle.dumps(one)) is one
    plain.close()
    assert Runtime.shared("sprout", namespace="a") is not one
