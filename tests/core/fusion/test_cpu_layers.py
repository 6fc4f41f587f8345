from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from graftlm.core.config import EngineConfig
from graftlm.core.execution.paged import PagedRunner
from graftlm.core.fusion import cpu_layers
from graftlm.core.fusion.cpu_layers import FusedCpuLayer, fuse_cpu, skinny_head
from graftlm.core.fusion.linears import fuse
from graftlm.core.loaded_model import LoadedModel
from graftlm.core.model.load import load_model
from graftlm.core.model.qualify import probe_plan
from graftlm.kernels.cpu.attention.backend import TorchAttention
from graftlm.kernels.cpu.decoder.decoder_layer import MAX_DECODE_ROWS, MIN_BLOCK, DecodeLayer, PrefillLayer
from graftlm.kernels.cpu.linear import packed_pieces
from graftlm.kernels.cpu.linear.packed_linear import PackedLinear
from graftlm.kernels.cpu.linear.packed_pieces import PackedPieces
from graftlm.kernels.kv_store import allocate_kv
from graftlm.kernels.wire_plan import Extent
from tests.models import byte_tokenizer, tiny_model

OTHERWISE = "oneDNN lays weights out otherwise on this CPU"  # for AMX, those in bfloat16


def lies_otherwise(dtype: torch.dtype) -> bool:
    return PackedLinear(torch.nn.Linear(64, 64, dtype=dtype)).panels() is None


WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 16, "num_key_value_heads": 16}
"""Every product has four panels of outputs at least."""

pytestmark = pytest.mark.skipif(lies_otherwise(torch.float32), reason=OTHERWISE)


def load(kind: str = "llama", dtype: torch.dtype = torch.float32, **config: object) -> LoadedModel:
    return load_model(tiny_model(kind, **config).to(dtype), EngineConfig(), byte_tokenizer())


def num_fused(loaded: LoadedModel) -> int:
    return sum(isinstance(module.forward, FusedCpuLayer) for module in loaded.model.modules())


def ids(num_tokens: int) -> list[int]:
    return [3 + i % 200 for i in range(num_tokens)]


def logits(loaded: LoadedModel, num_tokens: int, wanted: list[int] | None = None) -> torch.Tensor:
    store = allocate_kv(loaded.kv_layout, num_tokens, loaded.dtype)
    runner = PagedRunner(loaded, TorchAttention(store))
    tokens = ids(num_tokens)
    plan = probe_plan([tokens], ([Extent(0, num_tokens)],), [(0, num_tokens)])
    return runner.forward(plan if wanted is None else replace(plan, logits_rows=np.array(wanted)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind", ["llama", "mistral", "qwen3", "qwen2", "phi3", "gemma3_text", "qwen3_moe", "qwen2_moe"]
)
def test_every_layer_of_the_common_shape_runs_few_tokens_as_compiled_loops(kind: str, dtype: torch.dtype) -> None:
    if lies_otherwise(dtype):
        pytest.skip(OTHERWISE)
    loaded = load(kind, dtype, intermediate_size=128)
    assert num_fused(loaded) == loaded.text_config.num_hidden_layers


@pytest.mark.parametrize("kind", ["gpt2", "olmo2"])
def test_layers_of_another_shape_keep_their_own_forward(kind: str) -> None:
    assert num_fused(load(kind)) == 0


def test_a_released_mixture_has_its_weights_again() -> None:
    model = tiny_model("mixtral")
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    loaded = load_model(model, EngineConfig(), byte_tokenizer())
    assert model.model.layers[0].mlp.experts.down_proj.numel() == 0
    loaded.release()
    assert all(torch.equal(before[name], weight) for name, weight in model.named_parameters())


@pytest.mark.parametrize("num_tokens", [1, 5, MAX_DECODE_ROWS[torch.float32], MAX_DECODE_ROWS[torch.float32] + 1, 300])
def test_few_tokens_and_many_get_the_logits_of_the_model(num_tokens: int) -> None:
    model = tiny_model()
    with torch.inference_mode():
        expected = model(torch.tensor([ids(num_tokens)])).logits[0]
    found = logits(load_model(model, EngineConfig(), byte_tokenizer()), num_tokens)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_some_hundred_tokens_run_in_blocks_of_about_the_same_size(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    loaded, blocks, after = load(dtype=dtype, **WIDE), [], DecodeLayer.after
    if MAX_DECODE_ROWS[dtype] < MIN_BLOCK or lies_otherwise(dtype):
        pytest.skip("bfloat16 products of our own are slow for many rows on this CPU")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)

    def noted(self: DecodeLayer, x: torch.Tensor, attended: torch.Tensor, **options: bool) -> None:
        blocks.append(len(x))
        after(self, x, attended, **options)

    monkeypatch.setattr(DecodeLayer, "after", noted)
    found = logits(loaded, 150)
    assert blocks[:3] == [50, 50, 50]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)  # more threads than there are parts for
    blocks.clear()
    torch.testing.assert_close(found, logits(loaded, 150), rtol=1e-4, atol=1e-5 if dtype is torch.float32 else 2e-2)
    assert blocks == []


@pytest.mark.parametrize(
    ("dtype", "parts"), [(torch.float32, [500, 256, 244]), (torch.bfloat16, [500, 500])], ids=["float32", "bfloat16"]
)
def test_more_bfloat16_tokens_run_through_an_mlp_together_where_tiles_lay_its_weights_out_anew(
    dtype: torch.dtype, parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, sizes, part = load(dtype=dtype, intermediate_size=128), [], FusedCpuLayer._part
    if num_fused(loaded) == 0:
        pytest.skip(OTHERWISE)
    monkeypatch.setattr(cpu_layers, "HAS_TILES", True)
    monkeypatch.setattr(FusedCpuLayer, "_part", lambda self, x, n: sizes.append(len(x)) or part(self, x, n))
    logits(loaded, 500)
    assert sizes[: len(parts)] == parts


def test_a_layer_whose_head_norms_differ_in_epsilon_keeps_its_own_forward() -> None:
    model = tiny_model("qwen3")
    model.model.layers[0].self_attn.k_norm.variance_epsilon *= 2  # too little for random input to show it
    loaded = load_model(model, EngineConfig(), byte_tokenizer())
    assert num_fused(loaded) == loaded.text_config.num_hidden_layers - 1


def test_a_layer_whose_loops_answer_otherwise_keeps_its_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    right = DecodeLayer.after

    def wrong(self: DecodeLayer, x: torch.Tensor, attended: torch.Tensor, **options: bool) -> None:
        right(self, x, attended, **options)
        x.mul_(1.001)

    monkeypatch.setattr(DecodeLayer, "after", wrong)
    assert num_fused(load()) == 0


def test_a_head_was_unpacked_to_look_at_its_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(tie_word_embeddings=False)
    assert isinstance(loaded.model.get_output_embeddings(), PackedLinear)  # type: ignore[operator]
    monkeypatch.setattr(PackedLinear, "weight", property(lambda self: pytest.fail("a copy of the whole weight")))
    assert skinny_head(loaded.model) is not None


def test_a_head_in_pieces_runs_in_decode_steps_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_pieces, "_PIECE_BYTES", 1)
    model = tiny_model(tie_word_embeddings=False).eval()
    ids, weight = torch.arange(3, 12)[None], model.lm_head.weight.detach().clone()
    with torch.no_grad():
        expected = model(ids).logits
        fusions = fuse(model, unchanged=True)
        fuse_cpu(model, fusions)
        assert isinstance(model.lm_head, PackedPieces) and "forward" in vars(model.lm_head)
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-4)
    fusions.undo()
    assert type(model.lm_head) is nn.Linear and torch.equal(model.lm_head.weight, weight)


def test_a_model_is_given_back_with_its_own_forwards() -> None:
    loaded = load(tie_word_embeddings=True)
    assert num_fused(loaded)
    loaded.release()
    assert not any("forward" in vars(module) for module in loaded.model.modules())


def test_a_step_of_few_tokens_outlives_weights_that_were_moved() -> None:
    """Norms used to be read where they had been before their files were let go."""
    loaded = load()
    before = logits(loaded, 3)
    for parameter in loaded.model.parameters():
        if parameter.numel():
            parameter.data = parameter.data.clone()
    assert torch.equal(logits(loaded, 3), before)


def test_the_last_layer_runs_only_the_tokens_whose_logits_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load()
    expected = logits(loaded, 90)
    seen: list[int] = []
    right = PrefillLayer.after

    def after(self: PrefillLayer, x: torch.Tensor, attended: torch.Tensor) -> None:
        seen.append(len(x))
        right(self, x, attended)

    monkeypatch.setattr(PrefillLayer, "after", after)
    assert_close = torch.testing.assert_close
    assert_close(logits(loaded, 90, wanted=[89]), expected[-1:], rtol=1e-4, atol=1e-5)
    assert seen == [90]  # of two layers: the last one's token went through the loops for few
    assert_close(logits(loaded, 90, wanted=[3, 40]), expected[[3, 40]], rtol=1e-4, atol=1e-5)
    assert seen == [90, 90]
