"""Replacements in encoders of pictures; without a GPU, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from graftlm.core.fusion.gpu_encoders import AlignedMlp, fuse_encoders
from graftlm.core.fusion.gpu_modules import _agree
from graftlm.core.fusion.linears import Fusions
from graftlm.testing.random_vision import random_vision_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@torch.no_grad()
def test_an_encoder_gives_the_same_embeddings(family: str) -> None:
    model = random_vision_model(family)[0].to(DEVICE)
    conv = next(module for module in model.modules() if isinstance(module, nn.Conv3d))
    pixels, grid = torch.randn(32, conv.weight[0].numel(), device=DEVICE), torch.tensor([[1, 4, 8]], device=DEVICE)

    def embeddings() -> torch.Tensor:
        return torch.cat(list(model.model.get_image_features(pixels, grid, return_dict=True).pooler_output))

    expected, fusions = embeddings(), Fusions()
    fuse_encoders(model, fusions, _agree)
    assert "forward" in vars(conv) and len(fusions._undo) == 2  # the rotary embedding too
    torch.testing.assert_close(embeddings(), expected, rtol=1e-4, atol=1e-5)
    fusions.undo()
    assert "forward" not in vars(conv)
    torch.testing.assert_close(embeddings(), expected, rtol=0, atol=0)


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(16, width), nn.Linear(16, width, bias=False)
        self.down_proj, self.act_fn = nn.Linear(width, 16), nn.SiLU()

    def forward(self, x: torch.Tensor) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = Gated(width)

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor) -> Any:
        return self.mlp(x)


@pytest.mark.parametrize(("width", "padded"), [(20, True), (24, False)])
@torch.no_grad()
def test_a_hidden_layer_is_padded_until_it_is_undone(width: int, padded: bool) -> None:
    block = Block(width).half().to(DEVICE)
    before = {name: x.clone() for name, x in block.state_dict().items()}
    x = torch.randn(3, 16, device=DEVICE).half()
    expected, fusions = block.mlp(x), Fusions()
    fuse_encoders(block, fusions, _agree)
    assert isinstance(vars(block.mlp).get("forward"), AlignedMlp) == padded
    torch.testing.assert_close(block.mlp(x), expected, rtol=5e-3, atol=5e-3)
    assert all(torch.equal(before[name], x) for name, x in block.state_dict().items())
    fusions.undo()
    assert block.mlp.down_proj.weight.is_contiguous() and torch.equal(block.mlp(x), expected)


@torch.no_grad()
def test_a_rotation_of_another_kind_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl as source

    own = source.apply_rotary_pos_emb_vision
    monkeypatch.setattr(source, "apply_rotary_pos_emb_vision", lambda q, k, cos, sin: (2 * q, k))
    model, fusions = random_vision_model("qwen2_5_vl")[0].to(DEVICE), Fusions()
    fuse_encoders(model, fusions, _agree)
    assert len(fusions._undo) == 1  # the embedding of patches alone
    fusions.undo()
    monkeypatch.undo()
    assert source.apply_rotary_pos_emb_vision is own
