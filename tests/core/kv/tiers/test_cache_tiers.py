"""Evicted KV comes back from host memory: the same answers, hardly more computed tokens than with an endless pool."""

from __future__ import annotations

import random

import pytest

import graftlm as gl
from graftlm.core.config import SchedulerConfig
from graftlm.core.errors import ConfigError
from graftlm.core.kv.tiers.block_copier import Arrival
from graftlm.core.metrics import Stats
from tests.models import byte_tokenizer, tiny_model

NUM_CHATS, NUM_TURNS, NUM_NEW = 8, 3, 30
HOST = {"host_bytes": 1 << 26}
FIRST_COME = SchedulerConfig(policy="fcfs")


def chat(kind: str, *, namespaces: bool = False, **cache: object) -> tuple[list[list[int]], Stats]:
    """Answer turns of several chats over one shared prompt; the chats take their turns in the same order."""
    dice = random.Random(3)
    shared = [dice.randrange(40, 200) for _ in range(70)]
    chats = [shared + [dice.randrange(40, 200) for _ in range(50)] for _ in range(NUM_CHATS)]
    options = gl.CacheConfig(**cache)
    with gl.Runtime(
        tiny_model(kind), tokenizer=byte_tokenizer(), device="cpu", dtype="float32", max_batch=4, cache=options
    ) as runtime:
        answers: list[list[int]] = []
        for _ in range(NUM_TURNS):
            requests = [
                gl.Request(
                    list(one),
                    gl.SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
                    namespace=str(number) if namespaces else "",
                )
                for number, one in enumerate(chats)
            ]
            done = [future.result() for future in runtime.submit_many(requests)]
            answers += [one.token_ids for one in done]
            for one, completion in zip(chats, done, strict=True):
                one += completion.token_ids + [dice.randrange(40, 200) for _ in range(NUM_NEW)]
        runtime._thread.call(lambda engine: engine.check_integrity())
        return answers, runtime.stats()


@pytest.fixture(scope="module")
def endless() -> tuple[list[list[int]], Stats]:
    return chat("llama", max_tokens=10_000)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_pool_of_a_third_computes_what_an_endless_one_does(
    endless: tuple[list[list[int]], Stats], page_size: int
) -> None:
    answers, right = endless
    without, evicting = chat("llama", max_tokens=512, page_size=page_size)
    found, stats = chat("llama", max_tokens=512, page_size=page_size, **HOST)
    assert found == without == answers
    assert evicting.computed_tokens > 1.5 * right.computed_tokens
    lost = NUM_CHATS * NUM_TURNS * (page_size - 1)  # the end of a prompt that fills no page
    assert stats.computed_tokens <= 1.05 * right.computed_tokens + lost
    assert stats.tiers["host"].loaded_tokens > 300


def test_states_of_hybrid_models_come_back_with_their_kv() -> None:
    answers, right = chat("qwen3_next", max_tokens=10_000, states=60)
    found, stats = chat("qwen3_next", max_tokens=512, states=7, **HOST)
    assert found == answers
    assert stats.computed_tokens <= 1.15 * right.computed_tokens
    assert stats.tiers["host"].loaded_tokens > 300


def test_namespaces_are_kept_apart_in_host_memory() -> None:
    answers, right = chat("llama", namespaces=True, max_tokens=10_000)
    found, stats = chat("llama", namespaces=True, max_tokens=512, **HOST)
    assert found == answers
    assert right.computed_tokens <= stats.computed_tokens <= 1.05 * right.computed_tokens


def test_clear_cache_empties_host_memory() -> None:
    runtime = gl.Runtime(
        tiny_model("llama"), tokenizer=byte_tokenizer(), device="cpu", cache=gl.CacheConfig(max_tokens=256, **HOST)
    )
    with runtime:
        first, second = list(range(40, 190)), list(range(190, 40, -1))
        for prompt in (first, second):
            runtime.generate(prompt, max_tokens=2)
        assert runtime.stats().tiers["host"].tokens > 0
        runtime.clear_cache()
        assert runtime.stats().tiers["host"].tokens == 0
        assert runtime.generate(first, max_tokens=2).usage.cached_tokens == 0


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        ({"host_bytes": 1 << 50}, "host_bytes is 1,125,899.9 GB, .* GB of this machine's memory are free"),
        ({"host_bytes": 1000}, "host_bytes is 0.0 MB, one block of 64 tokens of this model takes"),
        ({"host_bytes": 1 << 20, "enabled": False}, "host_bytes and enabled=False"),
    ],
)
def test_host_memory_that_cannot_be_had_is_refused_with_both_numbers(cache: dict[str, object], words: str) -> None:
    runtime = gl.Runtime(tiny_model("llama"), tokenizer=byte_tokenizer(), device="cpu", cache=gl.CacheConfig(**cache))
    with runtime, pytest.raises(ConfigError, match=words):
        runtime.load()


def test_a_load_that_evicts_the_prefix_of_the_next_waiting_prompt_moves_none_of_its_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dice = random.Random(5)
    first, second, third = ([dice.randrange(40, 200) for _ in range(size)] for size in (150, 150, 400))
    calls = iter(range(10**9))
    monkeypatch.setattr(Arrival, "done", lambda self: next(calls) % 4 == 3)  # later than the lookup, as on a GPU
    found = []
    for tiers in ({}, HOST):
        cache = gl.CacheConfig(max_tokens=512 if tiers else 10_000, **tiers)
        options = {"tokenizer": byte_tokenizer(), "dtype": "float32", "cache": cache, "schedule": FIRST_COME}
        with gl.Runtime(tiny_model("llama"), device="cpu", **options) as runtime:
            for prompt in (first, second, third):  # the third evicts the first, and the end of the second
                runtime.generate(prompt, max_tokens=1)
            sampling = gl.SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
            done = [
                future.result()
                for future in runtime.submit_many([gl.Request(prompt, sampling) for prompt in (first, second)])
            ]
            runtime._thread.call(lambda engine: engine.check_integrity())
            found.append([one.token_ids for one in done])
            stats = runtime.stats()
    assert found[0] == found[1]
    assert stats.slots_in_use == 0
    assert stats.tiers["host"].loaded_tokens > 150
