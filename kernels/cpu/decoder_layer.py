"""A decoder layer for few tokens at a time: its weights, work space and compiled calls."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from graftlm.kernels.cpu.decode_layer_loops import AfterCall, BeforeCall, compile_after, compile_before
from graftlm.kernels.cpu.matmul import PANEL, ProductCall, compile_plain_product, compile_product
from graftlm.kernels.cpu.openmp import team
from graftlm.kernels.cpu.packed_linear import Panels

MAX_ROWS = {torch.float32: 64, torch.bfloat16: 16}
"""Rows up to which these loops are as fast as oneDNN's, which has instructions for bfloat16 that these lack."""
_SMALL_BYTES = 1 << 18
"""Of a layer's weights: below this, one thread is done before another has joined."""


class Norm(NamedTuple):
    """RMSNorm. weight [n]"""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True)
class LayerWeights:
    """What a layer computes with.

    qkv      the projections whose outputs are all heads of q, then of k, then of v: one weight, or three
    gate_up  gate and up, or one weight that holds the rows of both
    q_norm   of each head before it is rotated; k_norm likewise; both or none
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

    def problem(self) -> str | None:
        """Why the compiled loops cannot compute this; None if they can."""
        if len(self.gate_up) == 1 and self.gate_size % PANEL:
            return "gate and up do not meet between two panels"
        if any(p.bias is not None for p in self.gate_up):
            return "gate and up have a bias"
        if self.q_norm is not None and self.k_norm is not None and self.q_norm.eps != self.k_norm.eps:
            return "the norms of queries and keys have different epsilons"
        return None


class WorkSpace:
    """Memory that the layers of a model use one after the other."""

    def __init__(self, layers: Sequence[LayerWeights]) -> None:
        dtype = layers[0].before_attention.weight.dtype
        widest = max(p.depth for layer in layers for p in (*layer.qkv, layer.out, *layer.gate_up, layer.down))
        self.num_rows = num_rows = MAX_ROWS[dtype]
        self.inputs = torch.empty(num_rows, widest)
        self.qkv = torch.empty(
            num_rows * max((layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim for layer in layers), dtype=dtype
        )
        self.gate = torch.empty(num_rows * max(layer.gate_size for layer in layers), dtype=dtype)


def _address(x: torch.Tensor | None) -> int:
    return x.data_ptr() if x is not None else 0


class RowProduct:
    """One linear layer for few tokens; its weight in panels, or as it is, row by row."""

    def __init__(self, weight: Panels | torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        half = dtype is torch.bfloat16
        if isinstance(weight, Panels):
            self.num_out, self._num_in = weight.num_out, weight.num_in
            depth, num_bytes = weight.depth, weight.num_bytes
            address, function = weight.address, compile_product(half)
        else:
            self.num_out, self._num_in = weight.shape
            depth, num_bytes = self._num_in, weight.nbytes
            address, function = weight.data_ptr(), compile_plain_product(half)
        self._weights = weight, bias  # addresses do not keep them
        self._pieces = np.array([[0, self.num_out, 0, address, 0, _address(bias)]], np.int64)
        call = self._call = ProductCall()
        call.num_tasks, call.depth, call.x_row = -(-self.num_out // PANEL), depth, depth
        call.pieces, call.num_pieces, call.out_row = self._pieces.ctypes.data, 1, self.num_out
        self._address, self._function = ctypes.addressof(call), function
        self._alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
        self._team = team() if num_bytes >= _SMALL_BYTES else None

    @staticmethod
    def fits(weight: torch.Tensor) -> bool:
        """Whether the loops can read this weight [n, k] row by row."""
        return weight.is_contiguous() and weight.shape[1] % 16 == 0 and weight.shape[0] >= 4

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_rows, k] -> [num_rows, n], dtype of x"""
        call = self._call
        inputs = x.float().contiguous()
        if call.depth != self._num_in:
            inputs = torch.nn.functional.pad(inputs, (0, call.depth - self._num_in))
        out = torch.empty(x.shape[0], self.num_out, dtype=x.dtype)
        call.next_task, call.num_rows, call.x, call.out = 0, x.shape[0], inputs.data_ptr(), out.data_ptr()
        threads = torch.get_num_threads()
        if self._team is None or threads == 1:
            self._alone(self._address)
        else:
            self._team(self._function, self._address, threads, 0)
        return out


class RowLayer:
    """The compiled halves of one layer, before and after its attention."""

    def __init__(self, weights: LayerWeights, space: WorkSpace) -> None:
        self.weights = weights
        self.space = space
        w, inputs = weights, space.inputs
        self.dtype = w.before_attention.weight.dtype
        half = self.dtype is torch.bfloat16
        self._keep: list[object] = []
        self._function = compile_product(half)
        run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        self._run_before, self._run_after = run(compile_before(half)), run(compile_after(half))
        num_bytes = sum(p.num_bytes for p in (*w.qkv, w.out, *w.gate_up, w.down))
        self._team = team() if num_bytes >= _SMALL_BYTES else None
        self._entry = ctypes.cast(cast(Any, self._team), ctypes.c_void_p).value or 0 if self._team is not None else 0
        heads = w.num_heads + 2 * w.num_kv_heads
        width = heads * w.head_dim
        self._qkv = space.qkv[: space.num_rows * width].view(space.num_rows, heads, w.head_dim)
        gate = space.gate
        up = w.gate_up
        if len(up) == 1:
            size = up[0].num_bytes // 2
            second = up[0].address + size
        else:
            second = up[1].address
        b = self._before = BeforeCall()
        b.hidden_size, b.norm, b.eps = w.hidden_size, w.before_attention.weight.data_ptr(), w.before_attention.eps
        b.scratch, b.scratch_row, b.work = inputs.data_ptr(), inputs.shape[1], self._function
        b.out, b.num_heads, b.num_kv_heads, b.head_dim = self._qkv.data_ptr(), w.num_heads, w.num_kv_heads, w.head_dim
        b.q_norm = w.q_norm.weight.data_ptr() if w.q_norm is not None else 0
        b.k_norm = w.k_norm.weight.data_ptr() if w.k_norm is not None else 0
        b.head_eps = w.q_norm.eps if w.q_norm is not None else 0.0
        b.qkv = self._product(w.qkv, self._qkv.data_ptr(), width)
        a = self._after = AfterCall()
        a.hidden_size, a.norm, a.eps = w.hidden_size, w.before_mlp.weight.data_ptr(), w.before_mlp.eps
        a.scratch, a.scratch_row, a.work = inputs.data_ptr(), inputs.shape[1], self._function
        a.attended_size, a.gate, a.gate_size = w.num_heads * w.head_dim, gate.data_ptr(), w.gate_size
        a.o = self._product([w.out], 0, w.hidden_size, add=True)
        a.gate_up = self._product([up[0]], gate.data_ptr(), w.gate_size, second=second)
        a.down = self._product([w.down], 0, w.hidden_size, add=True)
        self._addresses = ctypes.addressof(b), ctypes.addressof(a)

    def _product(self, weights: Sequence[Panels], out: int, out_row: int, *, add: bool = False, second: int = 0) -> int:
        """Address of a ProductCall for these weights; `second` is that of what their outputs are the gates of."""
        pieces = np.zeros((len(weights), 6), np.int64)
        task = column = 0
        for i, panels in enumerate(weights):
            num_out = out_row if second else panels.num_out
            pieces[i] = task, num_out, column, panels.address, second, _address(panels.bias)
            task += -(-num_out // PANEL)
            column += num_out
        call = ProductCall()
        call.num_tasks, call.depth = task, weights[0].depth
        call.x, call.x_row = self.space.inputs.data_ptr(), self.space.inputs.shape[1]
        call.pieces, call.num_pieces = pieces.ctypes.data, len(weights)
        call.out, call.out_row, call.add = out, out_row, add
        self._keep += [pieces, call]
        return ctypes.addressof(call)

    def before(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of x [num_rows, hidden_size], dense.

        cos  [num_rows, rotary_dim], both halves equal; sin likewise
        -> q [num_rows, num_heads, head_dim], k, v [num_rows, num_kv_heads, head_dim]: views of the work space
        """
        call, w = self._before, self.weights
        num_rows = x.shape[0]
        threads = torch.get_num_threads()
        call.num_rows, call.x = num_rows, x.data_ptr()
        call.entry, call.threads = self._entry if threads > 1 else 0, threads
        call.cos, call.sin, call.table_row, call.rotary_dim = (
            cos.data_ptr(),
            sin.data_ptr(),
            cos.stride(0),
            cos.shape[1],
        )
        self._run_before(self._addresses[0])
        qkv = self._qkv[:num_rows]
        kv = w.num_heads + w.num_kv_heads
        return qkv[:, : w.num_heads], qkv[:, w.num_heads : kv], qkv[:, kv:]

    def after(self, x: torch.Tensor, attended: torch.Tensor) -> None:
        """Add to x [num_rows, hidden_size] what follows the attention, whose output is attended, dense."""
        call = self._after
        threads = torch.get_num_threads()
        call.num_rows, call.x, call.attended = x.shape[0], x.data_ptr(), attended.data_ptr()
        call.entry, call.threads = self._entry if threads > 1 else 0, threads
        self._run_after(self._addresses[1])
