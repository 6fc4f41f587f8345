"""The product of few rows with a weight in 12 bits (bits12/weight_codec.py) on Hopper.

As in prefetch_matmul.py one warp fills shared memory with the weight before it waits for earlier kernels. Two groups of
warps take the stages in turn: each turns codes into the first factor in its registers, while the other one's products
are under way. A third group adds what the listed weights contribute, which it reads one by one meanwhile. So few rows
take the time of reading the codes. This is in Gluon, the level below Triton.
"""

from __future__ import annotations

import functools

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
from graftlm.kernels.bits12.weight_codec import INPUTS, LINES, OUTPUTS, SENTINEL, CompactWeight
from graftlm.kernels.gpu.pdl import grid_wait, launch_dependents, pdl_options
from graftlm.kernels.hopper.prefetch_matmul import num_parts
from graftlm.kernels.hopper.tiles import K, barrier, gated, halves, load, tiled

_SHARED = 200 * 1024
"""Bytes of shared memory for the stages of a program and the sums that its groups exchange."""
_REGISTERS = 96
"""Of a thread."""

# Eight weights: bytes of two pairs in $4, of two in $5, and the upper bits of all in $6, each pair's four bits further.
_EIGHT = gl.constexpr("""{
.reg .b32 upper;
lop3.b32 upper, $6, 0x87008700, 0x40004000, 0xEA;
prmt.b32 $0, $4, upper, 0x7250;
shf.r.wrap.b32 upper, $6, $6, 4;
lop3.b32 upper, upper, 0x87008700, 0x40004000, 0xEA;
prmt.b32 $1, $4, upper, 0x7351;
shf.r.wrap.b32 upper, $6, $6, 8;
lop3.b32 upper, upper, 0x87008700, 0x40004000, 0xEA;
prmt.b32 $2, $5, upper, 0x7250;
shf.r.wrap.b32 upper, $6, $6, 12;
lop3.b32 upper, upper, 0x87008700, 0x40004000, 0xEA;
prmt.b32 $3, $5, upper, 0x7351;
}""")
_SENTINEL = gl.constexpr(SENTINEL)
_LINES = gl.constexpr(LINES)
_INPUTS = gl.constexpr(INPUTS)


@gluon.jit
def _factor(bytes_of, rest, layout: gl.constexpr):
    """The weights of a box [64, 64], bytes_of [32, 32] and rest [16, 32] in shared memory, as a first factor."""
    words: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    a, b, c, d = gl.inline_asm_elementwise(
        _EIGHT,
        "=&r,=&r,=&r,=&r,r,r,r",
        [bytes_of.slice(0, 16, 0).load(words), bytes_of.slice(16, 16, 0).load(words), rest.load(words)],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    # [16, 32, half, output, input], then by the names of bits12/weight_codec.py; nothing moves between threads
    w = gl.join(gl.join(halves(a), halves(b)), gl.join(halves(c), halves(d)))
    w = w.reshape([4, 4, 2, 4, 2, 2, 2, 2, 2]).permute((0, 7, 1, 2, 4, 5, 8, 3, 6)).reshape([64, 64])
    return gl.convert_layout(w.to(gl.bfloat16, bitcast=True), gl.DotOperandLayout(0, layout, 2), assert_trivial=True)


@gluon.jit
def _read_codes(codes, shared, s, tile, pred):
    """Into stage `s`, three boxes of 32 lines: the bytes of either half of a tile, and the rest of both."""
    _, ws, ready, _ = shared
    for part in gl.static_range(3):
        load(codes, [tile * _LINES + part * 32, 0], ready.index(s), ws.index(s * 3 + part), pred=pred)


@gluon.jit
def _read(x, codes, shared, sizes, tiles, PDL: gl.constexpr):
    """Fill the stages in turn, as they become free, with what this program's items need."""
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
        _read_codes(codes, shared, stage, tile, True)
    grid_wait(PDL)
    at = 0
    for item in range(first, num_items, num_programs):
        block, begin = item % num_blocks, item // num_blocks * steps
        for step in range(steps):
            s, later = at % STAGES, at >= STAGES
            mbarrier.wait(free.index(s), (at // STAGES & 1) ^ 1)
            mbarrier.expect(ready.index(s), BYTES, pred=later)
            _read_codes(codes, shared, s, block * tiles + begin + step, later)
            for box in gl.static_range(2):
                load(x, [0, ((begin + step) * 2 + box) * K], ready.index(s), xs.index(s * 2 + box))
            at += 1


@gluon.jit
def _listed(starts, block, output, ok):
    """Where the listed weights of the outputs of a block begin and end."""
    at = starts + block * 64 + output
    return gl.load(at, mask=ok, other=0), gl.load(at + 1, mask=ok, other=0)


@gluon.jit
def _one_of_each(inputs, values, at, end):
    """The next listed weight of each output, for input -1 where there is none."""
    return gl.load(inputs + at, mask=at < end, other=-1), gl.load(values + at, mask=at < end, other=0.0)


@gluon.jit
def _add_listed(x, given, handed, starts, most, inputs, values, k, sizes, PDL: gl.constexpr):
    """Give what the listed weights add to each of the program's items; what lists say is read ahead."""
    num_rows, _, num_blocks, num_items, steps = sizes
    ROWS: gl.constexpr = given.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    output = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    there, rows = (row < num_rows)[None, :], (row * k)[None, :]
    first, num_programs = gl.program_id(0), gl.num_programs(0)
    at, end = _listed(starts, first % num_blocks, output, True)
    column, value = _one_of_each(inputs, values, at, end)
    grid_wait(PDL)
    for item in range(first, num_items, num_programs):
        begin, after = item // num_blocks * steps * _INPUTS, item + num_programs
        next_at, next_end = _listed(starts, after % num_blocks, output, after < num_items)
        sums = gl.zeros([64, ROWS], gl.float32, layout)
        # read here: Triton 3.6 does not carry the bound of an inner loop from one turn of the outer one to the next
        for _ in range(gl.load(most + item % num_blocks)):
            at += 1
            next_column, next_value = _one_of_each(inputs, values, at, end)
            ok = ((column >= begin) & (column < begin + steps * _INPUTS))[:, None] & there
            found = gl.load(x + rows + column[:, None], mask=ok, other=0.0).to(gl.float32)
            sums += value[:, None] * found
            sums -= _SENTINEL * found
            column, value = next_column, next_value
        at, end = next_at, next_end
        column, value = _one_of_each(inputs, values, at, end)
        mbarrier.wait(handed.index(1), (item // num_programs & 1) ^ 1)
        given.store(sums)
        barrier()
        mbarrier.arrive(handed.index(0))


@gluon.jit
def _store(found, out, first_row, num_rows, first, n):
    """found [outputs, rows] into out [:, n], of whose outputs these begin at `first`."""
    layout: gl.constexpr = found.type.layout
    i = first + gl.arange(0, found.shape[0], layout=gl.SliceLayout(1, layout))
    row = gl.arange(0, found.shape[1], layout=gl.SliceLayout(0, layout))
    target = out + (first_row + row)[None, :] * n + i[:, None]
    gl.store(target, found.to(out.dtype.element_ty), mask=(row < num_rows)[None, :] & (i < n)[:, None])


@gluon.jit
def _multiply(
    shared, given, handed, scales, bias, out, sizes,
    GROUP: gl.constexpr, BIAS: gl.constexpr, GATE: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Every second step of each of the program's items; the first group stores their sum."""
    xs, ws, ready, free = shared
    from_other, from_lists = given
    by_other, by_lists = handed
    STAGES: gl.constexpr = ready.shape[0]
    ROWS: gl.constexpr = xs.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    num_rows, n, num_blocks, num_items, steps = sizes
    at, num_programs = 0, gl.num_programs(0)
    for item in range(gl.program_id(0), num_items, num_programs):
        block, turn = item % num_blocks, item // num_programs & 1
        i = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        scale = gl.load(scales + i)
        sums = gl.zeros([64, ROWS], gl.float32, layout)
        for step in range((GROUP + at) % 2, steps, 2):
            s = (at + step) % STAGES
            mbarrier.wait(ready.index(s), (at + step) // STAGES & 1)
            more = warpgroup_mma_init(sums)
            for box in gl.static_range(2):
                w = _factor(ws.index(s * 3 + box), ws.index(s * 3 + 2).slice(box * 16, 16, 0), layout)
                more = warpgroup_mma(w, xs.index(s * 2 + box).permute((1, 0)), more, is_async=True)
            sums = warpgroup_mma_wait(0, deps=(more,))
            mbarrier.arrive(free.index(s))
        at += steps
        if GROUP == 1:
            mbarrier.wait(by_other.index(1), turn ^ 1)
            from_other.store(sums)
            barrier()
            mbarrier.arrive(by_other.index(0))
        else:
            mbarrier.wait(by_lists.index(0), turn)
            sums += from_lists.load(layout)
            barrier()
            mbarrier.arrive(by_lists.index(1))
            mbarrier.wait(by_other.index(0), turn)
            sums += from_other.load(layout)
            barrier()
            mbarrier.arrive(by_other.index(1))
            sums *= scale[:, None]
            if GATE:
                _store(gated(sums, out.dtype.element_ty, ACTIVATION), out, 0, num_rows, block * 32, n)
            else:
                if BIAS:
                    sums += gl.load(bias + i, mask=i < n, other=0.0).to(gl.float32)[:, None]
                _store(sums, out, item // num_blocks * num_rows, num_rows, block * 64, n)


@gluon.jit(do_not_specialize=["num_rows", "num_blocks", "num_items", "steps", "tiles"])
def _compact(
    x, x_tiles, codes, starts, most, inputs, values, scales, bias, out,
    num_rows, k, n, num_blocks, num_items, steps, tiles,
    ROWS: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, BIAS: gl.constexpr, GATE: gl.constexpr,
    ACTIVATION: gl.constexpr, REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program (some of the items: a block of outputs, a part of the inputs)."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    xs = gl.allocate_shared_memory(x_tiles.dtype, [STAGES * 2, ROWS, K], x_tiles.layout)
    ws = gl.allocate_shared_memory(gl.int32, [STAGES * 3, 32, 32], codes.layout)
    from_other = gl.allocate_shared_memory(gl.float32, [64, ROWS], flat)
    from_lists = gl.allocate_shared_memory(gl.float32, [64, ROWS], flat)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    by_other = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())  # handed over, taken
    by_lists = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    for i in gl.static_range(2):
        mbarrier.init(by_other.index(i), count=1)
        mbarrier.init(by_lists.index(i), count=1)
    fence_async_shared()
    shared, given, handed = (xs, ws, ready, free), (from_other, from_lists), (by_other, by_lists)
    sizes = (num_rows, n, num_blocks, num_items, steps)
    gl.warp_specialize(
        [
            (_multiply, (shared, given, handed, scales, bias, out, sizes, 0, BIAS, GATE, ACTIVATION)),
            (_multiply, (shared, given, handed, scales, bias, out, sizes, 1, BIAS, GATE, ACTIVATION)),
            (_add_listed, (x, from_lists, by_lists, starts, most, inputs, values, k, sizes, PDL)),
            (_read, (x_tiles, codes, shared, sizes, tiles, PDL)),
        ],
        [4, 4, 1],  # warps
        [REGISTERS, REGISTERS, 24],  # registers of a thread
    )


@functools.cache
def codes_layout() -> gl.NVMMASharedLayout:
    """How 32 lines of codes lie in shared memory: threads that read side by side find different banks."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)


def stages_of(rows: int) -> int:
    """How many stages there is room for: an even number, so that each is always that of one group."""
    return (_SHARED - 2 * OUTPUTS * rows * 4) // (rows * INPUTS * 2 + LINES * 128) // 2 * 2


def launch(
    x: torch.Tensor,
    weight: CompactWeight,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: Activation | None = None,
) -> None:
    """out [num_parts, num_rows, n]: what x [num_rows, k] @ weight.T + bias [n] is the sum of.

    activation  the outputs are gates and ups, eight beside eight; out [1, num_rows, n / 2] = activation(gate) * up.
    x contiguous bfloat16; num_rows up to 64, k at least 256 * num_parts, one part if there is a bias or an activation.
    """
    (num_rows, k), (num_parts, _, n) = x.shape, out.shape
    rows, num_blocks, tiles = max(16, triton.next_power_of_2(num_rows)), len(weight.most), triton.cdiv(k, INPUTS)
    steps, num_items = triton.cdiv(tiles, num_parts), num_blocks * num_parts  # behind the inputs are zeros
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
    """x [num_rows, k] @ weight.T + bias [n]. -> [num_rows, n], dtype of x. Sums are in float32."""
    out = torch.empty(1, x.shape[0], weight.num_outputs, dtype=x.dtype, device=x.device)
    launch(x, weight, out, bias)
    return out[0]


def compact_parts(x: torch.Tensor, weight: CompactWeight) -> torch.Tensor:
    """What x [num_rows, k] @ weight.T is the sum of. -> float32 [num_parts, num_rows, n]"""
    n, k = weight.num_outputs, weight.num_inputs
    parts = min(num_parts(n, k, x.device), k // (2 * INPUTS))
    out = torch.empty(parts, x.shape[0], n, dtype=torch.float32, device=x.device)
    launch(x, weight, out)
    return out


def compact_gate_up(x: torch.Tensor, weight: CompactWeight, activation: Activation = "silu") -> torch.Tensor:
    """activation(gate) * up, where x @ weight.T is both, eight beside eight (`compacted`). -> [num_rows, n / 2]"""
    out = torch.empty(1, x.shape[0], weight.num_outputs // 2, dtype=x.dtype, device=x.device)
    launch(x, weight, out, activation=activation)
    return out[0]
