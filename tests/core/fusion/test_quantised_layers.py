"""Models with quantised weights on a CPU: their layers, embedding and head run from panels of codes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import graftlm as gl
from graftlm.core.config import EngineConfig
from graftlm.core.model.load import load_model
from graftlm.kernels.cpu.linear.packed_codes import PackedCodes, PackedRows
from graftlm.kernels.quantised_modules import put_quantised
from graftlm.kernels.quantised_weight import QuantisedWeight
from tests.models import byte_tokenizer, greedy_reference, tiny_model

PROMPT = "the quick brown fox"


def quantised(values: torch.Tensor, bits: Any = 4) -> QuantisedWeight:
    n, k = values.shape
    groups, most = values.float().view(n, k // 32, 32), 2 ** (bits - 1)
    scale = (groups.abs().amax(-1) / (most - 1)).half()
    codes = (groups / scale.float()[..., None]).round().clamp(-most, most - 1).add(most).to(torch.uint8).view(n, k)
    if bits == 4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    return QuantisedWeight(codes, bits, None, 32, 1, scale, zero=most, dtype=values.dtype)


def model_of(dtype: torch.dtype, **config: Any) -> tuple[nn.Module, nn.Module]:
    """Return a model with quantised weights, and one with their values; down and v have 8 bits, as in Q4_K_M."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, **config}
    model, plain = (tiny_model(tie_word_embeddings=True, **sizes).to(dtype) for _ in range(2))
    weights = {}
    for name, module in plain.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            weights[f"{name}.weight"] = quantised(
                module.weight.detach(), 8 if name.endswith(("down_proj", "v_proj")) else 4
            )
    embedding = quantised(plain.get_input_embeddings().weight.detach(), 8)
    weights["model.embed_tokens.weight"] = weights["lm_head.weight"] = embedding
    for name, weight in weights.items():
        plain.get_parameter(name).data = weight.dense()
    put_quantised(model, weights)
    return model, plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activations", ["exact", "int8"])
def test_a_quantised_model_runs_whole_steps_from_its_codes(dtype: torch.dtype, activations: Any) -> None:
    model, _ = model_of(dtype)
    loaded = load_model(model, EngineConfig(device="cpu", activations=activations), byte_tokenizer())
    assert loaded.execution == "paged, 2 of 2 layers fused, decode steps in one call"
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert all(isinstance(m, PackedCodes) for m in linears)
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    assert isinstance(embedding, PackedRows)
    head: Any = model.lm_head
    assert head.panels().packed.data_ptr() == embedding.panels.packed.data_ptr()


def test_greedy_float32_tokens_are_those_of_the_values() -> None:
    model, plain = model_of(torch.float32)
    tokenizer = byte_tokenizer()
    with gl.Runtime(model, tokenizer=tokenizer, device="cpu") as runtime:
        found = [runtime.generate(PROMPT[:n], max_tokens=24, temperature=0.0).token_ids for n in (1, 7, 19)]
    encode: Any = tokenizer.encode
    assert found == [greedy_reference(plain, encode(PROMPT[:n]), 24) for n in (1, 7, 19)]  # type: ignore[arg-type]


@pytest.mark.parametrize("kept", ["owned", "exit"])
def test_weights_stay_packed_if_no_code_will_read_them(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = model_of(torch.float32)
    loaded = load_model(model, EngineConfig(device="cpu"), byte_tokenizer())
    assert not loaded.owned
    if kept == "exit":
        monkeypatch.setattr("graftlm.core.interpreter_exit._exit_began", begun := threading.Event())
        begun.set()
    else:
        loaded.owned = True
    loaded.close()
    assert all(isinstance(m, PackedCodes) for m in model.modules() if isinstance(m, nn.Linear))
    assert all("forward" not in vars(m) for m in model.modules() if not isinstance(m, PackedCodes | PackedRows))


def test_a_closed_runtime_leaves_the_weights_as_they_were() -> None:
    model, plain = model_of(torch.float32)
    loaded = load_model(model, EngineConfig(device="cpu"), byte_tokenizer())
    loaded.close()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            torch.testing.assert_close(module.weight, plain.get_submodule(name).weight.detach())  # type: ignore[arg-type]


def test_an_id_outside_of_the_embedding_is_an_error() -> None:
    model, _ = model_of(torch.float32)
    load_model(model, EngineConfig(device="cpu"), byte_tokenizer())
    with pytest.raises(IndexError, match="no row of the embedding"):
        model.get_input_embeddings()(torch.tensor([[1, 10**6]]))  # type: ignore[operator]
