"""Keys and values of a step's rows gathered densely, from the store in any of its formats and from the step itself."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graftlm.kernels.bits12.kv_read import SCALE, power_of, read_vectors
from graftlm.kernels.hopper.prompt_layout import BLOCK, FIELDS

PART = 32
"""Tokens of a program."""


@triton.jit(do_not_specialize=["exponents_head"], do_not_specialize_on_alignment=["rows"])
def _lay_out(
    k, v, exponents, table, rows, k_new, v_new, blocks, k_out, v_out,
    k_slot, k_head, v_slot, v_head, exponents_head, table_row,
    k_token, k_new_head, v_token, v_new_head, out_token, out_head,
    D: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, FIELDS: tl.constexpr,
    COMPACT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Program (part of a block, KV head)."""
    i, h = tl.program_id(0), tl.program_id(1)
    block = blocks + i // PARTS * FIELDS
    row, first, begin = tl.load(block), tl.load(block + 1), tl.load(block + 2) + i % PARTS * PART
    cached, num_new, token = tl.load(block + 3), tl.load(block + 4), tl.load(block + 5)
    n = begin + tl.arange(0, PART)
    d = tl.arange(0, D)[None, :]
    place = ((i.to(tl.int64) * PART + tl.arange(0, PART)) * out_token + h * out_head)[:, None] + d
    old = n < cached
    if begin < cached:
        slots = table + tl.load(rows + row).to(tl.int64) * table_row + first
        slot = tl.load(slots + n, mask=old, other=0).to(tl.int64)
        if COMPACT:
            both = tl.load(exponents + h.to(tl.int64) * exponents_head + slot).to(tl.int32)
            keys = read_vectors(k + h * k_head + slot * k_slot, power_of(both & 0xFF), PART, D, ASM)
            values = read_vectors(v + h * v_head + slot * v_slot, power_of(both >> 8 & 0xFF), PART, D, ASM)
            keys, values = keys.to(tl.float32) * SCALE, values.to(tl.float32) * SCALE
        else:
            keys = tl.load(k + h * k_head + (slot * k_slot)[:, None] + d, mask=old[:, None], other=0.0)
            values = tl.load(v + h * v_head + (slot * v_slot)[:, None] + d, mask=old[:, None], other=0.0)
        tl.store(k_out + place, keys.to(k_out.dtype.element_ty), mask=old[:, None])
        tl.store(v_out + place, values.to(v_out.dtype.element_ty), mask=old[:, None])
    if begin + PART > cached:
        there = ((n >= cached) & (n < cached + num_new))[:, None]
        source = (token + n - cached).to(tl.int64)
        keys = tl.load(k_new + h * k_new_head + (source * k_token)[:, None] + d, mask=there, other=0.0)
        values = tl.load(v_new + h * v_new_head + (source * v_token)[:, None] + d, mask=there, other=0.0)
        tl.store(k_out + place, keys, mask=(n >= cached)[:, None])
        tl.store(v_out + place, values, mask=(n >= cached)[:, None])


def lay_out(
    k: torch.Tensor,
    v: torch.Tensor,
    exponents: torch.Tensor | None,
    table: torch.Tensor,
    rows: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    blocks: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather the blocks of a PromptLayout, one after the other; 0 where a block has no token.

    k, v          [num_slots, num_kv_heads, head_dim]; with `exponents`, uint8 [num_kv_heads, num_slots, 2], of a
                  compact store: int32 [num_slots, num_kv_heads, words]
    table         int32 [num_table_rows, max_len], the slots of sequences; rows int32: the table row of each row
    k_new, v_new  [num_tokens, num_kv_heads, head_dim], of the step, last dimension dense
    blocks        int32 [num_blocks, FIELDS]
    -> keys and values [BLOCK * num_blocks, num_kv_heads, head_dim], dtype of k_new
    """
    _, num_heads, head_dim = k_new.shape
    shape = (BLOCK * len(blocks), num_heads, head_dim)
    keys, values = (torch.empty(shape, dtype=k_new.dtype, device=k_new.device) for _ in range(2))
    compact = exponents is not None
    if exponents is None:
        exponents = k
    else:
        k, v, exponents = k.view(torch.uint8), v.view(torch.uint8), exponents.view(torch.int16)
    _lay_out[(len(blocks) * (BLOCK // PART), num_heads)](
        k, v, exponents, table, rows, k_new, v_new, blocks, keys, values,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), exponents.stride(0), table.stride(0),
        k_new.stride(0), k_new.stride(1), v_new.stride(0), v_new.stride(1), keys.stride(0), keys.stride(1),
        D=head_dim, PARTS=BLOCK // PART, PART=PART, FIELDS=FIELDS, COMPACT=compact, ASM=k.is_cuda, num_warps=4,
    )  # fmt: skip
    return keys, values
