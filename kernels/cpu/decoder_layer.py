"""A decoder layer on a CPU as two halves, before and after its attention; one class for few tokens, one for many.

Few tokens, as in decode steps, run compiled code with products of our own. Many tokens, as in prefill, run oneDNN's
products with compiled loops between them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from graftlm.kernels.cpu import PANEL
from graftlm.kernels.cpu.decode_layer_loops import AfterCall, BeforeCall, compile_after, compile_before
from graftlm.kernels.cpu.elementwise import Elementwise
from graftlm.kernels.cpu.matmul import MatmulCall, compile_matmul
from graftlm.kernels.cpu.openmp import parallel_region
from graftlm.kernels.cpu.packed_linear import Panels, linear
from graftlm.kernels.cpu.skinny_linear import SMALL_BYTES, address_of
from graftlm.kernels.norm import Norm

MAX_DECODE_ROWS = {torch.float32: 64, torch.bfloat16: 16}
"""Rows up to which our products are as fast as oneDNN's, which also has instructions for bfloat16 arithmetic."""

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class LayerWeights:
    """What a layer computes with.

    qkv      the projections whose outputs are all heads of q, then of k, then of v: one weight, or three
    q_norm   RMSNorm of each head before its rotary embedding; k_norm likewise; both or none
    gate_up  gate and up projection, or one weight that holds the rows of both
    """

    before_attention: Norm
    qkv: Sequence[Panels]
    q_norm: Norm | None
    k_norm: Norm | None
    out: Panels
    before_mlp: Norm
    gate_up: Sequence[Panels]
    down: Panels
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def hidden_size(self) -> int:
        return self.before_attention.weight.shape[0]

    @property
    def gate_size(self) -> int:
        return sum(p.num_out for p in self.gate_up) // 2

    @property
    def all_panels(self) -> tuple[Panels, ...]:
        return (*self.qkv, self.out, *self.gate_up, self.down)

    def problem(self) -> str | None:
        """Why the compiled code cannot compute this; None if it can."""
        if len(self.gate_up) == 1 and self.gate_size % PANEL:
            return "gate and up projection share a panel"
        if any(p.bias is not None for p in self.gate_up):
            return "gate and up projection have a bias"
        if self.q_norm is not None and self.k_norm is not None and self.q_norm.eps != self.k_norm.eps:
            return "the norms of queries and keys have different epsilons"
        return None


class Workspace:
    """Memory that the layers of a model use one after the other."""

    def __init__(self, layers: Sequence[LayerWeights]) -> None:
        dtype = layers[0].before_attention.weight.dtype
        self.num_rows = num_rows = MAX_DECODE_ROWS[dtype]
        self.inputs = torch.empty(num_rows, max(p.depth for layer in layers for p in layer.all_panels))
        heads = max((layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim for layer in layers)
        self.qkv = torch.empty(num_rows * heads, dtype=dtype)
        self.gate = torch.empty(num_rows * max(layer.gate_size for layer in layers), dtype=dtype)


class DecodeLayer:
    """The compiled halves of one layer for steps of few tokens."""

    def __init__(self, weights: LayerWeights, space: Workspace) -> None:
        self.weights = w = weights
        self.space = space
        self.dtype = w.before_attention.weight.dtype
        half = self.dtype is torch.bfloat16
        self._keep: list[object] = []  # what the calls have addresses of
        run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        self._run_before, self._run_after = run(compile_before(half)), run(compile_after(half))
        small = sum(p.num_bytes for p in w.all_panels) < SMALL_BYTES
        region = None if small else parallel_region()
        self._region = ctypes.cast(cast(Any, region), ctypes.c_void_p).value or 0 if region is not None else 0
        heads = w.num_heads + 2 * w.num_kv_heads
        width = heads * w.head_dim
        self._qkv = space.qkv[: space.num_rows * width].view(space.num_rows, heads, w.head_dim)
        gate, *ups = w.gate_up
        up = ups[0].address if ups else gate.address + gate.num_bytes // 2
        b, a = self._before, self._after = BeforeCall(), AfterCall()
        for call, norm in ((b, w.before_attention), (a, w.before_mlp)):
            call.hidden_size, call.norm, call.eps = w.hidden_size, norm.weight.data_ptr(), norm.eps
            call.scratch, call.scratch_row = space.inputs.data_ptr(), space.inputs.shape[1]
            call.matmul = compile_matmul(half)
        b.out, b.num_heads, b.num_kv_heads, b.head_dim = self._qkv.data_ptr(), w.num_heads, w.num_kv_heads, w.head_dim
        b.q_norm, b.k_norm = (address_of(norm.weight if norm is not None else None) for norm in (w.q_norm, w.k_norm))
        b.head_eps = w.q_norm.eps if w.q_norm is not None else 0.0
        b.qkv = self._matmul(w.qkv, self._qkv.data_ptr(), width)
        a.attended_size, a.gate, a.gate_size = w.num_heads * w.head_dim, space.gate.data_ptr(), w.gate_size
        a.o = self._matmul([w.out], 0, w.hidden_size, add=True)
        a.gate_up = self._matmul([gate], space.gate.data_ptr(), w.gate_size, up=up)
        a.down = self._matmul([w.down], 0, w.hidden_size, add=True)

    def _matmul(self, weights: Sequence[Panels], out: int, out_row: int, *, add: bool = False, up: int = 0) -> int:
        """Address of a MatmulCall for these weights; `up` is the address of the up projection of a gate projection."""
        segments = np.zeros((len(weights), 6), np.int64)
        task = column = 0
        for i, panels in enumerate(weights):
            num_out = out_row if up else panels.num_out
            segments[i] = task, num_out, column, panels.address, up, address_of(panels.bias)
            task += -(-num_out // PANEL)
            column += num_out
        call = MatmulCall()
        call.num_tasks, call.depth = task, weights[0].depth
        call.x, call.x_row = self.space.inputs.data_ptr(), self.space.inputs.shape[1]
        call.segments, call.num_segments = segments.ctypes.data, len(weights)
        call.out, call.out_row, call.add = out, out_row, add
        self._keep += [segments, call]
        return ctypes.addressof(call)

    def _set_step(self, call: Any, x: torch.Tensor) -> None:
        threads = torch.get_num_threads()
        call.num_rows, call.x = x.shape[0], x.data_ptr()
        call.parallel_region, call.threads = self._region if threads > 1 else 0, threads

    def before(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> QKV:
        """Queries, keys and values of x [num_rows, hidden_size], dense, after their rotary embedding.

        cos  [num_rows, rotary_dim], both halves equal; sin likewise
        -> q [num_rows, num_heads, head_dim], k, v [num_rows, num_kv_heads, head_dim]: views of the workspace
        """
        call: Any = self._before
        self._set_step(call, x)
        call.cos, call.sin = cos.data_ptr(), sin.data_ptr()
        call.table_row, call.rotary_dim = cos.stride(0), cos.shape[1]
        self._run_before(ctypes.addressof(call))
        qkv, first_k = self._qkv[: x.shape[0]], self.weights.num_heads
        first_v = first_k + self.weights.num_kv_heads
        return qkv[:, :first_k], qkv[:, first_k:first_v], qkv[:, first_v:]

    def after(self, x: torch.Tensor, attended: torch.Tensor) -> None:
        """Add to x [num_rows, hidden_size] what follows the attention, whose output is `attended`, dense."""
        call: Any = self._after
        self._set_step(call, x)
        call.attended = attended.data_ptr()
        self._run_after(ctypes.addressof(call))


def padded(num_rows: int) -> int:
    """`num_rows` rounded up to one of at most sixteen numbers between a power of 2 and the next.

    oneDNN compiles a product for every new number of rows, which takes half a millisecond and half a MiB. Padding costs
    at most one row in eight, and one in sixteen from 128 rows on.
    """
    step = max(8, (1 << (num_rows - 1).bit_length()) // 32)
    return -(-num_rows // step) * step


class PrefillLayer:
    """The halves of one layer for steps of many tokens."""

    def __init__(self, weights: LayerWeights, loops: Elementwise) -> None:
        self.weights = weights
        self.loops = loops

    def before(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> QKV:
        """As DecodeLayer.before, but in new memory."""
        w, num_rows = self.weights, x.shape[0]
        normed = _padded_rows(num_rows, w.hidden_size, x)
        self.loops.norm(x, None, w.before_attention, normed)
        parts = [linear(normed, panels)[:num_rows].unflatten(1, (-1, w.head_dim)) for panels in w.qkv]
        q, k, v = parts if len(parts) == 3 else parts[0].split([w.num_heads, w.num_kv_heads, w.num_kv_heads], 1)
        self.loops.rotate(q, k, cos, sin, w.q_norm, w.k_norm)
        return q, k, v

    def after(self, x: torch.Tensor, attended: torch.Tensor) -> None:
        """As DecodeLayer.after."""
        w, num_rows = self.weights, x.shape[0]
        inputs = _padded_rows(num_rows, attended[0].numel(), x)
        inputs[:num_rows].copy_(attended.flatten(1))
        normed = _padded_rows(num_rows, w.hidden_size, x)
        self.loops.norm(x, linear(inputs, w.out), w.before_mlp, normed)
        if len(w.gate_up) == 1:
            gate, up = linear(normed, w.gate_up[0]).split(w.gate_size, 1)
            hidden = torch.empty_like(gate, memory_format=torch.contiguous_format)
        else:
            gate, up = (linear(normed, panels) for panels in w.gate_up)
            hidden = gate
        self.loops.silu_mul(gate, up, hidden)
        x += linear(hidden, w.down)[:num_rows]


def _padded_rows(num_rows: int, size: int, like: torch.Tensor) -> torch.Tensor:
    """New memory for padded(num_rows) rows; those after `num_rows` are 0."""
    x = torch.empty(padded(num_rows), size, dtype=like.dtype)
    x[num_rows:] = 0
    return x
