"""Tiles of a 12-bit weight inside the matmul kernels: load, unpack and accumulate.

matmul.py and experts.py are built from these. Four groups of warps share a program: one reads codes, two multiply
alternate steps, and one adds the listed weights, whose inputs it reads one by one.
"""

from __future__ import annotations

import functools

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from graftlm.kernels.bits12.weight_codec import LINES
from graftlm.kernels.hopper.tiles import barrier, gated, halves, load

# Eight weights: bytes of two pairs in $4, of two in $5, upper bits of all in $6, four bits further for each pair.
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
_LINES = gl.constexpr(LINES)


@gluon.jit
def factor(bytes_of, rest, layout: gl.constexpr):
    """Return a box [64, 64] of weights as a first factor, from bytes_of [32, 32] and rest [16, 32] in shared memory."""
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
def read_codes(codes, shared, s, tile, pred):
    """Load three boxes of 32 lines into stage `s`: the bytes of either half of a tile, and the rest of both."""
    _, ws, ready, _ = shared
    for part in gl.static_range(3):
        load(codes, [tile * _LINES + part * 32, 0], ready.index(s), ws.index(s * 3 + part), pred=pred)


@gluon.jit
def allocate(x_tiles, codes, ROWS: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr):
    """Allocate shared memory: (tiles of x, of codes, stages read, stages free), sums, barriers of the sums.

    Sums and their barriers exist twice: for the second matmul group, and for the listed weights.
    """
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
    return (xs, ws, ready, free), (from_other, from_lists), (by_other, by_lists)


@gluon.jit
def block_sums(shared, at, steps, GROUP: gl.constexpr):
    """Return a block's 64 outputs over every second of `steps` stages from number `at` on. -> float32 [64, rows]"""
    xs, ws, ready, free = shared
    STAGES: gl.constexpr = ready.shape[0]
    ROWS: gl.constexpr = xs.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    sums = gl.zeros([64, ROWS], gl.float32, layout)
    for step in range((GROUP + at) % 2, steps, 2):
        s = (at + step) % STAGES
        mbarrier.wait(ready.index(s), (at + step) // STAGES & 1)
        more = warpgroup_mma_init(sums)
        for box in gl.static_range(2):
            w = factor(ws.index(s * 3 + box), ws.index(s * 3 + 2).slice(box * 16, 16, 0), layout)
            more = warpgroup_mma(w, xs.index(s * 2 + box).permute((1, 0)), more, is_async=True)
        sums = warpgroup_mma_wait(0, deps=(more,))
        mbarrier.arrive(free.index(s))
    return sums


@gluon.jit
def hand_over(sums, to, handed, turn):
    """Write sums to shared memory once the sums of the previous turn are read."""
    mbarrier.wait(handed.index(1), turn ^ 1)
    to.store(sums)
    barrier()
    mbarrier.arrive(handed.index(0))


@gluon.jit
def take_over(sums, given, handed, turn):
    """Return `sums` plus the sums that another group of warps has written in this turn."""
    mbarrier.wait(handed.index(0), turn)
    sums += given.load(sums.type.layout)
    barrier()
    mbarrier.arrive(handed.index(1))
    return sums


@gluon.jit
def listed_range(starts, block, output, ok):
    """Return the offsets [first, end) of the listed weights of a block's outputs."""
    at = starts + block * 64 + output
    return gl.load(at, mask=ok, other=0), gl.load(at + 1, mask=ok, other=0)


@gluon.jit
def one_of_each(inputs, values, at, end):
    """Return the next listed weight of each output; its input is -1 where there is none."""
    return gl.load(inputs + at, mask=at < end, other=-1), gl.load(values + at, mask=at < end, other=0.0)


@gluon.jit
def store_rows(found, out, first_row, num_rows, first, n):
    """Store found [outputs, rows] to out [:, n] from output `first` on."""
    layout: gl.constexpr = found.type.layout
    i = first + gl.arange(0, found.shape[0], layout=gl.SliceLayout(1, layout))
    row = gl.arange(0, found.shape[1], layout=gl.SliceLayout(0, layout))
    target = out + (first_row + row)[None, :] * n + i[:, None]
    gl.store(target, found.to(out.dtype.element_ty), mask=(row < num_rows)[None, :] & (i < n)[:, None])


@gluon.jit
def store_block(
    sums, bias, out, first_row, num_rows, block, n,
    BIAS: gl.constexpr, GATE: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Store the sums [64, rows] of a block to out [:, n]: gated (eight gates, eight ups, ...), or with their bias."""
    if GATE:
        store_rows(gated(sums, out.dtype.element_ty, ACTIVATION), out, 0, num_rows, block * 32, n)  # a single part
    else:
        i = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, sums.type.layout))
        if BIAS:
            sums += gl.load(bias + i, mask=i < n, other=0.0).to(gl.float32)[:, None]
        store_rows(sums, out, first_row, num_rows, block * 64, n)


@functools.cache
def codes_layout() -> gl.NVMMASharedLayout:
    """Return the layout of 32 lines of codes in shared memory: neighbouring threads read different banks."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
