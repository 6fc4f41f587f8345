"""Tables of slots, written out on the device from the extents that a step sends."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PIECE = 4  # numbers per piece: table row, first column, first slot, number of slots


@triton.jit
def _write_table(table, pieces, table_row, BLOCK: tl.constexpr):
    piece = pieces + tl.program_id(0) * 4
    row = tl.load(piece).to(tl.int64)
    column, slot, count = tl.load(piece + 1), tl.load(piece + 2), tl.load(piece + 3)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(table + row * table_row + column + i, slot + i, mask=i < count)


def write_table(table: torch.Tensor, pieces: torch.Tensor, longest: int) -> None:
    """table[row, column + i] = slot + i for i < count, for each piece.

    table    int32 [num_rows, max_len]
    pieces   int32 [num_pieces, 4]: row, column, slot, count
    longest  the largest count
    """
    if pieces.shape[0]:
        _write_table[(pieces.shape[0], triton.cdiv(longest, 1024))](
            table, pieces, table.stride(0), BLOCK=1024, num_warps=4
        )
