"""Routers of mixtures: logits of all experts, then the chosen experts with their weights, in two small kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graftlm.kernels.gpu.attention.online_softmax import precision
from graftlm.kernels.gpu.mixture.router import Router
from graftlm.kernels.gpu.pdl import grid_wait, launch_and_wait, launch_dependents, pdl_options


@triton.jit(do_not_specialize=["num_rows"])
def _logits(
    x, weight, out, num_rows, num_experts, k_total, x_row, w_row,
    M: tl.constexpr, E: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block of rows, part of the inputs)."""
    launch_and_wait(PDL)
    m, e, kk = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, E), tl.arange(0, K)
    split = tl.program_id(1)
    m_ok, e_ok = m < num_rows, e < num_experts
    per_split = tl.cdiv(tl.cdiv(k_total, tl.num_programs(1)), K) * K
    begins = split * per_split
    acc = tl.zeros([M, E], tl.float32)
    for first in tl.range(begins, tl.minimum(begins + per_split, k_total), K, num_stages=3):
        k = first + kk
        k_ok = k < k_total
        value = tl.load(x + m.to(tl.int64)[:, None] * x_row + k[None, :], mask=m_ok[:, None] & k_ok[None, :], other=0.0)
        w = tl.load(weight + e[:, None] * w_row + k[None, :], mask=e_ok[:, None] & k_ok[None, :], other=0.0)
        acc = tl.dot(value.to(w.dtype), tl.trans(w), acc, input_precision=PRECISION)
    target = out + (split * num_rows + m).to(tl.int64)[:, None] * num_experts + e[None, :]
    tl.store(target, acc, mask=m_ok[:, None] & e_ok[None, :])


@triton.jit
def _best_groups(choice, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TWO: tl.constexpr, E: tl.constexpr):
    """Return `choice` [E] with the experts outside the best groups at -inf."""
    size: tl.constexpr = E // GROUPS
    grid = tl.reshape(choice, [GROUPS, size])
    best = tl.max(grid, 1)
    if TWO:
        at = tl.argmax(grid, 1)
        rest = tl.where(tl.arange(0, size)[None, :] == at[:, None], float("-inf"), grid)
        best += tl.max(rest, 1)
    groups = tl.arange(0, GROUPS)
    kept = tl.zeros([GROUPS], tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        at = tl.argmax(best, 0)
        kept = tl.where(groups == at, 1, kept)
        best = tl.where(groups == at, float("-inf"), best)
    return tl.reshape(tl.where(kept[:, None] == 1, grid, float("-inf")), [E])


@triton.jit(do_not_specialize=["num_rows"])
def _route(
    parts, bias, correction, factors, experts, weights, num_rows, num_experts, eps, factor,
    E: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, ROUND: tl.constexpr,
    SCORE: tl.constexpr, CORRECTED: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TWO: tl.constexpr,
    AFTER: tl.constexpr, RENORMALIZE: tl.constexpr, FACTORS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row)."""
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, E)
    ok = e < num_experts
    grid_wait(PDL)
    logits = tl.zeros([E], tl.float32)
    for part in tl.static_range(0, PARTS):
        logits += tl.load(parts + (part * num_rows + row) * num_experts + e, mask=ok, other=0.0)
    if BIAS:
        logits += tl.load(bias + e, mask=ok, other=0.0).to(tl.float32)
    logits = logits.to(ROUND).to(tl.float32)
    score = logits
    if SCORE == "softmax":
        score = tl.where(ok, tl.exp(logits - tl.max(tl.where(ok, logits, float("-inf")), 0)), 0.0)
        score = score / tl.sum(score, 0)
    elif SCORE == "sigmoid":
        score = 1.0 / (1.0 + tl.exp(-logits))
    choice = score
    if CORRECTED:
        choice += tl.load(correction + e, mask=ok, other=0.0).to(tl.float32)
    choice = tl.where(ok, choice, float("-inf"))
    if TOP_GROUPS < GROUPS:
        choice = _best_groups(choice, GROUPS, TOP_GROUPS, TWO, E)
    rank = tl.arange(0, K_PAD)
    chosen = tl.zeros([K_PAD], tl.int32)
    value = tl.full([K_PAD], float("-inf"), tl.float32)
    for j in tl.static_range(K):
        at = tl.argmax(choice, 0)
        chosen = tl.where(rank == j, at, chosen)
        value = tl.where(rank == j, tl.sum(tl.where(e == at, score, 0.0), 0), value)
        choice = tl.where(e == at, float("-inf"), choice)
    k_ok = rank < K
    if AFTER == "softmax":
        value = tl.where(k_ok, tl.exp(value - tl.max(value, 0)), 0.0)
        value = value / tl.sum(value, 0)
    elif AFTER == "sigmoid":
        value = 1.0 / (1.0 + tl.exp(-value))
    if RENORMALIZE:
        value = value / (tl.sum(tl.where(k_ok, value, 0.0), 0) + eps)
    if FACTORS:
        value *= tl.load(factors + chosen, mask=k_ok, other=0.0).to(tl.float32)
    tl.store(experts + row * K + rank, chosen, mask=k_ok)
    tl.store(weights + row * K + rank, value * factor, mask=k_ok)


_ROUND = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def route(
    x: torch.Tensor, router: Router, *, strict: bool = False, factors: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each token.

    x        [num_tokens, hidden_size], last dimension dense
    strict   sum in one order for every number of tokens
    factors  [num_experts], of the weights
    -> experts int32 [num_tokens, top_k], the best first, ties by index; weights float32 [num_tokens, top_k]
    """
    num_rows, k = x.shape
    num_experts = router.weight.shape[0]
    rows = 16 if num_rows <= 256 or strict else 64
    num_blocks = triton.cdiv(num_rows, rows)
    splits = 8 if strict or num_blocks > 16 else 16  # few values: each is a variant of _route to compile
    parts = torch.empty(splits, num_rows, num_experts, dtype=torch.float32, device=x.device)
    padded = max(16, triton.next_power_of_2(num_experts))
    _logits[(num_blocks, splits)](
        x, router.weight, parts, num_rows, num_experts, k, x.stride(0), router.weight.stride(0),
        M=rows, E=padded, K=64 if padded <= 256 else 32, PRECISION=precision(router.weight.dtype),
        num_warps=4 if padded <= 128 else 8, **pdl_options(x),
    )  # fmt: skip
    correction = router.correction if router.correction is not None else x
    experts = torch.empty(num_rows, router.top_k, dtype=torch.int32, device=x.device)
    weights = torch.empty(num_rows, router.top_k, dtype=torch.float32, device=x.device)
    _route[(num_rows,)](
        parts, router.bias if router.bias is not None else x, correction, factors if factors is not None else x,
        experts, weights, num_rows, num_experts, router.eps, router.scale,
        E=padded, K=router.top_k, K_PAD=triton.next_power_of_2(router.top_k), PARTS=splits,
        BIAS=router.bias is not None, ROUND=_ROUND[router.logits_dtype], SCORE=router.score,
        CORRECTED=router.correction is not None,
        GROUPS=router.num_groups, TOP_GROUPS=router.top_groups, TWO=router.group_score == "two", AFTER=router.after,
        RENORMALIZE=router.renormalize, FACTORS=factors is not None, num_warps=1 if padded <= 256 else 4,
        **pdl_options(x),
    )  # fmt: skip
    return experts, weights
