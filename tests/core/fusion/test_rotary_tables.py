"""Rotary embeddings by one kernel: those whose frequencies are constant, and only if it gives what they give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from graftlm.core.fusion.linears import Fusions
from graftlm.core.fusion.rotary import fuse_rotary_tables

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_theta": 5e5,
}  # fmt: skip
LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}


def model_of(model_type: str, **options: Any) -> nn.Module:
    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 50, "pad_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    config = AutoConfig.for_model(model_type, **sizes, **options)
    model: nn.Module = AutoModelForCausalLM.from_config(config).eval().to(DEVICE)
    return model


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("llama", {}),
        ("llama", {"rope_parameters": LLAMA3}),
        ("gemma3_text", LAYERS),
        ("phi3", {"partial_rotary_factor": 0.75}),
    ],
)
@torch.no_grad()
def test_a_model_gives_the_same_with_tables(model_type: str, options: dict[str, Any]) -> None:
    model, ids, fusions = model_of(model_type, **options), torch.arange(6, device=DEVICE)[None], Fusions()
    expected = model(input_ids=ids).logits
    fuse_rotary_tables(model, fusions)
    tables = [module for module in model.modules() if "forward" in vars(module)]
    assert len(tables) == 1
    assert torch.allclose(model(input_ids=ids).logits, expected, atol=1e-5)
    fusions.undo()
    assert not any("forward" in vars(module) for module in model.modules())


def test_rows_of_their_own_positions_go_through_the_modules_own_code() -> None:
    model, fusions = model_of("llama"), Fusions()
    rotary: Any = next(module for module in model.modules() if hasattr(module, "inv_freq"))
    x, positions = torch.zeros(2, 3, 1, device=DEVICE), torch.tensor([[0, 1, 2], [5, 6, 7]], device=DEVICE)
    expected = rotary(x, positions)
    fuse_rotary_tables(model, fusions)
    assert all(torch.equal(a, b) for a, b in zip(rotary(x, positions), expected, strict=True))


@pytest.mark.parametrize("wrong", ["dynamic", "values"])
def test_others_keep_their_own(wrong: str) -> None:
    dynamic = {"rope_parameters": {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 1e4}}
    model = model_of("llama", **(dynamic if wrong == "dynamic" else {}))
    rotary: Any = next(module for module in model.modules() if hasattr(module, "inv_freq"))
    if wrong == "values":
        own = type(rotary).forward
        rotary.__class__ = type("Turned", (type(rotary),), {"forward": lambda *a: tuple(reversed(own(*a)))})
    fuse_rotary_tables(model, Fusions())
    assert "forward" not in vars(rotary)
