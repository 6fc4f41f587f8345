"""The matmul of up to 32 rows with a 12-bit weight on Hopper, in the order of sums of prefetch_matmul.py.

A 12-bit weight equals its 16-bit original up to a power of two for each output. Sums over the inputs from the first to
the last, sixteen at a time, have the bits of the kernels that read 16-bit weights, hence strict mode may read 12 bits.
Two groups of warps have an item each, with stages of their own that one warp a group fills, or one group has all items
if these are few; in matmul.py two groups share an item and add their sums. The listed weights are inserted into the
first factor, from a list beside each tile. The kernel is in Gluon, the level below Triton.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

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
from graftlm.kernels.bits12.code_tiles import codes_layout, factor, read_codes, store_block
from graftlm.kernels.bits12.weight_codec import INPUTS, LINES, CompactWeight, listed_by_tile
from graftlm.kernels.gpu.pdl import grid_wait, launch_dependents, pdl_options
from graftlm.kernels.hopper.tiles import K, load, tiled

_SHARED = 200 * 1024
"""Bytes of shared memory for the stages of both groups."""
_REGISTERS = 96
"""Registers of a thread."""

_LINES = gl.constexpr(LINES)


@gluon.jit
def _allocate(x_tiles, codes, listed, ROWS: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr):
    """Allocate a group's shared memory: tiles of x, of codes, their lists, stages read, stages free."""
    xs = gl.allocate_shared_memory(x_tiles.dtype, [STAGES * 2, ROWS, K], x_tiles.layout)
    ws = gl.allocate_shared_memory(gl.int32, [STAGES * 3, 32, 32], codes.layout)
    lists = gl.allocate_shared_memory(gl.int32, [STAGES, 1, 32], listed.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    return xs, ws, lists, ready, free


@gluon.jit
def _read(
    x, codes, listed, shared, sizes,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Fill a group's stages with its items in order, as stages become free."""
    xs, ws, lists, ready, free = shared
    _, _, num_blocks, num_items, steps, tiles = sizes
    STAGES: gl.constexpr = ready.shape[0]
    K: gl.constexpr = xs.shape[2]
    BYTES: gl.constexpr = xs.shape[1] * 2 * K * 2 + (_LINES + 1) * 128
    first, num_groups = GROUP * gl.num_programs(0) + gl.program_id(0), GROUPS * gl.num_programs(0)
    launch_dependents(PDL)
    begin = first % num_blocks * tiles + first // num_blocks * steps
    for stage in gl.static_range(STAGES):  # no kernel before writes the weight
        mbarrier.expect(ready.index(stage), BYTES, pred=first < num_items)
        read_codes(codes, (xs, ws, ready, free), stage, begin + stage, first < num_items)
        load(listed, [begin + stage, 0], ready.index(stage), lists.index(stage), pred=first < num_items)
    grid_wait(PDL)
    at = 0
    for item in range(first, num_items, num_groups):
        block, begin = item % num_blocks, item // num_blocks * steps
        for step in range(steps):
            s, later = at % STAGES, at >= STAGES
            mbarrier.wait(free.index(s), (at // STAGES & 1) ^ 1)
            mbarrier.expect(ready.index(s), BYTES, pred=later)
            read_codes(codes, (xs, ws, ready, free), s, block * tiles + begin + step, later)
            load(listed, [block * tiles + begin + step, 0], ready.index(s), lists.index(s), pred=later)
            for box in gl.static_range(2):
                load(x, [0, ((begin + step) * 2 + box) * K], ready.index(s), xs.index(s * 2 + box))
            at += 1


@gluon.jit
def _word(words, i):
    """Return word i of words [32]."""
    return gl.sum(gl.where(gl.arange(0, 32, layout=words.type.layout) == i, words, 0), 0)


@gluon.jit
def _listed(w, words, first, end):
    """Return the factor w [64, 64] of a box with the listed weights of words [first, end) inserted."""
    output = gl.arange(0, 64, layout=gl.SliceLayout(1, w.type.layout))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, w.type.layout))
    for i in range(first, end):
        word = _word(words, i)
        here = (output == (word >> 6 & 63))[:, None] & (column == (word & 63))[None, :]
        w = gl.where(here, (word >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True), w)
    return w


@gluon.jit
def _factors(shared, at, num_tiles, layout: gl.constexpr):
    """Return the weights of a group's tile number `at` as first factors, one a box; undefined beyond the last tile."""
    _, ws, lists, ready, _ = shared
    s, phase = at % ready.shape[0], at // ready.shape[0] & 1
    mbarrier.wait(ready.index(s), phase, pred=at < num_tiles)
    words = lists.index(s).reshape([32]).load(gl.BlockedLayout([1], [32], [4], [0]))
    counts, rest = gl.where(at < num_tiles, _word(words, 0), 0), ws.index(s * 3 + 2)
    end = 1 + (counts & 255)
    first = _listed(factor(ws.index(s * 3), rest.slice(0, 16, 0), layout), words, 1, end)
    return first, _listed(factor(ws.index(s * 3 + 1), rest.slice(16, 16, 0), layout), words, end, 1 + (counts >> 8))


@gluon.jit
def _multiply(
    shared, scales, bias, out, sizes,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, BIAS: gl.constexpr, GATE: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Compute each of a group's items: a block of outputs, from one part of the inputs. A tile's codes are unpacked
    during the matmul of the previous tile.
    """
    xs, _, _, _, free = shared
    num_rows, n, num_blocks, num_items, steps, _ = sizes
    STAGES: gl.constexpr = free.shape[0]
    ROWS: gl.constexpr = xs.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    first, num_groups = GROUP * gl.num_programs(0) + gl.program_id(0), GROUPS * gl.num_programs(0)
    num_tiles = (gl.maximum(num_items - first, 0) + num_groups - 1) // num_groups * steps
    at = 0
    w, other = _factors(shared, at, num_tiles, layout)
    for item in range(first, num_items, num_groups):
        block = item % num_blocks
        i = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        scale = gl.load(scales + i)
        sums = gl.zeros([64, ROWS], gl.float32, layout)
        for _ in range(steps):
            s = at % STAGES
            more = warpgroup_mma_init(sums)
            more = warpgroup_mma(w, xs.index(s * 2).permute((1, 0)), more, is_async=True)
            more = warpgroup_mma(other, xs.index(s * 2 + 1).permute((1, 0)), more, is_async=True)
            at += 1
            next_w, next_other = _factors(shared, at, num_tiles, layout)
            sums = warpgroup_mma_wait(0, deps=(more,))
            mbarrier.arrive(free.index(s))
            w, other = next_w, next_other
        sums *= scale[:, None]
        store_block(sums, bias, out, item // num_blocks * num_rows, num_rows, block, n, BIAS, GATE, ACTIVATION)


@gluon.jit(do_not_specialize=["num_rows", "num_blocks", "num_items", "steps", "tiles"])
def _one_order(
    x_tiles, codes, listed, scales, bias, out, num_rows, n, num_blocks, num_items, steps, tiles,
    ROWS: gl.constexpr, K: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, BIAS: gl.constexpr,
    GATE: gl.constexpr, ACTIVATION: gl.constexpr, REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program (some of the items for each group: a block of outputs, a part of the inputs)."""
    first = _allocate(x_tiles, codes, listed, ROWS, K, STAGES)
    sizes = (num_rows, n, num_blocks, num_items, steps, tiles)
    if GROUPS == 1:
        fence_async_shared()
        gl.warp_specialize(
            [
                (_multiply, (first, scales, bias, out, sizes, 0, 1, BIAS, GATE, ACTIVATION)),
                (_read, (x_tiles, codes, listed, first, sizes, 0, 1, PDL)),
            ],
            [1],  # warps
            [24],  # registers of a thread
        )
    else:
        second = _allocate(x_tiles, codes, listed, ROWS, K, STAGES)
        fence_async_shared()
        gl.warp_specialize(
            [
                (_multiply, (first, scales, bias, out, sizes, 0, 2, BIAS, GATE, ACTIVATION)),
                (_multiply, (second, scales, bias, out, sizes, 1, 2, BIAS, GATE, ACTIVATION)),
                (_read, (x_tiles, codes, listed, first, sizes, 0, 2, PDL)),
                (_read, (x_tiles, codes, listed, second, sizes, 1, 2, PDL)),
            ],
            [4, 1, 1],  # warps
            [REGISTERS, 24, 24],  # registers of a thread
        )


def stages_of(rows: int, groups: int) -> int:
    """Return the number of stages that fit, for each group."""
    return _SHARED // (rows * INPUTS * 2 + (LINES + 1) * 128) // groups


@functools.cache
def lists_layout() -> gl.NVMMASharedLayout:
    """Return the layout of a tile's list in shared memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


@dataclass(frozen=True)
class OneOrderWeight:
    """A 12-bit weight with a list of its listed weights for each tile (weight_codec.py: listed_by_tile)."""

    codes: CompactWeight
    listed: torch.Tensor


def held(codes: CompactWeight | None) -> OneOrderWeight | None:
    """Return the operand of `launch` for a weight; None if a tile has too many listed weights."""
    listed = listed_by_tile(codes) if codes is not None else None
    return OneOrderWeight(codes, listed) if codes is not None and listed is not None else None


def launch(
    x: torch.Tensor,
    weight: OneOrderWeight,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: Activation | None = None,
) -> None:
    """Compute out [num_parts, num_rows, n], whose sum over parts is x [num_rows, k] @ weight.T + bias [n].

    activation  of gates that alternate with ups in eights; then out [1, num_rows, n / 2] = activation(gate) * up.
    x contiguous bfloat16; up to 32 rows, k at least 128 * num_parts; with a bias or an activation one part.
    """
    (num_rows, k), (num_parts, _, n) = x.shape, out.shape
    codes = weight.codes
    rows, num_blocks, tiles = max(16, triton.next_power_of_2(num_rows)), len(codes.most), triton.cdiv(k, INPUTS)
    steps, num_items = triton.cdiv(tiles, num_parts), num_blocks * num_parts  # zeros follow the inputs
    num_sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    groups = 1 if num_items <= num_sms else 2  # one group fills all of shared memory before earlier kernels end
    lists = TensorDescriptor(weight.listed, list(weight.listed.shape), [32, 1], [1, 32], lists_layout())
    described = TensorDescriptor(codes.codes, list(codes.codes.shape), [32, 1], [32, 32], codes_layout())
    _one_order[(min(num_items, num_sms),)](
        tiled(x, rows, K), described, lists, codes.scales, bias if bias is not None else x, out,
        num_rows, n, num_blocks, num_items, steps, tiles,
        ROWS=rows, K=K, GROUPS=groups, STAGES=min(stages_of(rows, groups), steps), BIAS=bias is not None,
        GATE=activation is not None, ACTIVATION=activation or "", REGISTERS=_REGISTERS,
        num_warps=4, maxnreg=_REGISTERS, **pdl_options(x),
    )  # fmt: skip
