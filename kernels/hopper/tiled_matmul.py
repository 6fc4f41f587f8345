"""The matmul of more than 64 rows with a weight on Hopper, each output summed in the order of prefetch_matmul.py.

Every output is summed over its inputs from the first to the last, sixteen at a time, within each of a number of parts
that does not depend on the rows. A row's result is equal to the bit for every number of rows and every tile, and in
both kernels. One warp loads tiles of both factors by the copy engine, two groups of warps multiply them, the weight as
the first factor. The kernel is in Gluon, the level below Triton: on Hopper Triton cannot assign loads and matmuls to
different warps.
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
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from graftlm.kernels.gpu.pdl import grid_wait, launch_dependents, pdl_options
from graftlm.kernels.hopper.prefetch_matmul import BOXES
from graftlm.kernels.hopper.tiles import K, load, place, tiled

BAND = 8
"""Tiles of rows whose rows of x stay in the second-level cache while the weight is read."""

_SHARED = 200 * 1024
"""Bytes of shared memory for the stages of a program."""


@gluon.jit
def _read_weight(weight, shared, s, tile, inputs, pred):
    """Load the weight of a tile's step into stage `s`."""
    _, ws, ready, _ = shared
    BOXES: gl.constexpr = ws.shape[0] // ready.shape[0]
    for box in gl.static_range(BOXES):
        load(weight, [(tile * BOXES + box) * 64, inputs], ready.index(s), ws.index(s * BOXES + box), pred=pred)


@gluon.jit
def _read(x, weight, shared, sizes, BAND: gl.constexpr, PARTS: gl.constexpr, PDL: gl.constexpr):
    """Fill the stages with this program's items in order, as stages become free."""
    xs, ws, ready, free = shared
    across, down, num_items, steps = sizes
    STAGES: gl.constexpr = ready.shape[0]
    BOXES: gl.constexpr = xs.shape[0] // STAGES
    K: gl.constexpr = xs.shape[2]
    BYTES: gl.constexpr = (xs.shape[0] * xs.shape[1] + ws.shape[0] * ws.shape[1]) // STAGES * K * 2
    first, num_programs = gl.program_id(0), gl.num_programs(0)
    launch_dependents(PDL)
    _, tile = place(first % (across * down), across, down, BAND)
    begin = first // (across * down) * steps
    for stage in gl.static_range(STAGES):  # no kernel before writes the weight
        mbarrier.expect(ready.index(stage), BYTES)
        _read_weight(weight, shared, stage, tile, (begin + stage) * K, True)
    grid_wait(PDL)
    at = 0
    for item in range(first, num_items, num_programs):
        row, tile = place(item % (across * down), across, down, BAND)
        begin = item // (across * down) * steps
        for step in range(begin, begin + steps * PARTS):
            s, later = at % STAGES, at >= STAGES
            mbarrier.wait(free.index(s), (at // STAGES & 1) ^ 1)
            mbarrier.expect(ready.index(s), BYTES, pred=later)
            _read_weight(weight, shared, s, tile, step * K, later)
            for box in gl.static_range(BOXES):
                load(x, [(row * BOXES + box) * xs.shape[1], step * K], ready.index(s), xs.index(s * BOXES + box))
            at += 1


@gluon.jit
def _multiply(
    shared, bias, out, num_rows, n, sizes,
    GROUP: gl.constexpr, BAND: gl.constexpr, PARTS: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Compute this group's half of each of the program's tiles: 64 outputs, or half of the rows."""
    xs, ws, ready, free = shared
    across, down, num_items, steps = sizes
    STAGES: gl.constexpr = ready.shape[0]
    X_BOXES: gl.constexpr = xs.shape[0] // STAGES
    W_BOXES: gl.constexpr = ws.shape[0] // STAGES
    ROWS: gl.constexpr = xs.shape[1]
    X: gl.constexpr = GROUP * (X_BOXES - 1)
    W: gl.constexpr = GROUP * (W_BOXES - 1)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    at = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        total = gl.zeros([64, ROWS], gl.float32, layout)
        for _ in range(PARTS):
            sums = warpgroup_mma_init(gl.zeros([64, ROWS], gl.float32, layout))
            for step in range(steps):
                s = at % STAGES
                mbarrier.wait(ready.index(s), at // STAGES & 1)
                factor = xs.index(s * X_BOXES + X).permute((1, 0))
                sums = warpgroup_mma(ws.index(s * W_BOXES + W), factor, sums, use_acc=step > 0, is_async=True)
                # waits for the previous step's matmul, not for this one's
                sums = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(sums,)))
                mbarrier.arrive(free.index((at + STAGES - 1) % STAGES), pred=step > 0)
                at += 1
            found = warpgroup_mma_wait(0, deps=(sums,))
            mbarrier.arrive(free.index((at + STAGES - 1) % STAGES))
            if PARTS > 1:
                total += found
            else:
                total = found
        row, tile = place(item % (across * down), across, down, BAND)
        first = (tile * W_BOXES + W) * 64
        i = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        if BIAS:
            total += gl.load(bias + first + i, mask=first + i < n, other=0.0).to(gl.float32)[:, None]
        row = (row * X_BOXES + X) * ROWS
        there = out + (item // (across * down) * num_rows + row).to(gl.int64) * n + first
        r = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
        mask = (row + r < num_rows)[None, :] & (first + i < n)[:, None]
        gl.store(there + (r * n)[None, :] + i[:, None], total.to(out.dtype.element_ty), mask=mask)


@gluon.jit(do_not_specialize=["num_rows", "across", "down", "num_items", "steps"])
def _tiled(
    x, weight, bias, out, num_rows, n, across, down, num_items, steps,
    ROWS: gl.constexpr, X_BOXES: gl.constexpr, W_BOXES: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr,
    BAND: gl.constexpr, PARTS: gl.constexpr, BIAS: gl.constexpr, REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program (some of the items: a tile of rows and outputs, one part of the inputs or all of them)."""
    xs = gl.allocate_shared_memory(x.dtype, [STAGES * X_BOXES, ROWS, K], x.layout)
    ws = gl.allocate_shared_memory(x.dtype, [STAGES * W_BOXES, 64, K], weight.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    shared = (xs, ws, ready, free)
    sizes = (across, down, num_items, steps)
    gl.warp_specialize(
        [
            (_multiply, (shared, bias, out, num_rows, n, sizes, 0, BAND, PARTS, BIAS)),
            (_multiply, (shared, bias, out, num_rows, n, sizes, 1, BAND, PARTS, BIAS)),
            (_read, (x, weight, shared, sizes, BAND, PARTS, PDL)),
        ],
        [4, 1],  # warps
        [REGISTERS, 24],  # registers of a thread
    )


class Tile(NamedTuple):
    """The tile of the kernel: rows of a box of x, boxes of x, boxes of the weight of 64 outputs each.

    One of the factors has two boxes, one for each group of warps.
    """

    rows: int
    x_boxes: int
    w_boxes: int

    @property
    def stages(self) -> int:
        return _SHARED // ((self.rows * self.x_boxes + 64 * self.w_boxes) * K * 2)


SQUARE, WIDE, NARROW = Tile(128, 1, 2), Tile(256, 1, 2), Tile(64, 2, 1)


def tile_of(num_rows: int, n: int, num_parts: int, num_sms: int, *, summed: bool) -> Tile:
    """Return the fastest measured tile.

    summed  whether a program sums all parts, for which a large tile has too few registers
    """
    across = triton.cdiv(n, 128) * (1 if summed else num_parts)
    if num_rows <= 128:
        return NARROW if 3 * across < 2 * num_sms else SQUARE
    return WIDE if not summed and across * triton.cdiv(num_rows, 256) >= 4 * num_sms else SQUARE


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    num_parts: int = 1,
    tile: Tile | None = None,
) -> None:
    """Compute x [num_rows, k] @ weight [n, k].T + bias [n], or its parts. -> out [1 or num_parts, num_rows, n]

    x and the weight contiguous and of one type of 16 bits that `takes` of hopper/support.py accepts; k at least
    128 * num_parts, one part with a bias.
    """
    (num_rows, k), (given_parts, _, n) = x.shape, out.shape
    summed = given_parts < num_parts
    num_sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    tile = tile or tile_of(num_rows, n, num_parts, num_sms, summed=summed)
    across, down = triton.cdiv(n, 64 * tile.w_boxes), triton.cdiv(num_rows, tile.rows * tile.x_boxes)
    # parts are those of prefetch_matmul.py; zeros follow the inputs
    steps, num_items = triton.cdiv(k, num_parts * K * BOXES) * BOXES, across * down * given_parts
    _tiled[(min(num_items, num_sms),)](
        tiled(x, tile.rows, K), tiled(weight, 64, K), bias if bias is not None else x, out,
        num_rows, n, across, down, num_items, steps,
        ROWS=tile.rows, X_BOXES=tile.x_boxes, W_BOXES=tile.w_boxes, K=K, STAGES=min(tile.stages, steps), BAND=BAND,
        PARTS=num_parts if summed else 1, BIAS=bias is not None,
        REGISTERS=240, num_warps=4, maxnreg=168, **pdl_options(x),
    )  # fmt: skip
