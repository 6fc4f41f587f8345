"""The arguments of the compiled loops: one ctypes structure for each, whose first field counts tasks.

A structure that begins with _SHARED can be a phase of a larger call: its loop counts finished tasks.
"""

from __future__ import annotations

import ctypes
from typing import Any

from graftlm.kernels.cpu import PANEL

COLUMNS = PANEL
"""Queries of a task of prefill attention: the width of a register tile."""


def int_fields(*names: str) -> tuple[tuple[str, Any], ...]:
    """Return int64 fields of a call structure: counts, strides in elements, and addresses."""
    return tuple((name, ctypes.c_int64) for name in names)


_SHARED = int_fields("next_task", "num_done", "num_tasks")


class DecodeCall(ctypes.Structure):
    """The arguments of decode attention: addresses, counts, and strides in elements.

    new_k      0 if this step's K and V are stored already
    num_tasks  num_runs * num_kv_heads
    k_scale, v_scale  of stores in int8: float32 [num_kv_heads, num_slots]
    """

    _fields_ = (
        *_SHARED,
        *int_fields("num_queries", "num_runs", "num_kv_heads", "num_slots"),
        *int_fields("q", "q_token", "q_head", "new_k", "k_token", "k_head", "new_v", "v_token", "v_head"),
        *int_fields("k", "v", "k_scale", "v_scale", "query", "indptr", "spans", "runs", "out", "lse", "float32_out"),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class PrefillCall(ctypes.Structure):
    """The arguments of prefill attention: addresses, counts, and strides; num_tasks is num_blocks * num_kv_heads."""

    _fields_ = (
        *_SHARED,
        *int_fields("num_blocks", "num_kv_heads", "num_slots", "q", "q_token", "q_head", "k", "v"),
        *int_fields("query", "visible", "query_ptr", "spans", "span_ptr", "out", "lse"),
        ("scale", ctypes.c_float),
    )


SEGMENT = 16
"""Numbers of a segment of a MatmulCall."""

HALVES, SUMS, INT8_ROWS, FLOAT_ROWS = 1, 2, 4, 8
"""Forms of rows: bfloat16; float32 sums of 32 inputs; int8 with a scale and a sum for every 32 inputs; float32."""


class MatmulCall(ctypes.Structure):
    """The arguments of one matmul x W^T: addresses and counts; `x_row` and `out_row` are strides in elements.

    x         float32 [num_rows, depth], zeros after the weight's last input; or bfloat16 if x_bfloat16 is not 0, with
              quantised panels, and with plain ones for processors that multiply bfloat16
    task_rows rows of a task of PANEL outputs; 0 for all rows. num_tasks counts accordingly; tasks of equal outputs are
              consecutive
    segments  int64 [num_segments, SEGMENT], the weights whose outputs are concatenated. Each: first panel, number of
              outputs, first column of `out`, address of the weight, address of an up projection or 0, address of the
              bias or 0. With an up projection, the result is gate(x W^T) * (x U^T). Then for the weight and for the up
              projection, of quantised panels: address of the loop of a PanelCall, bytes of a panel, address of the
              table, Arithmetic of the loop, inputs of a block; 0 for other weights
    forms     forms of the rows that loops of PanelCalls read, a sum of these flags; 0 without such loops
    add       whether the result is added to `out`
    gelu      whether the gate of an up projection is GELU, by its tanh form, and not SiLU

    A weight is packed in panels, or row-major: then depth is a multiple of 16, and it has at least 4 outputs.
    """

    _fields_ = (
        *_SHARED,
        *int_fields("num_rows", "depth", "x", "x_row", "x_bfloat16", "task_rows"),
        *int_fields("segments", "num_segments", "out", "out_row", "add", "forms", "gelu"),
    )


class NormCall(ctypes.Structure):
    """The arguments of x += added; out = RMSNorm of x.

    added_norm  weight of an RMSNorm of `added` before the sum, or 0
    wide        whether weights are float32 and multiply values that are not rounded (Gemma)
    """

    _fields_ = (
        *int_fields("next_task", "num_rows", "size", "x", "added", "added_row", "weight", "out", "out_row"),
        *int_fields("added_norm", "wide"),
        ("eps", ctypes.c_float),
        ("added_eps", ctypes.c_float),
    )


class RotationCall(ctypes.Structure):
    _fields_ = (
        *int_fields("next_task", "num_rows", "q", "q_row", "k", "k_row", "num_heads", "num_kv_heads", "head_dim"),
        *int_fields("rotary_dim", "cos", "sin", "table_row", "q_norm", "k_norm", "wide"),
        ("eps", ctypes.c_float),
    )


class GateMulCall(ctypes.Structure):
    _fields_ = int_fields("next_task", "num_rows", "size", "gate", "up", "row", "out", "out_row", "gelu")


EXPERT_PHASES = 6
"""Phases of a mixture: router scores, choice, gather of tokens by expert, gate and up, down, sum."""

SOFTMAX, SIGMOID, IDENTITY = 0, 1, 2
"""Functions of a router's scores."""


class ExpertsCall(ctypes.Structure):
    """The arguments of a mixture of experts: out = sum over a row's experts of weight * down(gate(x G^T) * (x U^T)).

    counters   int64 [EXPERT_PHASES, 2], started and finished tasks of phases, 0 before
    x          float32 [num_rows, x_row], zeros after the hidden size
    num_shared  the last of the experts, which every row has: the last of its `top_k`
    router     elements [num_experts - num_shared, hidden_size], the router's weight; 0 if `experts` and `weights` are
               given. Then its bias float32 [num_experts - num_shared], or 0
    gated      whether `router` has one more row, the sigmoid of whose score is the weight of shared experts, else 1
    rounds     whether scores are rounded to elements
    score      function of the scores before the choice, `after` of the chosen ones; SOFTMAX, SIGMOID or IDENTITY
    correction float32 [num_experts], added for the choice alone, or 0
    experts, weights  int64 and float32 [num_rows, top_k], the choice
    gate, up, down  panels of all experts, `up_bytes` and `down_bytes` an expert; depths of the matmuls
    sorted, hidden  elements [num_rows * top_k, depth or down_depth], rows ordered by expert; halves in bfloat16
    parts      float32 [num_rows * top_k, hidden_size], outputs ordered by expert
    out        elements [num_rows, hidden_size]; `add` as in MatmulCall
    """

    _fields_ = (
        *int_fields("next_task", "counters", "num_rows", "hidden_size", "gate_size", "num_experts", "top_k"),
        *int_fields("num_shared", "gated"),
        *int_fields("x", "x_row", "router", "bias", "rounds", "score", "after", "correction", "renormalize"),
        *int_fields("logits", "experts", "weights", "gate", "up", "down", "up_bytes", "down_bytes"),
        *int_fields("depth", "down_depth", "sorted", "hidden", "parts", "out", "add", "gelu"),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


BEFORE, ATTEND, AFTER = 1, 2, 4
"""Parts of a layer: norm, projections to queries, keys and values with their rotation; attention; the rest."""

PHASES = 6
"""Phases of a layer whose tasks are rows; two phases of the head follow the last layer."""


class LayerCall(ctypes.Structure):
    """The arguments of one layer. `qkv`, `o`, `gate_up` and `down` are addresses of MatmulCalls without started tasks.

    qkv_out  elements [num_rows, num_heads + 2 * num_kv_heads, head_dim], output of the matmul `qkv`
    gate     elements [num_rows, gate_size], output of the matmul `gate_up`
    wide     whether the norms' weights are float32 and multiply values that are not rounded (Gemma)
    attention_norm, output_norm  weights of RMSNorms of the attention's and of the MLP's output before they are added to
             the residual stream, or 0. The matmul `o`, or `down`, then writes elements [num_rows, hidden_size] at
             `addend`
    mixture  address of an ExpertsCall of the loop `experts`, in place of the matmuls `gate_up` and `down`, or 0
    table    the number of the layer's rotation among those of the tables `cos` and `sin`
    k_store, v_store  elements [num_kv_heads, num_slots, head_dim], the store of keys and values; 0 stores none
    singles, blocks, prefixes  addresses of calls of the attention's loops `decode` and `prefill`, or 0: for single
             queries, for blocks of queries, and for blocks over prefixes that rows share
    shared   uint8 [num_rows], whether a row shares a prefix; 0 if there are no prefixes
    """

    _fields_ = (
        *int_fields("norm", "qkv", "qkv_out", "num_heads", "num_kv_heads", "head_dim", "q_norm", "k_norm"),
        *int_fields("k_store", "v_store", "num_slots", "decode", "singles", "prefill", "blocks", "prefixes", "shared"),
        *int_fields("o", "mlp_norm", "gate_up", "gate", "gate_size", "down"),
        *int_fields("wide", "attention_norm", "output_norm", "addend", "mixture", "experts", "table"),
        ("eps", ctypes.c_float),
        ("head_eps", ctypes.c_float),
        ("mlp_eps", ctypes.c_float),
        ("attention_eps", ctypes.c_float),
        ("output_eps", ctypes.c_float),
    )


class LayersCall(ctypes.Structure):
    """The arguments of steps through layers: one, or several, each over the tokens that its predecessor has chosen.

    counters   int64 [PHASES * num_layers + 2, 2], started and finished tasks of phases, 0 before and after
    barrier    address of a function at which all threads wait for one another
    matmul     address of the loop of matmuls with panels
    x          elements [num_rows, hidden_size], the residual stream
    ids        int64 [num_rows], rows of `embedding` that initialise x; 0 if x is initialised
    gather     address of the loop of `rows`, a GatherCall of `ids` to x, in place of `embedding`; 0 without
    embedding_scale  factor of the rows of `embedding`, rounded to an element
    positions  int64 [num_rows], rows of `cos` and `sin`, `table_row` elements apart; tables of several rotations are
               `table_size` elements apart
    slots      int64 [num_rows], slots of the new keys and values
    attended   float32 [num_rows, num_heads * head_dim], attention's output; its lse [num_rows, num_heads]
    prefix_out, prefix_lse  output and lse of attention to prefixes
    wide       as in LayerCall, of the last norm
    head       MatmulCall of the head by the loop `head_matmul`, for the rows `wanted` int64 [num_wanted], or 0
    num_steps  the largest number of steps; `steps_done` is the number that ran
    tokens     int64 [num_steps, num_rows], the likeliest token of each row, -1 where logits are not finite; 0 chooses
               none and runs one step. All rows are wanted. A step after which a row has ended is the last
    ends       token ids that end a row, int64 [end_ptr[num_rows]]; those of row i from end_ptr[i] to end_ptr[i + 1]
    grow       int64 [num_grow], addresses of numbers that a step increments: positions, slots, ends of spans
    interrupt  address of an int64 that is not 0 if the current step is to be the last
    steps_left 0 after the last step; turn, the address of an int64, counts finished steps, from 0
    """

    _fields_ = (
        *int_fields("next_task", "num_rows", "num_layers", "layers", "parts", "counters", "barrier", "matmul"),
        *int_fields("hidden_size", "x", "ids", "embedding", "positions", "cos", "sin", "table_row", "rotary_dim"),
        *int_fields("slots", "attended", "lse", "prefix_out", "prefix_lse"),
        *int_fields("head", "head_matmul", "norm", "wanted", "num_wanted"),
        *int_fields("num_steps", "steps_done", "tokens", "ends", "end_ptr", "grow", "num_grow", "interrupt"),
        *int_fields("turn", "steps_left", "gather", "rows", "table_size", "wide"),
        ("eps", ctypes.c_float),
        ("embedding_scale", ctypes.c_float),
    )


class PanelCall(ctypes.Structure):
    """The arguments of a matmul with one quantised panel: addresses and counts.

    out    float32 [num_rows, PANEL]
    x      rows of the loop's arithmetic (panel_kind.py), `x_row` bytes apart
    sums, scales  of the rows' inputs in each block, `sums_row` numbers a row; see `quantised_tile`
    panel  address of the panel; table, address of the weight's table
    ahead  bytes from the panel to the one that this thread probably multiplies next
    """

    _fields_ = int_fields(
        "out", "x", "x_row", "sums", "scales", "sums_row", "panel", "table", "num_rows", "num_blocks", "ahead"
    )


class GatherCall(ctypes.Structure):
    """The arguments of a gather of outputs of a quantised weight, such as rows of an embedding; a task is a row.

    ids          int64 [num_tasks], the outputs
    out          elements [num_tasks, depth]
    weight       address of the first panel, `panel_bytes` apart; table, address of its table
    """

    _fields_ = (*_SHARED, *int_fields("ids", "out", "depth", "weight", "panel_bytes", "table"))
