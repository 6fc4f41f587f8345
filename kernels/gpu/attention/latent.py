"""Latent attention on a GPU: absorbed, by one kernel for decode rows and few new tokens, else over expanded keys.

The kernel reads each latent once for all query heads of a tile: its first part is the value too. A row's tokens are cut
into parts (split_kv.py); the program that ends last joins them. Every new token is a row of its own, which sees the
tokens before it. Rows of many new tokens expand their latents and go through torch's attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from graftlm.kernels.attention_params import AttentionParams
from graftlm.kernels.bits12.kv_read import slots_of
from graftlm.kernels.gpu.attention.decode import ANYWHERE, DecodeRows, Workspace
from graftlm.kernels.gpu.attention.online_softmax import LOG2E, precision
from graftlm.kernels.gpu.attention.split_kv import MAX_SPLITS, PARTS, uniform_parts
from graftlm.kernels.gpu.attention.step_buffers import DeviceStep, Layout
from graftlm.kernels.gpu.pdl import grid_wait, launch_dependents, pdl_options
from graftlm.kernels.latent import LatentHeads
from graftlm.kernels.transfer import send
from graftlm.kernels.wire_plan import WirePlan

MIN_EXPANDED = 64
"""New tokens of a row from which on its latents are expanded: absorbed scores take over three times the operations."""

PROGRAMS = 1.8
"""Programs to each multiprocessor. Of 48 rows of 2,200 tokens five parts take 51 us on an H200, four 55, eight 69."""

_PARTS = tl.constexpr(PARTS)


@triton.jit(do_not_specialize=["num_parts"], do_not_specialize_on_alignment=ANYWHERE)
def _latent_decode(
    q, latents, table, rows, lens, items, counts, part_out, part_lse, counters, out, scale,
    q_row, q_head, slot_step, table_row, out_row, out_head, num_parts,
    HEADS: tl.constexpr, M: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr, P: tl.constexpr, P_PAD: tl.constexpr,
    BLOCK: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of heads, item): a part of a row's tokens."""
    launch_dependents(PDL)
    tile, item = tl.program_id(0), tl.load(items + tl.program_id(1))
    b, s = item // _PARTS, item % _PARTS
    length = tl.load(lens + b)
    slots = table + tl.load(rows + b).to(tl.int64) * table_row
    per_split = tl.maximum(tl.cdiv(tl.cdiv(length, tl.load(counts + b)), BLOCK), 1) * BLOCK
    used = tl.maximum(tl.cdiv(length, per_split), 1)
    first = s * per_split
    last = tl.minimum(first + per_split, length)
    slot = slots_of(slots, first, last, BLOCK)
    grid_wait(PDL)
    if s < used:
        head, r, p = tile * M + tl.arange(0, M), tl.arange(0, R_PAD), tl.arange(0, P_PAD)
        h_ok, r_ok, p_ok = head < HEADS, r < R, p < P
        here = q + b.to(tl.int64) * q_row + head[:, None] * q_head
        q_latent = tl.load(here + r[None, :], mask=h_ok[:, None] & r_ok[None, :], other=0.0)
        q_rope = tl.load(here + R + p[None, :], mask=h_ok[:, None] & p_ok[None, :], other=0.0)
        m = tl.full([M], -1e30, tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, R_PAD], tl.float32)
        for position in range(first, last, BLOCK):
            n = position + tl.arange(0, BLOCK)
            ok = n < last
            token = latents + slot.to(tl.int64)[:, None] * slot_step
            latent = tl.load(token + r[None, :], mask=ok[:, None] & r_ok[None, :], other=0.0)
            rope = tl.load(token + R + p[None, :], mask=ok[:, None] & p_ok[None, :], other=0.0)
            slot = slots_of(slots, position + BLOCK, last, BLOCK)
            x = tl.dot(q_latent, tl.trans(latent), input_precision=PRECISION)
            x = tl.dot(q_rope, tl.trans(rope), x, input_precision=PRECISION) * scale
            x = tl.where(ok[None, :], x, -1e30)
            high = tl.maximum(m, tl.max(x, 1))
            weight = tl.where(ok[None, :], tl.exp2(x - high[:, None]), 0.0)
            shrink = tl.exp2(m - high)
            total = total * shrink + tl.sum(weight, 1)
            acc = tl.dot(weight.to(latent.dtype), latent, acc * shrink[:, None], input_precision=PRECISION)
            m = high
        joined = acc / tl.where(total > 0, total, 1.0)[:, None]
        ok = h_ok[:, None] & r_ok[None, :]
        there = out + b.to(tl.int64) * out_row + head[:, None] * out_head + r[None, :]
        if used == 1:
            tl.store(there, joined.to(out.dtype.element_ty), mask=ok)
        elif SPLIT:
            base = (b * HEADS + head).to(tl.int64) * num_parts
            tl.store(part_out + (base + s)[:, None] * R + r[None, :], joined, mask=ok)
            tl.store(
                part_lse + base + s, tl.where(total > 0, m + tl.log2(tl.where(total > 0, total, 1.0)), -1e30), mask=h_ok
            )
            counter = counters + b * tl.num_programs(0) + tile
            tl.debug_barrier()  # all of this program's part is written before it counts as done
            if tl.atomic_add(counter, 1) == used - 1:
                tl.debug_barrier()
                tl.store(counter, 0)
                m = tl.full([M], -1e30, tl.float32)
                total = tl.zeros([M], tl.float32)
                acc = tl.zeros([M, R_PAD], tl.float32)
                for part in range(0, used):
                    # from the second-level cache: other multiprocessors wrote them during this launch
                    lse = tl.load(part_lse + base + part, mask=h_ok, other=-1e30, cache_modifier=".cg")
                    value = tl.load(
                        part_out + (base + part)[:, None] * R + r[None, :], mask=ok, other=0.0, cache_modifier=".cg"
                    )
                    high = tl.maximum(m, lse)
                    weight, shrink = tl.exp2(lse - high), tl.exp2(m - high)
                    acc = acc * shrink[:, None] + value * weight[:, None]
                    total = total * shrink + weight
                    m = high
                joined = acc / tl.where(total > 0, total, 1.0)[:, None]
                tl.store(there, joined.to(out.dtype.element_ty), mask=ok)


class LatentTile(NamedTuple):
    """How the kernel is cut: query heads and tokens of a block, warps, and how many reads are under way."""

    heads: int
    block: int
    warps: int
    stages: int


def tile_of(dtype: torch.dtype, num_heads: int) -> LatentTile:
    """Return the tile for layers of so many query heads."""
    heads = min(max(triton.next_power_of_2(num_heads), 16), 64)
    if dtype.itemsize > 2:
        return LatentTile(16, 16, 4, 1)
    return LatentTile(heads, 64, 4, 2) if heads < 64 else LatentTile(64, 32, 8, 2)


def latent_splits(num_rows: int, num_sms: int) -> int:
    """Return the parts to cut rows of one length into.

    Fewer than of other attention: the result of a part is 32 KB for 16 heads.
    """
    return min(max(round(PROGRAMS * num_sms / num_rows), 1), MAX_SPLITS)


def latent_decode(
    q: torch.Tensor,
    latents: torch.Tensor,
    step: DecodeRows,
    workspace: Workspace,
    scale: float,
    rank: int,
    *,
    tile: LatentTile | None = None,
) -> torch.Tensor:
    """Attend each row's newest token, in latent space.

    q        [num_rows, num_heads, rank + rope_dim], absorbed; last dimension dense
    latents  [num_slots, 1, rank + rope_dim]
    -> [num_rows, num_heads, rank], dtype of q; softmax in float32
    """
    num_rows, num_heads, dim = q.shape
    parts = step.parts or uniform_parts(num_rows, 1, q.device)
    tile = tile or tile_of(q.dtype, num_heads)
    out = torch.empty(num_rows, num_heads, rank, dtype=q.dtype, device=q.device)
    _latent_decode[(triton.cdiv(num_heads, tile.heads), len(parts.items))](
        q, latents, step.table, step.rows, step.lens, parts.items, parts.counts, workspace.out, workspace.lse,
        workspace.counters, out, scale * LOG2E, q.stride(0), q.stride(1), latents.stride(0), step.table.stride(0),
        out.stride(0), out.stride(1), parts.most,
        HEADS=num_heads, M=tile.heads, R=rank, R_PAD=triton.next_power_of_2(rank), P=dim - rank,
        P_PAD=max(triton.next_power_of_2(dim - rank), 16), BLOCK=tile.block, SPLIT=parts.most > 1,
        PRECISION=precision(q.dtype), num_warps=tile.warps, num_stages=tile.stages, **pdl_options(q),
    )  # fmt: skip
    return out


class ExpandedRow(NamedTuple):
    """A row of many new tokens: those are tokens [first, last) of the step, `past` tokens come before them."""

    first: int
    last: int
    past: int
    extents: list[list[int]]


@dataclass(frozen=True)
class LatentStep:
    """The new tokens of a step that has rows of several.

    tokens    int64 [n], on the device: the tokens that are attended absorbed, each as a row of its own
    rows      int32 [n] their rows of the table; lens int32 [n] the tokens that each sees
    expanded  the other rows
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    lens: torch.Tensor
    expanded: tuple[ExpandedRow, ...]

    @classmethod
    def of(cls, plan: WirePlan, step: DeviceStep, layout: Layout, *, strict: bool) -> LatentStep | None:
        """Return the parts of a step; None if every row has one new token. strict: expand no row"""
        if layout.num_decode == layout.num_rows:
            return None
        many = (plan.num_new >= MIN_EXPANDED) & (not strict)
        row_of = np.repeat(np.arange(plan.num_rows), plan.num_new)
        tokens = np.flatnonzero(~many[row_of])
        device = step.table.device
        rows = step.rows[send(row_of[tokens], device)]
        lens = send((plan.indices[tokens] + 1).astype(np.int32), device)
        starts = plan.ends - plan.num_new
        expanded = tuple(
            ExpandedRow(int(starts[row]), int(plan.ends[row]), int(plan.past[row]), plan.extents_of(row))
            for row in np.flatnonzero(many).tolist()
        )
        return cls(send(tokens, device), rows, lens, expanded)


def attend_expanded(
    heads: LatentHeads, q: torch.Tensor, latents: torch.Tensor, row: ExpandedRow, params: AttentionParams
) -> torch.Tensor:
    """Attend the new tokens of one row, whose latents are in the store, over expanded keys.

    q  [num_new, num_heads, nope_dim + rope_dim]
    -> [num_new, num_heads, v_dim]
    """
    length = row.past + len(q)
    left, pieces = length, list[torch.Tensor]()
    for start, stop in row.extents:
        pieces.append(latents[start : min(stop, start + left), 0])
        left -= len(pieces[-1])
    k, v = heads.expand(pieces[0] if len(pieces) == 1 else torch.cat(pieces))
    v_dim = v.shape[2]
    if k.shape[2] > v_dim:  # torch's kernels want both of one size
        v = torch.nn.functional.pad(v, (0, k.shape[2] - v_dim))
    queries, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
    options: dict[str, object] = {"is_causal": True}
    if row.past:
        from torch.nn.attention.bias import causal_lower_right

        options = {"attn_mask": causal_lower_right(len(q), length)}
    out = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, scale=params.scale, **options)  # type: ignore[arg-type]
    return out[0].transpose(0, 1)[..., :v_dim]
