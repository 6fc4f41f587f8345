"""Compiled code of a decoder layer in decode steps: one call before its attention and one after it.

Decoding is bound by reading weights, so all else has to be nearly free: norms, rotary embedding, SwiGLU and residual
sums run between the products in the same call, and each product is one parallel region on torch's own threads.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from graftlm.kernels.cpu.loop_runtime import (
    at,
    compile_loop,
    copy_row,
    element_of,
    int_fields,
    rms_norm,
    rotate,
    store_row,
)
from graftlm.kernels.cpu.matmul import MatmulCall


class BeforeCall(ctypes.Structure):
    """Norm, projections to queries, keys and values, norms of their heads, rotary embedding."""

    _fields_ = (
        *int_fields("num_rows", "hidden_size", "x", "norm", "scratch", "scratch_row"),
        *int_fields("parallel_region", "matmul", "threads", "qkv", "out", "num_heads", "num_kv_heads", "head_dim"),
        *int_fields("rotary_dim", "cos", "sin", "table_row", "q_norm", "k_norm"),
        ("eps", ctypes.c_float),
        ("head_eps", ctypes.c_float),
    )


class AfterCall(ctypes.Structure):
    """Output projection, norm and SwiGLU MLP; both the projection and the MLP are added to x."""

    _fields_ = (
        *int_fields("num_rows", "hidden_size", "x", "norm", "scratch", "scratch_row"),
        *int_fields("parallel_region", "matmul", "threads", "attended", "attended_size", "o"),
        *int_fields("gate_up", "gate", "gate_size", "down"),
        ("eps", ctypes.c_float),
    )


@intrinsic
def _run(
    typingctx: Any, parallel_region: Any, function: Any, call: Any, threads: Any
) -> tuple[Any, Callable[..., Any]]:
    """Run `function(call)` on `threads` threads through GOMP_parallel, or on this one if its address is 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        entry, function, call, threads = arguments
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        data = builder.inttoptr(call, pointer)
        single = builder.icmp_signed("==", entry, ir.Constant(ir.IntType(64), 0))
        with builder.if_else(single) as (here, together):
            with here:
                kind = ir.FunctionType(ir.VoidType(), [pointer])
                builder.call(builder.inttoptr(function, kind.as_pointer()), [data])
            with together:
                kind = ir.FunctionType(ir.VoidType(), [pointer, pointer, number, number])
                region, count = builder.inttoptr(entry, kind.as_pointer()), builder.trunc(threads, number)
                builder.call(region, [builder.inttoptr(function, pointer), data, count, ir.Constant(number, 0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), generate


@functools.cache
def compile_before(bfloat16: bool) -> int:
    """Address of `void (BeforeCall *)`."""
    element, size = element_of(bfloat16)
    matmul = np.dtype(MatmulCall)

    def work(pointer):
        call = carray(pointer, 1)[0]
        num_rows, hidden, dim = call.num_rows, call.hidden_size, call.head_dim
        weight = carray(at(call.norm), hidden, element)
        qkv = carray(at(call.qkv), 1, matmul)
        for row in range(num_rows):
            x = carray(at(call.x + row * hidden * size), hidden, element)
            to = carray(at(call.scratch + row * call.scratch_row * 4), qkv[0].depth, np.float32)
            rms_norm(to, x, weight, hidden, call.eps)
        qkv[0].next_task = 0
        qkv[0].num_rows = num_rows
        _run(call.parallel_region, call.matmul, call.qkv, call.threads)
        half = call.rotary_dim // 2
        num_rotated = call.num_heads + call.num_kv_heads
        scratch = carray(at(call.scratch), dim, np.float32)
        for row in range(num_rows):
            cos = carray(at(call.cos + row * call.table_row * size), call.rotary_dim, element)
            sin = carray(at(call.sin + row * call.table_row * size), call.rotary_dim, element)
            for head in range(num_rotated):
                place = call.out + ((row * (num_rotated + call.num_kv_heads) + head) * dim) * size
                x = carray(at(place), dim, element)
                norm = call.q_norm if head < call.num_heads else call.k_norm
                if norm != 0:
                    rms_norm(scratch, x, carray(at(norm), dim, element), dim, call.head_eps)
                    store_row(x, scratch)
                rotate(x, cos, sin, half)

    return compile_loop(BeforeCall, work)


@functools.cache
def compile_after(bfloat16: bool) -> int:
    """Address of `void (AfterCall *)`."""
    element, size = element_of(bfloat16)
    matmul = np.dtype(MatmulCall)

    def work(pointer):
        call = carray(pointer, 1)[0]
        num_rows, hidden = call.num_rows, call.hidden_size
        weight = carray(at(call.norm), hidden, element)
        o, gate_up, down = (
            carray(at(call.o), 1, matmul),
            carray(at(call.gate_up), 1, matmul),
            carray(at(call.down), 1, matmul),
        )
        o[0].next_task, gate_up[0].next_task, down[0].next_task = 0, 0, 0
        o[0].num_rows, gate_up[0].num_rows, down[0].num_rows = num_rows, num_rows, num_rows
        o[0].out, down[0].out = call.x, call.x
        for row in range(num_rows):
            place = call.attended + row * call.attended_size * size
            to = carray(at(call.scratch + row * call.scratch_row * 4), o[0].depth, np.float32)
            copy_row(to, carray(at(place), call.attended_size, element))
        _run(call.parallel_region, call.matmul, call.o, call.threads)
        for row in range(num_rows):
            x = carray(at(call.x + row * hidden * size), hidden, element)
            to = carray(at(call.scratch + row * call.scratch_row * 4), gate_up[0].depth, np.float32)
            rms_norm(to, x, weight, hidden, call.eps)
        _run(call.parallel_region, call.matmul, call.gate_up, call.threads)
        for row in range(num_rows):
            place = call.gate + row * call.gate_size * size
            to = carray(at(call.scratch + row * call.scratch_row * 4), down[0].depth, np.float32)
            copy_row(to, carray(at(place), call.gate_size, element))
        _run(call.parallel_region, call.matmul, call.down, call.threads)

    return compile_loop(AfterCall, work)
