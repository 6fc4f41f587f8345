"""Factors for the matrix units, unpacked from 12-bit words (kv_codec.py) by the threads that multiply them.

One warp has a block of T tokens in shared memory: low [T, D / 4], the words of low bytes of vectors of D numbers, and
high [T, D / 8], those of upper bits. Only kernels in Gluon import this module.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from graftlm.kernels.bits12.kv_codec import EIGHT
from graftlm.kernels.hopper.tiles import halves

_EIGHT = gl.constexpr(f"{{{EIGHT}}}")


@gluon.constexpr_function
def _key_words(tokens, words, first):
    """Return the layout of a block's words [tokens, words] in which each thread reads the words of its own keys.

    first  distance in words of the first threads of a token
    """
    return _words(tokens, words, [[0, first], [0, 2 * first], [1, 0], [2, 0], [4, 0]])


@gluon.constexpr_function
def _value_words(tokens, words, apart):
    """Return the layout of a block's words for values. apart  distance in words of the threads of a token"""
    return _words(tokens, words, [[2, 0], [4, 0], *([0, lane] for lane in apart)])


@gluon.constexpr_function
def _words(tokens, words, by_lane):
    each = [[0, 1 << i] for i in range(words.bit_length() - 1)] + [[1 << i, 0] for i in range(tokens.bit_length() - 1)]
    return gl.DistributedLinearLayout([x for x in each if x not in by_lane], by_lane, [], [], [tokens, words])


@gluon.constexpr_function
def copied(words):
    """Return the layout of the copy to shared memory: 16 bytes a thread, up to 128 adjacent bytes of a token."""
    threads = min(words // 4, 8)
    return gl.BlockedLayout([1, 4], [32 // threads, threads], [1, 1], [1, 0])


@gluon.constexpr_function
def shared_layout(words):
    """Return the layout of `words` words of each token in shared memory, whose banks are 32 words."""
    if words >= 32:
        return gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    return gl.SwizzledSharedLayout(4, 32 // words, words // 4, [1, 0])


@gluon.jit
def _numbers(low, high):
    """Unpack T vectors of D numbers, words low [T, D / 4] and high [T, D / 8]. -> bfloat16 [T, D / 8, 2, 2, 2]

    A dimension is D / 2 * i4 + 4 * i1 + i2 + 2 * i3, with indices i1 to i4 of the result.
    """
    T: gl.constexpr = low.shape[0]
    W: gl.constexpr = high.shape[1]
    first, second = gl.split(low.reshape([T, W // 2, 2, 2]).permute((0, 1, 3, 2)))
    first, second = first.reshape([T, W]), second.reshape([T, W])
    a, b, c, d = gl.inline_asm_elementwise(
        _EIGHT,
        "=&r,=&r,=&r,=&r,r,r,r",
        [first, second, gl.convert_layout(high, first.type.layout, assert_trivial=True)],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    numbers = gl.join(gl.join(halves(a), halves(b)), gl.join(halves(c), halves(d)))
    return numbers.to(gl.bfloat16, bitcast=True)


@gluon.jit
def keys_of(low, high):
    """Return the first factor of a matmul with queries, bfloat16 [T, D]; `dims_of_keys` has its dimensions."""
    T: gl.constexpr = low.shape[0]
    LOW: gl.constexpr = low.shape[1]
    HIGH: gl.constexpr = high.shape[1]
    SMALL: gl.constexpr = LOW < 32
    found = _numbers(low.load(_key_words(T, LOW, 4 if SMALL else 8)), high.load(_key_words(T, HIGH, 2 if SMALL else 4)))
    found = found.reshape([T, 1 if SMALL else LOW // 32, 2, 2, 1 if SMALL else 2, 2, 2, 2, 2])
    return found.permute((0, 8, 1, 4, 5, 7, 2, 3, 6)).reshape([T, 4 * LOW])


@gluon.jit
def dims_of_keys(D: gl.constexpr, layout: gl.constexpr):
    """Return the dimension of each column of `keys_of`, int32 [D]."""
    i = gl.arange(0, D, layout=layout)
    dim = i >> 5 << 5 | (i >> 1 & 3) << 3
    if D >= 128:
        dim = i >> 6 << 6 | (i >> 1 & 3) << 4 | (i >> 5 & 1) << 3
    return dim | (i >> 4 & 1) << 2 | (i >> 3 & 1) << 1 | i & 1


@gluon.jit
def values_of(low, high):
    """Return the first factor of a matmul with probabilities, bfloat16 [D, T]; `dims_of_values` has its dimensions."""
    T: gl.constexpr = low.shape[0]
    LOW: gl.constexpr = low.shape[1]
    HIGH: gl.constexpr = high.shape[1]
    SMALL: gl.constexpr = LOW < 32
    found = _numbers(
        low.load(_value_words(T, LOW, (1, 4, 8) if SMALL else (4, 8, 16))),
        high.load(_value_words(T, HIGH, (1, 2, 4) if SMALL else (2, 4, 8))),
    )
    found = found.reshape([T, 1 if SMALL else LOW // 32, 2, 2, 2, 1 if SMALL else 2, 2, 2, 2])
    return found.permute((8, 1, 5, 7, 6, 2, 3, 4, 0)).reshape([4 * LOW, T])


@gluon.jit
def dims_of_values(D: gl.constexpr, layout: gl.constexpr):
    """Return the dimension of each row of `values_of`, int32 [D]."""
    i = gl.arange(0, D, layout=layout)
    dim = i >> 5 << 5 | (i & 7) << 2
    if D >= 128:
        dim = i >> 6 << 6 | (i & 7) << 3 | (i >> 5 & 1) << 2
    return dim | (i >> 4 & 1) << 1 | i >> 3 & 1
