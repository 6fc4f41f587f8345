"""Activations of gates, and their definition in torch."""

from __future__ import annotations

from typing import Literal

import torch

Activation = Literal["silu", "gelu_tanh"]
"""silu(x) = x * sigmoid(x); gelu_tanh is GELU with tanh in place of erf, x * sigmoid(1.596 x + 0.0714 x^3)."""


def gate_by_torch(both: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Compute activation(gate) * up of packed projections, gates first, by definition. [..., 2 n] -> [..., n]"""
    gate, up = both.chunk(2, -1)
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh") * up
