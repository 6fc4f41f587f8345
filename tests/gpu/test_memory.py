"""A real card's memory, of which this process allows itself a part."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from graftlm.core.config import CacheConfig
from graftlm.core.errors import ConfigError, EngineError, ModelError, RequestTooLong
from graftlm.core.kv.memory import free_bytes
from graftlm.core.runtime import Runtime
from tests.gpu.device import GREEDY, on_gpu, replace_forward
from tests.models import byte_tokenizer, greedy_reference, random_prompt, tiny_model

pytestmark = pytest.mark.gpu

TOKEN = 512  # bytes of KV of the tiny model in float32


@pytest.fixture
def little_memory() -> Iterator[int]:
    """Eight gigabytes more than are in use; -> bytes of them."""
    room = 8 << 30
    device = torch.device("cuda")
    gc.collect()  # an earlier test's runtime may lie in a circle of references
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)
    yield room
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def test_free_memory_is_what_this_process_may_still_take(little_memory: int) -> None:
    before = free_bytes(torch.device("cuda"))
    held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    assert before == pytest.approx(little_memory, rel=0.01)
    assert free_bytes(torch.device("cuda")) == pytest.approx(before - held.nbytes, rel=0.01)


def test_a_model_larger_than_the_free_memory_says_so(little_memory: int) -> None:
    held = torch.empty(little_memory - (8 << 20), dtype=torch.uint8, device="cuda")
    wide = tiny_model(hidden_size=1024, intermediate_size=4096, num_hidden_layers=4)
    message = r"take 0\.2 GB, \d+\.\d MB are free on cuda.*; use dtype='bfloat16'"
    with Runtime(wide, tokenizer=byte_tokenizer(), device="cuda") as runtime, pytest.raises(ModelError, match=message):
        runtime.generate("x")
    assert held.is_cuda


def test_the_pool_takes_its_share_of_what_is_free(little_memory: int) -> None:
    with on_gpu(cache=CacheConfig(memory_share=0.25)) as runtime:
        assert runtime.load().stats().slots_total * TOKEN == pytest.approx(little_memory / 4, rel=0.1)
    with on_gpu(cache=CacheConfig()) as runtime:
        assert runtime.load().stats().slots_total * TOKEN == pytest.approx(0.85 * little_memory, rel=0.1)
        assert runtime.generate(random_prompt(30), **GREEDY).finish_reason == "length"


def test_steps_are_large_only_where_there_is_room_for_them(little_memory: int) -> None:
    def steps(cache: CacheConfig) -> int:
        long = tiny_model(max_position_embeddings=4096)
        with Runtime(long, tokenizer=byte_tokenizer(), device="cuda", cache=cache, max_batch=2) as runtime:
            runtime.generate(random_prompt(3000), max_tokens=1, temperature=0)
            return runtime.stats().steps

    assert steps(CacheConfig()) == 2  # the pool leaves 1.2 GB
    hopper = torch.cuda.get_device_capability() >= (9, 0)
    assert steps(CacheConfig(max_tokens=4000)) == (1 if hopper else 2)


def test_a_pool_that_does_not_fit_is_refused_with_one_that_does(little_memory: int) -> None:
    message = r"takes 4,\d+\.\d GB, \d\.\d GB are free .* lower CacheConfig\.max_tokens"
    with on_gpu(cache=CacheConfig(max_tokens=little_memory)) as runtime, pytest.raises(ConfigError, match=message):
        runtime.generate("x")


def test_a_share_too_small_for_two_tokens_is_refused(little_memory: int) -> None:
    runtime = on_gpu(cache=CacheConfig(memory_share=1e-9))
    with runtime, pytest.raises(ConfigError, match="would hold 0 tokens"):
        runtime.generate("x")


def test_a_request_larger_than_the_pool_is_refused_and_others_run() -> None:
    with on_gpu(cache=CacheConfig(max_tokens=64)) as runtime:
        with pytest.raises(RequestTooLong, match="pool has 64"):
            runtime.generate(random_prompt(60), max_tokens=20)
        assert runtime.generate(random_prompt(40), **GREEDY).finish_reason == "length"


def test_a_step_that_runs_out_of_memory_fails_alone() -> None:
    prompt = random_prompt(20)
    with on_gpu() as runtime:

        def out_of_memory(runner: object, plan: object) -> torch.Tensor:
            return torch.empty(1 << 50, dtype=torch.uint8, device="cuda")

        replace_forward(runtime, out_of_memory)
        with pytest.raises(EngineError, match="out of memory"):
            runtime.generate(prompt, **GREEDY)
        del runtime._thread.engine.runner.forward
        assert runtime.generate(prompt, **GREEDY).token_ids == greedy_reference(tiny_model(), prompt, 12)
