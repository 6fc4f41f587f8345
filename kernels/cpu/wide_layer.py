"""A decoder layer for many tokens on a CPU: oneDNN's products, with compiled loops between them.

oneDNN compiles a product anew for every number of rows it has not seen, in half a millisecond and half a MiB. So rows
are filled up to a few different numbers, at the cost of at most one row in eight, and of one in sixteen from 128 on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from graftlm.kernels.cpu.elementwise import Elementwise
from graftlm.kernels.cpu.packed_linear import linear

if TYPE_CHECKING:
    from graftlm.kernels.cpu.decoder_layer import LayerWeights


def filled(num_rows: int) -> int:
    """The number of rows that is computed for `num_rows`: one of sixteen, at most, from a power of 2 to the next."""
    step = max(8, (1 << (num_rows - 1).bit_length()) // 32)
    return -(-num_rows // step) * step


class WideLayer:
    """The halves of one layer before and after its attention."""

    def __init__(self, weights: LayerWeights, loops: Elementwise) -> None:
        self.weights = weights
        self.loops = loops

    def before(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As RowLayer.before; the views are of new memory."""
        w, num_rows = self.weights, x.shape[0]
        normed = _new(num_rows, w.hidden_size, x)
        self.loops.norm(x, None, w.before_attention, normed)
        parts = [linear(normed, panels)[:num_rows].unflatten(1, (-1, w.head_dim)) for panels in w.qkv]
        if len(parts) == 1:
            q, k, v = parts[0].split([w.num_heads, w.num_kv_heads, w.num_kv_heads], 1)
        else:
            q, k, v = parts
        self.loops.rotate(q, k, cos, sin, w.q_norm, w.k_norm)
        return q, k, v

    def after(self, x: torch.Tensor, attended: torch.Tensor) -> None:
        """As RowLayer.after."""
        w, num_rows = self.weights, x.shape[0]
        inputs = _new(num_rows, attended[0].numel(), x)
        inputs[:num_rows].copy_(attended.flatten(1))
        normed = _new(num_rows, w.hidden_size, x)
        self.loops.norm(x, linear(inputs, w.out), w.before_mlp, normed)
        if len(w.gate_up) == 1:
            gate, up = linear(normed, w.gate_up[0]).split(w.gate_size, 1)
            hidden = torch.empty_like(gate, memory_format=torch.contiguous_format)
        else:
            gate, up = (linear(normed, panels) for panels in w.gate_up)
            hidden = gate
        self.loops.gate(gate, up, hidden)
        x += linear(hidden, w.down)[:num_rows]


def _new(num_rows: int, size: int, like: torch.Tensor) -> torch.Tensor:
    """New memory for `num_rows` rows and those that fill them up, which are 0."""
    x = torch.empty(filled(num_rows), size, dtype=like.dtype)
    x[num_rows:] = 0
    return x
