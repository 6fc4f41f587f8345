"""Activations of gates on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activated(gate, ACTIVATION: tl.constexpr):
    """Return the activation of `gate` in float32 (kernels/activation.py)."""
    x = gate
    if ACTIVATION == "gelu_tanh":
        x = gate * (1.5957691216057308 + 0.07135481627260025 * gate * gate)
    return gate / (1.0 + tl.exp(-x))
