"""Attention of many queries over the same keys on a CPU, for prefill: one compiled loop, on torch's own threads.

Queries are columns: with Q transposed once, K and V are read as they lie in the store, and the softmax of each query
runs down a column, so that one instruction serves sixteen queries and nothing is summed across a register.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from graftlm.kernels.cpu.attention_metadata import Blocks
from graftlm.kernels.cpu.loop_runtime import FLAGS, Loop, at, compiled, element_of, exp, row_address, take, widen

COLUMNS = 64
"""Queries of a task: four vector registers of float32."""
KEYS = 64
"""Keys whose scores are held at once."""

_NUMBERS = (
    *("next_task", "num_blocks", "num_kv_heads", "num_slots", "q", "q_token", "q_head", "k", "v"),
    *("query", "visible", "query_ptr", "spans", "span_ptr", "out", "lse"),
)


class _Call(ctypes.Structure):
    """What the compiled loop is handed: addresses, and strides in elements."""

    _fields_ = (*((name, ctypes.c_int64) for name in _NUMBERS), ("scale", ctypes.c_float))


class CompiledChunks:
    """The loop for one shape of heads and one dtype, compiled when it is made and kept on disk for later processes."""

    def __init__(self, group: int, k_dim: int, v_dim: int, dtype: torch.dtype) -> None:
        self._loop = Loop(_Call(), _compile(group, k_dim, v_dim, dtype is torch.bfloat16))

    def run(
        self,
        q: torch.Tensor,
        stores: tuple[torch.Tensor, torch.Tensor],
        blocks: Blocks,
        scale: float,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Attend the queries of each block to the block's spans.

        q       [num_tokens, Hq, Dk]
        stores  K and V [num_slots, Hkv, D], dtype of q, KV head first in memory
        out     [num_tokens, Hq, Dv], lse [num_tokens, Hq], both float32; only the blocks' queries are set
        """
        k_store, v_store = stores
        call = self._loop.call
        call.num_blocks = len(blocks.query_ptr) - 1
        call.num_slots, call.num_kv_heads = k_store.shape[:2]
        call.q, call.q_token, call.q_head = row_address(q)
        call.k, call.v = k_store.data_ptr(), v_store.data_ptr()
        call.query, call.visible, call.query_ptr, call.spans, call.span_ptr = blocks.addresses
        call.out, call.lse = out.data_ptr(), lse.data_ptr()
        call.scale = scale
        self._loop.run()


def _tile(num_rows: int, width: int, *, half: bool = False) -> Any:
    """C [num_rows, 16 width] = A [num_rows, depth] B [depth, 16 width], all of C in registers meanwhile.

    A is float32, or bfloat16 if `half`, and read through two strides, in bytes; rows of B and C lie COLUMNS apart.
    """

    @intrinsic
    def tile(typingctx: Any, c: Any, a: Any, a_row: Any, a_step: Any, b: Any, depth: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
            c, a, a_row, a_step, b, depth = arguments
            word, single = ir.IntType(64), ir.FloatType()
            vector = ir.VectorType(single, 16)
            zero = ir.Constant(vector, [0.0] * 16)
            first = ir.Constant(ir.VectorType(ir.IntType(32), 16), [0] * 16)

            def at(base: Any, offset: Any, kind: Any) -> Any:
                return builder.inttoptr(builder.add(base, offset), kind.as_pointer())

            def place(row: int, column: int) -> Any:
                return at(c, ir.Constant(word, 4 * (row * COLUMNS + 16 * column)), vector)

            sums = [[cgutils.alloca_once(builder, vector) for _ in range(width)] for _ in range(num_rows)]
            for row in range(num_rows):
                for column in range(width):
                    builder.store(zero, sums[row][column])
            with cgutils.for_range(builder, depth) as loop:
                offset = builder.mul(loop.index, ir.Constant(word, 4 * COLUMNS))
                lines = [
                    builder.load(at(b, builder.add(offset, ir.Constant(word, 64 * i)), vector), align=4)
                    for i in range(width)
                ]
                step = builder.mul(loop.index, a_step)
                for row in range(num_rows):
                    place_a = builder.add(step, builder.mul(a_row, ir.Constant(word, row)))
                    if half:
                        bits = builder.zext(builder.load(at(a, place_a, ir.IntType(16)), align=2), ir.IntType(32))
                        scalar = builder.bitcast(builder.shl(bits, ir.Constant(ir.IntType(32), 16)), single)
                    else:
                        scalar = builder.load(at(a, place_a, single), align=4)
                    one = builder.insert_element(zero, scalar, ir.Constant(ir.IntType(32), 0))
                    many = builder.shuffle_vector(one, zero, first)
                    for column in range(width):
                        total = sums[row][column]
                        product = builder.fmul(many, lines[column], flags=("fast",))
                        builder.store(builder.fadd(builder.load(total), product, flags=("fast",)), total)
            for row in range(num_rows):
                for column in range(width):
                    builder.store(builder.load(sums[row][column]), place(row, column), align=4)

        integer = types.int64
        return types.void(integer, integer, integer, integer, integer, integer), generate

    return tile


def _in_blocks(num_rows: int, width: int, *, half: bool) -> Any:
    """The product of any number of rows: `num_rows` at a time, and the rest one by one."""
    many, one = _tile(num_rows, width, half=half), _tile(1, width, half=half)

    @njit(forceinline=True, **FLAGS)
    def product(c, a, a_row, a_step, b, rows, depth):
        row = 0
        while row + num_rows <= rows:
            many(c + row * 4 * COLUMNS, a + row * a_row, a_row, a_step, b, depth)
            row += num_rows
        while row < rows:
            one(c + row * 4 * COLUMNS, a + row * a_row, a_row, a_step, b, depth)
            row += 1

    return product


def _by_columns(*, half: bool) -> Any:
    """C [num_rows, columns] = A B, as `_tile` reads them, for 16, 32 or 64 columns."""
    by_16, by_32, by_64 = (_in_blocks(rows, width, half=half) for rows, width in ((8, 1), (8, 2), (4, 4)))

    @njit(**FLAGS)
    def product(c, a, a_row, a_step, b, num_rows, depth, columns):
        if columns == 16:
            by_16(c, a, a_row, a_step, b, num_rows, depth)
        elif columns == 32:
            by_32(c, a, a_row, a_step, b, num_rows, depth)
        else:
            by_64(c, a, a_row, a_step, b, num_rows, depth)

    return product


# of the module, not of `_compile`: what a loop closes over is part of the name that it is kept under
_product, _half_product = _by_columns(half=False), _by_columns(half=True)

_F = np.float32


@functools.cache
def _compile(group: int, k_dim: int, v_dim: int, bfloat16: bool) -> int:
    """Address of the loop `void (call *)`: works on tasks, one block and KV head each, until none is left."""
    element, size = element_of(bfloat16)

    def work(pointer):
        call = carray(pointer, 1)[0]
        num_blocks, num_kv_heads = call.num_blocks, call.num_kv_heads
        query_ptr = carray(at(call.query_ptr), num_blocks + 1, np.int64)
        span_ptr = carray(at(call.span_ptr), num_blocks + 1, np.int64)
        query = carray(at(call.query), query_ptr[num_blocks], np.int64)
        visible = carray(at(call.visible), query_ptr[num_blocks], np.int64)
        spans = carray(at(call.spans), (span_ptr[num_blocks], 2), np.int64)
        turned = np.empty((k_dim, COLUMNS), np.float32)
        total, added = np.empty((v_dim, COLUMNS), np.float32), np.empty((v_dim, COLUMNS), np.float32)
        scores = np.empty((KEYS, COLUMNS), np.float32)
        peak, weight = np.empty(COLUMNS, np.float32), np.empty(COLUMNS, np.float32)
        kept, gained = np.empty(COLUMNS, np.float32), np.empty(COLUMNS, np.float32)
        last_seen = np.empty(COLUMNS, np.int64)
        while True:
            task = take(pointer)
            if task >= num_blocks * num_kv_heads:
                break
            # the longest blocks of a row are its last ones: they go first, so that no thread ends long after another
            block, head = num_blocks - 1 - task // num_kv_heads, task % num_kv_heads
            first_query = query_ptr[block]
            num_columns = (query_ptr[block + 1] - first_query) * group
            columns = 16 if num_columns <= 16 else 32 if num_columns <= 32 else COLUMNS
            turned[:] = _F(0)
            total[:] = _F(0)
            peak[:] = _F(-1e30)
            weight[:] = _F(0)
            most, least = np.int64(0), np.int64(1 << 62)
            for column in range(COLUMNS):
                seen = visible[first_query + min(column, num_columns - 1) // group]
                last_seen[column] = seen
                most, least = max(most, seen), min(least, seen)
            for column in range(num_columns):
                token = query[first_query + column // group]
                offset = token * call.q_token + (head * group + column % group) * call.q_head
                row = carray(at(call.q + offset * size), k_dim, element)
                for d in range(k_dim):
                    turned[d, column] = widen(row[d]) * call.scale
            position = np.int64(0)
            for span in range(span_ptr[block], span_ptr[block + 1]):
                for first in range(spans[span, 0], spans[span, 1], KEYS):
                    num_keys = min(KEYS, spans[span, 1] - first, most - position)
                    if num_keys <= 0:
                        break
                    slot = head * call.num_slots + first
                    keys, values = call.k + slot * k_dim * size, call.v + slot * v_dim * size
                    s, t, o = scores.ctypes.data, turned.ctypes.data, added.ctypes.data
                    if bfloat16:
                        _half_product(s, keys, k_dim * size, size, t, num_keys, k_dim, columns)
                    else:
                        _product(s, keys, k_dim * size, size, t, num_keys, k_dim, columns)
                    if position + num_keys > least:
                        for j in range(num_keys):
                            for column in range(columns):
                                if position + j >= last_seen[column]:
                                    scores[j, column] = _F(-1e30)
                    kept[:] = peak
                    for j in range(num_keys):
                        for column in range(columns):
                            peak[column] = max(peak[column], scores[j, column])
                    for column in range(columns):
                        kept[column] = exp(kept[column] - peak[column])
                        gained[column] = _F(0)
                    for j in range(num_keys):
                        for column in range(columns):
                            x = exp(scores[j, column] - peak[column])
                            scores[j, column] = x
                            gained[column] += x
                    if bfloat16:
                        _half_product(o, values, size, v_dim * size, s, v_dim, num_keys, columns)
                    else:
                        _product(o, values, size, v_dim * size, s, v_dim, num_keys, columns)
                    # each block is summed by itself first: sums over thousands of keys would round as often
                    for column in range(columns):
                        weight[column] = weight[column] * kept[column] + gained[column]
                    for d in range(v_dim):
                        for column in range(columns):
                            total[d, column] = total[d, column] * kept[column] + added[d, column]
                    position += num_keys
            for column in range(num_columns):
                token = query[first_query + column // group]
                offset = (token * num_kv_heads + head) * group + column % group
                row = carray(at(call.out + offset * v_dim * 4), v_dim, np.float32)
                for d in range(v_dim):
                    row[d] = total[d, column] / weight[column]
                carray(at(call.lse + offset * 4), 1, np.float32)[0] = peak[column] + np.log(weight[column])

    return compiled(_Call, work)
