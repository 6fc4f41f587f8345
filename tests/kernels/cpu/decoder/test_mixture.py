from __future__ import annotations

from typing import Any

import pytest
import torch

from graftlm.core.fusion.expert_routers import chosen
from graftlm.kernels.activation import Activation, gate_by_torch
from graftlm.kernels.cpu.compiled.loop_runtime import Loop, loop_address
from graftlm.kernels.cpu.decoder.mixture import (
    CompiledExperts,
    ExpertPanels,
    ExpertsRecord,
    ExpertsSpace,
    SharedExperts,
)
from graftlm.kernels.cpu.element_format import ElementFormat
from graftlm.kernels.gpu.mixture.router import Router

EXPERTS, GATE, HIDDEN, TOP_K = 6, 40, 72, 3
"""Sizes that fill no panel of 64 outputs."""


def weights(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    gate_up, down = torch.randn(EXPERTS, 2 * GATE, HIDDEN), torch.randn(EXPERTS, HIDDEN, GATE)
    return (0.1 * gate_up).to(dtype), (0.1 * down).to(dtype)


def router(dtype: torch.dtype, **rule: Any) -> Router:
    weight = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    return Router(weight, TOP_K, logits_dtype=dtype, **rule)


def by_definition(
    x: torch.Tensor, panels: ExpertPanels, choice: tuple[torch.Tensor, torch.Tensor], activation: Activation
) -> torch.Tensor:
    gate_up, down = (weight.float() for weight in panels.unpack())
    out = torch.zeros(len(x), HIDDEN)
    for row in range(len(x)):
        for expert, weight in zip(choice[0][row].tolist(), choice[1][row].tolist(), strict=True):
            out[row] += weight * (gate_by_torch(x[row].float() @ gate_up[expert].T, activation) @ down[expert].T)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 5, 200])
def test_experts_compute_the_weighted_sum_of_those_chosen(num_rows: int, dtype: torch.dtype) -> None:
    activation: Activation = "gelu_tanh" if num_rows == 5 else "silu"
    panels = ExpertPanels.of(*weights(dtype), activation)
    x = torch.randn(num_rows, HIDDEN).to(dtype)
    choice = chosen(router(dtype), x)
    expected = by_definition(x, panels, choice, activation)
    error = (CompiledExperts(panels).chosen(x, *choice).float() - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype is torch.float32 else 1e-2)


@pytest.mark.parametrize(
    "rule",
    [
        {"renormalize": True, "eps": 1e-20},
        {"score": "logits", "after": "softmax", "bias": torch.linspace(-1, 1, EXPERTS)},
        {"score": "sigmoid", "correction": torch.linspace(2, -2, EXPERTS), "renormalize": True, "scale": 2.5},
    ],
    ids=["softmax", "softmax of the chosen", "sigmoid"],
)
def test_a_router_chooses_as_its_rule_says(rule: dict[str, Any]) -> None:
    panels, made = ExpertPanels.of(*weights(torch.float32), "silu"), router(torch.float32, **rule)
    x = torch.randn(7, HIDDEN)
    found = CompiledExperts(panels, made).routed(x)
    torch.testing.assert_close(found, by_definition(x, panels, chosen(made, x), "silu"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unpacked_experts_are_those_packed(dtype: torch.dtype) -> None:
    found = ExpertPanels.of(*weights(dtype), "silu").unpack()
    assert all(torch.equal(a, b) for a, b in zip(found, weights(dtype), strict=True))


@pytest.mark.parametrize("gated", [False, True])
def test_shared_experts_are_added_to_those_chosen(gated: bool) -> None:
    gate_up, down = weights(torch.float32)
    gate = torch.randn(HIDDEN) if gated else None
    shared = SharedExperts(gate_up[:2].flip(0), down[:2].flip(0), gate)
    panels = ExpertPanels.of(gate_up, down, "silu", shared)
    made = router(torch.float32, bias=torch.linspace(-1, 1, EXPERTS), renormalize=True, eps=1e-20)
    x = torch.randn(7, HIDDEN)
    factor = torch.sigmoid(x @ gate)[:, None] if gate is not None else torch.ones(7, 1)
    experts, factors = chosen(made, x)
    expected = by_definition(
        x,
        panels,
        (torch.cat([experts, torch.tensor([[1, 0]] * 7)], 1), torch.cat([factors, factor, factor], 1)),
        "silu",
    )
    found = CompiledExperts(panels, made, gate).routed(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(panels.unpack(), (gate_up, down), strict=True))


def test_a_thread_that_comes_late_finds_the_choice_of_its_layer() -> None:
    """It found the choice of the next layer, took tasks that were none, and waited for them for ever."""
    panels, made = ExpertPanels.of(*weights(torch.float32), "silu"), router(torch.float32)
    space, inputs = ExpertsSpace([(panels, TOP_K)], 4), torch.randn(2, 4, panels.depth)
    inputs[:, :, HIDDEN:] = 0
    out = torch.empty(4, HIDDEN)
    layers = [ExpertsRecord(panels, made, TOP_K, space) for _ in inputs]
    for layer, x in zip(layers, inputs, strict=True):
        call = layer.record
        call.num_rows, call.x, call.x_row = 4, x.data_ptr(), panels.depth
        call.out, call.add = out.data_ptr(), 0
        Loop(call, loop_address("experts", ElementFormat.of(torch.float32))).run(single_thread=True)
    for layer, x in zip(layers, inputs, strict=True):
        experts, _ = chosen(made, x[:, :HIDDEN])
        assert torch.equal(layer.experts.view(4, TOP_K).sort().values, experts.sort().values)
