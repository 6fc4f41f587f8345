"""Which steps are worth a graph, by the sizes of a model."""

from __future__ import annotations

from types import SimpleNamespace

from graftlm.core.execution.replay_cost import ReplayCost

LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}


def test_smaller_layers_are_worth_graphs_of_more_tokens() -> None:
    large = ReplayCost(SimpleNamespace(**LLAMA_8B))
    small = ReplayCost(SimpleNamespace(**{**LLAMA_8B, "hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64}))
    assert [large.fits(n) for n in (1_024, 1_280)] == [True, False]
    assert small.fits(1_536)


def test_of_a_mixture_the_experts_of_a_token_count() -> None:
    active = ReplayCost(SimpleNamespace(**{**LLAMA_8B, "intermediate_size": 8 * 768}))
    mixture = {**LLAMA_8B, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    found = ReplayCost(SimpleNamespace(**mixture))
    assert [found.fits(n) for n in range(1, 4_000)] == [active.fits(n) for n in range(1, 4_000)]
