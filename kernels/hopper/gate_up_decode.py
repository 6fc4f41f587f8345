"""Gate and up projections with their activation in one kernel, for up to 256 rows, on Hopper.

Such a step reads the weight once, which takes as long as its arithmetic does or longer. One warp has the copy engine
bring in tiles of both factors, two groups of warps multiply them, the weight as the first factor. Each eight gates
are laid beside the eight outputs that they are for, so that a thread has both of a pair among its sums: what a
library's product writes and a second kernel reads, twice as much as the result, is never stored. This is in Gluon,
the level below Triton, which leaves loading and multiplying to the same warps on Hopper.
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
    """Into stage `s`, the weight's part of a tile's step: two blocks of 64 outputs."""
    xs, _, ws, ready, _ = shared
    for block in gl.static_range(2):
        place = [(tile * 2 + block) * 4, 0, 0, step * xs.shape[2]]
        load(weight, place, ready.index(s), ws.index(s * 2 + block), pred=pred)


@gluon.jit
def _read(
    x, more_x, weight, shared, num_tiles,
    MORE: gl.constexpr, STEPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Fill the stages in turn, as they become free, with what this program's tiles need."""
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
    """Store the gated form of sums [64, rows]: eight gates, the eight that they are for, and so on. By way of `to`"""
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
    """This group's block of 64 outputs of each of the program's tiles."""
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
            # the step before is waited for, this one is not
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
    """Program (some of the tiles of 64 gates and the 64 outputs that they are for)."""
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
"""Gates of a tile, and as many outputs that they are for."""


class Tile(NamedTuple):
    """How the kernel is cut: rows of one product and of a second beside it, stages of inputs.

    registers  of a thread: one that multiplies, and all when they start. With few rows there is room for the kernel
               before on the same multiprocessor.
    """

    rows: int
    more: int
    stages: int
    registers: tuple[int, int] = (240, 168)


TILES = (
    Tile(16, 0, 10, (104, 80)), Tile(64, 0, 8, (104, 80)), Tile(64, 32, 7), Tile(128, 0, 6), Tile(128, 32, 5),
    Tile(128, 64, 5), Tile(256, 0, 4),
)  # fmt: skip
"""Tiles that fit in shared memory. Rows of padding take no time to read, but they take time to multiply."""


def tile_of(num_rows: int) -> Tile:
    """The first of `TILES` that has as many rows."""
    return next(tile for tile in TILES if num_rows <= tile.rows + tile.more)


def launch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, activation: Activation = "silu") -> None:
    """out [num_rows, n] = activation(gate) * up, where x [num_rows, k] @ weight [2 n, k].T is both, the gates first.

    All contiguous and of one type of 16 bits, n in eights, k in 64s; up to MAX_ROWS rows.
    """
    (num_rows, k), n = x.shape, out.shape[1]
    rows, more, stages, (registers, at_start) = tile_of(num_rows)
    num_tiles = triton.cdiv(n, GATES)
    # each program has as many tiles: those that would have one less would only draw power meanwhile
    num_programs = triton.cdiv(num_tiles, rounds(num_tiles, x.device))
    beside = weight.view(2, n // 8, 8, k).transpose(0, 1)  # eight gates, then what they are for
    _gated[(num_programs,)](
        tiled(x, rows, K), tiled(x, more or rows, K), tiled(beside, 4, 2, 8, K),
        tiled(out, rows, 32), tiled(out, more or rows, 32), num_tiles,
        ROWS=rows, MORE=more, K=K, STEPS=k // K, STAGES=min(stages, k // K), ACTIVATION=activation,
        REGISTERS=registers, num_warps=4, maxnreg=at_start, **pdl_options(x),
    )  # fmt: skip


def gate_up(x: torch.Tensor, weight: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """activation(gate) * up, where x [num_rows, k] @ weight [2 n, k].T is both, the gates first. -> [num_rows, n]"""
    out = torch.empty(x.shape[0], weight.shape[0] // 2, dtype=x.dtype, device=x.device)
    launch(x, weight, out, activation)
    return out
