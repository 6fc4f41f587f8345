"""A decoder layer on a CPU for the few tokens of a decode step, as two compiled calls around its attention.

Decoding is bound by reading the weights, so everything beside that is to cost nothing: weights are read as oneDNN has
laid them out, in panels of 64 outputs, by loops that keep the outputs in registers, and norms, rotary embedding, gates
and sums happen where the products begin and end. The threads are torch's own; one call starts each of its products.
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

from graftlm.kernels.cpu.loop_runtime import at, compiled, element_of, load, load_normed, narrow, turn
from graftlm.kernels.cpu.matmul import ProductCall


class BeforeCall(ctypes.Structure):
    """Norm, projections to queries, keys and values, norms of their heads, rotary embedding."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                *("num_rows", "hidden_size", "x", "norm", "scratch", "scratch_row", "qkv", "entry", "work", "threads"),
                *("out", "num_heads", "num_kv_heads", "head_dim", "rotary_dim", "cos", "sin", "table_row"),
                *("q_norm", "k_norm"),
            )
        ),
        ("eps", ctypes.c_float),
        ("head_eps", ctypes.c_float),
    )


class AfterCall(ctypes.Structure):
    """Output projection, norm and gated MLP, both halves added to x."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                *("num_rows", "hidden_size", "x", "norm", "scratch", "scratch_row", "entry", "work", "threads"),
                *("attended", "attended_size", "o", "gate_up", "gate", "gate_size", "down"),
            )
        ),
        ("eps", ctypes.c_float),
    )


@intrinsic
def _start(typingctx: Any, entry: Any, work: Any, call: Any, threads: Any) -> tuple[Any, Callable[..., Any]]:
    """Run `work(call)` on `threads` threads by OpenMP's `entry`, or here if that is 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        entry, work, call, threads = arguments
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        data = builder.inttoptr(call, pointer)
        alone = builder.icmp_signed("==", entry, ir.Constant(ir.IntType(64), 0))
        with builder.if_else(alone) as (here, together):
            with here:
                kind = ir.FunctionType(ir.VoidType(), [pointer])
                builder.call(builder.inttoptr(work, kind.as_pointer()), [data])
            with together:
                kind = ir.FunctionType(ir.VoidType(), [pointer, pointer, number, number])
                function, count = builder.inttoptr(entry, kind.as_pointer()), builder.trunc(threads, number)
                builder.call(function, [builder.inttoptr(work, pointer), data, count, ir.Constant(number, 0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), generate


@functools.cache
def compile_before(bfloat16: bool) -> int:
    """Address of `void (BeforeCall *)`."""
    element, size = element_of(bfloat16)
    product = np.dtype(ProductCall)

    def work(pointer):
        call = carray(pointer, 1)[0]
        num_rows, hidden, dim = call.num_rows, call.hidden_size, call.head_dim
        weight = carray(at(call.norm), hidden, element)
        qkv = carray(at(call.qkv), 1, product)
        for row in range(num_rows):
            x = carray(at(call.x + row * hidden * size), hidden, element)
            to = carray(at(call.scratch + row * call.scratch_row * 4), qkv[0].depth, np.float32)
            load_normed(to, x, weight, hidden, call.eps)
        qkv[0].next_task = 0
        qkv[0].num_rows = num_rows
        _start(call.entry, call.work, call.qkv, call.threads)
        half = call.rotary_dim // 2
        num_turned = call.num_heads + call.num_kv_heads
        scratch = carray(at(call.scratch), dim, np.float32)
        for row in range(num_rows):
            cos = carray(at(call.cos + row * call.table_row * size), call.rotary_dim, element)
            sin = carray(at(call.sin + row * call.table_row * size), call.rotary_dim, element)
            for head in range(num_turned):
                place = call.out + ((row * (num_turned + call.num_kv_heads) + head) * dim) * size
                x = carray(at(place), dim, element)
                norm = call.q_norm if head < call.num_heads else call.k_norm
                if norm != 0:
                    load_normed(scratch, x, carray(at(norm), dim, element), dim, call.head_eps)
                    for d in range(dim):
                        x[d] = narrow(scratch[d], x)
                turn(x, cos, sin, half)

    return compiled(BeforeCall, work)


@functools.cache
def compile_after(bfloat16: bool) -> int:
    """Address of `void (AfterCall *)`."""
    element, size = element_of(bfloat16)
    product = np.dtype(ProductCall)

    def work(pointer):
        call = carray(pointer, 1)[0]
        num_rows, hidden = call.num_rows, call.hidden_size
        weight = carray(at(call.norm), hidden, element)
        o, gate_up, down = (
            carray(at(call.o), 1, product),
            carray(at(call.gate_up), 1, product),
            carray(at(call.down), 1, product),
        )
        o[0].next_task, gate_up[0].next_task, down[0].next_task = 0, 0, 0
        o[0].num_rows, gate_up[0].num_rows, down[0].num_rows = num_rows, num_rows, num_rows
        o[0].out, down[0].out = call.x, call.x
        size_a, size_g = call.attended_size, call.gate_size
        for row in range(num_rows):
            source = carray(at(call.attended + row * size_a * size), size_a, element)
            to = carray(at(call.scratch + row * call.scratch_row * 4), o[0].depth, np.float32)
            load(to, source)
        _start(call.entry, call.work, call.o, call.threads)
        for row in range(num_rows):
            x = carray(at(call.x + row * hidden * size), hidden, element)
            to = carray(at(call.scratch + row * call.scratch_row * 4), gate_up[0].depth, np.float32)
            load_normed(to, x, weight, hidden, call.eps)
        _start(call.entry, call.work, call.gate_up, call.threads)
        for row in range(num_rows):
            source = carray(at(call.gate + row * size_g * size), size_g, element)
            to = carray(at(call.scratch + row * call.scratch_row * 4), down[0].depth, np.float32)
            load(to, source)
        _start(call.entry, call.work, call.down, call.threads)

    return compiled(AfterCall, work)
