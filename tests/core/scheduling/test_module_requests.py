"""Prompts of modules: each is computed once, by itself, and read in any order; nothing of it reaches other prompts."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import graftlm as gl
from graftlm.core.prompt_input import PromptInput
from tests.models import byte_tokenizer, random_prompt, tiny_model

NEW = 6
GREEDY: dict[str, Any] = {"max_tokens": NEW, "temperature": 0, "ignore_eos": True}
MODULES = [random_prompt(length, seed) for seed, length in enumerate((30, 17, 44))]
REST = random_prompt(9, 7)


def composed(modules: list[list[int]], rest: list[int] = REST) -> PromptInput:
    return PromptInput.composed([np.array(one, np.int32) for one in modules], np.array(rest, np.int32))


def opened(kind: str = "llama", **options: Any) -> gl.Runtime:
    own: dict[str, Any] = {"device": "cpu", "speculation": "off", "quiet": True}
    return gl.Runtime(tiny_model(kind), tokenizer=byte_tokenizer(), **own | options)


def check(runtime: gl.Runtime) -> None:
    engine: Any = runtime._thread.engine
    runtime._thread.call(lambda _: engine.check_integrity(), "check")


def answers_of(runtime: gl.Runtime, prompts: list[PromptInput]) -> list[gl.Completion]:
    requests = [gl.Request(prompt, gl.SamplingParams(**GREEDY)) for prompt in prompts]
    return [future.result() for future in runtime.submit_many(requests)]


@pytest.fixture(scope="module")
def runtime() -> Iterator[gl.Runtime]:
    with opened(dtype="float32") as made:
        yield made


@pytest.fixture(autouse=True)
def all_slots_come_back(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "runtime" in request.fixturenames:
        made = request.getfixturevalue("runtime")
        check(made)
        assert made.stats().slots_in_use == 0
        made.clear_cache()
        assert made.stats().slots_cached == 0


def reference(modules: list[list[int]], rest: list[int]) -> list[int]:
    """Greedy tokens by transformers: modules see themselves alone, by a mask, and all begin at position 0."""
    model = tiny_model("llama")
    sizes = [len(one) for one in modules]
    ids = [*itertools.chain(*modules), *rest]
    positions = [*itertools.chain(*(range(size) for size in sizes)), *range(max(sizes), max(sizes) + len(rest))]
    answer: list[int] = []
    for _ in range(NEW):
        n = len(ids)
        seen = torch.ones(n, n).tril().bool()
        start = 0
        for size in sizes:
            seen[start : start + size, :start] = False
            start += size
        mask = torch.zeros(1, 1, n, n).masked_fill(~seen, torch.finfo(torch.float32).min)
        with torch.inference_mode():
            logits = model(
                torch.tensor([ids]), attention_mask=mask, position_ids=torch.tensor([positions]), use_cache=False
            ).logits
        answer.append(int(logits[0, -1].argmax()))
        ids.append(answer[-1])
        positions.append(positions[-1] + 1)
    return answer


def test_tokens_are_those_of_a_mask_and_positions_in_every_order(runtime: gl.Runtime) -> None:
    for order in itertools.permutations(MODULES):
        assert runtime.generate(composed([*order]), **GREEDY).token_ids == reference([*order], REST)


def test_each_module_is_computed_once(runtime: gl.Runtime) -> None:
    runtime.reset_stats()
    prompts = [composed([*order]) for order in itertools.permutations(MODULES)]
    answers = answers_of(runtime, prompts)
    assert len({tuple(answer.token_ids) for answer in answers}) == 1
    modules = sum(map(len, MODULES))
    assert runtime.stats().computed_tokens == modules + len(prompts) * len(REST)
    assert {answer.usage.cached_tokens for answer in answers} == {modules}
    runtime.reset_stats()
    runtime.generate(composed(MODULES[:2]), **GREEDY)
    assert runtime.stats().computed_tokens == len(REST)


def test_a_module_shares_its_kv_with_prompts_that_begin_with_it_and_no_other_text_does(runtime: gl.Runtime) -> None:
    runtime.generate(composed(MODULES), **GREEDY)
    plain = [*itertools.chain(*MODULES), *REST]
    answer = runtime.generate(plain, **GREEDY)
    assert answer.usage.cached_tokens == len(MODULES[0])
    with opened(dtype="float32") as fresh:
        assert answer.token_ids == fresh.generate(plain, **GREEDY).token_ids


def test_samples_and_scores_read_modules(runtime: gl.Runtime) -> None:
    prompt = composed(MODULES)
    drawn = runtime.generate(prompt, n=3, seed=1, temperature=1.0, max_tokens=NEW, ignore_eos=True)
    again = runtime.generate(prompt, n=3, seed=1, temperature=1.0, max_tokens=NEW, ignore_eos=True)
    assert [one.token_ids for one in drawn.completions] == [one.token_ids for one in again.completions]
    greedy = runtime.generate(prompt, **GREEDY, logprobs=True)
    scored = runtime.score(prompt, greedy.token_ids)
    assert scored.logprobs == pytest.approx([one.logprob for one in greedy.logprobs or []], abs=1e-4)


def test_long_rests_run_in_chunks_and_small_pools_keep_the_modules() -> None:
    rest = random_prompt(60, 8)
    with opened(dtype="float32", max_step_tokens=16, cache=gl.CacheConfig(max_tokens=260)) as runtime:
        prompts = [composed([*order], rest) for order in itertools.permutations(MODULES)]
        answers = answers_of(runtime, prompts)
        assert {tuple(answer.token_ids) for answer in answers} == {tuple(reference(MODULES, rest))}
        check(runtime)


def test_a_request_that_ends_while_its_modules_are_computed_leaves_nothing(runtime: gl.Runtime) -> None:

    futures = [runtime.submit(gl.Request(composed([random_prompt(400, seed)]))) for seed in range(8)]
    for future in futures:
        future.cancel()
    late = gl.SamplingParams(timeout=1e-9)
    with pytest.raises(gl.RequestTimeout):
        runtime.complete(gl.Request(composed(MODULES), late))
    assert runtime.generate(composed(MODULES), **GREEDY).token_ids == reference(MODULES, REST)


def test_a_module_that_does_not_fit_ends_its_requests() -> None:
    with opened(cache=gl.CacheConfig(max_tokens=64)) as runtime:
        with pytest.raises(gl.RequestTooLong, match="64"):
            runtime.generate(composed(MODULES), **GREEDY)
        pin = runtime.warm(random_prompt(40, 9))
        with pytest.raises(gl.RequestTooLong, match="not pinned"):
            runtime.generate(composed([MODULES[0]]), max_tokens=1)
        pin.unpin()
        assert runtime.generate(composed([MODULES[0]]), max_tokens=1).usage.completion_tokens == 1


def test_a_prompt_longer_than_the_context_is_refused() -> None:
    with opened(max_model_len=64) as runtime, pytest.raises(gl.RequestTooLong, match="100 tokens"):
        runtime.generate(composed(MODULES), max_tokens=1)


@pytest.mark.filterwarnings("ignore:BloomForCausalLM runs in the serial lane")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: opened(strict=True), "strict=True"),
        (lambda: opened("mistral"), "8 tokens only"),
        (lambda: opened("qwen3_next"), "state"),
        (lambda: opened("bloom"), "positions cannot be set"),
        (lambda: opened(cache=gl.CacheConfig(enabled=False)), "prefix cache"),
    ],
    ids=["strict", "window", "hybrid", "positions", "no cache"],
)
def test_what_cannot_read_modules_says_why(make: Callable[[], gl.Runtime], words: str) -> None:
    with make() as runtime, pytest.raises(gl.ConfigError, match=words):
        runtime.generate(composed(MODULES), **GREEDY)


def test_namespaces_share_no_module(runtime: gl.Runtime) -> None:
    sampling = gl.SamplingParams(max_tokens=1)
    runtime.complete(gl.Request(composed(MODULES), sampling, namespace="a"))
    runtime.reset_stats()
    runtime.complete(gl.Request(composed(MODULES), sampling, namespace="b"))
    assert runtime.stats().computed_tokens == sum(map(len, MODULES)) + len(REST)


def test_requests_from_many_threads_share_a_module(runtime: gl.Runtime) -> None:
    found: list[list[int]] = []

    def ask(seed: int) -> None:
        order = MODULES[seed % 3 :] + MODULES[: seed % 3]
        found.append(runtime.generate(composed(order), **GREEDY).token_ids)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 9 and len({tuple(one) for one in found}) == 1


def test_evicted_modules_come_back_from_host_memory() -> None:
    cache = gl.CacheConfig(max_tokens=192, host_bytes=1 << 24)
    with opened(dtype="float32", cache=cache) as runtime:
        modules = [random_prompt(80, 20), random_prompt(70, 21)]
        expected = reference(modules, REST)
        assert runtime.generate(composed(modules), **GREEDY).token_ids == expected
        for seed in range(4):
            runtime.generate(random_prompt(150, 30 + seed), max_tokens=1)
        runtime.reset_stats()
        assert runtime.generate(composed(modules[::-1]), **GREEDY).token_ids == expected
        assert runtime.stats().computed_tokens < sum(map(len, modules))
        assert runtime.stats().tiers["host"].loaded_tokens > 0
        check(runtime)
