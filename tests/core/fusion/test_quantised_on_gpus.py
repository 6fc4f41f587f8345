"""Models with quantised weights, fused as on a GPU: their codes lie in tiles, and no bfloat16 copy is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from graftlm.core.fusion.gpu_modules import fuse_gpu
from graftlm.kernels.codes.tiled_weight import TiledParts, TiledWeight
from graftlm.kernels.quantised_modules import QuantisedLinear, put_quantised
from tests.core.fusion.test_quantised_layers import quantised
from tests.models import tiny_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@torch.no_grad()
def test_a_fused_model_computes_the_same_from_tiles_and_can_be_undone() -> None:
    plain = tiny_model(hidden_size=256, intermediate_size=256, num_hidden_layers=1, head_dim=64)
    model: Any = plain.to(torch.bfloat16).to(DEVICE)  # type: ignore[arg-type]
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    bits = {name: 8 if name.endswith("v_proj") else 4 for name in linears}  # as in Q4_K_M
    put_quantised(model, {f"{name}.weight": quantised(x.weight.detach(), bits[name]) for name, x in linears.items()})
    ids = torch.arange(7, device=DEVICE)[None]
    expected = model(ids).logits
    fusions = fuse_gpu(model)
    assert fusions.num_fused == 1, fusions.unfused
    weights = [module.quantised for module in model.modules() if isinstance(module, QuantisedLinear)]
    assert {type(weight) for weight in weights if weight is not None} == {TiledWeight}
    assert isinstance(model.model.layers[0].self_attn.q_proj.product.weight, TiledParts)
    assert not any(parameter.dim() == 2 for name, parameter in model.named_parameters() if "embed" not in name)
    for _ in range(2):
        found = model(ids).logits
        assert float((found - expected).norm() / expected.norm()) < 4e-2
        fusions.undo()
