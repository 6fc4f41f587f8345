"""Prefill through the flash attention that torch brings along: the rows of a step as ragged sequences, side by side.

It reads K and V that lie in one run. Those of a row without cached tokens are the step's own; those of others are
gathered from the store. A cached prefix that rows share is read once, by all their queries together, and what they
see of it is merged with what each sees of its own by log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from graftlm.kernels.attention import Plan, Row, Shared
from graftlm.kernels.torch_attention import Partial, attend
from graftlm.kernels.triton_decode import Scales
from graftlm.kernels.triton_merge import merge_into

MIN_TOKENS = 512  # new tokens of a step, and
MIN_TOKENS_PER_ROW = 48  # of a row on average, from which on this is faster than the kernel that reads the table
MIN_SHARED_READS = 8192  # tokens whose reading a shared prefix must save to be worth its own pass


@dataclass(frozen=True)
class Ragged:
    """Sequences one after the other: indptr int32 [num_rows + 1] on the device, and the longest."""

    indptr: torch.Tensor
    longest: int


@dataclass(frozen=True)
class PrefixPass:
    """Queries that all see one cached prefix whole.

    queries  int64 [num_queries], which of the pass's tokens; None for all of them
    slots    int64 [length], where the prefix lies; or the one range of slots that holds it
    """

    queries: torch.Tensor | None
    slots: torch.Tensor | slice
    num_queries: int
    length: int


@dataclass(frozen=True)
class FlashStep:
    """How the rows of a step that have several new tokens are attended.

    first   where their tokens begin in the step
    q       their new tokens
    k       the tokens that each reads by itself: the new ones, and what is cached and not in a shared prefix
    slots   int64 [total k], where those lie; or the one range of slots; None if they are just the new ones
    cached  whether any row has cached tokens
    """

    first: int
    q: Ragged
    k: Ragged
    slots: torch.Tensor | slice | None
    prefixes: tuple[PrefixPass, ...]
    cached: bool

    @classmethod
    def of(cls, plan: Plan, num_decode: int, device: torch.device) -> FlashStep | None:
        """Lay out all rows from `num_decode` on; None where these are too few tokens to be worth it."""
        rows = plan.rows[num_decode:]
        num_tokens = sum(row.num_new for row in rows)
        if num_tokens < max(MIN_TOKENS, MIN_TOKENS_PER_ROW * len(rows)):
            return None
        return lay_out(rows, [_within(s, num_decode) for s in plan.shared], device)


def lay_out(rows: Sequence[Row], shared: Sequence[tuple[Shared, list[int]]], device: torch.device) -> FlashStep:
    """Lay out rows, and prefixes that some of them share, each with the indices of those rows."""
    first = rows[0].start
    counts = np.fromiter((row.num_new for row in rows), np.int64, len(rows))
    covered = np.zeros(len(rows), np.int64)
    prefixes: list[PrefixPass] = []
    for prefix, members in shared:
        if (len(members) - 1) * prefix.length < MIN_SHARED_READS:
            continue
        covered[members] = prefix.length
        queries = [np.arange(rows[i].start - first, rows[i].start - first + rows[i].num_new) for i in members]
        num_queries = sum(map(len, queries))
        index = None if num_queries == counts.sum() else _send(np.concatenate(queries), device)
        pieces = [(extent.start, extent.stop) for extent in prefix.extents]
        prefixes.append(PrefixPass(index, _slots(pieces, device), num_queries, prefix.length))
    lens = np.fromiter((row.past for row in rows), np.int64, len(rows)) + counts - covered
    q = Ragged(_indptr(counts, device), int(counts.max()))
    cached = any(row.past for row in rows)
    if (lens == counts).all():
        return FlashStep(first, q, q, None, tuple(prefixes), cached)
    own: list[tuple[int, int]] = []
    for row, skip in zip(rows, covered.tolist(), strict=True):
        for extent in row.extents:
            length = extent.stop - extent.start
            if skip < length:
                own.append((extent.start + skip, extent.stop))
            skip = max(skip - length, 0)
    k = Ragged(_indptr(lens, device), int(lens.max()))
    return FlashStep(first, q, k, _slots(own, device), tuple(prefixes), cached)


def _within(shared: Shared, num_decode: int) -> tuple[Shared, list[int]]:
    return shared, [row - num_decode for row in shared.rows if row >= num_decode]


def _slots(pieces: list[tuple[int, int]], device: torch.device) -> torch.Tensor | slice:
    if len(pieces) == 1:
        return slice(*pieces[0])
    return _send(np.concatenate([np.arange(start, stop) for start, stop in pieces]), device)


def _indptr(counts: np.ndarray, device: torch.device) -> torch.Tensor:
    return _send(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), device)


def _send(array: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def flash_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_store: torch.Tensor,
    v_store: torch.Tensor,
    step: FlashStep,
    *,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    scales: Scales | None = None,
) -> torch.Tensor:
    """Attend the step's tokens from `step.first` on.

    q [num_tokens, num_heads, head_dim]; k, v [num_tokens, num_kv_heads, head_dim]: of these tokens, in bfloat16 or
    float16; stored already. A `window` is only taken where nothing is cached.
    -> [num_tokens, num_heads, head_dim], dtype of q.
    """
    assert window is None or not step.cached
    if step.slots is not None:
        k, v = _read(k_store, v_store, step.slots, scales, q.dtype)
    out, lse = varlen_attention(q, k, v, step.q, step.k, scale=scale, causal=True, window=window)
    for prefix in step.prefixes:
        queries = q if prefix.queries is None else q.index_select(0, prefix.queries)
        keys, values = _read(k_store, v_store, prefix.slots, scales, q.dtype)
        whole = varlen_attention(
            queries, keys, values, _single(prefix.num_queries, q.device), _single(prefix.length, q.device),
            scale=scale, causal=False,
        )  # fmt: skip
        merge_into(out, lse, whole.out, whole.lse, prefix.queries)
    if sinks is not None:
        out = (out.float() * torch.sigmoid(lse.transpose(0, 1) - sinks.float())[..., None]).to(q.dtype)
    return out


def _single(length: int, device: torch.device) -> Ragged:
    return Ragged(torch.arange(2, dtype=torch.int32, device=device) * length, length)


def _read(
    k_store: torch.Tensor, v_store: torch.Tensor, slots: torch.Tensor | slice, scales: Scales | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(slots, slice):
        k, v = k_store[slots], v_store[slots]
    elif scales is None:
        k, v = k_store.index_select(0, slots), v_store.index_select(0, slots)
    else:  # not every operation takes float8
        k, v = (x.view(torch.uint8).index_select(0, slots).view(x.dtype) for x in (k_store, v_store))
    if scales is None:
        return k, v
    return (k.float() * scales.k[:, None]).to(dtype), (v.float() * scales.v[:, None]).to(dtype)


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    queries: Ragged,
    keys: Ragged,
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
) -> Partial:
    """Attend each of several sequences to its own keys; the last query sees the last key.

    q [total q, num_heads, head_dim], k, v [total k, num_kv_heads, head_dim], last dimension dense
    -> out [total q, num_heads, head_dim] as q; lse float32 [num_heads, total q]. Without a GPU: the definition.
    """
    if q.device.type == "cuda":
        left, right = (window - 1, 0) if window is not None else (None, None)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, queries.indptr, keys.indptr, queries.longest, keys.longest, 0.0, causal and window is None, False,
            scale=scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return Partial(out, lse)
    group = q.shape[1] // k.shape[1]
    parts: list[Partial] = []
    q_indptr, k_indptr = queries.indptr.tolist(), keys.indptr.tolist()
    for i in range(len(q_indptr) - 1):
        here, there = slice(q_indptr[i], q_indptr[i + 1]), slice(k_indptr[i], k_indptr[i + 1])
        a, b, c = q[here].transpose(0, 1), k[there].transpose(0, 1), v[there].transpose(0, 1)
        b, c = b.repeat_interleave(group, 0), c.repeat_interleave(group, 0)
        num_q, num_k = a.shape[1], b.shape[1]
        mask = torch.ones(num_q, num_k, dtype=torch.bool, device=q.device)
        if causal:
            mask = mask.tril(num_k - num_q)
        if window is not None:
            mask = mask.triu(num_k - num_q - window + 1)
        parts.append(attend(a[None], b[None], c[None], scale=scale, mask=mask))
    return Partial(torch.cat([p.out[0] for p in parts], 1).transpose(0, 1), torch.cat([p.lse[0] for p in parts], 1))
