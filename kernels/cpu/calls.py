"""The arguments of the compiled loops: one ctypes structure for each, whose first field counts tasks."""

from __future__ import annotations

import ctypes
from typing import Any

from graftlm.kernels.cpu import PANEL

COLUMNS = PANEL
"""Queries of a task of prefill attention: the width of a register tile."""


def int_fields(*names: str) -> tuple[tuple[str, Any], ...]:
    """Fields of a call structure that are int64: counts, strides in elements, and addresses."""
    return tuple((name, ctypes.c_int64) for name in names)


class DecodeCall(ctypes.Structure):
    """Addresses, counts, and strides in elements. `new_k` is 0 if this step's K and V are stored already."""

    _fields_ = (
        *int_fields("next_task", "num_queries", "num_runs", "num_kv_heads", "num_slots"),
        *int_fields("q", "q_token", "q_head", "new_k", "k_token", "k_head", "new_v", "v_token", "v_head"),
        *int_fields("k", "v", "query", "indptr", "spans", "runs", "out", "lse", "float32_out"),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class PrefillCall(ctypes.Structure):
    """Addresses, counts, and strides in elements."""

    _fields_ = (
        *int_fields("next_task", "num_blocks", "num_kv_heads", "num_slots", "q", "q_token", "q_head", "k", "v"),
        *int_fields("query", "visible", "query_ptr", "spans", "span_ptr", "out", "lse"),
        ("scale", ctypes.c_float),
    )


class MatmulCall(ctypes.Structure):
    """One product x W^T. Fields are addresses and counts; `x_row` and `out_row` are strides in elements.

    x         float32 [num_rows, depth], zeros after the weight's last input
    segments  int64 [num_segments, 6], the weights whose outputs are concatenated. Each: first task, number of outputs,
              first column of `out`, address of the weight, address of an up projection or 0, address of the bias or 0.
              With an up projection, the result is silu(x W^T) * (x U^T).
    add       whether the result is added to `out`

    A weight is packed in panels, or row-major: then depth is a multiple of 16, and it has at least 4 outputs.
    """

    _fields_ = int_fields(
        *("next_task", "num_tasks", "num_rows", "depth", "x", "x_row"),
        *("segments", "num_segments", "out", "out_row", "add"),
    )


class NormCall(ctypes.Structure):
    _fields_ = (
        *int_fields("next_task", "num_rows", "size", "x", "added", "added_row", "weight", "out", "out_row"),
        ("eps", ctypes.c_float),
    )


class RotationCall(ctypes.Structure):
    _fields_ = (
        *int_fields("next_task", "num_rows", "q", "q_row", "k", "k_row", "num_heads", "num_kv_heads", "head_dim"),
        *int_fields("rotary_dim", "cos", "sin", "table_row", "q_norm", "k_norm"),
        ("eps", ctypes.c_float),
    )


class SiluMulCall(ctypes.Structure):
    _fields_ = int_fields("next_task", "num_rows", "size", "gate", "up", "row", "out", "out_row")


BEFORE, ATTEND, AFTER = 1, 2, 4
"""Parts of a layer: norm, projections to queries, keys and values with their rotation; attention; what follows it."""

PHASES = 5
"""Phases of a layer whose tasks are rows."""


class LayerCall(ctypes.Structure):
    """One layer. `qkv`, `o`, `gate_up` and `down` are addresses of MatmulCalls, whose next_task is 0.

    qkv_out  elements [num_rows, num_heads + 2 * num_kv_heads, head_dim], where the product puts them
    gate     elements [num_rows, gate_size], likewise
    k_store, v_store  elements [num_kv_heads, num_slots, head_dim], where keys and values are stored; 0 stores none
    singles, blocks, prefixes  addresses of calls of the attention's loops `decode` and `prefill`, or 0: for queries
             that are read one by one, for blocks of queries, and for blocks over prefixes that rows share
    shared   uint8 [num_rows], whether a row shares a prefix; 0 if there are no prefixes
    """

    _fields_ = (
        *int_fields("norm", "qkv", "qkv_out", "num_heads", "num_kv_heads", "head_dim", "q_norm", "k_norm"),
        *int_fields("k_store", "v_store", "num_slots", "decode", "singles", "prefill", "blocks", "prefixes", "shared"),
        *int_fields("o", "mlp_norm", "gate_up", "gate", "gate_size", "down"),
        ("eps", ctypes.c_float),
        ("head_eps", ctypes.c_float),
        ("mlp_eps", ctypes.c_float),
    )


class LayersCall(ctypes.Structure):
    """A step through layers.

    counters   int64 [PHASES * num_layers + 1], 0
    barrier    address of a function at which all threads wait for one another
    matmul     address of the loop of products with panels
    x          elements [num_rows, hidden_size], the residual stream
    ids        int64 [num_rows], whose rows of `embedding` are x at first; 0 if x is there
    positions  int64 [num_rows], rows of `cos` and `sin`, which are `table_row` elements apart
    slots      int64 [num_rows], where keys and values are stored
    attended   float32 [num_rows, num_heads * head_dim], what attention gives; lse of it [num_rows, num_heads]
    prefix_out, prefix_lse  the same of attention to prefixes
    head       MatmulCall of the head by the loop `head_matmul`, for the rows `wanted` int64 [num_wanted], or 0
    """

    _fields_ = (
        *int_fields("next_task", "num_rows", "num_layers", "layers", "parts", "counters", "barrier", "matmul"),
        *int_fields("hidden_size", "x", "ids", "embedding", "positions", "cos", "sin", "table_row", "rotary_dim"),
        *int_fields("slots", "attended", "lse", "prefix_out", "prefix_lse"),
        *int_fields("head", "head_matmul", "norm", "wanted", "num_wanted"),
        ("eps", ctypes.c_float),
    )
