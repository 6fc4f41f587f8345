"""Activations of gates on a GPU."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

Activation = Literal["silu", "gelu_tanh"]
"""silu(x) = x * sigmoid(x); gelu_tanh is GELU with tanh in place of erf, x * sigmoid(1.596 x + 0.0714 x^3)."""


@triton.jit
def activated(gate, ACTIVATION: tl.constexpr):
    """The activation of `gate`, float32."""
    x = gate
    if ACTIVATION == "gelu_tanh":
        x = gate * (1.5957691216057308 + 0.07135481627260025 * gate * gate)
    return gate / (1.0 + tl.exp(-x))


def gate_by_torch(both: torch.Tensor, activation: Activation) -> torch.Tensor:
    """activation(gate) * up of packed projections, the gates first. The definition: [..., 2 n] -> [..., n]"""
    gate, up = both.chunk(2, -1)
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh") * up
