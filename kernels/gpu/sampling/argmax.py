"""The argmax of each row, in one pass over the logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graftlm.kernels.sampling_codes import NOT_FINITE, NOTHING_ALLOWED

BLOCK = 1024
MAX_SPLITS = 64


@triton.jit
def _largest(logits, values, columns, logits_row, n, per_split, BLOCK: tl.constexpr):
    """Program (row, split): the maximum of a part of the row and its first column; NaN if any logit is NaN."""
    b, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = s * per_split
    last = tl.minimum(first + per_split, n)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    column = tl.full([BLOCK], 2147483647, tl.int32)
    bad = tl.zeros([BLOCK], tl.int32)
    for position in range(first, last, BLOCK):
        i = position + tl.arange(0, BLOCK)
        x = tl.load(logits + b * logits_row + i, mask=i < last, other=float("-inf")).to(tl.float32)
        bad = tl.where(x != x, 1, bad)
        column = tl.where(x > best, i, column)
        best = tl.where(x > best, x, best)
    value = tl.max(best, 0)
    found = tl.min(tl.where(best == value, column, 2147483647), 0)
    part = b * tl.num_programs(1) + s
    tl.store(values + part, tl.where(tl.max(bad, 0) > 0, float("nan"), value))
    tl.store(columns + part, found)


@triton.jit(do_not_specialize=["num_splits"])
def _pick(values, columns, codes, tokens, num_splits, SPLITS: tl.constexpr, INVALID: tl.constexpr, NONE: tl.constexpr):
    """Program (row): the maximum over its parts."""
    b = tl.program_id(0)
    s = tl.arange(0, SPLITS)
    x = tl.load(values + b * num_splits + s, mask=s < num_splits, other=float("-inf"))
    column = tl.load(columns + b * num_splits + s, mask=s < num_splits, other=2147483647)
    bad = tl.max(tl.where(x != x, 1, 0), 0)
    value = tl.max(tl.where(x != x, float("-inf"), x), 0)
    token = tl.min(tl.where(x == value, column, 2147483647), 0)
    code = tl.where(value == float("-inf"), NONE, tl.where(value == float("inf"), INVALID, token))
    code = tl.where(bad > 0, INVALID, code)
    tl.store(codes + b, code.to(tl.int64))
    tl.store(tokens + b, tl.maximum(code, 0).to(tl.int64))


def greedy(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Find the first largest logit of each row.

    logits  [num_rows, vocab_size], last dimension dense
    tokens  int64 [>= num_rows], output: the column, or 0 where there is none
    -> int64 [num_rows]: the column, NOT_FINITE or NOTHING_ALLOWED
    """
    values, columns = largest(logits)
    num_rows, num_splits = values.shape
    codes = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    _pick[(num_rows,)](
        values,
        columns,
        codes,
        tokens,
        num_splits,
        SPLITS=MAX_SPLITS,
        INVALID=NOT_FINITE,
        NONE=NOTHING_ALLOWED,
        num_warps=1,
    )
    return codes


def largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the largest logit of each part of each row.

    -> float32 [num_rows, num_splits], at most MAX_SPLITS parts: NaN if any logit is NaN; int32 of the same shape: the
       first column of each maximum
    """
    num_rows, n = logits.shape
    num_splits = min(triton.cdiv(n, BLOCK), max(1, min(MAX_SPLITS, 1024 // num_rows)))
    values = torch.empty(num_rows, num_splits, dtype=torch.float32, device=logits.device)
    columns = torch.empty(num_rows, num_splits, dtype=torch.int32, device=logits.device)
    per_split = triton.cdiv(triton.cdiv(n, num_splits), BLOCK) * BLOCK
    _largest[(num_rows, num_splits)](logits, values, columns, logits.stride(0), n, per_split, BLOCK=BLOCK, num_warps=4)
    return values, columns
