"""Tokens sorted by expert, in blocks of one expert each, without synchronising with the host.

A pair is a token and one of its experts: pair = token * top_k + rank. Each program of a grouped matmul
(grouped_matmul.py) has a block of pairs of one expert; the shapes alone bound the number of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from graftlm.kernels.gpu.pdl import launch_and_wait, pdl_options

_CHUNK = 4096
"""Pairs that a program reads at once."""
_GATHERED = 512
"""Numbers of each token that a program gathers."""


@triton.jit(do_not_specialize=["num_pairs", "max_blocks"])
def _sort_pairs(
    experts, pairs, block_expert, block_start, block_end, num_used, x, laid, num_pairs, max_blocks, num_experts,
    top_k, k_total, x_row,
    E: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (e, part) stores the pairs of expert e after those of all earlier experts, in their original order.

    With K above 0 it also gathers a part of their tokens, K numbers, into its blocks: programs of several parts store
    the same pairs, since one after the other they would take longer than all else. Rows of a block without a pair are
    not written.
    """
    launch_and_wait(PDL)
    mine = tl.program_id(0)
    i = tl.arange(0, CHUNK)
    bins = tl.arange(0, E)
    counts = tl.zeros([E], tl.int32)
    for first in range(0, num_pairs, CHUNK):
        ok = first + i < num_pairs
        ids = tl.load(experts + first + i, mask=ok, other=E - 1)
        counts += tl.histogram(ids, E)
        # elements beyond the end were counted in the last bin
        counts -= tl.where(bins == E - 1, CHUNK - tl.minimum(num_pairs - first, CHUNK), 0)
    before = bins < mine
    begin = tl.sum(tl.where(before, counts, 0), 0)
    count = tl.sum(tl.where(bins == mine, counts, 0), 0)
    blocks = (counts + BLOCK - 1) // BLOCK
    block = tl.sum(tl.where(before, blocks, 0), 0)
    for b in range(0, (count + BLOCK - 1) // BLOCK):
        tl.store(block_expert + block + b, mine)
        tl.store(block_start + block + b, begin + b * BLOCK)
        tl.store(block_end + block + b, begin + count)
    if mine == num_experts - 1:
        used = tl.sum(blocks, 0)
        tl.store(num_used, used)
        for first in range(used, max_blocks, CHUNK):
            tl.store(block_expert + first + i, -1, mask=first + i < max_blocks)
    placed = begin
    for first in range(0, num_pairs, CHUNK):
        ok = first + i < num_pairs
        ids = tl.load(experts + first + i, mask=ok, other=-1)
        hit = (ids == mine).to(tl.int32)
        rank = tl.cumsum(hit, 0)
        tl.store(pairs + placed + rank - 1, first + i, mask=hit == 1)
        placed += tl.sum(hit, 0)
    if K > 0:
        tl.debug_barrier()  # the program reads stores of its other threads
        m, kk = tl.arange(0, BLOCK), tl.program_id(1) * K + tl.arange(0, K)
        for b in range(0, (count + BLOCK - 1) // BLOCK):
            at = begin + b * BLOCK + m
            there = at < begin + count
            token = tl.load(pairs + at, mask=there, other=0) // top_k
            row = ((block + b) * BLOCK + m).to(tl.int64)
            ok = there[:, None] & (kk < k_total)[None, :]
            found = tl.load(x + token.to(tl.int64)[:, None] * x_row + kk[None, :], mask=ok, other=0.0)
            tl.store(laid + row[:, None] * k_total + kk[None, :], found, mask=ok)


@dataclass(frozen=True)
class ExpertBlocks:
    """Pairs sorted by expert, and blocks of them.

    pairs         int32 [num_pairs], sorted by expert, stable
    block_expert  int32 [max_blocks], -1 beyond the last used block
    block_start   int32 [max_blocks], the index of a block's first pair in `pairs`
    block_end     int32 [max_blocks], the end of its expert's pairs, which may be in a later block
    used          int32 [1]: the number of used blocks
    block         the largest number of pairs of a block
    laid          [max_blocks * block, n]: the tokens of each block, gathered, undefined beyond its pairs; None without
                  `lay_out`
    """

    pairs: torch.Tensor
    block_expert: torch.Tensor
    block_start: torch.Tensor
    block_end: torch.Tensor
    used: torch.Tensor
    block: int
    laid: torch.Tensor | None = None

    @classmethod
    def of(
        cls, experts: torch.Tensor, num_experts: int, block: int, lay_out: torch.Tensor | None = None
    ) -> ExpertBlocks:
        """Sort the pairs of experts int32 [num_tokens, top_k], contiguous, each below num_experts.

        lay_out  tokens [num_tokens, n], last dimension dense, to be gathered by blocks; for few tokens
        """
        num_pairs = experts.numel()
        limit = max_blocks(num_pairs, num_experts, block)
        pairs = torch.empty(num_pairs, dtype=torch.int32, device=experts.device)
        # columns begin at multiples of 16 bytes, so that kernels are not compiled anew for another number of pairs
        table = torch.empty(4, triton.cdiv(limit, 4) * 4, dtype=torch.int32, device=experts.device)
        expert, start, end, used = table[0, :limit], table[1, :limit], table[2, :limit], table[3, :1]
        laid = None if lay_out is None else lay_out.new_empty(limit * block, lay_out.shape[1])
        x = experts if lay_out is None else lay_out
        chunk = max(16, min(_CHUNK, triton.next_power_of_2(num_pairs)))
        parts = 1 if laid is None else triton.cdiv(laid.shape[1], _GATHERED)
        _sort_pairs[(num_experts, parts)](
            experts, pairs, expert, start, end, used, x, x if laid is None else laid, num_pairs, limit, num_experts,
            experts.shape[1], x.shape[1], x.stride(0), K=0 if laid is None else _GATHERED,
            E=triton.next_power_of_2(num_experts), CHUNK=chunk, BLOCK=block, num_warps=4 if chunk <= 1024 else 8,
            **pdl_options(experts),
        )  # fmt: skip
        return cls(pairs, expert, start, end, used, block, laid)


def max_blocks(num_pairs: int, num_experts: int, block: int) -> int:
    """Return the largest number of blocks of these pairs: each expert in use may have one partial block."""
    return min(num_pairs, num_experts + num_pairs // block)
