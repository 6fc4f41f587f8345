"""The matmul of few rows with a quantised weight (codes/tiled_weight.py) on Hopper.

As in bits12/matmul.py one warp fills shared memory with codes and scales before it waits for earlier kernels, and two
to four teams of warps share the stages: each decodes to the first factor in its registers during the others' matmuls.
With 4 bits a load for each tile would take that warp longer than memory: codes, scales and rows of a stage are one load
each. Few rows take the time of reading the codes. The kernel is in Gluon, the level below Triton.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from graftlm.kernels.activation import Activation
from graftlm.kernels.codes.code_tiles import (
    allocate,
    block_sums,
    hand_over,
    lines_layout,
    read_rows,
    read_tiles,
    store_outputs,
    take_over,
)
from graftlm.kernels.codes.tiled_weight import INPUTS, OUTPUTS, TiledWeight
from graftlm.kernels.gpu.pdl import grid_wait, launch_dependents, pdl_options
from graftlm.kernels.hopper.prefetch_matmul import num_parts
from graftlm.kernels.weight import Weight

MAX_STAGES = 16
_MAX_LINES = 16
"""Lines of a stage's scales, each a register of a thread, unless those of one tile are more."""


class Layout(NamedTuple):
    """The teams of a program, the registers of a thread, and bytes of shared memory for stages and sums.

    depth  tiles of a stage with 4 bits, at most, half as many with 8: a team's step has latencies, which the codes of
           one tile do not cover
    """

    teams: int
    registers: int
    shared: int
    depth: int = 1


LAYOUTS = {
    8: Layout(2, 168, 190 * 1024, 4),
    16: Layout(4, 96, 190 * 1024, 2),
    32: Layout(3, 120, 190 * 1024, 2),
    64: Layout(2, 168, 190 * 1024),
}
"""Layouts by the rows of a tile. A step of one row of an 8B model on an H200 takes 1.90 ms with 4 bits in groups of 128
and 2.57 with 8 bits; 1.98 and 2.69 with four teams of 96 registers, 2.00 and 2.62 with three of 120, 2.65 with 8 bits
and stages of one tile."""


@gluon.jit
def _read(given, SHAPE: gl.constexpr, SCALE_LINES: gl.constexpr, PDL: gl.constexpr):
    """Fill the stages with this program's items in order, as stages become free."""
    x, codes, scales, shared, sizes, tiles = given
    _, _, _, ready, free = shared
    num_items, num_blocks, steps = sizes
    STAGES: gl.constexpr = ready.shape[0]
    DEPTH: gl.constexpr = SHAPE[5]
    BYTES: gl.constexpr = (SHAPE[0] * 256 + SHAPE[2] * 1024) * DEPTH + SHAPE[3] * 128
    first, num_programs = gl.program_id(0), gl.num_programs(0)
    launch_dependents(PDL)
    for stage in gl.static_range(STAGES):  # no kernel before writes the weight
        item = first + stage // steps * num_programs
        mbarrier.expect(ready.index(stage), BYTES, pred=item < num_items)
        tile = item % num_blocks * tiles + (item // num_blocks * steps + stage % steps) * DEPTH
        read_tiles(codes, scales, shared, stage, stage, tile, item < num_items, SHAPE, SCALE_LINES)
    grid_wait(PDL)
    at = 0
    for item in range(first, num_items, num_programs):
        block, begin = item % num_blocks, item // num_blocks * steps
        for step in range(begin, begin + steps):
            s, later = at % STAGES, at >= STAGES
            mbarrier.wait(free.index(s), (at // STAGES & 1) ^ 1)
            mbarrier.expect(ready.index(s), BYTES, pred=later)
            read_tiles(codes, scales, shared, s, s, block * tiles + step * DEPTH, later, SHAPE, SCALE_LINES)
            read_rows(x, shared, s, 0, step * DEPTH, SHAPE)
            at += 1


@gluon.jit
def _multiply(
    given, TEAM: gl.constexpr, SHAPE: gl.constexpr, FORMAT: gl.constexpr, OUTPUT: gl.constexpr, PDL: gl.constexpr
):
    """Compute a team's steps of each of the program's items; the first team stores the sum of all teams."""
    shared, teams, scales, bias, out, counts, sizes = given
    num_items, num_blocks, steps = sizes
    num_rows, n, out_row = counts
    at, num_programs = 0, gl.num_programs(0)
    for item in range(gl.program_id(0), num_items, num_programs):
        block, turn = item % num_blocks, item // num_programs & 1
        sums = block_sums(shared, at, steps, TEAM, SHAPE, FORMAT)
        at += steps
        if TEAM > 0:
            hand_over(sums, teams[0], teams[1], TEAM, turn)
        else:
            sums = take_over(sums, teams[0], teams[1], SHAPE[4], turn)
            part = out + item // num_blocks * num_rows * out_row
            store_outputs(sums, scales, bias, part, 0, num_rows, block, n, out_row, FORMAT[0] == 0, OUTPUT)


@gluon.jit(do_not_specialize=["num_rows", "num_items", "num_blocks", "steps", "tiles"])
def _codes(
    x_tiles, codes, scale_tiles, scales, bias, out, num_rows, n, out_row, num_items, num_blocks, steps, tiles,
    SHAPE: gl.constexpr, SCALE_LINES: gl.constexpr, STAGES: gl.constexpr, FORMAT: gl.constexpr, OUTPUT: gl.constexpr,
    REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program (some of the items: a block of outputs, a part of the inputs).

    SHAPE   of `allocate`
    OUTPUT  of `store_outputs`
    """
    shared, sums, handed = allocate(x_tiles, codes, scale_tiles, SHAPE, STAGES)
    sizes = (num_items, num_blocks, steps)
    given = (shared, (sums, handed), scales, bias, out, (num_rows, n, out_row), sizes)
    reading = (x_tiles, codes, scale_tiles, shared, sizes, tiles)
    if SHAPE[4] == 4:
        gl.warp_specialize(
            [
                (_multiply, (given, 0, SHAPE, FORMAT, OUTPUT, PDL)),
                (_multiply, (given, 1, SHAPE, FORMAT, OUTPUT, PDL)),
                (_multiply, (given, 2, SHAPE, FORMAT, OUTPUT, PDL)),
                (_multiply, (given, 3, SHAPE, FORMAT, OUTPUT, PDL)),
                (_read, (reading, SHAPE, SCALE_LINES, PDL)),
            ],
            [4, 4, 4, 1],  # warps
            [REGISTERS, REGISTERS, REGISTERS, 24],  # registers of a thread
        )
    elif SHAPE[4] == 3:
        gl.warp_specialize(
            [
                (_multiply, (given, 0, SHAPE, FORMAT, OUTPUT, PDL)),
                (_multiply, (given, 1, SHAPE, FORMAT, OUTPUT, PDL)),
                (_multiply, (given, 2, SHAPE, FORMAT, OUTPUT, PDL)),
                (_read, (reading, SHAPE, SCALE_LINES, PDL)),
            ],
            [4, 4, 1],  # warps
            [REGISTERS, REGISTERS, 24],  # registers of a thread
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (given, 0, SHAPE, FORMAT, OUTPUT, PDL)),
                (_multiply, (given, 1, SHAPE, FORMAT, OUTPUT, PDL)),
                (_read, (reading, SHAPE, SCALE_LINES, PDL)),
            ],
            [4, 1],  # warps
            [REGISTERS, 24],  # registers of a thread
        )


def depth_of(weight: TiledWeight, layout: Layout) -> int:
    """Return the tiles of a stage: as many as the layout says and registers hold the scales of."""
    fitting: int = max(_MAX_LINES // max(weight.scale_lines, 1), 1)
    return max(min(layout.depth * 4 // weight.bits, 1 << fitting.bit_length() - 1), 1)


def stages_of(rows: int, weight: TiledWeight, layout: Layout) -> int:
    """Return the number of stages that fit: a multiple of the teams, so that each stage belongs to one of them."""
    free, depth = layout.shared - (layout.teams - 1) * OUTPUTS * rows * 4, depth_of(weight, layout)
    fitting = free // ((rows * 256 + weight.bits * 1024) * depth + scale_lines(weight, depth) * 128)
    return max(min(fitting, MAX_STAGES) // layout.teams, 1) * layout.teams


def scale_lines(weight: TiledWeight, depth: int = 1) -> int:
    """Return the lines of a stage's scales: whole atoms of the layout in shared memory, some unused."""
    return max(triton.next_power_of_2(depth * weight.scale_lines), 8) if weight.groups else 0


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
    rows, blocks, tiles = max(8, triton.next_power_of_2(num_rows)), weight.blocks, triton.cdiv(k, INPUTS)
    layout = LAYOUTS[rows]
    depth, num_items, box = depth_of(weight, layout), blocks * parts, inputs_of_box(weight)
    codes, scales = weight_boxes(weight, depth)
    lines = scale_lines(weight, depth)
    _codes[(min(num_items, num_sms_of(x.device)),)](
        row_boxes(x, depth * INPUTS // box, rows, box), codes, scales, weight.scales, bias if bias is not None else x,
        out, num_rows, n, out.stride(1), num_items, blocks, triton.cdiv(tiles, depth * parts), tiles,
        SHAPE=(rows, box, weight.bits, lines, layout.teams, depth, 1), SCALE_LINES=weight.scale_lines,
        STAGES=stages_of(rows, weight, layout), FORMAT=(weight.groups, weight.kind, weight.table or ""),
        OUTPUT=(bias is not None, activation is not None, activation or ""),
        REGISTERS=layout.registers, num_warps=4, maxnreg=layout.registers, **pdl_options(x),
    )  # fmt: skip


def weight_boxes(weight: TiledWeight, depth: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Return the copy engine's descriptors of a weight's codes and of its groups' scales, by stages."""
    height = depth * weight.bits // 4 * 32
    codes = TensorDescriptor(weight.codes, list(weight.codes.shape), [32, 1], [height, 32], lines_layout())
    lines = scale_lines(weight, depth)
    if not lines:
        return codes, codes
    return codes, TensorDescriptor(weight.scales, list(weight.scales.shape), [32, 1], [lines, 32], lines_layout())


def row_boxes(x: torch.Tensor, boxes: int, rows: int, inputs: int) -> TensorDescriptor:
    """Return the copy engine's descriptor of rows x [num_rows, k] by `boxes` neighbouring boxes [rows, inputs]."""
    (num_rows, k), stride = x.shape, x.stride(0)
    return TensorDescriptor(
        x, [k // inputs, num_rows, inputs], [inputs, stride, 1], [boxes, rows, inputs], boxes_layout(inputs)
    )


@functools.cache
def boxes_layout(inputs: int) -> gl.NVMMASharedLayout:
    """Return the layout of neighbouring boxes in shared memory, one after the other."""
    return gl.NVMMASharedLayout(swizzle_byte_width=2 * inputs, element_bitwidth=16, rank=3)


def num_sms_of(device: torch.device) -> int:
    """Return the number of multiprocessors of a device."""
    found: int = torch.cuda.get_device_properties(device).multi_processor_count
    return found


def parts_of(num_rows: int, weight: Weight, *, summed: bool) -> int:
    """Return the number of parts of the inputs: the most with which all programs run concurrently.

    summed  whether the result shall be no parts
    """
    n, k = weight.shape
    return 1 if summed else min(num_parts(n, k, weight.device), k // (2 * INPUTS))
