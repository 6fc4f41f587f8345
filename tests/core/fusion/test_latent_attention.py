"""Latent attention: the latent is cached, and greedy tokens are those of transformers however they are asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graftlm.core.config import CacheConfig, EngineConfig
from graftlm.core.errors import ConfigError
from graftlm.core.fusion.latent_attention import fuse_latent
from graftlm.core.fusion.linears import Fusions
from graftlm.core.model.load import load_model
from graftlm.core.runtime import Runtime
from tests.models import byte_tokenizer, greedy_reference, random_prompt, tiny_model

YARN = {
    "rope_type": "yarn", "factor": 40.0, "rope_theta": 10_000.0, "mscale": 1.0, "mscale_all_dim": 0.8, "beta_fast": 32,
    "beta_slow": 1, "original_max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"q_lora_rank": None},
    "deepseek_v3": {"rope_interleave": True, "rope_parameters": YARN},
    "glm4_moe_lite": {},
    "youtu": {"rope_interleave": False},
    "longcat_flash": {},
    "deepseek_v32": {},
    "glm_moe_dsa": {"indexer_types": ["full", "shared"]},
}
NEW = 5


@pytest.mark.parametrize("kind", MODELS)
def test_tokens_are_those_of_transformers_in_six_ways_to_ask(kind: str) -> None:
    model = tiny_model(kind, **MODELS[kind])
    shared = random_prompt(40)
    prompts = [shared + random_prompt(n, seed=n) for n in (3, 9, 20)]
    expected = [greedy_reference(model, prompt, NEW) for prompt in prompts]
    # A pool that holds two prompts, in chunks: each evicts another.
    options: dict[str, Any] = {"cache": CacheConfig(max_tokens=160), "max_step_tokens": 16, "dtype": "float32"}
    sampling: dict[str, Any] = {"max_tokens": NEW, "temperature": 0.0, "ignore_eos": True}
    with Runtime(model, tokenizer=byte_tokenizer(), max_model_len=128, **options) as runtime:
        alone = [runtime.generate(prompt, **sampling).token_ids for prompt in prompts]
        cached = [runtime.generate(prompt, **sampling).token_ids for prompt in prompts]
        batch = [found.token_ids for found in runtime.generate(prompts, **sampling)]
        runtime.generate(random_prompt(100, seed=7), max_tokens=1)
        evicted = [runtime.generate(prompt, **sampling).token_ids for prompt in prompts]
        forked = runtime.generate(prompts[0], n=2, **sampling)
        stats = runtime.stats()
        assert stats.execution.startswith("paged") and stats.cached_tokens > 0
    assert alone == cached == batch == evicted == expected
    assert [found.token_ids for found in forked.completions] == [expected[0]] * 2
    assert greedy_reference(model, prompts[0], NEW) == expected[0]  # outside of the runtime the model is as it was


def test_attention_with_an_indexer_needs_a_context_of_which_it_chooses_all() -> None:
    model, config = tiny_model("deepseek_v32", index_topk=64), EngineConfig(device="cpu", max_model_len=64)
    loaded = load_model(model, config, byte_tokenizer())
    assert loaded.lane == "paged"
    loaded.release()
    assert not any("forward" in vars(module) for module in model.modules())
    with pytest.warns(UserWarning, match="chooses tokens by an indexer beyond 64 tokens; max_model_len=64 keeps it"):
        assert load_model(model, EngineConfig(device="cpu", max_model_len=65), byte_tokenizer()).lane == "serial"


def test_one_latent_a_token_is_kept() -> None:
    loaded = load_model(tiny_model("deepseek_v3"), EngineConfig(device="cpu", dtype="float32"), byte_tokenizer())
    rank, rope = 16, 8
    assert loaded.bytes_per_token == 2 * (rank + rope) * 4
    loaded.release()


def test_strict_answers_are_the_same_in_every_batch() -> None:
    prompts = [random_prompt(n, seed=n) for n in (5, 17, 33)]
    options: dict[str, Any] = {"strict": True, "dtype": "float32", "max_model_len": 128}
    with Runtime(tiny_model("deepseek_v3"), tokenizer=byte_tokenizer(), **options) as runtime:
        alone = [runtime.generate(p, max_tokens=6, temperature=0.0, ignore_eos=True).token_ids for p in prompts]
        runtime.clear_cache()
        batch = runtime.generate(prompts, max_tokens=6, temperature=0.0, ignore_eos=True)
    assert [found.token_ids for found in batch] == alone


@pytest.mark.parametrize("dtype", ["int8", "fp8", "compact"])
def test_another_format_for_latents_is_an_error(dtype: Any) -> None:
    with pytest.raises(ConfigError, match="caches latents"):
        Runtime(tiny_model("deepseek_v3"), tokenizer=byte_tokenizer(), cache=CacheConfig(dtype=dtype)).load()


def test_an_expansion_that_computes_something_else_keeps_its_own_code() -> None:
    model = tiny_model("deepseek_v3")
    first, second = (layer.self_attn for layer in model.model.layers)
    own = first.expand_kv
    first.expand_kv = lambda kv_nope, k_rot: tuple(2 * part for part in own(kv_nope, k_rot))
    fusions = Fusions()
    fuse_latent(model, fusions)
    assert "graftlm_latent" not in vars(first)
    assert "graftlm_latent" in vars(second)
    latent = torch.randn(1, 1, 3, 16), torch.randn(1, 1, 3, 8)
    assert second.expand_kv(*latent)[0].shape == (1, 4, 3, 16)  # of all heads: there is no step
    fusions.undo()
    assert "expand_kv" not in vars(second)
