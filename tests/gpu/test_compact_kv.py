"""Models whose KV is kept in 12 bits a number answer as they do with all 16."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from graftlm.core.config import CacheConfig
from graftlm.core.errors import ConfigError
from graftlm.core.runtime import Runtime
from graftlm.kernels.wire_plan import WirePlan
from tests.gpu.device import GREEDY, difference_of_graphs, error_of_decode, family, relative, replace_forward
from tests.models import byte_tokenizer, tiny_model

pytestmark = pytest.mark.gpu

COMPACT = "bfloat16 in 12 bits"


def model(kind: str = "llama", **overrides: Any) -> Any:
    return tiny_model(kind, **{"head_dim": 128} | overrides)


def on_hopper(kind: str = "llama", *, kv: Any = "auto", dtype: torch.dtype = torch.bfloat16, **options: Any) -> Runtime:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    overrides = options.pop("overrides", {})
    options = {"max_batch": 40, "device": "cuda", "cache": CacheConfig(max_tokens=4096, dtype=kv)} | options
    return Runtime(model(kind, **overrides).to(dtype), tokenizer=byte_tokenizer(), **options)


def form_of(head_dim: int) -> str:
    """What keeps heads of so many dimensions in 12 bits on any Hopper GPU."""
    return "compact" if head_dim == 64 else "auto"


@pytest.mark.parametrize(
    ("kind", "head_dim"),
    [("llama", 128), ("qwen3", 128), ("mistral", 128), ("gemma3", 256), ("gemma2", 256), ("llama", 64)],
)
@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_logits_are_near_those_of_float32(kind: str, head_dim: int, num_rows: int) -> None:
    size = {"head_dim": head_dim}
    with warnings.catch_warnings(), on_hopper(kind, kv=form_of(head_dim), overrides=size) as runtime:
        warnings.simplefilter("error")
        assert runtime.load().stats().kv == COMPACT
        assert error_of_decode(runtime, model(kind, **size).bfloat16().float(), num_rows) < 2e-2


@pytest.mark.parametrize(("kind", "head_dim"), [("llama", 128), ("mistral", 128), ("gemma3", 256), ("llama", 64)])
def test_a_replayed_graph_computes_what_the_eager_step_does(kind: str, head_dim: int) -> None:
    with on_hopper(kind, kv=form_of(head_dim), overrides={"head_dim": head_dim}) as runtime:
        assert runtime.load().stats().kv == COMPACT
        assert difference_of_graphs(runtime, 8) == 0.0


@pytest.mark.parametrize(("kind", "head_dim"), [("llama", 128), ("gemma3", 256), ("llama", 64)])
def test_a_cached_prefix_gives_the_logits_of_a_fresh_one(kind: str, head_dim: int) -> None:
    (prompt,) = family(1, shared=300)
    size = {"head_dim": head_dim}
    with (
        on_hopper(kind, kv=form_of(head_dim), overrides=size) as cached,
        on_hopper(kind, kv="model", overrides=size) as plain,
    ):
        fresh = cached.logits(prompt).result()
        cached.generate(prompt[:290], max_tokens=1)
        again, expected = cached.logits(prompt).result(), plain.logits(prompt).result()
        assert cached.stats().cached_tokens > 500
    for found in (fresh, again):
        assert relative(torch.from_numpy(found), torch.from_numpy(expected)) < 3e-2


@pytest.mark.parametrize(("kind", "head_dim"), [("llama", 128), ("gemma3", 256), ("llama", 64)])
def test_a_short_prompt_in_a_graph_reads_no_slot_before_it_is_written(kind: str, head_dim: int) -> None:
    """A graph has a row for each token of a prompt, so the tokens before a row's last one are as new as that one."""
    prompts = family(3, shared=100)
    with on_hopper(kind, kv=form_of(head_dim), overrides={"head_dim": head_dim}) as runtime:
        in_graphs: list[int] = []

        def count(runner: Any, plan: WirePlan) -> torch.Tensor:
            in_graphs.append(0 if plan.is_decode or not runner._fits(plan) else int(plan.num_new.max()))
            logits: torch.Tensor = type(runner).forward(runner, plan)
            return logits

        replace_forward(runtime, count)
        expected = [runtime.generate(prompt, **GREEDY).token_ids for prompt in prompts]
        for _ in range(2):
            _spoil(runtime)
            assert [runtime.generate(prompt, **GREEDY).token_ids for prompt in prompts] == expected
        assert max(in_graphs) > 4


def _spoil(runtime: Runtime) -> None:
    """Fill the KV pool with codes of numbers that are not finite."""
    runtime.clear_cache()
    engine: Any = runtime.load()._thread.engine
    store = engine.runner.attention.store
    with torch.inference_mode():
        for tensor, value in [*((x, -1) for x in store.records), *((x, 255) for x in store.exponents)]:
            tensor.fill_(value)
    torch.cuda.synchronize()


def test_a_pool_of_so_many_bytes_holds_a_third_more_tokens() -> None:
    size = {"cache": CacheConfig(max_bytes=4_000_000)}
    with on_hopper(**size) as compact, on_hopper(cache=CacheConfig(max_bytes=4_000_000, dtype="model")) as plain:
        ratio = compact.load().stats().slots_total / plain.load().stats().slots_total
    assert 1.32 < ratio < 1.33


@pytest.mark.parametrize(
    ("options", "kv"),
    [
        ({"kv": "model"}, "bfloat16"),
        ({"strict": True}, "bfloat16"),
        ({"overrides": {"head_dim": 32}}, "bfloat16"),
        ({"dtype": torch.float16}, "float16"),
    ],
)
def test_others_keep_kv_in_their_own_dtype(options: dict[str, Any], kv: str) -> None:
    with on_hopper(**options) as runtime:
        assert runtime.load().stats().kv == kv


def test_asking_for_what_there_is_not_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"CacheConfig\.dtype is 'compact', but strict=True; KV in 12 bits is for"):
        on_hopper(kv="compact", strict=True).load()
