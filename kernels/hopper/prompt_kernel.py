"""Attention of long prompts on Hopper: many new tokens over dense keys and values (prompt_layout.py).

A program has 128 queries of a KV head at a time. One warp loads blocks of keys and values by the copy engine, two
groups of warps have 64 queries each. A group starts the matmuls of its next scores and of its previous weights with
their values, and computes the next weights during the latter. The groups alternate, so that the matmuls of one keep the
matrix units busy during the exponentials of the other, as in FlashAttention-3 (Shah et al., 2024). The kernel is in
Gluon, the level below Triton: on Hopper Triton cannot assign these roles to different warps.

Blocks that every query sees whole come first, without masks: of the shared prefix, then of the row's own tokens. The
end of the prefix follows, then own tokens that only some queries see.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from graftlm.kernels.gpu.attention.online_softmax import LOG2E
from graftlm.kernels.hopper.prompt_layout import BLOCK, FIELDS, QUERIES, padded
from graftlm.kernels.hopper.tiles import load, tiled

STAGES = 2
"""Blocks in shared memory."""

HEAD_DIMS = (64, 128)
MAX_GROUP = QUERIES // 2
"""The largest number of query heads of a KV head."""

_FIELDS = gl.constexpr(FIELDS)


@gluon.jit
def _tile(tiles, work, num_tiles, N: gl.constexpr):
    """Return a tile in the form of PromptLayout.tiles, its blocks, and its KV head.

    -> (first token, tokens, start of the prefix, its length, start of own tokens, earlier own tokens),
       (whole blocks of the prefix, of own tokens; 1 if the prefix ends within a block; all blocks), head
    """
    t = tiles + work % num_tiles * _FIELDS
    tokens, shared, before = gl.load(t + 1), gl.load(t + 3), gl.load(t + 5)
    whole, own_whole = shared // N, (before + 1) // N
    end = gl.where(shared % N > 0, 1, 0)
    count = whole + end + (before + tokens + N - 1) // N
    place = (gl.load(t), tokens, gl.load(t + 2), shared, gl.load(t + 4), before)
    return place, (whole, own_whole, end, count), work // num_tiles


@gluon.jit
def _read(q, k, v, tiles, num_tiles, num_work, shared, HEADS: gl.constexpr):
    """Load queries, then blocks of keys and values alternately, as stages become free."""
    qs, ks, vs, q_ready, q_free, k_ready, k_free, v_ready, v_free, turns = shared
    STAGES: gl.constexpr = ks.shape[0]
    N: gl.constexpr = ks.shape[1]
    D: gl.constexpr = ks.shape[2]
    T: gl.constexpr = qs.shape[1]
    at = 0
    for turn in range(gl.cdiv(num_work - gl.program_id(0), gl.num_programs(0))):
        work = gl.program_id(0) + turn * gl.num_programs(0)
        place, blocks, head = _tile(tiles, work, num_tiles, N)
        token, shared_begin, own_begin = place[0], place[2], place[4]
        whole, own_whole, end, count = blocks
        unmasked = whole + own_whole
        mbarrier.wait(q_free, (turn & 1) ^ 1)
        mbarrier.expect(q_ready, 2 * 64 * D * 2)
        for group in gl.static_range(2):
            load(q, [token + group * T, head * HEADS, 0], q_ready, qs.index(group))
        for block in range(count):
            own = gl.where(block < unmasked, block - whole, block - whole - end)
            of_prefix = (block < whole) | ((block == unmasked) & (end > 0))
            begin = gl.where(of_prefix, shared_begin + gl.minimum(block, whole) * N, own_begin + own * N)
            s, phase = at % STAGES, (at // STAGES & 1) ^ 1
            mbarrier.wait(k_free.index(s), phase)
            mbarrier.expect(k_ready.index(s), N * D * 2)
            load(k, [begin, head * D], k_ready.index(s), ks.index(s))
            mbarrier.wait(v_free.index(s), phase)
            mbarrier.expect(v_ready.index(s), N * D * 2)
            load(v, [begin, head * D], v_ready.index(s), vs.index(s))
            at += 1


@gluon.jit
def _begin_scores(qs, ks, turns, at, GROUP: gl.constexpr):
    """Start the matmul of this group's queries with the loaded block `at`, in the group's turn."""
    N: gl.constexpr = ks.shape[1]
    D: gl.constexpr = ks.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    mbarrier.wait(turns.index(GROUP), (at & 1) ^ (1 - GROUP))
    return warpgroup_mma(
        qs.index(GROUP).reshape([64, D]),
        ks.index(at % ks.shape[0]).permute((1, 0)),
        gl.zeros([64, N], gl.float32, layout),
        use_acc=False,
        is_async=True,
    )


@gluon.jit
def _weigh(scores, sees, high, total, scale, MASKED: gl.constexpr):
    """Compute the weights of a block's scores [64, N], the first `sees` unmasked, and update the softmax's state.

    -> weights [64, N], high [64], total [64], factor of the sums so far [64]
    """
    if MASKED:
        column = gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, scores.type.layout))
        scores = gl.where(column[None, :] < sees[:, None], scores, -1e30)
    new_high = gl.maximum(high, gl.max(scores, 1))
    base = new_high * scale
    weights = gl.exp2(scores * scale - base[:, None])
    shrink = gl.exp2(high * scale - base)
    return weights, new_high, total * shrink + gl.sum(weights, 1), shrink


@gluon.jit
def _add_block(shared, state, at, sees, scale, MASKED: gl.constexpr, GROUP: gl.constexpr):
    """Compute the weights of block `at` during the matmul of the previous block's values."""
    qs, ks, vs, q_ready, q_free, k_ready, k_free, v_ready, v_free, turns = shared
    STAGES: gl.constexpr = ks.shape[0]
    weights, high, total, acc = state
    s, before = at % STAGES, (at - 1) % STAGES
    before_phase = (at - 1) // STAGES & 1
    mbarrier.wait(k_ready.index(s), at // STAGES & 1)
    mbarrier.wait(v_ready.index(before), before_phase)
    scores = _begin_scores(qs, ks, turns, at, GROUP)
    sums = warpgroup_mma(weights, vs.index(before), warpgroup_mma_init(acc), is_async=True)
    mbarrier.arrive(turns.index(1 - GROUP))
    scores = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(k_free.index(s))
    new_weights, high, total, shrink = _weigh(scores, sees, high, total, scale, MASKED)
    # It passes at once. Without a loop in between ptxas moves the exponentials after the wait for the sums.
    mbarrier.wait(v_ready.index(before), before_phase)
    acc = warpgroup_mma_wait(0, deps=(sums,))
    mbarrier.arrive(v_free.index(before))
    acc *= gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    return gl.convert_layout(new_weights.to(weights.dtype), weights.type.layout), high, total, acc


@gluon.jit
def _attend_tiles(
    shared, out, tiles, num_tiles, num_work, scale, out_token, out_head, GROUP: gl.constexpr, HEADS: gl.constexpr
):  # fmt: skip
    """Attend this group's 64 queries of each of the program's tiles."""
    qs, ks, vs, q_ready, q_free, k_ready, k_free, v_ready, v_free, turns = shared
    STAGES: gl.constexpr = ks.shape[0]
    N: gl.constexpr = ks.shape[1]
    D: gl.constexpr = ks.shape[2]
    PADDED: gl.constexpr = qs.shape[2]
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    queries: gl.constexpr = gl.SliceLayout(1, of_scores)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    at = 0
    for turn in range(gl.cdiv(num_work - gl.program_id(0), gl.num_programs(0))):
        work = gl.program_id(0) + turn * gl.num_programs(0)
        place, blocks, head = _tile(tiles, work, num_tiles, N)
        token, tokens, shared_len, before = place[0], place[1], place[3], place[5]
        whole, own_whole, end, count = blocks
        unmasked = whole + own_whole
        query = GROUP * 64 + gl.arange(0, 64, layout=queries)
        sees_own = before + query // PADDED + 1 - own_whole * N  # counted from the first masked own block on
        sees_end = shared_len - whole * N
        mbarrier.wait(q_ready, turn & 1)
        mbarrier.wait(k_ready.index(at % STAGES), at // STAGES & 1)
        scores = _begin_scores(qs, ks, turns, at, GROUP)
        mbarrier.arrive(turns.index(1 - GROUP))
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(k_free.index(at % STAGES))
        sees = gl.where(unmasked > 0, N, gl.where(end > 0, sees_end, sees_own))
        nothing = gl.full([64], -1e30, gl.float32, queries)
        weights, high, total, shrink = _weigh(scores, sees, nothing, gl.zeros([64], gl.float32, queries), scale, True)
        weights = gl.convert_layout(weights.to(qs.dtype), gl.DotOperandLayout(0, of_sums, 2))
        state = (weights, high, total, gl.zeros([64, D], gl.float32, of_sums))
        for block in range(1, unmasked):
            state = _add_block(shared, state, at + block, 0, scale, False, GROUP)
        for block in range(gl.maximum(unmasked, 1), count):
            of_prefix = (block == unmasked) & (end > 0)
            sees = gl.where(of_prefix, sees_end, sees_own - (block - unmasked - end) * N)
            state = _add_block(shared, state, at + block, sees, scale, True, GROUP)
        mbarrier.arrive(q_free)
        at += count
        weights, high, total, acc = state
        last = (at - 1) % STAGES
        mbarrier.wait(v_ready.index(last), (at - 1) // STAGES & 1)
        sums = warpgroup_mma(weights, vs.index(last), warpgroup_mma_init(acc), is_async=True)
        found = warpgroup_mma_wait(0, deps=(sums,))
        mbarrier.arrive(v_free.index(last))
        found = found / gl.convert_layout(total, gl.SliceLayout(1, of_sums))[:, None]
        found = gl.convert_layout(found.to(out.dtype.element_ty), wide)
        query = GROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, wide))
        d = gl.arange(0, D, layout=gl.SliceLayout(0, wide))
        row = (token + query // PADDED).to(gl.int64) * out_token + (head * HEADS + query % PADDED) * out_head
        ok = (query // PADDED < tokens) & (query % PADDED < HEADS)
        gl.store(out + row[:, None] + d[None, :], found, mask=ok[:, None])


@gluon.jit(do_not_specialize=["num_tiles", "num_work"])
def _attend(
    q, k, v, out, tiles, num_tiles, num_work, scale, out_token, out_head, HEADS: gl.constexpr, STAGES: gl.constexpr
):
    """Program (some of the tiles, of all KV heads)."""
    kind: gl.constexpr = q.dtype
    N: gl.constexpr = k.block_shape[0]
    D: gl.constexpr = k.block_shape[1]
    qs = gl.allocate_shared_memory(kind, [2, q.block_shape[0], q.block_shape[1], D], q.layout)
    ks = gl.allocate_shared_memory(kind, [STAGES, N, D], k.layout)
    vs = gl.allocate_shared_memory(kind, [STAGES, N, D], v.layout)
    one: gl.constexpr = mbarrier.MBarrierLayout()
    q_ready = gl.allocate_shared_memory(gl.int64, [1], one)
    q_free = gl.allocate_shared_memory(gl.int64, [1], one)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], one)
    mbarrier.init(q_ready, count=1)
    mbarrier.init(q_free, count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(v_free.index(stage), count=2)
    for group in gl.static_range(2):
        mbarrier.init(turns.index(group), count=1)
    fence_async_shared()
    shared = (qs, ks, vs, q_ready, q_free, k_ready, k_free, v_ready, v_free, turns)
    gl.warp_specialize(
        [
            (_attend_tiles, (shared, out, tiles, num_tiles, num_work, scale, out_token, out_head, 0, HEADS)),
            (_attend_tiles, (shared, out, tiles, num_tiles, num_work, scale, out_token, out_head, 1, HEADS)),
            (_read, (q, k, v, tiles, num_tiles, num_work, shared, HEADS)),
        ],
        [4, 1],  # warps
        [240, 24],  # registers of a thread
    )


def prompt_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: torch.Tensor, scale: float, out: torch.Tensor
) -> None:
    """Attend the tiles of a PromptLayout to its blocks, causally; softmax in float32.

    q      [num_tokens, num_heads, head_dim], of 16 bits, of the whole step, last dimension dense
    k, v   [num_laid_out, num_kv_heads, head_dim]: the result of lay_out, or dense K and V of the step; heads adjacent
    tiles  int32 [num_tiles, FIELDS], for this number of query heads of a KV head
    scale  above 0
    out    [num_tokens, num_heads, head_dim], dtype of q: the tiles' tokens are written
    """
    _, num_kv_heads, head_dim = k.shape
    group = q.shape[1] // num_kv_heads
    lanes = padded(group)
    num_work = len(tiles) * num_kv_heads
    num_sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    keys, values = (tiled(x.view(len(x), -1), BLOCK, head_dim) for x in (k, v))
    _attend[(min(num_work, num_sms),)](
        tiled(q, QUERIES // 2 // lanes, lanes, head_dim), keys, values, out, tiles, len(tiles), num_work, scale * LOG2E,
        out.stride(0), out.stride(1), HEADS=group, STAGES=STAGES, num_warps=4, maxnreg=168,
    )  # fmt: skip
