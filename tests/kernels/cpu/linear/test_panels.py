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


@pytest.mark.parametrize("num_in", [48, 33])
def test_products_by_tiles_take_a_few_panels_at_a_time(num_in: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "_LAID_OUT_BYTES", 2 * PANEL * num_in * 2)
    weight, bias = torch.randn(5 * PANEL - 3, num_in).bfloat16(), torch.randn(5 * PANEL - 3).bfloat16()
    x = torch.randn(67, num_in).bfloat16()
    expected = x.float() @ weight.float().T + bias.float()
    found = packed_linear.linear_by_tiles(x, pack(weight, bias))
    assert found.shape == expected.shape and found.dtype is torch.bfloat16
    assert (found.float() - expected).norm() <= 1e-2 * expected.norm()  # bfloat16 has 8 bits


@pytest.mark.parametrize(
    ("num_rows", "dtype", "has_tiles", "by_tiles"),
    [
        (64, torch.bfloat16, True, True),
        (63, torch.bfloat16, True, False),
        (64, torch.float32, True, False),
        (64, torch.bfloat16, False, False),
    ],
)
def test_many_bfloat16_rows_are_multiplied_by_tiles_where_the_processor_has_them(
    num_rows: int, dtype: torch.dtype, has_tiles: bool, by_tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt took three times as long as with plain transformers."""
    calls = []
    by_onednn = packed_linear.linear_by_tiles
    monkeypatch.setattr(packed_linear, "HAS_TILES", has_tiles)
    monkeypatch.setattr(packed_linear, "linear_by_tiles", lambda x, panels: calls.append(x) or by_onednn(x, panels))
    packed_linear.linear(torch.randn(num_rows, 48).to(dtype), pack(torch.randn(70, 48).to(dtype), None))
    assert bool(calls) is by_tiles


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
