"""Elementwise loops of a decoder layer on a CPU, for many tokens: norm, rotary embedding, SwiGLU."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import carray

from graftlm.kernels.cpu.loop_runtime import (
    Loop,
    at,
    compile_loop,
    copy_row,
    element_of,
    int_fields,
    narrow,
    next_task,
    rms_norm,
    rotate,
    silu_mul,
    store_row,
    widen,
)

if TYPE_CHECKING:
    import torch

    from graftlm.kernels.norm import Norm

_ROWS = 4
"""Rows of a task."""
_SMALL = 1 << 14
"""Tensors of fewer elements are left to one thread: it is done before a second one would start."""


class _Norm(ctypes.Structure):
    _fields_ = (
        *int_fields("next_task", "num_rows", "size", "x", "added", "added_row", "weight", "out", "out_row"),
        ("eps", ctypes.c_float),
    )


class _Rotation(ctypes.Structure):
    _fields_ = (
        *int_fields("next_task", "num_rows", "q", "q_row", "k", "k_row", "num_heads", "num_kv_heads", "head_dim"),
        *int_fields("rotary_dim", "cos", "sin", "table_row", "q_norm", "k_norm"),
        ("eps", ctypes.c_float),
    )


class _SiluMul(ctypes.Structure):
    _fields_ = int_fields("next_task", "num_rows", "size", "gate", "up", "row", "out", "out_row")


class Elementwise:
    """The loops for one dtype, compiled when this is made."""

    def __init__(self, dtype: torch.dtype) -> None:
        half = dtype.itemsize == 2
        self._norm = Loop(_Norm(), compile_norm(half))
        self._rotation = Loop(_Rotation(), compile_rotation(half))
        self._silu_mul = Loop(_SiluMul(), compile_silu_mul(half))

    def norm(self, x: torch.Tensor, added: torch.Tensor | None, norm: Norm, out: torch.Tensor) -> None:
        """x += added; out = RMSNorm of x.

        x      [num_rows, n], dense; added [num_rows or more, n], rows dense, or None
        out    [num_rows or more, n], rows dense; rows of padding are left alone
        """
        call: Any = self._norm.call
        call.num_rows, call.size = x.shape
        call.weight, call.eps = norm.weight.data_ptr(), norm.eps
        call.x, call.out, call.out_row = x.data_ptr(), out.data_ptr(), out.stride(0)
        call.added, call.added_row = (added.data_ptr(), added.stride(0)) if added is not None else (0, 0)
        self._norm.run(single_thread=x.numel() < _SMALL)

    def rotate(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        q_norm: Norm | None,
        k_norm: Norm | None,
    ) -> None:
        """Norm and rotate the heads of q and k [num_rows, num_heads or num_kv_heads, head_dim] in place.

        cos, sin  [num_rows, rotary_dim], both halves equal
        """
        call: Any = self._rotation.call
        call.num_rows, call.num_heads, call.head_dim = q.shape
        call.q, call.q_row, call.k, call.k_row = q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0)
        call.num_kv_heads, call.rotary_dim = k.shape[1], cos.shape[1]
        call.cos, call.sin, call.table_row = cos.data_ptr(), sin.data_ptr(), cos.stride(0)
        call.q_norm, call.eps = (q_norm.weight.data_ptr(), q_norm.eps) if q_norm is not None else (0, 0.0)
        call.k_norm = k_norm.weight.data_ptr() if k_norm is not None else 0
        self._rotation.run(single_thread=q.numel() < _SMALL)

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor) -> None:
        """out = silu(gate) * up. All [num_rows, n], rows dense, gate and up of one stride; out may be gate."""
        call: Any = self._silu_mul.call
        assert gate.stride(0) == up.stride(0)
        call.num_rows, call.size = gate.shape
        call.gate, call.up, call.row = gate.data_ptr(), up.data_ptr(), gate.stride(0)
        call.out, call.out_row = out.data_ptr(), out.stride(0)
        self._silu_mul.run(single_thread=gate.numel() < _SMALL)


@functools.cache
def compile_norm(bfloat16: bool) -> int:
    element, size = element_of(bfloat16)

    def work(pointer):
        call = carray(pointer, 1)[0]
        num = call.size
        weight = carray(at(call.weight), num, element)
        wide = np.empty(num, np.float32)
        while True:
            first = next_task(pointer) * _ROWS
            if first >= call.num_rows:
                break
            for row in range(first, min(first + _ROWS, call.num_rows)):
                x = carray(at(call.x + row * num * size), num, element)
                if call.added != 0:
                    added = carray(at(call.added + row * call.added_row * size), num, element)
                    for d in range(num):
                        x[d] = narrow(widen(x[d]) + widen(added[d]), x)
                rms_norm(wide, x, weight, num, call.eps)
                out = carray(at(call.out + row * call.out_row * size), num, element)
                store_row(out, wide)

    return compile_loop(_Norm, work)


@functools.cache
def compile_rotation(bfloat16: bool) -> int:
    element, size = element_of(bfloat16)

    def work(pointer):
        call = carray(pointer, 1)[0]
        dim, half = call.head_dim, call.rotary_dim // 2
        wide = np.empty(dim, np.float32)
        while True:
            first = next_task(pointer) * _ROWS
            if first >= call.num_rows:
                break
            for row in range(first, min(first + _ROWS, call.num_rows)):
                cos = carray(at(call.cos + row * call.table_row * size), call.rotary_dim, element)
                sin = carray(at(call.sin + row * call.table_row * size), call.rotary_dim, element)
                for head in range(call.num_heads + call.num_kv_heads):
                    if head < call.num_heads:
                        place, norm = call.q + (row * call.q_row + head * dim) * size, call.q_norm
                    else:
                        place = call.k + (row * call.k_row + (head - call.num_heads) * dim) * size
                        norm = call.k_norm
                    x = carray(at(place), dim, element)
                    if norm != 0:
                        rms_norm(wide, x, carray(at(norm), dim, element), dim, call.eps)
                        store_row(x, wide)
                    rotate(x, cos, sin, half)

    return compile_loop(_Rotation, work)


@functools.cache
def compile_silu_mul(bfloat16: bool) -> int:
    element, size = element_of(bfloat16)

    def work(pointer):
        call = carray(pointer, 1)[0]
        num = call.size
        wide = np.empty(num, np.float32)
        while True:
            first = next_task(pointer) * _ROWS
            if first >= call.num_rows:
                break
            for row in range(first, min(first + _ROWS, call.num_rows)):
                copy_row(wide, carray(at(call.gate + row * call.row * size), num, element))
                up = carray(at(call.up + row * call.row * size), num, element)
                out = carray(at(call.out + row * call.out_row * size), num, element)
                for d in range(num):
                    out[d] = narrow(silu_mul(wide[d], widen(up[d]), out), out)

    return compile_loop(_SiluMul, work)
