"""A decoder layer in steps of many tokens, with matmuls by our own loop: of quantised weights, or where it is fastest.

With plain weights, oneDNN's matmuls take about as long, but write the gate and up projections and the addends of the
residual stream to memory, which further loops read again.
"""

from __future__ import annotations

from typing import Any

import torch

from graftlm.kernels.cpu.calls import MatmulCall
from graftlm.kernels.cpu.compiled.loop_runtime import Loop
from graftlm.kernels.cpu.decoder.decoder_layer import (
    DOTS,
    DOWN_PRODUCT,
    GATE_UP_PRODUCT,
    OUT_PRODUCT,
    QKV,
    QKV_PRODUCT,
    DecodeLayer,
)
from graftlm.kernels.cpu.decoder.elementwise import Elementwise

_TASK_ROWS, _QUANTISED_ROWS = 66, 64
"""Rows of a task, with plain and with quantised weights: whole register tiles, whose sums stay in the first-level
cache."""


class DotLayer:
    """The halves of one layer for steps of many tokens; see `fits`."""

    def __init__(self, decode: DecodeLayer, loops: Elementwise) -> None:
        self.weights, self.loops = decode.weights, loops
        layers = decode.layers
        self._loops = [
            Loop(MatmulCall.from_buffer_copy(product), layers.call.matmul) for product in layers.products[decode.place]
        ]
        self._num_panels = [loop.call.num_tasks for loop in self._loops]
        self._task_rows = _QUANTISED_ROWS if self.weights.is_quantised else _TASK_ROWS
        self._held = layers  # keeps memory alive to which its matmuls have addresses

    @staticmethod
    def fits(decode: DecodeLayer) -> bool:
        """Return True if this is the fastest class for the layer: there is a part for each thread."""
        layers = decode.layers
        is_whole = all(p.depth == p.num_in for p in decode.weights.all_panels)
        is_fast = (DOTS or decode.weights.is_quantised) and 2 * torch.get_num_threads() <= layers.num_parts
        return layers.dtype is torch.bfloat16 and is_whole and is_fast

    def before(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> QKV:
        """Run `DecodeLayer.before` with newly allocated results."""
        w = self.weights
        normed = torch.empty_like(x)
        self.loops.norm(x, w.before_attention, normed)
        qkv = torch.empty(x.shape[0], w.num_qkv_heads * w.head_dim, dtype=x.dtype)
        self._multiply(QKV_PRODUCT, normed, qkv)
        q, k, v = w.heads(qkv)
        self.loops.rotate(q, k, cos, sin, w.q_norm, w.k_norm)
        return q, k, v

    def add_attended(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Add the projected output of attention to x. -> the MLP's input"""
        w = self.weights
        normed = torch.empty_like(x)
        if w.after_attention is None:
            self._multiply(OUT_PRODUCT, attended.flatten(1), x)
            self.loops.norm(x, w.before_mlp, normed)
        else:
            addend = torch.empty_like(x)
            self._multiply(OUT_PRODUCT, attended.flatten(1), addend)
            self.loops.add_norm(x, addend, w.after_attention, w.before_mlp, normed)
        return normed

    def after(self, x: torch.Tensor, attended: torch.Tensor) -> None:
        """Run `DecodeLayer.after`."""
        w, normed = self.weights, self.add_attended(x, attended)
        if w.mixture is not None:
            self.loops.add_norm(x, w.mixture.routed(normed), w.after_mlp, None, None)
            return
        hidden = torch.empty(x.shape[0], w.gate_size, dtype=x.dtype)
        self._multiply(GATE_UP_PRODUCT, normed, hidden)
        if w.after_mlp is None:
            self._multiply(DOWN_PRODUCT, hidden, x)
        else:
            self._multiply(DOWN_PRODUCT, hidden, normed)
            self.loops.add_norm(x, normed, w.after_mlp, None, None)

    def _multiply(self, product: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """Run a matmul on x [num_rows, depth]; its `add` says whether `out` is set or incremented."""
        loop = self._loops[product]
        call: Any = loop.call
        x = x.to(out.dtype).contiguous()
        call.num_rows, call.task_rows, call.x_bfloat16 = x.shape[0], self._task_rows, 1
        call.x, call.x_row, call.out, call.out_row = x.data_ptr(), x.shape[1], out.data_ptr(), out.stride(0)
        call.num_tasks = self._num_panels[product] * -(-x.shape[0] // self._task_rows)
        loop.run()
