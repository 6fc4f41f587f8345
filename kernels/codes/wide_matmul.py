"""The matmul of more than 64 rows with a quantised weight (codes/tiled_weight.py) on Hopper.

A program computes 128 outputs of up to 256 rows: one warp reads x and codes, each of two groups of warps decodes the
codes of its 64 outputs once for all of the rows, while the other multiplies. Scales of groups multiply the codes before
the matmul, so values are those of `dense`, rounded to bfloat16. E4M3 multiplies E4M3 where x is rounded to it too
(`fp8_rows`): the matrix units take half of the time. The kernel is in Gluon, the level below Triton.
"""

from __future__ import annotations

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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from graftlm.kernels.activation import Activation
from graftlm.kernels.codes.code_tiles import (
    box_factor,
    box_words,
    lines_layout,
    numbers_of_stage,
    row_of,
    store_outputs,
)
from graftlm.kernels.codes.fp8_rows import Fp8Rows
from graftlm.kernels.codes.matmul import inputs_of_box, scale_lines
from graftlm.kernels.codes.tiled_weight import INPUTS, OUTPUTS, TiledWeight
from graftlm.kernels.gpu.pdl import grid_wait, launch_dependents, pdl_options
from graftlm.kernels.hopper.tiles import load, place, tiled
from graftlm.kernels.weight import Weight

BAND = 8
"""Tiles of rows whose rows of x stay in the second-level cache while the weight is read."""
MAX_PARTS = 8
_SHARED = 226 * 1024
"""Bytes of shared memory for the stages of a program: three of 256 rows with 4 bits."""
_REGISTERS = 240
"""Registers of a thread that multiplies."""


@gluon.jit
def _read_weight(codes, scales, shared, s, pair, tiles, step, pred, SHAPE: gl.constexpr, SCALE_LINES: gl.constexpr):
    """Load the codes and scales of two blocks' step into stage `s`."""
    _, ws, ss, ready, _ = shared
    PARTS: gl.constexpr = SHAPE[2] // 4
    LINES: gl.constexpr = SHAPE[3]
    for team in gl.static_range(2):
        tile, own = (pair * 2 + team) * tiles + step, s * 2 + team
        for part in gl.static_range(PARTS):
            load(codes, [(tile * PARTS + part) * 32, 0], ready.index(s), ws.index(own * PARTS + part), pred=pred)
        if LINES > 0:
            load(scales, [tile * SCALE_LINES, 0], ready.index(s), ss.index(own), pred=pred)


@gluon.jit
def _read(
    x, codes, scales, shared, sizes, tiles, SHAPE: gl.constexpr, SCALE_LINES: gl.constexpr, BAND: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Fill the stages with this program's items in order, as stages become free."""
    xs, _, _, ready, free = shared
    across, down, num_items, steps = sizes
    STAGES: gl.constexpr = ready.shape[0]
    ROWS: gl.constexpr = SHAPE[0]
    K: gl.constexpr = SHAPE[1]
    BOXES: gl.constexpr = 128 // K
    BYTES: gl.constexpr = ROWS * 128 * SHAPE[4] + 2 * (SHAPE[2] * 1024 + SHAPE[3] * 128)
    first, num_programs = gl.program_id(0), gl.num_programs(0)
    launch_dependents(PDL)
    _, pair = place(first % (across * down), across, down, BAND)
    begin = first // (across * down) * steps
    for stage in gl.static_range(STAGES):  # no kernel before writes the weight
        mbarrier.expect(ready.index(stage), BYTES)
        _read_weight(codes, scales, shared, stage, pair, tiles, begin + stage, True, SHAPE, SCALE_LINES)
    grid_wait(PDL)
    at = 0
    for item in range(first, num_items, num_programs):
        row, pair = place(item % (across * down), across, down, BAND)
        begin = item // (across * down) * steps
        for step in range(begin, begin + steps):
            s, later = at % STAGES, at >= STAGES
            mbarrier.wait(free.index(s), (at // STAGES & 1) ^ 1)
            mbarrier.expect(ready.index(s), BYTES, pred=later)
            _read_weight(codes, scales, shared, s, pair, tiles, step, later, SHAPE, SCALE_LINES)
            for box in gl.static_range(BOXES):
                load(x, [row * ROWS, step * 128 + box * K], ready.index(s), xs.index(s * BOXES + box))
            at += 1


@gluon.jit
def _scaled(w, found, ROW: gl.constexpr, GROUPS: gl.constexpr, KIND: gl.constexpr, layout: gl.constexpr):
    """Return a first factor [64, inputs] of codes times their group's scale, plus its minimum, in bfloat16."""
    outputs: gl.constexpr = gl.SliceLayout(1, w.type.layout)
    scale = gl.convert_layout(row_of(found, ROW, layout), outputs, assert_trivial=True)
    value = w.to(gl.float32) * scale[:, None]
    if KIND == "minimum":
        value += gl.convert_layout(row_of(found, GROUPS + ROW, layout), outputs, assert_trivial=True)[:, None]
    return value.to(gl.bfloat16)


@gluon.jit
def _sums(shared, at, steps, TEAM: gl.constexpr, SHAPE: gl.constexpr, FORMAT: gl.constexpr):
    """Return a block's 64 outputs over `steps` stages from number `at` on. -> float32 [64, rows]"""
    xs, ws, ss, ready, free = shared
    GROUPS: gl.constexpr = FORMAT[0]
    KIND: gl.constexpr = FORMAT[1]
    STAGES: gl.constexpr = ready.shape[0]
    ROWS: gl.constexpr = SHAPE[0]
    K: gl.constexpr = SHAPE[1]
    BOXES: gl.constexpr = 128 // K
    SCALED: gl.constexpr = GROUPS > 0 and KIND != "power"  # a power is part of the decoding
    EACH: gl.constexpr = BOXES // (GROUPS if SCALED else 1)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    sums = gl.zeros([64, ROWS], gl.float32, layout)
    for step in range(steps):
        s = (at + step) % STAGES
        mbarrier.wait(ready.index(s), (at + step) // STAGES & 1)
        found = sums
        if GROUPS > 0:
            found = numbers_of_stage(ss, s * 2 + TEAM)
        more = warpgroup_mma_init(sums)
        for group in gl.static_range(BOXES // EACH):
            for part in gl.static_range(EACH):
                w = box_factor(ws, found, 0, s * 2 + TEAM, group, part, SHAPE, FORMAT)
                if SCALED:
                    w = _scaled(w, found, group, GROUPS, KIND, layout)
                x = xs.index(s * BOXES + group * EACH + part).permute((1, 0))
                more = warpgroup_mma(w, x, more, is_async=True)
        sums = warpgroup_mma_wait(0, deps=(more,))
        mbarrier.arrive(free.index(s))
    return sums


_INPUTS = gl.constexpr("""{
prmt.b32 $0, $2, $3, 0x7531;
prmt.b32 $1, $2, $3, 0x6420;
}""")


@gluon.jit
def _four(words):
    """Split words [16, 32] into their bytes. -> int8 [16, 32, 2, 2], the lowest bit of a byte's number first"""
    a, b, c, d = words.to(gl.int8), (words >> 8).to(gl.int8), (words >> 16).to(gl.int8), (words >> 24).to(gl.int8)
    return gl.join(gl.join(a, b), gl.join(c, d))


@gluon.jit
def _fp8_factor(first, second, layout: gl.constexpr):
    """Return a first factor [64, 64] in E4M3 of words [16, 32]: sixteen inputs in the order of `fp8_rows`."""
    even, odd = gl.inline_asm_elementwise(
        _INPUTS, "=&r,=&r,r,r", [first, second], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )  # outputs m and m + 8
    w = gl.join(_four(even), _four(odd))
    # [warp, row, other row, column, by 32, by 16, byte, byte, eight]; nothing moves between threads
    w = w.reshape([4, 4, 2, 4, 2, 2, 2, 2, 2]).permute((0, 8, 1, 2, 4, 5, 3, 7, 6)).reshape([64, 64])
    w = gl.convert_layout(w, gl.DotOperandLayout(0, layout, 4), assert_trivial=True)
    return w.to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _fp8_sums(shared, at, steps, TEAM: gl.constexpr, SHAPE: gl.constexpr, GROUPS: gl.constexpr):
    """Return a block's 64 outputs over `steps` stages of rows in E4M3. -> float32 [64, rows]

    The matrix units add with 13 bits of mantissa: where registers suffice, each stage has sums of its own.
    """
    xs, ws, ss, ready, free = shared
    STAGES: gl.constexpr = ready.shape[0]
    ROWS: gl.constexpr = SHAPE[0]
    APART: gl.constexpr = ROWS <= 128
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    fp8: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    zeros = gl.zeros([64, ROWS], gl.float32, fp8)
    sums = zeros
    for step in range(steps):
        s = (at + step) % STAGES
        mbarrier.wait(ready.index(s), (at + step) // STAGES & 1)
        more = warpgroup_mma_init(zeros if APART else sums)
        for box in gl.static_range(2):
            first, second = box_words(ws, s * 2 + TEAM, box, 8)
            x = xs.index(s * 2 + box).permute((1, 0))
            more = warpgroup_mma(
                _fp8_factor(first, second, fp8), x, more, use_acc=(not APART) | (box > 0), is_async=True
            )
        found = warpgroup_mma_wait(0, deps=(more,))
        if GROUPS > 0:
            scale = row_of(numbers_of_stage(ss, s * 2 + TEAM), 0, layout)
            found *= gl.convert_layout(scale, gl.SliceLayout(1, fp8), assert_trivial=True)[:, None]
        if APART:
            sums += found
        else:
            sums = found
        mbarrier.arrive(free.index(s))
    return gl.convert_layout(sums, layout, assert_trivial=True)


@gluon.jit
def _multiply(
    given, TEAM: gl.constexpr, SHAPE: gl.constexpr, FORMAT: gl.constexpr, OUTPUT: gl.constexpr, BAND: gl.constexpr
):
    """Compute this team's 64 outputs of each of the program's items."""
    shared, row_scales, scales, bias, out, counts, sizes = given
    ROWS: gl.constexpr = SHAPE[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    across, down, num_items, steps = sizes
    num_rows, n, out_row = counts
    at = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        row, pair = place(item % (across * down), across, down, BAND)
        if SHAPE[4] == 1:
            sums = _fp8_sums(shared, at, steps, TEAM, SHAPE, FORMAT[0])
            r = row * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
            sums *= gl.load(row_scales + r, mask=r < num_rows, other=0.0)[None, :]
        else:
            sums = _sums(shared, at, steps, TEAM, SHAPE, FORMAT)
        at += steps
        part = out + item // (across * down) * num_rows * out_row
        store_outputs(
            sums, scales, bias, part, row * ROWS, num_rows, pair * 2 + TEAM, n, out_row, FORMAT[0] == 0, OUTPUT
        )


@gluon.jit(do_not_specialize=["num_rows", "across", "down", "num_items", "steps", "tiles"])
def _wide(
    x_tiles, codes, scale_tiles, row_scales, scales, bias, out,
    num_rows, n, out_row, across, down, num_items, steps, tiles,
    SHAPE: gl.constexpr, SCALE_LINES: gl.constexpr, STAGES: gl.constexpr, FORMAT: gl.constexpr, OUTPUT: gl.constexpr,
    BAND: gl.constexpr, REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program (some of the items: a tile of rows, two blocks of outputs, one part of the inputs).

    SHAPE  rows, inputs of a box of x, bits, lines of scales, bytes of an element of x
    """
    xs = gl.allocate_shared_memory(x_tiles.dtype, [STAGES * (128 // SHAPE[1]), SHAPE[0], SHAPE[1]], x_tiles.layout)
    ws = gl.allocate_shared_memory(gl.int32, [STAGES * 2 * (SHAPE[2] // 4), 32, 32], codes.layout)
    ss = ws
    if SHAPE[3] > 0:
        ss = gl.allocate_shared_memory(gl.float32, [STAGES * 2, SHAPE[3], 32], scale_tiles.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    shared, sizes = (xs, ws, ss, ready, free), (across, down, num_items, steps)
    given = (shared, row_scales, scales, bias, out, (num_rows, n, out_row), sizes)
    gl.warp_specialize(
        [
            (_multiply, (given, 0, SHAPE, FORMAT, OUTPUT, BAND)),
            (_multiply, (given, 1, SHAPE, FORMAT, OUTPUT, BAND)),
            (_read, (x_tiles, codes, scale_tiles, shared, sizes, tiles, SHAPE, SCALE_LINES, BAND, PDL)),
        ],
        [4, 1],  # warps
        [REGISTERS, 24],  # registers of a thread
    )


def parts_of(num_rows: int, weight: Weight, *, summed: bool) -> int:
    """Return the number of parts of the inputs: the most with which all programs run concurrently.

    summed  whether the result need not be parts, which are then as few
    """
    n, k = weight.shape
    num_sms = torch.cuda.get_device_properties(weight.device).multi_processor_count
    items = triton.cdiv(n, 2 * OUTPUTS) * triton.cdiv(num_rows, rows_of(num_rows))
    parts: int = max(min(num_sms // items, MAX_PARTS, k // (4 * INPUTS)), 1)
    return parts


def rows_of(num_rows: int) -> int:
    """Return the rows of a tile."""
    return 64 if num_rows <= 64 else 128 if num_rows <= 128 else 256


def launch(
    x: torch.Tensor | Fp8Rows,
    weight: TiledWeight,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: Activation | None = None,
    rows: int | None = None,
) -> None:
    """Compute out [num_parts, num_rows, n], whose sum over parts is x [num_rows, k] @ weight.T + bias [n].

    x           contiguous bfloat16, or rows in E4M3 of a weight in E4M3 with scales of 128 inputs or more
    activation  of gates that alternate with ups in eights; then out [1, num_rows, n / 2] = activation(gate) * up.
    rows        of a tile
    """
    values = x.codes if isinstance(x, Fp8Rows) else x
    (num_rows, k), (parts, _, n) = values.shape, out.shape
    rows = rows or (128 if isinstance(x, Fp8Rows) and weight.groups else rows_of(num_rows))
    tiles = triton.cdiv(k, INPUTS)
    across, down, steps = triton.cdiv(weight.blocks, 2), triton.cdiv(num_rows, rows), triton.cdiv(tiles, parts)
    lines, num_items = scale_lines(weight), across * down * parts
    num_sms = torch.cuda.get_device_properties(values.device).multi_processor_count
    codes = TensorDescriptor(weight.codes, list(weight.codes.shape), [32, 1], [32, 32], lines_layout())
    scales = codes
    if lines:
        scales = TensorDescriptor(weight.scales, list(weight.scales.shape), [32, 1], [lines, 32], lines_layout())
    if isinstance(x, Fp8Rows):
        box, x_tiles, row_scales = 64, fp8_tiled(values, rows, 64), x.scale
    else:
        x_tiles, row_scales = tiled(values, rows, box := inputs_of_box(weight)), values
    each = rows * 128 * values.element_size() + 2 * (weight.bits * 1024 + lines * 128)
    _wide[(min(num_items, num_sms),)](
        x_tiles, codes, scales, row_scales, weight.scales, bias if bias is not None else values, out,
        num_rows, n, out.stride(1), across, down, num_items, steps, tiles,
        SHAPE=(rows, box, weight.bits, lines, values.element_size()), SCALE_LINES=weight.scale_lines,
        STAGES=max(min(_SHARED // each, steps), 1), FORMAT=(weight.groups, weight.kind, weight.table or ""),
        OUTPUT=(bias is not None, activation is not None, activation or ""), BAND=BAND,
        REGISTERS=_REGISTERS, num_warps=4, maxnreg=168, **pdl_options(values),
    )  # fmt: skip


def fp8_tiled(x: torch.Tensor, *tile: int) -> TensorDescriptor:
    """Return the copy engine's descriptor of codes x [num_rows, k] in E4M3, by tiles."""
    layout = gl.NVMMASharedLayout.get_default_for(list(tile), gl.float8e4nv)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(tile), layout)
