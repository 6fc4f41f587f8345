from __future__ import annotations

import pytest
import torch
from torch import nn

from graftlm.kernels.cpu import PANEL
from graftlm.kernels.cpu.linear import packed_linear
from graftlm.kernels.cpu.linear.packed_linear import PackedLinear
from graftlm.kernels.cpu.linear.panels import pack, unpack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_comes_back_from_its_panels(dtype: torch.dtype) -> None:
    weight = torch.randn(70, 33).to(dtype)
    panels = pack(weight, None)
    assert (panels.num_out, panels.num_in, panels.depth, panels.num_bytes) == (70, 33, 34, 128 * 34 * weight.itemsize)
    assert torch.equal(unpack(panels), weight)


def test_pairs_of_inputs_lie_side_by_side_in_bfloat16() -> None:
    weight = torch.arange(4.0).to(torch.bfloat16).expand(PANEL, 4) + 4 * torch.arange(PANEL).to(torch.bfloat16)[:, None]
    assert pack(weight, None).packed.flatten()[:4].tolist() == [0, 1, 4, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_onednn_refuses_a_weight_our_loop_computes_the_layer(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_linear, "own_panels", lambda dtype: True)
    linear = nn.Linear(48, 70).to(dtype)
    weight, x = linear.weight.detach().clone(), torch.randn(2, 40, 48).to(dtype)
    with torch.inference_mode():
        expected = linear(x).float()
        packed = PackedLinear(linear)
        packed.release_original()
        assert packed.panels() is not None and linear.weight.numel() == 0
        found = packed(x)
    assert found.dtype is dtype and found.shape == (2, 40, 70)
    assert (found.float() - expected).norm() <= {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype] * expected.norm()
    assert torch.equal(packed.state_dict()["weight"], weight)
    assert packed.unpack() is linear and torch.equal(linear.weight, weight)


@pytest.mark.skipif(packed_linear.own_panels(torch.float32), reason="oneDNN reorders no weight here")
def test_a_weight_that_onednn_lays_out_otherwise_is_packed_by_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch 2.11, where that is so for numbers of outputs that are no multiple of a panel."""
    monkeypatch.setattr(packed_linear, "_is_in_panels", lambda num_out, *_: num_out % PANEL == 0)
    x = torch.randn(9, 48)
    for num_out, by_onednn in ((70, False), (128, True)):
        linear = nn.Linear(48, num_out)
        with torch.inference_mode():
            expected = linear(x)
            packed = PackedLinear(linear)
            panels = packed.panels()
            assert panels is not None and panels.is_mkldnn is by_onednn
            assert (packed(x) - expected).norm() <= 1e-5 * expected.norm()
