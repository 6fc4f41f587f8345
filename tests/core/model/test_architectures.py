"""Tiny random models of every architecture that was tried: which lane each takes, and that both lanes are exact."""

from __future__ import annotations

import warnings

import pytest

from graftlm.core.config import EngineConfig
from graftlm.core.model.load import load_model
from tests.models import TURNED_PAGED, byte_tokenizer, greedy_reference, random_prompt, tiny_model
from tests.stepping import paged_greedy

PAGED = """
llama qwen2 qwen3 mistral mixtral gemma gemma2 gemma3 gemma4 phi phi3 olmo2 olmo3 granite gpt_oss qwen2_moe
qwen3_moe starcoder2 cohere cohere2 glm4 glm4_moe smollm3 gpt2 gpt_neox opt deepseek_v2 deepseek_v3 llama4
exaone4 ministral hunyuan ernie4_5 seed_oss stablelm nemotron qwen3_next qwen3_5_text qwen3_5_moe_text lfm2 lfm2_moe
bamba granitemoehybrid nemotron_h falcon_h1
"""
SERIAL = """
bloom mpt falcon gptj codegen jamba minimax recurrent_gemma mamba mamba2 rwkv
"""


@pytest.mark.parametrize("kind", PAGED.split() + TURNED_PAGED)
def test_this_architecture_runs_ragged_and_exactly(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = load_model(tiny_model(kind), EngineConfig(device="cpu"), byte_tokenizer())
    assert (loaded.lane, loaded.lane_reason) == ("paged", None)
    prompts = [random_prompt(length, seed=length) for length in (21, 6)]
    expected = [greedy_reference(tiny_model(kind), prompt, 4) for prompt in prompts]
    assert paged_greedy(loaded, prompts, 4, chunk=9) == expected


@pytest.mark.parametrize("kind", [kind for kind in SERIAL.split() if kind not in TURNED_PAGED])
def test_this_architecture_takes_the_serial_lane(kind: str) -> None:
    with pytest.warns(UserWarning, match="serial lane"):
        loaded = load_model(tiny_model(kind), EngineConfig(device="cpu"), byte_tokenizer())
    assert loaded.lane == "serial"
