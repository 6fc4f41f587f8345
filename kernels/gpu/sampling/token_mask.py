"""Apply packed token masks to logits on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _apply_mask(logits, mask, rows, logits_row, mask_row, n, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    b = tl.load(rows + r).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = i < n
    word = tl.load(mask + r.to(tl.int64) * mask_row + i // 32, mask=ok, other=0)
    keep = ((word >> (i % 32)) & 1) != 0
    tl.store(logits + b * logits_row + i, float("-inf"), mask=ok & (keep == 0))


def apply_mask(logits: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor) -> None:
    """Set the logits of forbidden tokens to -inf, in place.

    logits  [num_rows, vocab_size], last dimension dense
    mask    int32 [num_masks, ceil(vocab_size / 32)]: bit i % 32 of word i // 32 set = token i allowed
    rows    int32 [num_masks]: the row of `logits` of each mask
    """
    n = logits.shape[1]
    _apply_mask[(mask.shape[0], triton.cdiv(n, 2048))](
        logits, mask, rows, logits.stride(0), mask.stride(0), n, BLOCK=2048, num_warps=4
    )
