"""Sampling by temperature, top-p and min-p in a few passes over the logits, without sorting them.

The nucleus of a row is the smallest set of its likeliest tokens whose weights sum to top_p. Its threshold is the logit
of its least likely token. Passes determine the bits of the threshold four at a time, from the highest on: each pass
sums the weights of the tokens that share the bits so far, by their next four. Among tokens at the threshold, the
nucleus has the first columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graftlm.kernels.gpu.sampling.argmax import MAX_SPLITS, largest
from graftlm.kernels.sampling_codes import NOT_FINITE, NOTHING_ALLOWED

CHUNK = 8192
"""Columns of a row that one program reads."""
MAX_COLUMNS = 64 * CHUNK
_WARPS = 8


@triton.jit
def _peak(peaks, b, num_splits, SPLITS: tl.constexpr):
    """Return the largest logit of row b, from those of its parts; NaN if any is NaN."""
    s = tl.arange(0, SPLITS)
    x = tl.load(peaks + b * num_splits + s, mask=s < num_splits, other=float("-inf"))
    is_bad = tl.max(tl.where(x != x, 1, 0), 0) > 0
    return tl.where(is_bad, float("nan"), tl.max(tl.where(x != x, float("-inf"), x), 0))


@triton.jit
def _weight(value, peak, temperature):
    """Return exp((value - peak) / temperature); 0 in a row without a finite peak."""
    is_finite = (peak == peak) & (tl.abs(peak) != float("inf"))
    return tl.exp(tl.where(is_finite, value - tl.where(is_finite, peak, 0.0), float("-inf")) / temperature)


@triton.jit
def _weights_and_keys(logits, b, c, logits_row, n, peak, temperature, CHUNK: tl.constexpr, BITS: tl.constexpr):
    """Return the weights of chunk c of row b, relative to the row's largest, and keys in the order of the logits."""
    i = c * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + b * logits_row + i, mask=i < n, other=float("-inf"))
    value = x.to(tl.float32)
    if BITS == 16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32)
        key = tl.where((bits & 0x8000) != 0, bits ^ 0xFFFF, bits | 0x8000)
        key = tl.where(value == 0, 0x8000, key)  # -0.0 equals 0.0
    else:
        bits = x.to(tl.uint32, bitcast=True)
        key = tl.where((bits & 0x80000000) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
        key = tl.where(value == 0, 0x80000000, key)
    return _weight(value, peak, temperature), key


@triton.jit
def _search(sums, weights, keys, numbers, b, num_rows, num_chunks, step, CHUNKS: tl.constexpr):
    """Return the results of `step` passes: weight above the threshold, target weight, the threshold's first bits.

    sums     float32 [passes, num_rows, num_chunks, 16]: sums of each pass
    weights  float32 [passes + 1, num_rows, 2], keys  uint32 [passes + 1, num_rows]: results of the earlier passes
    """
    above = tl.zeros([], tl.float32)
    goal = tl.zeros([], tl.float32)
    key = tl.zeros([], tl.uint32)
    if step > 0:
        digit = tl.arange(0, 16)
        c = tl.arange(0, CHUNKS)
        before = (step - 1) * num_rows + b
        parts = sums + (before * num_chunks + c[:, None]) * 16 + digit[None, :]
        by_digit = tl.sum(tl.load(parts, mask=c[:, None] < num_chunks, other=0.0), 0)
        if step > 1:
            above = tl.load(weights + before * 2)
            goal = tl.load(weights + before * 2 + 1)
            key = tl.load(keys + before)
        else:
            goal = tl.load(numbers + b * 3 + 1) * tl.sum(by_digit, 0)
        down_to = tl.cumsum(by_digit, 0, reverse=True)
        next_bits = tl.max(tl.where((above + down_to >= goal) & (down_to > 0), digit, 0), 0)
        above += tl.sum(tl.where(digit > next_bits, by_digit, 0.0), 0)
        key = key * 16 + next_bits.to(tl.uint32)
    return above, goal, key


@triton.jit(do_not_specialize=["num_splits", "step"], do_not_specialize_on_alignment=["numbers"])
def _add_up(
    logits, peaks, numbers, sums, weights, keys, logits_row, n, num_splits, step,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, SPLITS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): sums of the weights of columns that share the threshold's bits, by their next four."""
    b, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_rows, num_chunks = tl.num_programs(0), tl.num_programs(1)
    above, goal, found = _search(sums, weights, keys, numbers, b, num_rows, num_chunks, step, CHUNKS)
    here = step * num_rows + b
    if c == 0:
        tl.store(weights + here * 2, above)
        tl.store(weights + here * 2 + 1, goal)
        tl.store(keys + here, found)
    peak, temperature = _peak(peaks, b, num_splits, SPLITS), tl.load(numbers + b * 3)
    weight, key = _weights_and_keys(logits, b, c, logits_row, n, peak, temperature, CHUNK, BITS)
    key = key >> (BITS - 4 - 4 * step).to(tl.uint32)
    weight = tl.where((key >> 4) == found, weight, 0.0)
    key = key & 15
    for digit in tl.static_range(16):
        total = tl.sum(tl.where(key == digit, weight, 0.0), 0)
        tl.store(sums + (here * num_chunks + c) * 16 + digit, total)


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["numbers"])
def _keep(
    logits, peaks, numbers, sums, weights, keys, kept, ties, logits_row, n, num_splits,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, SPLITS: tl.constexpr, BITS: tl.constexpr, TOP_P: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): the weight of the columns above the threshold, and the number of columns at it."""
    b, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_rows, num_chunks = tl.num_programs(0), tl.num_programs(1)
    peak, temperature = _peak(peaks, b, num_splits, SPLITS), tl.load(numbers + b * 3)
    weight, key = _weights_and_keys(logits, b, c, logits_row, n, peak, temperature, CHUNK, BITS)
    weight = tl.where(weight >= tl.load(numbers + b * 3 + 2), weight, 0.0)
    if TOP_P:
        above, goal, found = _search(sums, weights, keys, numbers, b, num_rows, num_chunks, BITS // 4, CHUNKS)
        here = (BITS // 4) * num_rows + b
        if c == 0:
            tl.store(weights + here * 2, above)
            tl.store(weights + here * 2 + 1, goal)
            tl.store(keys + here, found)
        equal = tl.sum((key == found).to(tl.int32), 0)
        weight = tl.where(key > found, weight, 0.0)
        tl.store(ties + b * num_chunks + c, equal)
    tl.store(kept + b * num_chunks + c, tl.sum(weight, 0))


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["numbers", "uniforms"])
def _pick(
    logits, peaks, numbers, uniforms, weights, keys, kept, ties, codes, logits_row, n, num_splits, num_chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, SPLITS: tl.constexpr, BITS: tl.constexpr, TOP_P: tl.constexpr,
    INVALID: tl.constexpr, NONE: tl.constexpr,
):  # fmt: skip
    """Program (row): the first column at which the running sum of kept weights exceeds the random number's share."""
    b = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0)
    peak, temperature = _peak(peaks, b, num_splits, SPLITS), tl.load(numbers + b * 3)
    least = tl.load(numbers + b * 3 + 2)
    chunk = tl.arange(0, CHUNKS)
    mass = tl.load(kept + b * num_chunks + chunk, mask=chunk < num_chunks, other=0.0)
    if TOP_P:
        here = (BITS // 4) * num_rows + b
        above, goal = tl.load(weights + here * 2), tl.load(weights + here * 2 + 1)
        found = tl.load(keys + here)
        if BITS == 16:
            bits = tl.where((found & 0x8000) != 0, found ^ 0x8000, found ^ 0xFFFF)
            value = bits.to(tl.uint16).to(logits.dtype.element_ty, bitcast=True).to(tl.float32)
        else:
            bits = tl.where((found & 0x80000000) != 0, found ^ 0x80000000, found ^ 0xFFFFFFFF)
            value = bits.to(tl.float32, bitcast=True)
        each = _weight(value, peak, temperature)
        wanted = tl.ceil((goal - above) / tl.maximum(each, 1e-38))
        wanted = tl.minimum(tl.maximum(wanted, 1.0), 1e9).to(tl.int32)
        equal = tl.load(ties + b * num_chunks + chunk, mask=chunk < num_chunks, other=0)
        equal_before = tl.cumsum(equal, 0) - equal
        mass += tl.where(each >= least, each, 0.0) * tl.minimum(tl.maximum(wanted - equal_before, 0), equal).to(
            tl.float32
        )
    ends = tl.cumsum(mass, 0)
    target = tl.load(uniforms + b) * tl.sum(mass, 0)
    c = tl.min(tl.where(ends > target, chunk, CHUNKS), 0)
    c = tl.where(c == CHUNKS, tl.max(tl.where(mass > 0, chunk, 0), 0), c)
    before = tl.sum(tl.where(chunk < c, mass, 0.0), 0)
    weight, key = _weights_and_keys(logits, b, c, logits_row, n, peak, temperature, CHUNK, BITS)
    weight = tl.where(weight >= least, weight, 0.0)
    if TOP_P:
        is_equal = key == found
        rank = tl.cumsum(is_equal.to(tl.int32), 0) - 1 + tl.sum(tl.where(chunk == c, equal_before, 0), 0)
        weight = tl.where((key > found) | (is_equal & (rank < wanted)), weight, 0.0)
    column = tl.arange(0, CHUNK)
    ended = (before + tl.cumsum(weight, 0) > target) & (weight > 0)
    chosen = tl.min(tl.where(ended, column, CHUNK), 0)
    chosen = tl.where(chosen == CHUNK, tl.max(tl.where(weight > 0, column, 0), 0), chosen)
    code = tl.where(peak == float("-inf"), NONE, c * CHUNK + chosen)
    code = tl.where((peak != peak) | (peak == float("inf")), INVALID, code)
    tl.store(codes + b, code.to(tl.int64))


def draw_nucleus(logits: torch.Tensor, numbers: torch.Tensor, uniforms: torch.Tensor, *, top_p: bool) -> torch.Tensor:
    """Sample a column of each row by its weight, in the order of columns.

    logits    [num_rows, vocab_size], bfloat16, float16 or float32, last dimension dense; at most MAX_COLUMNS columns
    numbers   float32 [num_rows, 3]: temperature, above 0; top_p; min_p
    uniforms  float32 [num_rows, 1], in [0, 1)
    top_p     whether any row's top_p is below 1; else the values of top_p are not read
    -> int64 [num_rows]: the column, NOT_FINITE or NOTHING_ALLOWED
    """
    num_rows, n = logits.shape
    num_chunks = triton.cdiv(n, CHUNK)
    bits = 8 * logits.element_size()
    passes = bits // 4 if top_p else 0
    device = logits.device
    peaks, _ = largest(logits)
    num_splits = peaks.shape[1]
    sums = torch.empty(max(passes, 1), num_rows, num_chunks, 16, dtype=torch.float32, device=device)
    weights = torch.empty(passes + 1, num_rows, 2, dtype=torch.float32, device=device)
    keys = torch.empty(passes + 1, num_rows, dtype=torch.uint32, device=device)
    kept = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=device)
    ties = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=device)
    codes = torch.empty(num_rows, dtype=torch.int64, device=device)
    sizes = {
        "CHUNK": CHUNK,
        "CHUNKS": triton.next_power_of_2(num_chunks),
        "SPLITS": MAX_SPLITS,
        "BITS": bits,
        "num_warps": _WARPS,
    }
    row, grid = logits.stride(0), (num_rows, num_chunks)
    for step in range(passes):
        _add_up[grid](logits, peaks, numbers, sums, weights, keys, row, n, num_splits, step, **sizes)
    sizes["TOP_P"] = top_p
    _keep[grid](logits, peaks, numbers, sums, weights, keys, kept, ties, row, n, num_splits, **sizes)
    _pick[(num_rows,)](
        logits, peaks, numbers, uniforms, weights, keys, kept, ties, codes, row, n, num_splits, num_chunks,
        INVALID=NOT_FINITE, NONE=NOTHING_ALLOWED, **sizes,
    )  # fmt: skip
    return codes
