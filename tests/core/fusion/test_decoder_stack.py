from __future__ import annotations

from typing import Any

import pytest
import torch

from graftlm.core.config import EngineConfig
from graftlm.core.fusion.cpu_layers import _warn_without_numba
from graftlm.core.fusion.decoder_stack import stack_of
from graftlm.core.model.load import load_model
from graftlm.kernels.cpu.decoder.decoder_stack import DecoderStack
from graftlm.kernels.cpu.linear.packed_linear import PackedLinear
from tests.models import byte_tokenizer, tiny_model

pytestmark = pytest.mark.skipif(
    PackedLinear(torch.nn.Linear(64, 64)).panels() is None, reason="oneDNN lays weights out otherwise on this CPU"
)


def load(kind: str = "llama", **config: Any) -> Any:
    return load_model(tiny_model(kind, **config), EngineConfig(), byte_tokenizer())


@pytest.mark.parametrize(
    "kind",
    ["llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma2", "gemma3_text", "mixtral", "qwen2_moe", "glm4_moe"],
)
def test_a_model_of_the_common_shape_runs_decode_steps_in_one_call(kind: str) -> None:
    loaded = load(kind)
    assert loaded.execution == "paged, 2 of 2 layers fused, decode steps in one call"
    assert loaded.error < 1e-5


def test_a_factor_between_the_parts_is_found_by_what_comes_out() -> None:
    loaded = load("granite", logits_scaling=8.0, embedding_multiplier=12.0, residual_multiplier=1.0)
    assert isinstance(stack_of(loaded.model, loaded.max_model_len), DecoderStack)
    assert loaded.stack is None
    assert loaded.lane == "paged"
    assert "differs from the model's own forward" in loaded.execution


def test_a_stack_that_answers_otherwise_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = DecoderStack.run

    def wrong(self: DecoderStack, *arguments: Any) -> torch.Tensor | None:
        logits = right(self, *arguments)
        return logits.roll(1, -1) if logits is not None else None

    monkeypatch.setattr(DecoderStack, "run", wrong)
    assert load().stack is None


def test_layers_that_keep_their_own_forward_keep_all_in_their_modules() -> None:
    model = tiny_model("qwen3")
    model.model.layers[0].self_attn.k_norm.variance_epsilon *= 2
    loaded = load_model(model, EngineConfig(), byte_tokenizer())
    assert loaded.stack is None
    why = "layer 0: the norms of queries and keys have different epsilons"
    assert loaded.execution == f"paged, 1 of 2 layers fused: {why}"


def test_why_decode_steps_are_not_one_call_is_part_of_how_a_model_runs() -> None:
    model = tiny_model()
    model.model.embed_tokens = type("Scaled", (torch.nn.Embedding,), {})(*model.model.embed_tokens.weight.shape)
    why = "decode steps are not one call: an embedding of type Scaled"
    assert load_model(model, EngineConfig(), byte_tokenizer()).execution == f"paged, 2 of 2 layers fused: {why}"
    assert "0 of 2 layers fused: layers 0, 1: " in load("olmo2").execution


def test_without_numba_one_line_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    _warn_without_numba.cache_clear()
    monkeypatch.setattr("graftlm.core.fusion.cpu_layers.importlib.util.find_spec", lambda name: None)
    assert load().execution == "paged, 0 of 2 layers fused: numba, which compiles the CPU kernels, is not installed"
    load()
    assert caplog.text.count("pip install numba") == 1


def test_a_hook_of_the_user_is_still_called() -> None:
    model, seen = tiny_model(), []
    model.model.norm.register_forward_hook(lambda *call: seen.append(1))
    loaded = load_model(model, EngineConfig(), byte_tokenizer())
    assert loaded.stack is None
    assert loaded.lane == "paged"


def test_a_model_that_is_given_back_has_no_stack() -> None:
    loaded = load()
    loaded.release()
    assert loaded.stack is None
