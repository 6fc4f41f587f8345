"""The part of decode attention that rows share: a prefix of cached tokens, read once for all of them.

Its results are parts of each row, which gpu/attention/decode.py or bits12/decode.py joins with the row's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from graftlm.kernels.attention_params import AttentionParams
from graftlm.kernels.bits12.kv_read import SCALE, attend_records, slots_of
from graftlm.kernels.gpu.attention.decode import (
    DecodeRows,
    Scales,
    Tile,
    Workspace,
    num_splits,
    see,
    sizes,
    store_partial,
    strides,
    tile_of,
)
from graftlm.kernels.gpu.attention.online_softmax import LOG2E
from graftlm.kernels.gpu.pdl import grid_wait, launch_dependents

PREFIX_QUERIES = 64  # of one program
HUGE_PREFIX = 16, 4
"""Queries and warps of a program for heads of more than 256 dimensions."""

FEW_BLOCKS = 4
"""With fewer blocks of queries a prefix is cut into up to 16 parts, with more into up to 8.

On an H100 the prefix of 64 rows takes 16 us a layer in 8 parts and 21 us in 16.
"""


@triton.jit(do_not_specialize=["num_splits", "num_parts", "exponents_head"])
def _decode_prefix(
    q, k, v, table, rows, members, prefix_lens, part_out, part_lse, k_scale, v_scale, scale, softcap,
    q_row, q_head, k_slot, k_head, v_slot, v_head, table_row, num_members, num_splits, num_parts,
    exponents, exponents_head,
    GROUP: tl.constexpr, M: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr,
    BLOCK: tl.constexpr, SOFTCAP: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
    COMPACT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Program (block of queries, KV head, split): tokens of a prefix that all `members` share, read once.

    Who they are and where the tokens lie is read early.
    """
    launch_dependents(PDL)
    i, h, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(num_members)
    length = tl.load(prefix_lens)
    slots = table + tl.load(rows + tl.load(members, mask=count > 0, other=0)).to(tl.int64) * table_row
    per_split = tl.cdiv(tl.cdiv(length, num_splits), BLOCK) * BLOCK
    first = s * per_split
    last = tl.minimum(first + per_split, length)
    slot = slots_of(slots, first, last, BLOCK)
    query = i * M + tl.arange(0, M)  # a query is (member, head of the group)
    q_ok = query < count * GROUP
    b = tl.load(members + query // GROUP, mask=q_ok, other=0)
    grid_wait(PDL)
    if i * M < count * GROUP:
        head = h * GROUP + query % GROUP
        d, e = tl.arange(0, D_PAD), tl.arange(0, E_PAD)
        queries = tl.load(
            q + b[:, None] * q_row + head[:, None] * q_head + d[None, :],
            mask=q_ok[:, None] & (d < D)[None, :],
            other=0.0,
        )
        if SCALED:
            scale *= tl.load(k_scale + h)
        m = tl.full([M], -1e30, tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, E_PAD], tl.float32)
        if COMPACT:
            m, total, acc = attend_records(
                queries, k + h * k_head, v + h * v_head, exponents + h.to(tl.int64) * exponents_head, slots, slot,
                first, last, query, 0, m, total, acc, scale * SCALE, softcap, k_slot, v_slot,
                BLOCK, True, False, SOFTCAP, PRECISION, None, ASM,
            )  # fmt: skip
            acc *= SCALE
        else:
            m, total, acc = see(
                queries, k + h * k_head, v + h * v_head, slots, slot, first, last, m, total, acc,
                scale, softcap, k_slot, v_slot, D, D_PAD, E, E_PAD, BLOCK, SOFTCAP, PRECISION,
            )  # fmt: skip
        if SCALED:
            acc *= tl.load(v_scale + h)
        num_heads = tl.num_programs(1) * GROUP
        row = (b * num_heads + head).to(tl.int64) * num_parts + s
        store_partial(part_out, part_lse, row, q_ok, e, e < E, m, total, acc, E)


@dataclass(frozen=True)
class PrefixRows:
    """Rows that share their first tokens, all on the device.

    length   int32 [1]        how many tokens they share
    members  int32 [>= count] the rows of the batch
    count    int32 [1]        how many those are; with 0, none shares anything
    """

    length: torch.Tensor
    members: torch.Tensor
    count: torch.Tensor


def num_prefix_splits(num_rows: int, num_heads: int, num_kv_heads: int, num_sms: int) -> int:
    """Parts to cut a shared prefix into if all rows share it; every part of every query is written and read once."""
    blocks = triton.cdiv(num_rows * num_heads // num_kv_heads, PREFIX_QUERIES)
    return min(num_splits(blocks, num_kv_heads, num_sms), 16 if blocks < FEW_BLOCKS else 8)


def decode_prefix(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    step: DecodeRows,
    prefix: PrefixRows,
    workspace: Workspace,
    params: AttentionParams,
    *,
    splits: int,
    num_parts: int,
    scales: Scales | None = None,
    exponents: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> None:
    """Attend the newest tokens of the prefix's members to the prefix: the first `splits` of their `num_parts` parts.

    q, k, v    as for decode_attention, without a window; k and v of a compact store int32
               [num_slots, num_kv_heads, words]
    exponents  of a compact store, uint8 [num_kv_heads, num_slots, 2]
    """
    k_dim, v_dim = q.shape[2], v.shape[2]
    if exponents is not None:
        assert scales is None
        exponents, k, v, v_dim = exponents.view(torch.int16), k.view(torch.uint8), v.view(torch.uint8), k_dim
    num_kv_heads = k.shape[1]
    group = q.shape[1] // num_kv_heads
    tile = tile or tile_of(q.dtype, max(k_dim, v_dim))
    k_scale, v_scale = (scales.k, scales.v) if scales is not None else (workspace.lse, workspace.lse)
    queries, warps = (PREFIX_QUERIES, 4) if max(k_dim, v_dim) <= 256 else HUGE_PREFIX
    blocks = triton.cdiv(prefix.members.shape[0] * group, queries)
    _decode_prefix[(blocks, num_kv_heads, splits)](
        q, k, v, step.table, step.rows, prefix.members, prefix.length, workspace.out, workspace.lse,
        k_scale, v_scale, params.scale * LOG2E, (params.softcap or 1.0) * LOG2E, *strides(q, k, v, step),
        prefix.count, splits, num_parts,
        exponents if exponents is not None else q, exponents.stride(0) if exponents is not None else 0,
        GROUP=group, M=queries, BLOCK=tile.block, SOFTCAP=params.softcap is not None,
        SCALED=scales is not None, COMPACT=exponents is not None,
        ASM=q.is_cuda, num_warps=warps, num_stages=tile.stages, **sizes(q, k_dim, v_dim),
    )  # fmt: skip
