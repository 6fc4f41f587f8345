"""Tiles of quantised weights inside the matmul kernels: load, decode and accumulate.

matmul.py and experts.py are built from these. Groups of warps share a program: one reads codes and scales, the others,
called teams here, multiply steps in turn, or the same rows with outputs of their own. Codes become
bfloat16 numbers without rounding in the threads that hold them; sums of a group are multiplied by its scale in float32.
"""

from __future__ import annotations

import functools

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from graftlm.kernels.hopper.tiles import barrier, gated, halves, load, reinterpret

# Four pairs from a word of nibbles, of the outputs m and m + 8 in turn: 128 plus the number in bfloat16, less $5 or $6.
_INT4 = gl.constexpr("""{
.reg .b32 t;
lop3.b32 t, $4, 0x000f000f, 0x43004300, 0xEA;
sub.bf16x2 $0, t, $5;
shr.b32 t, $4, 4;
lop3.b32 t, t, 0x000f000f, 0x43004300, 0xEA;
sub.bf16x2 $1, t, $6;
shr.b32 t, $4, 8;
lop3.b32 t, t, 0x000f000f, 0x43004300, 0xEA;
sub.bf16x2 $2, t, $5;
shr.b32 t, $4, 12;
lop3.b32 t, t, 0x000f000f, 0x43004300, 0xEA;
sub.bf16x2 $3, t, $6;
}""")

# Sign, exponent and mantissa have the positions of a bfloat16 of 2^-126 times the value; times $5 or $6.
_E2M1 = gl.constexpr("""{
.reg .b32 t, s;
shl.b32 t, $4, 12;
and.b32 s, t, 0x80008000;
shr.b32 t, t, 6;
lop3.b32 t, t, 0x01c001c0, s, 0xEA;
mul.bf16x2 $0, t, $5;
shl.b32 t, $4, 8;
and.b32 s, t, 0x80008000;
shr.b32 t, t, 6;
lop3.b32 t, t, 0x01c001c0, s, 0xEA;
mul.bf16x2 $1, t, $6;
shl.b32 t, $4, 4;
and.b32 s, t, 0x80008000;
shr.b32 t, t, 6;
lop3.b32 t, t, 0x01c001c0, s, 0xEA;
mul.bf16x2 $2, t, $5;
and.b32 s, $4, 0x80008000;
shr.b32 t, $4, 6;
lop3.b32 t, t, 0x01c001c0, s, 0xEA;
mul.bf16x2 $3, t, $6;
}""")

# The same of two words that tiled_weight.py has interleaved: $8, $9 are the words, $10 to $13 their operands. Integer
# operations are what bounds the decoding (half of the rate of others): 12 for eight pairs, left shifts are products.
_TWO_E2M1 = gl.constexpr("""{
.reg .b32 t, c;
shl.b32 t, $9, 2;
lop3.b32 c, t, $8, 0x0c180c18, 0xD8;
and.b32 t, $8, 0x81c081c0;
mul.bf16x2 $0, t, $10;
shl.b32 t, $8, 6;
and.b32 t, t, 0x81c081c0;
mul.bf16x2 $2, t, $12;
shf.l.wrap.b32 t, $8, $8, 10;
and.b32 t, t, 0x81c081c0;
mul.bf16x2 $4, t, $10;
shl.b32 t, c, 2;
and.b32 t, t, 0x81c081c0;
mul.bf16x2 $6, t, $12;
and.b32 t, $9, 0x81c081c0;
mul.bf16x2 $1, t, $11;
shl.b32 t, $9, 6;
and.b32 t, t, 0x81c081c0;
mul.bf16x2 $3, t, $13;
shf.l.wrap.b32 t, $9, $9, 10;
and.b32 t, t, 0x81c081c0;
mul.bf16x2 $5, t, $11;
shf.l.wrap.b32 t, c, c, 12;
and.b32 t, t, 0x81c081c0;
mul.bf16x2 $7, t, $13;
}""")

# Two pairs from a word of bytes, upper bytes first: a bfloat16 of 2^-120 times the value.
_E4M3 = gl.constexpr("""{
.reg .b32 t, s, up;
mov.b32 up, 0x7b807b80;
and.b32 s, $2, 0x80008000;
shr.b32 t, $2, 4;
lop3.b32 t, t, 0x07f007f0, s, 0xEA;
mul.bf16x2 $0, t, up;
shl.b32 t, $2, 8;
and.b32 s, t, 0x80008000;
shr.b32 t, t, 4;
lop3.b32 t, t, 0x07f007f0, s, 0xEA;
mul.bf16x2 $1, t, up;
}""")

# 128 plus the lower seven bits, less 128 or 256 by the highest.
_INT8 = gl.constexpr("""{
.reg .b32 t, u, s;
shr.b32 t, $2, 8;
lop3.b32 u, t, 0x007f007f, 0x43004300, 0xEA;
lop3.b32 s, t, 0x00800080, 0x43004300, 0xAE;
sub.bf16x2 $0, u, s;
lop3.b32 u, $2, 0x007f007f, 0x43004300, 0xEA;
lop3.b32 s, $2, 0x00800080, 0x43004300, 0xAE;
sub.bf16x2 $1, u, s;
}""")


@gluon.jit
def _nibbles(words, even, odd, TABLE: gl.constexpr):
    """Return four pairs of each of words [16, W]; even and odd: operands of outputs m and m + 8, alike."""
    asm: gl.constexpr = _E2M1 if TABLE == "e2m1" else _INT4
    if TABLE == "e2m1" and words.shape[1] > 8:
        return gl.inline_asm_elementwise(
            _TWO_E2M1, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r", [words, even, odd],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=2,
        )  # fmt: skip
    return gl.inline_asm_elementwise(
        asm, "=&r,=&r,=&r,=&r,r,r,r", [words, even, odd], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True,
        pack=1,
    )  # fmt: skip


@gluon.jit
def _operands(found, NUMBER: gl.constexpr, like, KIND: gl.constexpr):
    """Return the operands of outputs m and m + 8, for each of words `like` [16, W]: number `NUMBER` of the stage's."""
    even, odd = _pair(found, NUMBER, KIND)
    return _spread(even, like), _spread(odd, like)


@gluon.jit
def _two_operands(found, NUMBER: gl.constexpr, like, KIND: gl.constexpr):
    """Return the operands of words `like` [16, 32], where each half of the inputs has its own from `NUMBER` on."""
    even, odd = _pair(found, NUMBER, KIND)
    next_even, next_odd = _pair(found, NUMBER + 1, KIND)
    return _spread_halves(even, next_even, like), _spread_halves(odd, next_odd, like)


@gluon.jit
def _pair(found, NUMBER: gl.constexpr, KIND: gl.constexpr):
    """Return the operands number `NUMBER` as words [4, 8] of outputs m, and of outputs m + 8: a row of found
    [rows, 64], or a byte of its words."""
    if KIND == "power":
        even, odd = _even_odd(found, NUMBER // 4)
        return _power(even, NUMBER % 4), _power(odd, NUMBER % 4)
    else:
        return _even_odd(found, NUMBER)


@gluon.jit
def _power(words, BYTE: gl.constexpr):
    """Return words of twice the bfloat16 number whose exponent is a byte of `words`."""
    asm: gl.constexpr = _power_asm(BYTE)
    return gl.inline_asm_elementwise(asm, "=r,r", [words], dtype=gl.int32, is_pure=True, pack=1)


@gluon.constexpr_function
def _power_asm(byte):
    return f"{{ .reg .b32 t; prmt.b32 t, $1, 0, 0x4{byte}4{byte}; shl.b32 $0, t, 7; }}"


@gluon.jit
def _even_odd(found, ROW: gl.constexpr):
    """Return row `ROW` of found [rows, 64] as words [4, 8] of outputs m, and of outputs m + 8."""
    ROWS: gl.constexpr = found.shape[0]
    if ROWS == 1:
        return gl.split(found.to(gl.int32, bitcast=True).reshape([4, 2, 8]).permute((0, 2, 1)))
    else:
        first, second = gl.split(found.reshape([2, ROWS // 2, 64]).permute((1, 2, 0)))
        return _even_odd(first if ROW < ROWS // 2 else second, ROW % (ROWS // 2))


@gluon.jit
def _spread_halves(first, second, like):
    """Return words [4, 8] of both halves of the inputs for all words [16, 32] of the output."""
    whole: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 0, 0, 1], [0, 0, 0, 1, 0]],
        [[0, 0, 1, 0, 0], [0, 0, 2, 0, 0], [0, 1, 0, 0, 0], [1, 0, 0, 0, 0], [2, 0, 0, 0, 0]],
        [[4, 0, 0, 0, 0], [8, 0, 0, 0, 0]], [], [16, 2, 4, 2, 2],
    )  # fmt: skip
    each: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, whole))
    x = gl.convert_layout(gl.join(first, second).reshape([16, 2, 2]), each, assert_trivial=True)
    zeros = gl.zeros([16, 2, 4, 2, 2], gl.int32, whole)
    found = (zeros + x.expand_dims(2).expand_dims(4)).reshape([16, 32])
    return gl.convert_layout(found, like.type.layout, assert_trivial=True)


@gluon.jit
def _spread(x, like):
    """Return x [4, 8], one for each output, for all words [16, W] of the output."""
    W: gl.constexpr = like.shape[1]
    if W == 32:
        whole: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 0, 1], [0, 0, 2]], [[0, 0, 4], [0, 0, 8], [0, 1, 0], [1, 0, 0], [2, 0, 0]],
            [[4, 0, 0], [8, 0, 0]], [], [16, 2, 16],
        )  # fmt: skip
    elif W == 16:
        whole: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 0, 1]], [[0, 0, 2], [0, 0, 4], [0, 1, 0], [1, 0, 0], [2, 0, 0]],
            [[4, 0, 0], [8, 0, 0]], [], [16, 2, 8],
        )  # fmt: skip
    else:
        whole: gl.constexpr = gl.DistributedLinearLayout(
            [], [[0, 0, 1], [0, 0, 2], [0, 1, 0], [1, 0, 0], [2, 0, 0]], [[4, 0, 0], [8, 0, 0]], [], [16, 2, 4]
        )
    x = gl.convert_layout(x.reshape([16, 2]), gl.SliceLayout(2, whole), assert_trivial=True)
    zeros = gl.zeros([16, 2, W // 2], gl.int32, whole)
    return gl.convert_layout((zeros + x.expand_dims(2)).reshape([16, W]), like.type.layout, assert_trivial=True)


@gluon.jit
def _bytes(words, TABLE: gl.constexpr):
    asm: gl.constexpr = _E4M3 if TABLE == "e4m3" else _INT8
    return gl.inline_asm_elementwise(asm, "=&r,=&r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)


@gluon.jit
def _factor(a, b, c, d, layout: gl.constexpr):
    """Return a factor [64, 2 * words] of pairs [16, words] of outputs m, m + 8, and of inputs 8 further."""
    W: gl.constexpr = a.shape[1]
    # [16, words, half, output, input]; nothing moves between threads
    w = gl.join(gl.join(halves(a), halves(b)), gl.join(halves(c), halves(d)))
    if W == 32:
        w = w.reshape([4, 4, 2, 4, 2, 2, 2, 2, 2]).permute((0, 7, 1, 2, 4, 5, 8, 3, 6)).reshape([64, 64])
    elif W == 16:
        w = w.reshape([4, 4, 2, 4, 2, 2, 2, 2]).permute((0, 6, 1, 2, 4, 7, 3, 5)).reshape([64, 32])
    else:
        w = w.reshape([4, 4, 2, 4, 2, 2, 2]).permute((0, 5, 1, 2, 6, 3, 4)).reshape([64, 16])
    return gl.convert_layout(w.to(gl.bfloat16, bitcast=True), gl.DotOperandLayout(0, layout, 2), assert_trivial=True)


@gluon.jit
def _half(words, PART: gl.constexpr):
    """Return the words [16, W / 2] of one half of the inputs of words [16, W]."""
    W: gl.constexpr = words.shape[1]
    first, second = gl.split(words.reshape([16, 8, 2, W // 16]).permute((0, 1, 3, 2)))
    return (first if PART == 0 else second).reshape([16, W // 2])


@gluon.jit
def _some_words(words, PART: gl.constexpr, BY: gl.constexpr):
    """Return the words [16, W / BY] of part `PART` of the inputs of words [16, W]."""
    if BY == 1:
        return words
    elif BY == 2:
        return _half(words, PART)
    else:
        return _half(_half(words, PART // 2), PART % 2)


@gluon.jit
def box_words(ws, s, BOX: gl.constexpr, BITS: gl.constexpr):
    """Return the words [16, 32] of a box of 64 inputs in stage `s`: twice the same with 4 bits, else both halves."""
    words: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    PARTS: gl.constexpr = BITS // 4
    if BITS == 4:
        first = ws.index(s).slice(BOX * 16, 16, 0).load(words)
        second = first
    else:
        first = ws.index(s * PARTS + BOX).slice(0, 16, 0).load(words)
        second = ws.index(s * PARTS + BOX).slice(16, 16, 0).load(words)
    return first, second


@gluon.jit
def factor(
    first, second, found, NUMBER: gl.constexpr, PART: gl.constexpr, BY: gl.constexpr, BITS: gl.constexpr,
    TABLE: gl.constexpr, KIND: gl.constexpr, TWO: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Return part `PART` of `BY` of a box's weights as a first factor [64, 64 / BY].

    found  the stage's numbers, among them the operands: number `NUMBER`, or two from there on
    """
    if BITS == 4:
        words = _some_words(first, PART, BY)
        if TWO:
            even, odd = _two_operands(found, NUMBER, words, KIND)
        elif KIND == "zero" or KIND == "power":
            even, odd = _operands(found, NUMBER, words, KIND)
        else:
            even = gl.full_like(words, 0x7E807E80 if TABLE == "e2m1" else 0x43084308)
            odd = even
        a, b, c, d = _nibbles(words, even, odd, TABLE)
    else:
        a, b = _bytes(_some_words(first, PART, BY), TABLE)
        c, d = _bytes(_some_words(second, PART, BY), TABLE)
    return _factor(a, b, c, d, layout)


@gluon.jit
def numbers_of_stage(ss, s):
    """Return the numbers of a stage. -> float32 [rows, 64]"""
    LINES: gl.constexpr = ss.shape[1]
    if LINES == 8:
        held: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 8], [2, 0], [4, 0]], [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]], [[0, 16], [1, 0]], [], [8, 32]
        )
    elif LINES == 16:
        held: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 8], [2, 0], [4, 0], [8, 0]], [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]], [[0, 16], [1, 0]], [], [16, 32]
        )
    else:
        held: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 8], [2, 0], [4, 0], [8, 0], [16, 0]], [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]],
            [[0, 16], [1, 0]], [], [32, 32],
        )  # fmt: skip
    return ss.index(s).load(held).reshape([LINES // 2, 64])


@gluon.jit
def row_of(found, ROW: gl.constexpr, layout: gl.constexpr):
    """Return row `ROW` of found [rows, 64], whose rows lie in a thread's registers."""
    ROWS: gl.constexpr = found.shape[0]
    if ROWS == 1:
        return gl.convert_layout(found.reshape([64]), gl.SliceLayout(1, layout), assert_trivial=True)
    else:
        first, second = gl.split(found.reshape([2, ROWS // 2, 64]).permute((1, 2, 0)))
        return row_of(first if ROW < ROWS // 2 else second, ROW % (ROWS // 2), layout)


@gluon.jit
def allocate(x_tiles, codes, scales, SHAPE: gl.constexpr, STAGES: gl.constexpr):
    """Allocate shared memory: (boxes of x, tiles of codes, scales of stages, stages read, stages free), sums, barriers
    of the sums.

    SHAPE  rows, inputs of a box of x, bits, lines of the scales, teams, tiles of a stage, blocks of outputs of a stage:
           one, whose steps the teams share, or one or two for each team
    """
    TEAMS: gl.constexpr = SHAPE[4]
    BLOCKS: gl.constexpr = SHAPE[6]
    ROWS: gl.constexpr = SHAPE[0]
    K: gl.constexpr = SHAPE[1]
    BITS: gl.constexpr = SHAPE[2]
    LINES: gl.constexpr = SHAPE[3]
    TILES: gl.constexpr = STAGES * SHAPE[5]
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    boxes: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * K, element_bitwidth=16, rank=2)
    xs = gl.allocate_shared_memory(x_tiles.dtype, [TILES * (128 // K), ROWS, K], boxes)
    ws = gl.allocate_shared_memory(gl.int32, [TILES * BLOCKS * (BITS // 4), 32, 32], codes.layout)
    ss = ws
    if LINES > 0:
        ss = gl.allocate_shared_memory(gl.float32, [STAGES * BLOCKS, LINES, 32], scales.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1 if BLOCKS == 1 else TEAMS)
    from_others, by_others = ready, ready
    if BLOCKS == 1:
        from_others = gl.allocate_shared_memory(gl.float32, [TEAMS - 1, 64, ROWS], flat)
        # handed over, taken by the first team
        by_others = gl.allocate_shared_memory(gl.int64, [2 * (TEAMS - 1), 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(2 * (TEAMS - 1)):
            mbarrier.init(by_others.index(i), count=1)
    fence_async_shared()
    return (xs, ws, ss, ready, free), from_others, by_others


@gluon.jit
def store_outputs(
    sums, scales, bias, out, first_row, num_rows, block, n, out_row, SCALED: gl.constexpr, OUTPUT: gl.constexpr
):
    """Store a block's sums [64, rows] to out [rows, out_row]: times their scales, with their bias, or gated.

    OUTPUT  whether there are a bias and gates; their activation
    """
    i = block * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, sums.type.layout))
    if SCALED:
        sums *= gl.load(scales + i, mask=i < (2 * n if OUTPUT[1] else n), other=0.0)[:, None]
    if OUTPUT[1]:
        ACTIVATION: gl.constexpr = OUTPUT[2]
        found = gated(sums, out.dtype.element_ty, ACTIVATION)
        _store(found, out, first_row, num_rows, block * 32, n, out_row)
    else:
        if OUTPUT[0]:
            sums += gl.load(bias + i, mask=i < n, other=0.0).to(gl.float32)[:, None]
        _store(sums, out, first_row, num_rows, block * 64, n, out_row)


@gluon.jit
def _store(found, out, first_row, num_rows, first, n, out_row):
    """Store found [outputs, rows] to out [rows, out_row] from row `first_row` and output `first` on."""
    layout: gl.constexpr = found.type.layout
    i = first + gl.arange(0, found.shape[0], layout=gl.SliceLayout(1, layout))
    row = first_row + gl.arange(0, found.shape[1], layout=gl.SliceLayout(0, layout))
    target = out + (row * out_row)[None, :] + i[:, None]
    gl.store(target, found.to(out.dtype.element_ty), mask=(row < num_rows)[None, :] & (i < n)[:, None])


@gluon.jit
def hand_over(sums, given, handed, TEAM: gl.constexpr, turn):
    """Write a team's sums to shared memory once those of its previous turn are read."""
    mbarrier.wait(handed.index(2 * TEAM - 1), turn ^ 1)
    given.index(TEAM - 1).store(sums)
    barrier()
    mbarrier.arrive(handed.index(2 * TEAM - 2))


@gluon.jit
def take_over(sums, given, handed, TEAMS: gl.constexpr, turn):
    """Return `sums` plus those that the other teams have written in this turn."""
    for team in gl.static_range(1, TEAMS):
        mbarrier.wait(handed.index(2 * team - 2), turn)
        sums += given.index(team - 1).load(sums.type.layout)
        barrier()
        mbarrier.arrive(handed.index(2 * team - 1))
    return sums


@gluon.jit
def read_tiles(codes, scales, shared, s, own, first, pred, SHAPE: gl.constexpr, SCALE_LINES: gl.constexpr):
    """Load the codes and scales of a block's tiles, from tile `first` on, into place `own` as a part of stage `s`."""
    _, ws, ss, ready, _ = shared
    PLACES: gl.constexpr = ready.shape[0] * SHAPE[6]
    HEIGHT: gl.constexpr = SHAPE[5] * SHAPE[2] // 4 * 32
    places = reinterpret(ws, gl.int32, [PLACES, HEIGHT, 32], codes.layout)
    load(codes, [first * (SHAPE[2] // 4 * 32), 0], ready.index(s), places.index(own), pred=pred)
    if SHAPE[3] > 0:
        load(scales, [first * SCALE_LINES, 0], ready.index(s), ss.index(own), pred=pred)


@gluon.jit
def read_rows(x, shared, s, row, first, SHAPE: gl.constexpr):
    """Load a stage's boxes of rows from `row` on, for tiles from `first` on, into stage `s`."""
    xs, _, _, ready, _ = shared
    STAGES: gl.constexpr = ready.shape[0]
    BOXES: gl.constexpr = SHAPE[5] * (128 // SHAPE[1])
    stages = reinterpret(xs, xs.dtype, [STAGES, BOXES, SHAPE[0], SHAPE[1]], x.layout)
    load(x, [first * (128 // SHAPE[1]), row, 0], ready.index(s), stages.index(s))


@gluon.constexpr_function
def rows_of_numbers(kind, groups):
    """Return the number of rows of a tile's numbers: four powers are one."""
    if kind == "power":
        return (groups + 3) // 4
    return groups * (2 if kind in ("zero", "minimum") else 1)


@gluon.constexpr_function
def number_of_operands(kind, groups, boxes, first, group, part):
    """Return the number of a box's operands in a stage, where those of its tile begin in row `first`."""
    return 4 * first + part * groups // boxes if kind == "power" else first + group + (groups if kind == "zero" else 0)


@gluon.constexpr_function
def sums_layout(rows):
    """Return the layout of sums [64, rows]: of matmuls of a warp up to 16 rows, else of four warps."""
    if rows <= 16:
        return gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 16])


@gluon.jit
def block_sums(shared, at, steps, TEAM: gl.constexpr, SHAPE: gl.constexpr, FORMAT: gl.constexpr):
    """Return a team's sums of a block's 64 outputs over `steps` stages from number `at` on. -> float32 [64, rows]

    Where the teams share a block, over its share of the stages.
    """
    ready, free = shared[3], shared[4]
    STAGES: gl.constexpr = ready.shape[0]
    ROWS: gl.constexpr = SHAPE[0]
    TEAMS: gl.constexpr = SHAPE[4]
    BLOCKS: gl.constexpr = SHAPE[6]
    sums = gl.zeros([64, ROWS], gl.float32, sums_layout(ROWS))
    begin = (TEAM + TEAMS - at % TEAMS) % TEAMS if BLOCKS == 1 else 0
    for step in range(begin, steps, TEAMS // BLOCKS):
        s = (at + step) % STAGES
        own = s * BLOCKS + (TEAM if BLOCKS > 1 else 0)
        mbarrier.wait(ready.index(s), (at + step) // STAGES & 1)
        if ROWS <= 16:
            sums = _add_few_rows(shared, s, own, sums, SHAPE, FORMAT)
        elif FORMAT[0] > 0 and FORMAT[1] != "power":
            sums = _add_groups(shared, s, own, sums, SHAPE, FORMAT)
        else:
            sums = _add_tiles(shared, s, own, sums, SHAPE, FORMAT)
        mbarrier.arrive(free.index(s))
    return sums


@gluon.jit
def two_block_sums(shared, at, steps, TEAM: gl.constexpr, SHAPE: gl.constexpr, FORMAT: gl.constexpr):
    """Return a team's sums of two blocks' 64 outputs over `steps` stages from number `at` on. -> two float32 [64, rows]

    For up to 16 rows and powers as scales. A warp reads all rows for its 16 outputs of a block, half of its reads of
    shared memory by count of instructions: here it reads them once for both blocks.
    """
    xs, ws, ss, ready, free = shared
    STAGES: gl.constexpr = ready.shape[0]
    ROWS: gl.constexpr = SHAPE[0]
    BOXES: gl.constexpr = 128 // SHAPE[1]
    DEPTH: gl.constexpr = SHAPE[5]
    NUMBERS: gl.constexpr = rows_of_numbers(FORMAT[1], FORMAT[0])
    layout: gl.constexpr = sums_layout(ROWS)
    first = gl.zeros([64, ROWS], gl.float32, layout)
    second = gl.zeros([64, ROWS], gl.float32, layout)
    for step in range(0, steps):
        s = (at + step) % STAGES
        own = s * SHAPE[6] + 2 * TEAM
        mbarrier.wait(ready.index(s), (at + step) // STAGES & 1)
        found, others = numbers_of_stage(ss, own), numbers_of_stage(ss, own + 1)
        for tile in gl.static_range(DEPTH):
            for box in gl.static_range(BOXES):
                rows = xs.index((s * DEPTH + tile) * BOXES + box).permute((1, 0))
                x = rows.load(gl.DotOperandLayout(1, layout, 2))
                w = box_factor(ws, found, tile * NUMBERS, own * DEPTH + tile, 0, box, SHAPE, FORMAT)
                first = mma_v2(w, x, first)
                w = box_factor(ws, others, tile * NUMBERS, (own + 1) * DEPTH + tile, 0, box, SHAPE, FORMAT)
                second = mma_v2(w, x, second)
        mbarrier.arrive(free.index(s))
    return first, second


@gluon.jit
def _add_few_rows(shared, s, own, sums, SHAPE: gl.constexpr, FORMAT: gl.constexpr):
    """Add a stage of up to 16 rows, by matmuls of a warp: those of four warps take as long for 8 rows as for 64."""
    xs, ws, ss, _, _ = shared
    GROUPS: gl.constexpr = FORMAT[0]
    KIND: gl.constexpr = FORMAT[1]
    ROWS: gl.constexpr = SHAPE[0]
    K: gl.constexpr = SHAPE[1]
    DEPTH: gl.constexpr = SHAPE[5]
    BOXES: gl.constexpr = 128 // K
    EACH: gl.constexpr = _each(GROUPS, KIND, BOXES)
    SCALED: gl.constexpr = GROUPS > 0 and KIND != "power"
    layout: gl.constexpr = sums.type.layout
    zeros = gl.zeros([64, ROWS], gl.float32, layout)
    if KIND == "minimum":
        ones = gl.full([64, K], 1.0, gl.bfloat16, gl.DotOperandLayout(0, layout, 2))
    NUMBERS: gl.constexpr = rows_of_numbers(KIND, GROUPS)
    found = sums
    if GROUPS > 0:
        found = numbers_of_stage(ss, own)
    for i in gl.static_range(DEPTH * (BOXES // EACH)):
        more = sums
        if SCALED:
            more = zeros
        total = zeros
        for part in gl.static_range(EACH):
            w = box_factor(
                ws, found, i // (BOXES // EACH) * NUMBERS, own * DEPTH + i // (BOXES // EACH), i % (BOXES // EACH),
                part, SHAPE, FORMAT,
            )  # fmt: skip
            rows = xs.index(s * DEPTH * BOXES + i * EACH + part).permute((1, 0))
            x = rows.load(gl.DotOperandLayout(1, layout, 2))
            more = mma_v2(w, x, more)
            if KIND == "minimum":
                total = mma_v2(ones, x, total)
        if SCALED:
            sums += more * row_of(found, i // (BOXES // EACH) * NUMBERS + i % (BOXES // EACH), layout)[:, None]
        else:
            sums = more
        if KIND == "minimum":
            sums += (
                total * row_of(found, i // (BOXES // EACH) * NUMBERS + GROUPS + i % (BOXES // EACH), layout)[:, None]
            )
    return sums


@gluon.jit
def box_factor(
    ws, found, FIRST: gl.constexpr, tile, GROUP: gl.constexpr, PART: gl.constexpr, SHAPE: gl.constexpr,
    FORMAT: gl.constexpr,
):  # fmt: skip
    """Return the first factor [64, K] of a box of a tile's codes: part `PART` of a group.

    found  the tile's numbers from row `FIRST` on
    """
    GROUPS: gl.constexpr = FORMAT[0]
    KIND: gl.constexpr = FORMAT[1]
    TABLE: gl.constexpr = FORMAT[2]
    ROWS: gl.constexpr = SHAPE[0]
    K: gl.constexpr = SHAPE[1]
    BITS: gl.constexpr = SHAPE[2]
    BOXES: gl.constexpr = 128 // K
    BOX: gl.constexpr = GROUP * _each(GROUPS, KIND, BOXES) + PART
    layout: gl.constexpr = sums_layout(ROWS)
    first, second = box_words(ws, tile, BOX * K // 64, BITS)
    return factor(
        first, second, found, number_of_operands(KIND, GROUPS, BOXES, FIRST, GROUP, PART), BOX % (64 // K), 64 // K,
        BITS, TABLE, KIND, KIND == "power" and GROUPS > BOXES, layout,
    )  # fmt: skip


@gluon.constexpr_function
def _each(groups, kind, boxes):
    """Return the boxes of a group, or of a tile whose sums have no scales of groups."""
    return boxes // groups if groups > 0 and kind != "power" else boxes


@gluon.jit
def _add_tiles(shared, s, own, sums, SHAPE: gl.constexpr, FORMAT: gl.constexpr):
    """Add a stage whose sums have no scales of groups."""
    xs, ws, ss, _, _ = shared
    DEPTH: gl.constexpr = SHAPE[5]
    BOXES: gl.constexpr = 128 // SHAPE[1]
    NUMBERS: gl.constexpr = rows_of_numbers(FORMAT[1], FORMAT[0])
    more = warpgroup_mma_init(sums)
    found = sums
    if FORMAT[0] > 0:
        found = numbers_of_stage(ss, own)
    for tile in gl.static_range(DEPTH):
        for box in gl.static_range(BOXES):
            w = box_factor(ws, found, tile * NUMBERS, own * DEPTH + tile, 0, box, SHAPE, FORMAT)
            x = xs.index((s * DEPTH + tile) * BOXES + box).permute((1, 0))
            more = warpgroup_mma(w, x, more, is_async=True)
    return warpgroup_mma_wait(0, deps=(more,))


@gluon.jit
def _add_groups(shared, s, own, sums, SHAPE: gl.constexpr, FORMAT: gl.constexpr):
    """Add a stage's groups, each with sums of its own; where registers suffice the next is decoded meanwhile."""
    xs, ws, ss, _, _ = shared
    GROUPS: gl.constexpr = FORMAT[0]
    MINIMUM: gl.constexpr = FORMAT[1] == "minimum"
    ROWS: gl.constexpr = SHAPE[0]
    K: gl.constexpr = SHAPE[1]
    DEPTH: gl.constexpr = SHAPE[5]
    BOXES: gl.constexpr = 128 // K
    EACH: gl.constexpr = BOXES // GROUPS  # one or two
    layout: gl.constexpr = sums.type.layout
    zeros = gl.zeros([64, ROWS], gl.float32, layout)
    if MINIMUM:
        ones = gl.full([64, K], 1.0, gl.bfloat16, gl.DotOperandLayout(0, layout, 2))
    found = numbers_of_stage(ss, own)
    NUMBERS: gl.constexpr = rows_of_numbers(FORMAT[1], GROUPS)
    w, other = _group_factors(ws, found, 0, own * DEPTH, 0, SHAPE, FORMAT)
    for i in gl.static_range(DEPTH * GROUPS):
        box = (s * DEPTH + i // GROUPS) * BOXES + i % GROUPS * EACH
        x, other_x = xs.index(box).permute((1, 0)), xs.index(box + EACH - 1).permute((1, 0))
        more = warpgroup_mma(w, x, warpgroup_mma_init(zeros), use_acc=False, is_async=True)
        if EACH == 2:
            more = warpgroup_mma(other, other_x, more, is_async=True)
        total = warpgroup_mma_init(zeros)
        if MINIMUM:
            total = warpgroup_mma(ones, x, total, use_acc=False, is_async=True)
            if EACH == 2:
                total = warpgroup_mma(ones, other_x, total, is_async=True)
        if ROWS > 32:
            sums = _scaled(sums, more, total, found, i // GROUPS * NUMBERS + i % GROUPS, GROUPS, MINIMUM)
        if i + 1 < DEPTH * GROUPS:
            w, other = _group_factors(
                ws, found, (i + 1) // GROUPS * NUMBERS, own * DEPTH + (i + 1) // GROUPS, (i + 1) % GROUPS, SHAPE, FORMAT
            )
        if ROWS <= 32:
            sums = _scaled(sums, more, total, found, i // GROUPS * NUMBERS + i % GROUPS, GROUPS, MINIMUM)
    return sums


@gluon.jit
def _group_factors(
    ws, found, FIRST: gl.constexpr, tile, GROUP: gl.constexpr, SHAPE: gl.constexpr, FORMAT: gl.constexpr
):
    """Return the first factors of a group's boxes, of which there are one or two."""
    EACH: gl.constexpr = 128 // SHAPE[1] // FORMAT[0]
    w = box_factor(ws, found, FIRST, tile, GROUP, 0, SHAPE, FORMAT)
    other = w
    if EACH == 2:
        other = box_factor(ws, found, FIRST, tile, GROUP, 1, SHAPE, FORMAT)
    return w, other


@gluon.jit
def _scaled(sums, more, total, found, ROW: gl.constexpr, GROUPS: gl.constexpr, MINIMUM: gl.constexpr):
    """Return `sums` plus the sums of a group times its scale in row `ROW`, and the total of its inputs times its
    minimum, `GROUPS` rows further."""
    layout: gl.constexpr = sums.type.layout
    if MINIMUM:
        more, total = warpgroup_mma_wait(0, deps=(more, total))
        sums += total * row_of(found, ROW + GROUPS, layout)[:, None]
    else:
        more = warpgroup_mma_wait(0, deps=(more,))
    return sums + more * row_of(found, ROW, layout)[:, None]


@functools.cache
def lines_layout(bits: int = 32) -> gl.NVMMASharedLayout:
    """Return the layout of lines of 128 bytes in shared memory: neighbouring threads read different banks."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)
