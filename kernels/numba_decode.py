"""Attention of single queries on a CPU: one compiled loop over queries and KV heads, on torch's own threads.

A query reads its few spans of slots in place, once, with the softmax kept running from block to block. Compared with
one library call per span, nothing is dispatched, padded or merged, and bfloat16 is widened on the way into registers.
The few new tokens of one row go from block to block together: their keys come from memory once.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, from_dtype, njit, types
from numba.extending import intrinsic

from graftlm.kernels.span_layout import MAX_RUN, Reads
from graftlm.kernels.team import team

BLOCK = 64
"""Keys whose scores are held at once."""
_SMALL_BYTES = 1 << 18
"""Of K read by a layer: below this, one thread is done before another has joined."""

_NUMBERS = (
    *("next_task", "num_queries", "num_runs", "num_kv_heads", "num_slots"),
    *("q", "q_token", "q_head", "new_k", "k_token", "k_head", "new_v", "v_token", "v_head"),
    *("k", "v", "query", "indptr", "spans", "runs", "out", "lse", "wide_out"),
)


class _Call(ctypes.Structure):
    """What the compiled loop is handed: addresses, and strides in elements. `new_k` 0: K and V are stored already."""

    _fields_ = (*((name, ctypes.c_int64) for name in _NUMBERS), ("scale", ctypes.c_float), ("softcap", ctypes.c_float))


_FLAGS: dict[str, Any] = {"fastmath": True, "error_model": "numpy"}


class CompiledDecode:
    """The loop for one shape of heads and one dtype, compiled when it is made and kept on disk for later processes."""

    def __init__(self, group: int, k_dim: int, v_dim: int, dtype: torch.dtype, *, capped: bool) -> None:
        self._call = _Call()
        self._address = ctypes.addressof(self._call)
        self._function = _compile(group, k_dim, v_dim, dtype is torch.bfloat16, capped)
        self._team = team()
        self._alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._function)

    def run(
        self,
        q: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor] | None,
        stores: tuple[torch.Tensor, torch.Tensor],
        reads: Reads,
        scale: float,
        softcap: float | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Attend each query of `reads` to its spans.

        q    [num_tokens, Hq, Dk]
        new  this step's K [num_tokens, Hkv, Dk] and V, to be stored first, each at the end of its query's last span;
             None if that is done
        stores  K and V [num_slots, Hkv, D], KV head first in memory
        out  [num_tokens, Hq, Dv], dtype of q or float32;  lse  float32 [num_tokens, Hq];  only `reads.query` is set
        """
        k_store, v_store = stores
        call = self._call
        call.next_task = 0
        call.num_queries, call.num_runs = len(reads.query), len(reads.runs) - 1
        call.num_slots, call.num_kv_heads = k_store.shape[:2]
        call.q, call.q_token, call.q_head = _row_address(q)
        if new is None:
            call.new_k = 0
        else:
            call.new_k, call.k_token, call.k_head = _row_address(new[0])
            call.new_v, call.v_token, call.v_head = _row_address(new[1])
        call.k, call.v = k_store.data_ptr(), v_store.data_ptr()
        call.query, call.indptr, call.spans, call.runs = reads.addresses
        call.out, call.lse, call.wide_out = out.data_ptr(), lse.data_ptr(), out.dtype is torch.float32
        call.scale, call.softcap = scale, softcap or 0.0
        threads = torch.get_num_threads()
        num_bytes = reads.num_keys * k_store[0].numel() * k_store.itemsize
        if self._team is None or threads == 1 or num_bytes < _SMALL_BYTES:
            self._alone(self._address)
        else:
            self._team(self._function, self._address, threads, 0)


def _row_address(x: torch.Tensor) -> tuple[int, int, int]:
    """Address of x [num_tokens, heads, dim], and its strides from token to token and from head to head."""
    per_token, per_head, per_element = x.stride()
    assert per_element == 1
    return x.data_ptr(), per_token, per_head


@intrinsic
def _take(typingctx: Any, call: Any) -> tuple[Any, Callable[..., Any]]:
    """The next task's number: each is handed out once, to whichever thread asks first."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        counter = builder.bitcast(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(call), generate


@intrinsic
def _at(typingctx: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic
def _from_bits(typingctx: Any, bits: Any) -> tuple[Any, Callable[..., Any]]:
    """The float32 whose bits these are."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def _wide(typingctx: Any, x: Any) -> tuple[Any, Callable[..., Any]]:
    """float32 of a float32, or of the upper half of one: bfloat16, held as uint16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (value,) = arguments
        if x == types.float32:
            return value
        word = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(value, word), ir.Constant(word, 16)), ir.FloatType())

    return types.float32(x), generate


@intrinsic
def _narrow(typingctx: Any, x: Any, like: Any) -> tuple[Any, Callable[..., Any]]:
    """float32 in the dtype of the array `like`; to bfloat16 it is rounded to nearest, ties to even."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = arguments[0]
        if like.dtype == types.float32:
            return value
        word = ir.IntType(32)
        bits = builder.bitcast(value, word)
        upper = builder.lshr(bits, ir.Constant(word, 16))
        odd = builder.and_(upper, ir.Constant(word, 1))
        rounded = builder.add(bits, builder.add(odd, ir.Constant(word, 0x7FFF)))
        return builder.trunc(builder.lshr(rounded, ir.Constant(word, 16)), ir.IntType(16))

    return like.dtype(x, like), generate


_F = np.float32
_LOG2_E = _F(1.4426950408889634)
# ln 2 in two parts: the first has so few bits that its product with a whole number is exact
_LN_2, _LN_2_REST = _F(0.693359375), _F(-2.12194440e-4)
_C0, _C1, _C2, _C3, _C4 = _F(1 / 720), _F(1 / 120), _F(1 / 24), _F(1 / 6), _F(0.5)


@njit(forceinline=True, **_FLAGS)
def _exp(x):
    """e to the x for x up to 88, to 2 units in the last place; below -87 that of -87.

    2 to a whole number times a short series: unlike a library call it is compiled into vector instructions.
    """
    x = max(x, _F(-87))
    whole = np.int32(x * _LOG2_E + (_F(0.5) if x > _F(0) else _F(-0.5)))
    rest = x - _F(whole) * _LN_2 - _F(whole) * _LN_2_REST
    series = ((((_C0 * rest + _C1) * rest + _C2) * rest + _C3) * rest + _C4) * rest * rest + rest + _F(1)
    return series * _from_bits((whole + np.int32(127)) << np.int32(23))


@njit(forceinline=True, **_FLAGS)
def _score(scores, scaled, keys, num_keys, group, k_dim):
    """scores[g, j] = scaled[g] . keys[j]; four keys at a time share each load of the query."""
    whole = num_keys - num_keys % 4
    for j in range(0, whole, 4):
        for g in range(group):
            a, b, c, e = _F(0), _F(0), _F(0), _F(0)
            for d in range(k_dim):
                x = scaled[g, d]
                a += x * _wide(keys[j, d])
                b += x * _wide(keys[j + 1, d])
                c += x * _wide(keys[j + 2, d])
                e += x * _wide(keys[j + 3, d])
            scores[g, j], scores[g, j + 1], scores[g, j + 2], scores[g, j + 3] = a, b, c, e
    for j in range(whole, num_keys):
        for g in range(group):
            a = _F(0)
            for d in range(k_dim):
                a += scaled[g, d] * _wide(keys[j, d])
            scores[g, j] = a


@njit(forceinline=True, **_FLAGS)
def _soften(scores, num_keys, softcap):
    """softcap * tanh(scores / softcap)"""
    for j in range(num_keys):
        x = min(scores[j] / softcap * _F(2), _F(80))
        scores[j] = softcap * (_F(1) - _F(2) / (_exp(x) + _F(1)))


@njit(forceinline=True, **_FLAGS)
def _add(total, scores, values, num_keys, group, v_dim):
    """total[g] += sum over j of scores[g, j] * values[j]; four values at a time share each load of the sum."""
    whole = num_keys - num_keys % 4
    for j in range(0, whole, 4):
        for g in range(group):
            a, b, c, e = scores[g, j], scores[g, j + 1], scores[g, j + 2], scores[g, j + 3]
            for d in range(v_dim):
                total[g, d] += (
                    a * _wide(values[j, d])
                    + b * _wide(values[j + 1, d])
                    + c * _wide(values[j + 2, d])
                    + e * _wide(values[j + 3, d])
                )
    for j in range(whole, num_keys):
        for g in range(group):
            a = scores[g, j]
            for d in range(v_dim):
                total[g, d] += a * _wide(values[j, d])


@functools.cache
def _compile(group: int, k_dim: int, v_dim: int, bfloat16: bool, capped: bool) -> int:
    """Address of the loop `void (call *)`: works on tasks, one run of queries and KV head each, until none is left."""
    element = np.uint16 if bfloat16 else np.float32
    size = np.dtype(element).itemsize

    def work(pointer):
        call = carray(pointer, 1)[0]
        num_runs, num_kv_heads = call.num_runs, call.num_kv_heads
        query = carray(_at(call.query), call.num_queries, np.int64)
        indptr = carray(_at(call.indptr), call.num_queries + 1, np.int64)
        spans = carray(_at(call.spans), (indptr[call.num_queries], 2), np.int64)
        runs = carray(_at(call.runs), num_runs + 1, np.int64)
        keys = carray(_at(call.k), (num_kv_heads, call.num_slots, k_dim), element)
        values = carray(_at(call.v), (num_kv_heads, call.num_slots, v_dim), element)
        scores, added = np.empty((group, BLOCK), np.float32), np.empty((group, v_dim), np.float32)
        total = np.empty((MAX_RUN, group, v_dim), np.float32)
        scaled = np.empty((MAX_RUN, group, k_dim), np.float32)
        peak, weight = np.empty((MAX_RUN, group), np.float32), np.empty((MAX_RUN, group), np.float32)
        kept = np.empty(group, np.float32)
        while True:
            task = _take(pointer)
            if task >= num_runs * num_kv_heads:
                break
            # head by head: queries that share a prefix find one head of it in their core's cache
            head, run = task // num_runs, task % num_runs
            begin, longest = runs[run], runs[run + 1] - 1
            num_together = longest + 1 - begin
            for i in range(num_together):
                for g in range(group):
                    offset = query[begin + i] * call.q_token + (head * group + g) * call.q_head
                    row = carray(_at(call.q + offset * size), k_dim, element)
                    for d in range(k_dim):
                        scaled[i, g, d] = _wide(row[d]) * call.scale
                    for d in range(v_dim):
                        total[i, g, d] = _F(0)
                    peak[i, g], weight[i, g] = _F(-1e30), _F(0)
            if call.new_k != 0:
                slot = spans[indptr[longest + 1] - 1, 1] - 1
                offset = query[longest] * call.k_token + head * call.k_head
                keys[head, slot] = carray(_at(call.new_k + offset * size), k_dim, element)
                offset = query[longest] * call.v_token + head * call.v_head
                values[head, slot] = carray(_at(call.new_v + offset * size), v_dim, element)
            left = np.int64(0)  # keys from here on; the last query of the run sees them all, the one before one fewer
            for span in range(indptr[longest], indptr[longest + 1]):
                left += spans[span, 1] - spans[span, 0]
            for span in range(indptr[longest], indptr[longest + 1]):
                for first in range(spans[span, 0], spans[span, 1], BLOCK):
                    here = min(BLOCK, spans[span, 1] - first)
                    for i in range(num_together):
                        num_keys = min(here, left - (num_together - 1 - i))
                        if num_keys <= 0:
                            continue
                        _score(scores, scaled[i], keys[head, first : first + num_keys], num_keys, group, k_dim)
                        for g in range(group):
                            if capped:
                                _soften(scores[g], num_keys, call.softcap)
                            highest = peak[i, g]
                            for j in range(num_keys):
                                highest = max(highest, scores[g, j])
                            kept[g] = _exp(peak[i, g] - highest)
                            gained = _F(0)
                            for j in range(num_keys):
                                x = _exp(scores[g, j] - highest)
                                scores[g, j] = x
                                gained += x
                            peak[i, g], weight[i, g] = highest, weight[i, g] * kept[g] + gained
                            for d in range(v_dim):
                                added[g, d] = _F(0)
                        # each block is summed by itself first: sums over thousands of keys would round as often
                        _add(added, scores, values[head, first : first + num_keys], num_keys, group, v_dim)
                        for g in range(group):
                            for d in range(v_dim):
                                total[i, g, d] = total[i, g, d] * kept[g] + added[g, d]
                    left -= here
            for i in range(num_together):
                for g in range(group):
                    offset = (query[begin + i] * num_kv_heads + head) * group + g
                    if call.wide_out != 0:
                        wide = carray(_at(call.out + offset * v_dim * 4), v_dim, np.float32)
                        for d in range(v_dim):
                            wide[d] = total[i, g, d] / weight[i, g]
                    else:
                        row = carray(_at(call.out + offset * v_dim * size), v_dim, element)
                        for d in range(v_dim):
                            row[d] = _narrow(total[i, g, d] / weight[i, g], row)
                    carray(_at(call.lse + offset * 4), 1, np.float32)[0] = peak[i, g] + np.log(weight[i, g])

    signature = types.void(types.CPointer(from_dtype(np.dtype(_Call))))
    address: int = _kept(signature, work).address
    return address


def _kept(signature: Any, function: Callable[..., Any]) -> Any:
    """Compile; the machine code is kept on disk for later processes where that can be."""
    try:
        return cfunc(signature, cache=True, **_FLAGS)(function)
    except RuntimeError:  # no folder to keep it in: neither beside the source nor the user's cache
        return cfunc(signature, **_FLAGS)(function)
