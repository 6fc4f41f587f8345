"""Decode attention on a GPU: one query per row, the KV of each row read through a table of slots.

Lengths and tables are read on the device and the grid does not depend on them, so a captured CUDA graph serves every
later step as it is. A row's tokens are cut into splits that run side by side; a second kernel joins them.
Source: flash decoding; the paged table after vLLM, arXiv 2309.06180.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

BLOCK = 64  # tokens read at once
MAX_SPLITS = 64
NOTHING = -1e30  # the log-sum-exp of no tokens; finite, so that differences stay numbers


@triton.jit
def _softcapped(x, softcap):
    # tanh(y) = 2 / (1 + exp(-2 y)) - 1
    return softcap * (2.0 / (1.0 + tl.exp(-2.0 * x / softcap)) - 1.0)


@triton.jit
def _attend_block(q, k, v, ok, m, total, acc, scale, softcap, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Let queries q [M, D] see tokens k [N, D], v [N, E] where ok [M or 1, N]; online softmax (m, total, acc)."""
    x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if SOFTCAP:
        x = _softcapped(x, softcap)
    x = tl.where(ok, x, -1e30)
    high = tl.maximum(m, tl.max(x, 1))
    p = tl.where(ok, tl.exp(x - high[:, None]), 0.0)
    shrink = tl.exp(m - high)
    total = total * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    return high, total, acc


@triton.jit
def _store_partial(out, lse, row, head_ok, e, e_ok, m, total, acc, E: tl.constexpr):
    has = total > 0
    safe = tl.where(has, total, 1.0)
    tl.store(out + row[:, None] * E + e[None, :], acc / safe[:, None], mask=head_ok[:, None] & e_ok[None, :])
    tl.store(lse + row, tl.where(has, m + tl.log(safe), -1e30), mask=head_ok)


@triton.jit
def _decode_split(
    q, k, v, table, rows, lens, starts, part_out, part_lse, scale, softcap, window,
    q_row, q_head, k_slot, k_head, v_slot, v_head, table_row, num_splits, num_parts,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    E: tl.constexpr, E_PAD: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (row, KV head, split): tokens [first, last) of this row's part of the table."""
    b, h, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lens + b)
    start = tl.load(starts + b)
    if WINDOW:
        start = tl.maximum(start, length - window)
    per_split = tl.cdiv(tl.cdiv(length - start, num_splits), BLOCK) * BLOCK
    first = start + s * per_split
    last = tl.minimum(first + per_split, length)
    g, d, e = tl.arange(0, GROUP_PAD), tl.arange(0, D_PAD), tl.arange(0, E_PAD)
    g_ok, d_ok, e_ok = g < GROUP, d < D, e < E
    queries = tl.load(
        q + b * q_row + (h * GROUP + g)[:, None] * q_head + d[None, :], mask=g_ok[:, None] & d_ok[None, :], other=0.0
    )
    m = tl.full([GROUP_PAD], -1e30, tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, E_PAD], tl.float32)
    slots = table + tl.load(rows + b).to(tl.int64) * table_row
    for position in range(first, last, BLOCK):
        n = position + tl.arange(0, BLOCK)
        ok = n < last
        slot = tl.load(slots + n, mask=ok, other=0).to(tl.int64)
        keys = tl.load(
            k + slot[:, None] * k_slot + h * k_head + d[None, :], mask=ok[:, None] & d_ok[None, :], other=0.0
        )
        values = tl.load(
            v + slot[:, None] * v_slot + h * v_head + e[None, :], mask=ok[:, None] & e_ok[None, :], other=0.0
        )
        m, total, acc = _attend_block(
            queries, keys, values, ok[None, :], m, total, acc, scale, softcap, SOFTCAP, PRECISION
        )
    num_heads = tl.num_programs(1) * GROUP
    row = (b * num_heads + h * GROUP + g).to(tl.int64) * num_parts + s
    _store_partial(part_out, part_lse, row, g_ok, e, e_ok, m, total, acc, E)


@triton.jit
def _prefix_split(
    q, k, v, table, rows, members, prefix_lens, part_out, part_lse, scale, softcap,
    q_row, q_head, k_slot, k_head, v_slot, v_head, table_row, num_members, num_splits, num_parts, first_part,
    GROUP: tl.constexpr, M: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    E: tl.constexpr, E_PAD: tl.constexpr, BLOCK: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (block of queries, KV head, split): tokens of a prefix that all `members` share, read once."""
    i, h, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(prefix_lens)
    count = tl.load(num_members)
    slots = table + tl.load(rows + tl.load(members)).to(tl.int64) * table_row
    per_split = tl.cdiv(tl.cdiv(length, num_splits), BLOCK) * BLOCK
    first = s * per_split
    last = tl.minimum(first + per_split, length)
    query = i * M + tl.arange(0, M)  # a query is (member, head of the group)
    q_ok = query < count * GROUP
    b = tl.load(members + query // GROUP, mask=q_ok, other=0)
    head = h * GROUP + query % GROUP
    d, e = tl.arange(0, D_PAD), tl.arange(0, E_PAD)
    d_ok, e_ok = d < D, e < E
    queries = tl.load(
        q + b[:, None] * q_row + head[:, None] * q_head + d[None, :], mask=q_ok[:, None] & d_ok[None, :], other=0.0
    )
    m = tl.full([M], -1e30, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, E_PAD], tl.float32)
    if i * M < count * GROUP:
        for position in range(first, last, BLOCK):
            n = position + tl.arange(0, BLOCK)
            ok = n < last
            slot = tl.load(slots + n, mask=ok, other=0).to(tl.int64)
            keys = tl.load(
                k + slot[:, None] * k_slot + h * k_head + d[None, :], mask=ok[:, None] & d_ok[None, :], other=0.0
            )
            values = tl.load(
                v + slot[:, None] * v_slot + h * v_head + e[None, :], mask=ok[:, None] & e_ok[None, :], other=0.0
            )
            m, total, acc = _attend_block(
                queries, keys, values, ok[None, :], m, total, acc, scale, softcap, SOFTCAP, PRECISION
            )
    num_heads = tl.num_programs(1) * GROUP
    row = (b * num_heads + head).to(tl.int64) * num_parts + first_part + s
    _store_partial(part_out, part_lse, row, q_ok, e, e_ok, m, total, acc, E)


@triton.jit
def _join(
    part_out, part_lse, sinks, out, out_row, out_head, num_parts,
    E: tl.constexpr, E_PAD: tl.constexpr, PARTS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Program (row, head): weigh the parts by their log-sum-exp."""
    b, h = tl.program_id(0), tl.program_id(1)
    s, e = tl.arange(0, PARTS), tl.arange(0, E_PAD)
    s_ok, e_ok = s < num_parts, e < E
    row = (b * tl.num_programs(1) + h).to(tl.int64) * num_parts + s
    lse = tl.load(part_lse + row, mask=s_ok, other=-1e30)
    high = tl.max(lse, 0)
    if SINKS:
        sink = tl.load(sinks + h).to(tl.float32)
        high = tl.maximum(high, sink)
    weight = tl.where(s_ok & (lse > -1e29), tl.exp(lse - high), 0.0)
    parts = tl.load(part_out + row[:, None] * E + e[None, :], mask=s_ok[:, None] & e_ok[None, :], other=0.0)
    parts = tl.where(weight[:, None] > 0, parts, 0.0)  # a part without tokens may hold anything
    total = tl.sum(weight, 0)
    if SINKS:
        total += tl.exp(sink - high)
    joined = tl.sum(parts * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + b * out_row + h * out_head + e, joined.to(out.dtype.element_ty), mask=e_ok)


def num_splits(num_rows: int, num_kv_heads: int, num_sms: int) -> int:
    """Parts to cut each row's tokens into so that about two programs fall to each multiprocessor."""
    splits = 1
    while num_rows * num_kv_heads * splits < 2 * num_sms and splits < MAX_SPLITS:
        splits *= 2
    return splits


@dataclass(frozen=True)
class Workspace:
    """Room for the partial results of up to `num_rows` rows of `num_parts` parts each, in float32."""

    out: torch.Tensor  # [num_rows * num_heads * num_parts * v_dim]
    lse: torch.Tensor  # [num_rows * num_heads * num_parts]

    @classmethod
    def allocate(cls, num_rows: int, num_heads: int, v_dim: int, num_parts: int, device: torch.device) -> Workspace:
        size = num_rows * num_heads * num_parts
        return cls(
            torch.empty(size * v_dim, dtype=torch.float32, device=device),
            torch.empty(size, dtype=torch.float32, device=device),
        )


@dataclass(frozen=True)
class DecodeRows:
    """The rows of a decode step, all on the device.

    table   int32 [num_table_rows, max_len]  the slots of a sequence's tokens
    rows    int32 [num_rows]                 which table row each query's sequence has
    lens    int32 [num_rows]                 tokens it sees, the new one included
    starts  int32 [num_rows]                 tokens that a shared prefix covers; 0 without one
    """

    table: torch.Tensor
    rows: torch.Tensor
    lens: torch.Tensor
    starts: torch.Tensor


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


def decode_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    step: DecodeRows,
    workspace: Workspace,
    *,
    splits: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    prefix: PrefixRows | None = None,
    prefix_splits: int = 1,
) -> torch.Tensor:
    """Attend each row's newest token to the row's slots.

    q  [num_rows, num_heads, k_dim], last dimension dense
    k  [num_slots, num_kv_heads, k_dim], v [num_slots, num_kv_heads, v_dim]
    -> [num_rows, num_heads, v_dim], dtype of q; softmax in float32. A row of length 0 gives zeros.

    With `prefix`, the tokens that its members share are read once for all of them; `window` must then be None.
    """
    num_rows, num_heads, k_dim = q.shape
    num_kv_heads, v_dim = v.shape[1], v.shape[2]
    group = num_heads // num_kv_heads
    num_parts = splits + (prefix_splits if prefix is not None else 0)
    d_pad, e_pad = triton.next_power_of_2(k_dim), triton.next_power_of_2(v_dim)
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1))
    if prefix is not None:
        workspace.lse.fill_(NOTHING)  # rows outside the group have no such parts
    _decode_split[(num_rows, num_kv_heads, splits)](
        q, k, v, step.table, step.rows, step.lens, step.starts, workspace.out, workspace.lse,
        scale, softcap or 1.0, window or 0, *strides, step.table.stride(0), splits, num_parts,
        GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)), D=k_dim, D_PAD=d_pad, E=v_dim, E_PAD=e_pad,
        BLOCK=BLOCK, WINDOW=window is not None, SOFTCAP=softcap is not None, PRECISION=precision,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    if prefix is not None:
        queries = 64
        blocks = triton.cdiv(prefix.members.shape[0] * group, queries)
        _prefix_split[(blocks, num_kv_heads, prefix_splits)](
            q, k, v, step.table, step.rows, prefix.members, prefix.length, workspace.out, workspace.lse,
            scale, softcap or 1.0, *strides, step.table.stride(0), prefix.count, prefix_splits, num_parts, splits,
            GROUP=group, M=queries, D=k_dim, D_PAD=d_pad, E=v_dim, E_PAD=e_pad,
            BLOCK=BLOCK, SOFTCAP=softcap is not None, PRECISION=precision, num_warps=4, num_stages=3,
        )  # fmt: skip
    out = torch.empty(num_rows, num_heads, v_dim, dtype=q.dtype, device=q.device)
    _join[(num_rows, num_heads)](
        workspace.out, workspace.lse, sinks if sinks is not None else workspace.lse, out, out.stride(0), out.stride(1),
        num_parts, E=v_dim, E_PAD=e_pad, PARTS=triton.next_power_of_2(num_parts), SINKS=sinks is not None, num_warps=2,
    )  # fmt: skip
    return out
