"""The matmul of few rows with a quantised weight (codes/tiled_weight.py) on Hopper.

As in bits12/matmul.py one warp fills shared memory with codes and scales before it waits for earlier kernels, and two
to four teams of warps share the stages: each decodes to the first factor in its registers during the others' matmuls.
Few rows take the time of reading the codes. The kernel is in Gluon, the level below Triton.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from graftlm.kernels.activation import Activation
from graftlm.kernels.bits12.code_tiles import store_rows
from graftlm.kernels.codes.code_tiles import allocate, block_sums, hand_over, lines_layout, read_tile, take_over
from graftlm.kernels.codes.tiled_weight import INPUTS, OUTPUTS, TiledParts, TiledWeight
from graftlm.kernels.gpu.pdl import grid_wait, launch_dependents, pdl_options
from graftlm.kernels.hopper.prefetch_matmul import num_parts
from graftlm.kernels.hopper.tiles import gated, load, tiled

ROWS = 64
"""The largest number of rows of one launch."""
MAX_STAGES = 16


class Layout(NamedTuple):
    """The teams of a program, the registers of a thread, and bytes of shared memory for stages and sums."""

    teams: int
    registers: int
    shared: int


LAYOUTS = {16: Layout(4, 96, 190 * 1024), 32: Layout(3, 120, 190 * 1024), 64: Layout(2, 168, 190 * 1024)}
"""Layouts by the rows of a tile. A smaller one for 16 rows, of which two fit on a multiprocessor, took 1.25 times as
long with linear layers of an 8B model."""


@gluon.jit
def _read(x, codes, scales, shared, sizes, tiles, SHAPE: gl.constexpr, SCALE_LINES: gl.constexpr, PDL: gl.constexpr):
    """Fill the stages with this program's items in order, as stages become free."""
    xs, _, _, ready, free = shared
    num_items, num_blocks, steps = sizes
    STAGES: gl.constexpr = ready.shape[0]
    ROWS: gl.constexpr = SHAPE[0]
    K: gl.constexpr = SHAPE[1]
    BOXES: gl.constexpr = 128 // K
    BYTES: gl.constexpr = ROWS * 256 + SHAPE[2] * 1024 + SHAPE[3] * 128
    first, num_programs = gl.program_id(0), gl.num_programs(0)
    launch_dependents(PDL)
    for stage in gl.static_range(STAGES):  # no kernel before writes the weight
        mbarrier.expect(ready.index(stage), BYTES)
        tile = first % num_blocks * tiles + first // num_blocks * steps + stage
        read_tile(codes, scales, shared, stage, tile, True, SHAPE, SCALE_LINES)
    grid_wait(PDL)
    at = 0
    for item in range(first, num_items, num_programs):
        block, begin = item % num_blocks, item // num_blocks * steps
        for step in range(steps):
            s, later = at % STAGES, at >= STAGES
            mbarrier.wait(free.index(s), (at // STAGES & 1) ^ 1)
            mbarrier.expect(ready.index(s), BYTES, pred=later)
            read_tile(codes, scales, shared, s, block * tiles + begin + step, later, SHAPE, SCALE_LINES)
            for box in gl.static_range(BOXES):
                load(x, [0, (begin + step) * 128 + box * K], ready.index(s), xs.index(s * BOXES + box))
            at += 1


@gluon.jit
def _multiply(
    shared, given, handed, scales, bias, out, counts, sizes,
    TEAM: gl.constexpr, SHAPE: gl.constexpr, GROUPS: gl.constexpr, KIND: gl.constexpr, TABLE: gl.constexpr,
    BIAS: gl.constexpr, GATE: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Compute a team's steps of each of the program's items; the first team stores the sum of all teams."""
    ROWS: gl.constexpr = SHAPE[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    num_items, num_blocks, steps = sizes
    num_rows, n, out_row = counts
    at, num_programs = 0, gl.num_programs(0)
    for item in range(gl.program_id(0), num_items, num_programs):
        block, turn = item % num_blocks, item // num_programs & 1
        sums = block_sums(shared, at, steps, TEAM, SHAPE, GROUPS, KIND, TABLE)
        at += steps
        if TEAM > 0:
            hand_over(sums, given, handed, TEAM, turn)
        else:
            sums = take_over(sums, given, handed, SHAPE[4], turn)
            if GROUPS == 0:
                i = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
                sums *= gl.load(scales + i)[:, None]
            if GATE:
                store_rows(gated(sums, out.dtype.element_ty, ACTIVATION), out, 0, num_rows, block * 32, n)
            else:
                if BIAS:
                    i = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
                    sums += gl.load(bias + i, mask=i < n, other=0.0).to(gl.float32)[:, None]
                _store(sums, out + item // num_blocks * num_rows * out_row, num_rows, block * 64, n, out_row)


@gluon.jit
def _store(found, out, num_rows, first, n, out_row):
    """Store found [outputs, rows] to out [rows, out_row] from output `first` on."""
    layout: gl.constexpr = found.type.layout
    i = first + gl.arange(0, found.shape[0], layout=gl.SliceLayout(1, layout))
    row = gl.arange(0, found.shape[1], layout=gl.SliceLayout(0, layout))
    target = out + row[None, :] * out_row + i[:, None]
    gl.store(target, found.to(out.dtype.element_ty), mask=(row < num_rows)[None, :] & (i < n)[:, None])


@gluon.jit(do_not_specialize=["num_rows", "num_items", "num_blocks", "steps", "tiles"])
def _codes(
    x_tiles, codes, scale_tiles, scales, bias, out, num_rows, n, out_row, num_items, num_blocks, steps, tiles,
    SHAPE: gl.constexpr, SCALE_LINES: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr, KIND: gl.constexpr,
    TABLE: gl.constexpr, BIAS: gl.constexpr, GATE: gl.constexpr, ACTIVATION: gl.constexpr, REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Program (some of the items: a block of outputs, a part of the inputs)."""
    shared, given, handed = allocate(x_tiles, codes, scale_tiles, SHAPE, STAGES)
    sizes, counts = (num_items, num_blocks, steps), (num_rows, n, out_row)
    if SHAPE[4] == 4:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        shared,
                        given,
                        handed,
                        scales,
                        bias,
                        out,
                        counts,
                        sizes,
                        0,
                        SHAPE,
                        GROUPS,
                        KIND,
                        TABLE,
                        BIAS,
                        GATE,
                        ACTIVATION,
                    ),
                ),
                (
                    _multiply,
                    (
                        shared,
                        given,
                        handed,
                        scales,
                        bias,
                        out,
                        counts,
                        sizes,
                        1,
                        SHAPE,
                        GROUPS,
                        KIND,
                        TABLE,
                        BIAS,
                        GATE,
                        ACTIVATION,
                    ),
                ),
                (
                    _multiply,
                    (
                        shared,
                        given,
                        handed,
                        scales,
                        bias,
                        out,
                        counts,
                        sizes,
                        2,
                        SHAPE,
                        GROUPS,
                        KIND,
                        TABLE,
                        BIAS,
                        GATE,
                        ACTIVATION,
                    ),
                ),
                (
                    _multiply,
                    (
                        shared,
                        given,
                        handed,
                        scales,
                        bias,
                        out,
                        counts,
                        sizes,
                        3,
                        SHAPE,
                        GROUPS,
                        KIND,
                        TABLE,
                        BIAS,
                        GATE,
                        ACTIVATION,
                    ),
                ),
                (_read, (x_tiles, codes, scale_tiles, shared, sizes, tiles, SHAPE, SCALE_LINES, PDL)),
            ],
            [4, 4, 4, 1],  # warps
            [REGISTERS, REGISTERS, REGISTERS, 24],  # registers of a thread
        )
    elif SHAPE[4] == 3:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        shared,
                        given,
                        handed,
                        scales,
                        bias,
                        out,
                        counts,
                        sizes,
                        0,
                        SHAPE,
                        GROUPS,
                        KIND,
                        TABLE,
                        BIAS,
                        GATE,
                        ACTIVATION,
                    ),
                ),
                (
                    _multiply,
                    (
                        shared,
                        given,
                        handed,
                        scales,
                        bias,
                        out,
                        counts,
                        sizes,
                        1,
                        SHAPE,
                        GROUPS,
                        KIND,
                        TABLE,
                        BIAS,
                        GATE,
                        ACTIVATION,
                    ),
                ),
                (
                    _multiply,
                    (
                        shared,
                        given,
                        handed,
                        scales,
                        bias,
                        out,
                        counts,
                        sizes,
                        2,
                        SHAPE,
                        GROUPS,
                        KIND,
                        TABLE,
                        BIAS,
                        GATE,
                        ACTIVATION,
                    ),
                ),
                (_read, (x_tiles, codes, scale_tiles, shared, sizes, tiles, SHAPE, SCALE_LINES, PDL)),
            ],
            [4, 4, 1],  # warps
            [REGISTERS, REGISTERS, 24],  # registers of a thread
        )
    else:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        shared,
                        given,
                        handed,
                        scales,
                        bias,
                        out,
                        counts,
                        sizes,
                        0,
                        SHAPE,
                        GROUPS,
                        KIND,
                        TABLE,
                        BIAS,
                        GATE,
                        ACTIVATION,
                    ),
                ),
                (
                    _multiply,
                    (
                        shared,
                        given,
                        handed,
                        scales,
                        bias,
                        out,
                        counts,
                        sizes,
                        1,
                        SHAPE,
                        GROUPS,
                        KIND,
                        TABLE,
                        BIAS,
                        GATE,
                        ACTIVATION,
                    ),
                ),
                (_read, (x_tiles, codes, scale_tiles, shared, sizes, tiles, SHAPE, SCALE_LINES, PDL)),
            ],
            [4, 1],  # warps
            [REGISTERS, 24],  # registers of a thread
        )


def stages_of(rows: int, weight: TiledWeight, steps: int, layout: Layout) -> int:
    """Return the number of stages that fit: a multiple of the teams, so that each stage belongs to one of them."""
    free = layout.shared - (layout.teams - 1) * OUTPUTS * rows * 4
    fitting = free // (rows * 256 + weight.bits * 1024 + scale_lines(weight) * 128)
    return max(min(fitting, steps, MAX_STAGES) // layout.teams, 1) * layout.teams


def scale_lines(weight: TiledWeight) -> int:
    """Return the lines of scales that a stage holds: whole atoms of the layout in shared memory, some unused."""
    return max(triton.next_power_of_2(weight.scale_lines), 8) if weight.groups else 0


def inputs_of_box(weight: TiledWeight) -> int:
    """Return the inputs of a box of x: at most 64, and those of one scale where its sums are multiplied by it."""
    if weight.kind == "power" and weight.groups == 4:
        return 64
    return min(INPUTS // max(weight.groups, 1), 64)


def launch(
    x: torch.Tensor,
    weight: TiledWeight,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: Activation | None = None,
) -> None:
    """Compute out [num_parts, num_rows, n], whose sum over parts is x [num_rows, k] @ weight.T + bias [n].

    activation  of gates that alternate with ups in eights; then out [1, num_rows, n / 2] = activation(gate) * up.
    x contiguous bfloat16; num_rows up to 64, k at least 256 * num_parts, one part with a bias or an activation. out may
    be some columns of a larger tensor, if its parts lie behind each other.
    """
    (num_rows, k), (parts, _, n) = x.shape, out.shape
    rows, blocks, tiles = max(16, triton.next_power_of_2(num_rows)), weight.blocks, triton.cdiv(k, INPUTS)
    layout = LAYOUTS[rows]
    steps, num_items = max(triton.cdiv(tiles, parts), layout.teams), blocks * parts  # zeros follow the inputs
    num_sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    codes = TensorDescriptor(weight.codes, list(weight.codes.shape), [32, 1], [32, 32], lines_layout())
    lines, scales = scale_lines(weight), codes
    if lines:
        scales = TensorDescriptor(weight.scales, list(weight.scales.shape), [32, 1], [lines, 32], lines_layout())
    _codes[(min(num_items, num_sms),)](
        tiled(x, rows, box := inputs_of_box(weight)), codes, scales, weight.scales, bias if bias is not None else x,
        out, num_rows, n, out.stride(1), num_items, blocks, steps, tiles,
        SHAPE=(rows, box, weight.bits, lines, layout.teams), SCALE_LINES=weight.scale_lines,
        STAGES=stages_of(rows, weight, steps, layout), GROUPS=weight.groups, KIND=weight.kind,
        TABLE=weight.table or "", BIAS=bias is not None, GATE=activation is not None, ACTIVATION=activation or "",
        REGISTERS=layout.registers, num_warps=4, maxnreg=layout.registers, **pdl_options(x),
    )  # fmt: skip


def codes_matmul(
    x: torch.Tensor,
    weight: TiledWeight | TiledParts,
    bias: torch.Tensor | None = None,
    *,
    activation: Activation | None = None,
) -> torch.Tensor:
    """Compute x [num_rows, k] @ weight.T + bias [n]. -> [num_rows, n], dtype of x. Sums are in float32.

    activation  of a weight with gates: activation(gate) * up, [num_rows, n / 2]
    """
    n = weight.shape[0] // (2 if activation is not None else 1)
    out = torch.empty(1, len(x), n, dtype=x.dtype, device=x.device)
    _by_rows(x, weight, out, bias, activation)
    return out[0]


def codes_parts(x: torch.Tensor, weight: TiledWeight | TiledParts) -> torch.Tensor:
    """Compute the parts whose sum is x [num_rows, k] @ weight.T. -> float32 [num_parts, num_rows, n]"""
    n, k = weight.shape
    parts = min(num_parts(n, k, x.device), k // (2 * INPUTS)) if len(x) <= ROWS else 1
    out = torch.empty(parts, len(x), n, dtype=torch.float32, device=x.device)
    _by_rows(x, weight, out, None, None)
    return out


def _by_rows(
    x: torch.Tensor,
    weight: TiledWeight | TiledParts,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation | None,
) -> None:
    """Launch a kernel for each weight and each 64 rows."""
    start = 0
    for part in weight.parts if isinstance(weight, TiledParts) else (weight,):
        n = out.shape[2] if part is weight else part.num_outputs
        ordered = x if part.order is None else x.index_select(1, part.order)
        own = bias[start : start + n] if bias is not None else None
        for first in range(0, len(x), ROWS):
            last = first + ROWS
            launch(ordered[first:last], part, out[:, first:last, start : start + n], own, activation=activation)
        start += n
