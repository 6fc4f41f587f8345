"""The matmul of few rows with a 12-bit weight (bits12/weight_codec.py) on Hopper.

As in prefetch_matmul.py one warp fills shared memory with the weight before it waits for earlier kernels. Two groups of
warps alternate over the stages: each unpacks codes to the first factor in its registers during the other's matmul. A
third group reads the listed weights one by one and adds their contributions. Few rows take the time of reading the
codes. The kernel is in Gluon, the level below Triton.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from graftlm.kernels.activation import Activation
from graftlm.kernels.bits12.code_tiles import (
    allocate,
    block_sums,
    codes_layout,
    hand_over,
    listed_range,
    one_of_each,
    read_codes,
    store_block,
    take_over,
)
from graftlm.kernels.bits12.weight_codec import INPUTS, LINES, OUTPUTS, SENTINEL, CompactWeight
from graftlm.kernels.gpu.pdl import grid_wait, launch_dependents, pdl_options
from graftlm.kernels.hopper.prefetch_matmul import num_parts
from graftlm.kernels.hopper.tiles import K, load, tiled

_SHARED = 200 * 1024
"""Bytes of shared memory for the stages of a program and the sums that its groups exchange."""
_REGISTERS = 96
"""Registers of a thread."""

_SENTINEL = gl.constexpr(SENTINEL)
_LINES = gl.constexpr(LINES)
_INPUTS = gl.constexpr(INPUTS)


@gluon.jit
def _read(x, codes, shared, sizes, tiles, PDL: gl.constexpr):
    """Fill the stages with this program's items in order, as stages become free."""
    xs, _, ready, free = shared
    _, _, num_blocks, num_items, steps = sizes
    STAGES: gl.constexpr = ready.shape[0]
    K: gl.constexpr = xs.shape[2]
    BYTES: gl.constexpr = xs.shape[1] * 2 * K * 2 + _LINES * 128
    first, num_programs = gl.program_id(0), gl.num_programs(0)
    launch_dependents(PDL)
    for stage in gl.static_range(STAGES):  # no kernel before writes the weight
        mbarrier.expect(ready.index(stage), BYTES)
        tile = first % num_blocks * tiles + first // num_blocks * steps + stage
        read_codes(codes, shared, stage, tile, True)
    grid_wait(PDL)
    at = 0
    for item in range(first, num_items, num_programs):
        block, begin = item % num_blocks, item // num_blocks * steps
        for step in range(steps):
            s, later = at % STAGES, at >= STAGES
            mbarrier.wait(free.index(s), (at // STAGES & 1) ^ 1)
            mbarrier.expect(ready.index(s), BYTES, pred=later)
            read_codes(codes, shared, s, block * tiles + begin + step, later)
            for box in gl.static_range(2):
                load(x, [0, ((begin + step) * 2 + box) * K], ready.index(s), xs.index(s * 2 + box))
            at += 1


@gluon.jit
def _add_listed(x, given, handed, starts, most, inputs, values, k, sizes, PDL: gl.constexpr):
    """Write the contributions of the listed weights to each of the program's items; lists are prefetched."""
    num_rows, _, num_blocks, num_items, steps = sizes
    ROWS: gl.constexpr = given.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    output = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    there, rows = (row < num_rows)[None, :], (row * k)[None, :]
    first, num_programs = gl.program_id(0), gl.num_programs(0)
    at, end = listed_range(starts, first % num_blocks, output, True)
    column, value = one_of_each(inputs, values, at, end)
    grid_wait(PDL)
    for item in range(first, num_items, num_programs):
        begin, after = item // num_blocks * steps * _INPUTS, item + num_programs
        next_at, next_end = listed_range(starts, after % num_blocks, output, after < num_items)
        sums = gl.zeros([64, ROWS], gl.float32, layout)
        # read here: Triton 3.6 does not carry the bound of an inner loop between iterations of the outer one
        for _ in range(gl.load(most + item % num_blocks)):
            at += 1
            next_column, next_value = one_of_each(inputs, values, at, end)
            ok = ((column >= begin) & (column < begin + steps * _INPUTS))[:, None] & there
            found = gl.load(x + rows + column[:, None], mask=ok, other=0.0).to(gl.float32)
            sums += value[:, None] * found
            sums -= _SENTINEL * found
            column, value = next_column, next_value
        at, end = next_at, next_end
        column, value = one_of_each(inputs, values, at, end)
        hand_over(sums, given, handed, item // num_programs & 1)


@gluon.jit
def _multiply(
    shared, given, handed, scales, bias, out, sizes,
    GROUP: gl.constexpr, BIAS: gl.constexpr, GATE: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Compute every second step of each of the program's items; the first group stores the sum of both groups."""
    from_other, from_lists = given
    by_other, by_lists = handed
    ROWS: gl.constexpr = shared[0].shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    num_rows, n, num_blocks, num_items, steps = sizes
    at, num_programs = 0, gl.num_programs(0)
    for item in range(gl.program_id(0), num_items, num_programs):
        block, turn = item % num_blocks, item // num_programs & 1
        i = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        scale = gl.load(scales + i)
        sums = block_sums(shared, at, steps, GROUP)
        at += steps
        if GROUP == 1:
            hand_over(sums, from_other, by_other, turn)
        else:
            sums = take_over(sums, from_lists, by_lists, turn)
            sums = take_over(sums, from_other, by_other, turn)
            sums *= scale[:, None]
            store_block(sums, bias, out, item // num_blocks * num_rows, num_rows, block, n, BIAS, GATE, ACTIVATION)


@gluon.jit(do_not_specialize=["num_rows", "num_blocks", "num_items", "steps", "tiles"])
def _compact(
    x, x_tiles, codes, starts, most, inputs, values, scales, bias, out,
    num_rows, k, n, num_blocks, num_items, steps, tiles,
    ROWS: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, BIAS: gl.constexpr, GATE: gl.constexpr,
    ACTIVATION: gl.constexpr, REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program (some of the items: a block of outputs, a part of the inputs)."""
    shared, given, handed = allocate(x_tiles, codes, ROWS, K, STAGES)
    sizes = (num_rows, n, num_blocks, num_items, steps)
    gl.warp_specialize(
        [
            (_multiply, (shared, given, handed, scales, bias, out, sizes, 0, BIAS, GATE, ACTIVATION)),
            (_multiply, (shared, given, handed, scales, bias, out, sizes, 1, BIAS, GATE, ACTIVATION)),
            (_add_listed, (x, given[1], handed[1], starts, most, inputs, values, k, sizes, PDL)),
            (_read, (x_tiles, codes, shared, sizes, tiles, PDL)),
        ],
        [4, 4, 1],  # warps
        [REGISTERS, REGISTERS, 24],  # registers of a thread
    )


def stages_of(rows: int) -> int:
    """Return the number of stages that fit: even, so that each stage belongs to one group."""
    return (_SHARED - 2 * OUTPUTS * rows * 4) // (rows * INPUTS * 2 + LINES * 128) // 2 * 2


def launch(
    x: torch.Tensor,
    weight: CompactWeight,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: Activation | None = None,
) -> None:
    """Compute out [num_parts, num_rows, n], whose sum over parts is x [num_rows, k] @ weight.T + bias [n].

    activation  of gates that alternate with ups in eights; then out [1, num_rows, n / 2] = activation(gate) * up.
    x contiguous bfloat16; num_rows up to 64, k at least 256 * num_parts, one part with a bias or an activation.
    """
    (num_rows, k), (num_parts, _, n) = x.shape, out.shape
    rows, num_blocks, tiles = max(16, triton.next_power_of_2(num_rows)), len(weight.most), triton.cdiv(k, INPUTS)
    steps, num_items = triton.cdiv(tiles, num_parts), num_blocks * num_parts  # zeros follow the inputs
    num_sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    codes = TensorDescriptor(weight.codes, list(weight.codes.shape), [32, 1], [32, 32], codes_layout())
    _compact[(min(num_items, num_sms),)](
        x, tiled(x, rows, K), codes, weight.starts, weight.most, weight.inputs, weight.values, weight.scales,
        bias if bias is not None else x, out, num_rows, k, n, num_blocks, num_items, steps, tiles,
        ROWS=rows, K=K, STAGES=min(stages_of(rows), steps // 2 * 2), BIAS=bias is not None,
        GATE=activation is not None, ACTIVATION=activation or "", REGISTERS=_REGISTERS,
        num_warps=4, maxnreg=_REGISTERS, **pdl_options(x),
    )  # fmt: skip


def compact_matmul(x: torch.Tensor, weight: CompactWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute x [num_rows, k] @ weight.T + bias [n]. -> [num_rows, n], dtype of x. Sums are in float32."""
    out = torch.empty(1, x.shape[0], weight.num_outputs, dtype=x.dtype, device=x.device)
    launch(x, weight, out, bias)
    return out[0]


def compact_parts(x: torch.Tensor, weight: CompactWeight) -> torch.Tensor:
    """Compute the parts whose sum is x [num_rows, k] @ weight.T. -> float32 [num_parts, num_rows, n]"""
    n, k = weight.num_outputs, weight.num_inputs
    parts = min(num_parts(n, k, x.device), k // (2 * INPUTS))
    out = torch.empty(parts, x.shape[0], n, dtype=torch.float32, device=x.device)
    launch(x, weight, out)
    return out


def compact_gate_up(x: torch.Tensor, weight: CompactWeight, activation: Activation = "silu") -> torch.Tensor:
    """Compute activation(gate) * up of x @ weight.T, which alternates in eights (`compacted`). -> [num_rows, n / 2]"""
    out = torch.empty(1, x.shape[0], weight.num_outputs // 2, dtype=x.dtype, device=x.device)
    launch(x, weight, out, activation=activation)
    return out[0]
