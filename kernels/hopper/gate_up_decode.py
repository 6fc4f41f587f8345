"""Gate and up projections with their activation in one kernel, for up to 256 rows, on Hopper.

Reading the weight once takes as long as the arithmetic or longer. One warp loads tiles of both factors by the copy
engine, two groups of warps multiply them, the weight as the first factor. Each eight gates are interleaved with their
eight ups, so that a thread holds both factors of a pair among its sums: the output of the matmul, twice the size of the
result, is never stored. The kernel is in Gluon, the level below Triton: on Hopper Triton cannot assign loads and
matmuls to different warps.
"""

from __future__ import annotations

from typing import NamedTuple

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

from graftlm.kernels.activation import Activation
from graftlm.kernels.gpu.pdl import grid_wait, launch_dependents, pdl_options
from graftlm.kernels.hopper.tiles import K, barrier, gated, load, rounds, store, tiled


@gluon.jit
def _read_weight(weight, shared, s, tile, step, pred):
    """Load the weight of a tile's step into stage `s`: two blocks of 64 outputs."""
    xs, _, ws, ready, _ = shared
    for block in gl.static_range(2):
        place = [(tile * 2 + block) * 4, 0, 0, step * xs.shape[2]]
        load(weight, place, ready.index(s), ws.index(s * 2 + block), pred=pred)


@gluon.jit
def _read(
    x, more_x, weight, shared, num_tiles,
    MORE: gl.constexpr, STEPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Fill the stages with this program's tiles in order, as stages become free."""
    xs, more_xs, ws, ready, free = shared
    STAGES: gl.constexpr = xs.shape[0]
    ROWS: gl.constexpr = xs.shape[1]
    BYTES: gl.constexpr = (ROWS + MORE + 128) * xs.shape[2] * 2
    first, num_programs = gl.program_id(0), gl.num_programs(0)
    launch_dependents(PDL)
    for stage in gl.static_range(STAGES):  # no kernel before writes the weight
        mbarrier.expect(ready.index(stage), BYTES)
        _read_weight(weight, shared, stage, first, stage, True)
    grid_wait(PDL)
    for at in range((num_tiles - first + num_programs - 1) // num_programs * STEPS):
        s, step, later = at % STAGES, at % STEPS, at >= STAGES
        mbarrier.wait(free.index(s), (at // STAGES & 1) ^ 1)
        mbarrier.expect(ready.index(s), BYTES, pred=later)
        _read_weight(weight, shared, s, first + at // STEPS * num_programs, step, later)
        load(x, [0, step * xs.shape[2]], ready.index(s), xs.index(s))
        if MORE > 0:
            load(more_x, [ROWS, step * xs.shape[2]], ready.index(s), more_xs.index(s))


@gluon.jit
def _gate(sums, to, out, row, gate, ACTIVATION: gl.constexpr):
    """Store the gated form of sums [64, rows] (eight gates, their eight ups, and so on) through shared memory `to`."""
    found = gated(sums, to.dtype, ACTIVATION)
    tma.store_wait(0)
    barrier()
    to.store(gl.permute(found, [1, 0]))
    fence_async_shared()
    barrier()
    store(out, [row, gate], to)


@gluon.jit
def _multiply(
    shared, to, more_to, out, more_out, num_tiles,
    GROUP: gl.constexpr, MORE: gl.constexpr, STEPS: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Compute this group's block of 64 outputs of each of the program's tiles."""
    xs, more_xs, ws, ready, free = shared
    STAGES: gl.constexpr = xs.shape[0]
    ROWS: gl.constexpr = xs.shape[1]
    K: gl.constexpr = xs.shape[2]
    at = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        sums = warpgroup_mma_init(
            gl.zeros([64, ROWS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16]))
        )
        if MORE > 0:
            more = warpgroup_mma_init(
                gl.zeros([64, MORE], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MORE, 16]))
            )
        for step in range(STEPS):
            s = at % STAGES
            mbarrier.wait(ready.index(s), at // STAGES & 1)
            w = ws.index(s * 2 + GROUP).reshape([64, K])
            sums = warpgroup_mma(w, xs.index(s).permute((1, 0)), sums, use_acc=step > 0, is_async=True)
            # waits for the previous step's matmul, not for this one's
            if MORE > 0:
                more = warpgroup_mma(w, more_xs.index(s).permute((1, 0)), more, use_acc=step > 0, is_async=True)
                a, b = warpgroup_mma_wait(2, deps=(sums, more))
                sums, more = warpgroup_mma_init(a), warpgroup_mma_init(b)
            else:
                sums = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(sums,)))
            mbarrier.arrive(free.index((at + STAGES - 1) % STAGES), pred=step > 0)
            at += 1
        gate = (tile * 2 + GROUP) * 32
        if MORE > 0:
            a, b = warpgroup_mma_wait(0, deps=(sums, more))
        else:
            a = warpgroup_mma_wait(0, deps=(sums,))
        mbarrier.arrive(free.index((at + STAGES - 1) % STAGES))
        _gate(a, to.index(GROUP), out, 0, gate, ACTIVATION)
        if MORE > 0:
            _gate(b, more_to.index(GROUP), more_out, ROWS, gate, ACTIVATION)
    tma.store_wait(0)


@gluon.jit
def _gated(
    x, more_x, weight, out, more_out, num_tiles,
    ROWS: gl.constexpr, MORE: gl.constexpr, K: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr, REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program (some of the tiles of 64 gates and their 64 ups)."""
    kind: gl.constexpr = x.dtype
    xs = gl.allocate_shared_memory(kind, [STAGES, ROWS, K], x.layout)
    ws = gl.allocate_shared_memory(kind, [STAGES * 2, 4, 2, 8, K], weight.layout)
    to = gl.allocate_shared_memory(kind, [2, ROWS, 32], out.layout)
    more_xs, more_to = xs, to
    if MORE > 0:
        more_xs = gl.allocate_shared_memory(kind, [STAGES, MORE, K], more_x.layout)
        more_to = gl.allocate_shared_memory(kind, [2, MORE, 32], more_out.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    shared = (xs, more_xs, ws, ready, free)
    gl.warp_specialize(
        [
            (_multiply, (shared, to, more_to, out, more_out, num_tiles, 0, MORE, STEPS, ACTIVATION)),
            (_multiply, (shared, to, more_to, out, more_out, num_tiles, 1, MORE, STEPS, ACTIVATION)),
            (_read, (x, more_x, weight, shared, num_tiles, MORE, STEPS, PDL)),
        ],
        [4, 1],  # warps
        [REGISTERS, 24],  # registers of a thread
    )


MAX_ROWS = 256

GATES = 64
"""Gates of a tile, and as many ups."""


class Tile(NamedTuple):
    """The tile of the kernel: rows of one matmul and of a second in the same program, stages of inputs.

    registers  of a multiplying thread, and of every thread at the start. With few rows the previous kernel fits on the
               same multiprocessor.
    """

    rows: int
    more: int
    stages: int
    registers: tuple[int, int] = (240, 168)


TILES = (
    Tile(16, 0, 10, (104, 80)), Tile(64, 0, 8, (104, 80)), Tile(64, 32, 7), Tile(128, 0, 6), Tile(128, 32, 5),
    Tile(128, 64, 5), Tile(256, 0, 4),
)  # fmt: skip
"""Tiles that fit in shared memory. Rows of padding cost no reads, but they cost arithmetic."""


def tile_of(num_rows: int) -> Tile:
    """Return the first of `TILES` with at least `num_rows` rows."""
    return next(tile for tile in TILES if num_rows <= tile.rows + tile.more)


def launch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, activation: Activation = "silu") -> None:
    """Compute out [num_rows, n] = activation(gate) * up of x [num_rows, k] @ weight [2 n, k].T, gates first.

    All contiguous and of one type of 16 bits, n in eights, k in 64s; up to MAX_ROWS rows.
    """
    (num_rows, k), n = x.shape, out.shape[1]
    rows, more, stages, (registers, at_start) = tile_of(num_rows)
    num_tiles = triton.cdiv(n, GATES)
    # all programs have an equal number of tiles: an idle program would only draw power
    num_programs = triton.cdiv(num_tiles, rounds(num_tiles, x.device))
    beside = weight.view(2, n // 8, 8, k).transpose(0, 1)  # eight gates, then their ups
    _gated[(num_programs,)](
        tiled(x, rows, K), tiled(x, more or rows, K), tiled(beside, 4, 2, 8, K),
        tiled(out, rows, 32), tiled(out, more or rows, 32), num_tiles,
        ROWS=rows, MORE=more, K=K, STEPS=k // K, STAGES=min(stages, k // K), ACTIVATION=activation,
        REGISTERS=registers, num_warps=4, maxnreg=at_start, **pdl_options(x),
    )  # fmt: skip


def gate_up(x: torch.Tensor, weight: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """Compute activation(gate) * up of x [num_rows, k] @ weight [2 n, k].T, gates first. -> [num_rows, n]"""
    out = torch.empty(x.shape[0], weight.shape[0] // 2, dtype=x.dtype, device=x.device)
    launch(x, weight, out, activation)
    return out
