"""The first product of an MLP for 193 to 256 rows, with the gate inside, on Hopper.

Multiplying so many rows takes longer than reading the weight, at the card's limit of power, where what takes fewer
cycles takes a lower clock and less energy. So tiles are of half of the rows and 112 gates with what they are for: of
14,336 gates 128 of 132 multiprocessors have two each. Two programs read the weight of the same gates at the same time.
One warp has the copy engine bring in tiles of both factors, two groups of warps multiply them. 224 columns are three
products, so the rows are the first factor, in registers, and read once for all three. The groups hand over their
products in turns: those of one are under way while the other waits for its own, its next rows read already. This is in
Gluon, the level below Triton, which leaves loading and multiplying to the same warps on Hopper.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from graftlm.kernels.gpu.pdl import announce, chain, wait
from graftlm.kernels.hopper.tiles import K, barrier, gated_across, load, rounds, store, tiled

GATES = 112
"""Gates of a tile, and as many outputs that they are for: 64, 32 and 16 of them are products of their own."""

STAGES = 4
"""Inputs that shared memory has room for, in multiples of K."""


@gluon.jit
def _read_weight(weights, ws, ready, s, tile, step, pred):
    """Into stage `s`, the weight's part of a tile's step: 8, 4 and 2 blocks of eight gates and what they are for."""
    K: gl.constexpr = ws[0].shape[4]
    block = tile // 2 * 14
    load(weights[0], [block, 0, 0, step * K], ready.index(s), ws[0].index(s), pred=pred)
    load(weights[1], [block + 8, 0, 0, step * K], ready.index(s), ws[1].index(s), pred=pred)
    load(weights[2], [block + 12, 0, 0, step * K], ready.index(s), ws[2].index(s), pred=pred)


@gluon.jit
def _read(x, weights, shared, num_tiles, STEPS: gl.constexpr, CHAINED: gl.constexpr):
    """Fill the stages in turn, as they become free, with what this program's tiles need."""
    xs, ws, ready, free, _ = shared
    STAGES: gl.constexpr = ready.shape[0]
    K: gl.constexpr = xs.shape[2]
    BYTES: gl.constexpr = (128 + 224) * K * 2
    first, num_programs = gl.program_id(0), gl.num_programs(0)
    announce(CHAINED)
    for stage in gl.static_range(STAGES):  # no kernel before writes the weight
        mbarrier.expect(ready.index(stage), BYTES)
        _read_weight(weights, ws, ready, stage, first, stage, True)
    wait(CHAINED)
    for at in range((num_tiles - first + num_programs - 1) // num_programs * STEPS):
        s, step, later = at % STAGES, at % STEPS, at >= STAGES
        tile = first + at // STEPS * num_programs
        mbarrier.wait(free.index(s), (at // STAGES & 1) ^ 1)
        mbarrier.expect(ready.index(s), BYTES, pred=later)
        _read_weight(weights, ws, ready, s, tile, step, later)
        for group in gl.static_range(2):
            load(x, [(tile % 2 * 2 + group) * 64, step * K], ready.index(s), xs.index(s * 2 + group))


@gluon.jit
def _rows(xs, ready, at, GROUP: gl.constexpr):
    """This group's rows of a step, once they are there, as a first factor."""
    STAGES: gl.constexpr = ready.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    mbarrier.wait(ready.index(at % STAGES), at // STAGES & 1)
    return xs.index(at % STAGES * 2 + GROUP).load(gl.DotOperandLayout(0, layout, 2))


@gluon.jit
def _none(columns: gl.constexpr):
    """Sums [64, columns] of nothing."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])
    return warpgroup_mma_init(gl.zeros([64, columns], gl.float32, layout))


@gluon.jit
def _add(sums, x, weight, more, columns: gl.constexpr):
    """Begin to add x [64, K] @ weight [columns // 16, 2, 8, K].T to sums [64, columns]; without `more`, to nothing."""
    K: gl.constexpr = x.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])
    first = gl.convert_layout(x, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)
    return warpgroup_mma(first, weight.reshape([columns, K]).permute((1, 0)), sums, use_acc=more, is_async=True)


@gluon.jit
def _begin(sums, x, ws, turns, at, more, GROUP: gl.constexpr):
    """In this group's turn, begin the products of the step that is the `at`th of the program."""
    a, b, c = sums
    s = at % ws[0].shape[0]
    mbarrier.wait(turns.index(GROUP), (at & 1) ^ (1 - GROUP))
    a = _add(a, x, ws[0].index(s), more, 128)
    b = _add(b, x, ws[1].index(s), more, 64)
    c = _add(c, x, ws[2].index(s), more, 32)
    mbarrier.arrive(turns.index(1 - GROUP))
    return a, b, c


@gluon.jit
def _end(sums, free, at):
    """Wait for the products that were begun, and give back their stage."""
    a, b, c = warpgroup_mma_wait(0, deps=sums)
    mbarrier.arrive(free.index(at % free.shape[0]))
    return warpgroup_mma_init(a), warpgroup_mma_init(b), warpgroup_mma_init(c)


@gluon.jit
def _multiply(shared, tos, outs, num_tiles, GROUP: gl.constexpr, STEPS: gl.constexpr):
    """This group's 64 rows of each of the program's tiles."""
    xs, ws, ready, free, turns = shared
    at = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        last = at + STEPS - 1
        sums = (_none(128), _none(64), _none(32))
        x = _rows(xs, ready, at, GROUP)
        for pair in range(STEPS // 2):  # so that the rows of two steps that follow have registers of their own
            sums = _begin(sums, x, ws, turns, at, pair > 0, GROUP)
            other_x = _rows(xs, ready, at + 1, GROUP)
            sums = _end(sums, free, at)
            sums = _begin(sums, other_x, ws, turns, at + 1, True, GROUP)
            x = _rows(xs, ready, gl.minimum(at + 2, last), GROUP)
            sums = _end(sums, free, at + 1)
            at += 2
        found = warpgroup_mma_wait(0, deps=sums)
        row, gate = (tile % 2 * 2 + GROUP) * 64, tile // 2 * 112
        tma.store_wait(0)
        barrier()
        for i in gl.static_range(3):
            tos[i].index(GROUP).store(gated_across(found[i], tos[i]))
        fence_async_shared()
        barrier()
        store(outs[0], [row, gate], tos[0].index(GROUP))
        store(outs[1], [row, gate + 64], tos[1].index(GROUP))
        store(outs[2], [row, gate + 96], tos[2].index(GROUP))
    tma.store_wait(0)


@gluon.jit
def _gated(
    x, weight_a, weight_b, weight_c, out_a, out_b, out_c, num_tiles,
    K: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, CHAINED: gl.constexpr,
):  # fmt: skip
    """Program (some of the tiles of 128 rows, 112 gates and the 112 outputs that they are for)."""
    kind: gl.constexpr = x.dtype
    xs = gl.allocate_shared_memory(kind, [STAGES * 2, 64, K], x.layout)
    ws = (
        gl.allocate_shared_memory(kind, [STAGES, 8, 2, 8, K], weight_a.layout),
        gl.allocate_shared_memory(kind, [STAGES, 4, 2, 8, K], weight_b.layout),
        gl.allocate_shared_memory(kind, [STAGES, 2, 2, 8, K], weight_c.layout),
    )
    tos = (
        gl.allocate_shared_memory(kind, [2, 64, 64], out_a.layout),
        gl.allocate_shared_memory(kind, [2, 64, 32], out_b.layout),
        gl.allocate_shared_memory(kind, [2, 64, 16], out_c.layout),
    )
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    for group in gl.static_range(2):
        mbarrier.init(turns.index(group), count=1)
    fence_async_shared()
    shared = (xs, ws, ready, free, turns)
    outs = (out_a, out_b, out_c)
    gl.warp_specialize(
        [
            (_multiply, (shared, tos, outs, num_tiles, 0, STEPS)),
            (_multiply, (shared, tos, outs, num_tiles, 1, STEPS)),
            (_read, (x, (weight_a, weight_b, weight_c), shared, num_tiles, STEPS, CHAINED)),
        ],
        [4, 1],  # warps
        [240, 24],  # registers of a thread
    )


def most_gates(n: int, device: torch.device) -> int:
    """How many of `n` gates a program multiplies with 256 rows, at most; a tile, of half of them, counts half."""
    return rounds(2 * triton.cdiv(n, GATES), device) * GATES // 2


def launch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """out [num_rows, n] = silu(gate) * up, where x [num_rows, k] @ weight [2 n, k].T is both, the gates first.

    All contiguous and of one type of 16 bits; at most 256 rows; k a multiple of 128. What else they have to be:
    wide_gate.py.
    """
    k, n = x.shape[1], out.shape[1]
    num_tiles = 2 * triton.cdiv(n, GATES)
    # each program has as many tiles: those that would have one less would only draw power meanwhile
    num_programs = triton.cdiv(num_tiles, rounds(num_tiles, x.device))
    beside = weight.view(2, n // 8, 8, k).transpose(0, 1)  # eight gates, then what they are for
    _gated[(num_programs,)](
        tiled(x, 64, K), tiled(beside, 8, 2, 8, K), tiled(beside, 4, 2, 8, K), tiled(beside, 2, 2, 8, K),
        tiled(out, 64, 64), tiled(out, 64, 32), tiled(out, 64, 16), num_tiles,
        K=K, STEPS=k // K, STAGES=min(STAGES, k // K), num_warps=4, maxnreg=168, **chain(x),
    )  # fmt: skip
