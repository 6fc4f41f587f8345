"""Keys and values packed to 12 bits a number in the kernels that compute them; bits12/kv_codec.py has the format."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _bits(x):
    """Return the bits of bfloat16 numbers as int32, sign-extended."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) >> 16


@triton.jit
def _fields(bits, largest):
    """Return the fields of numbers below their sign: exponent - `largest` + 15, then seven bits of mantissa."""
    exponent, mantissa = bits >> 7 & 0xFF, bits & 0x7F
    below = largest - 14 - exponent
    shift = tl.minimum(tl.maximum(below, 1), 12)
    small = ((mantissa | 0x80) + (1 << (shift - 1))) >> shift
    field = tl.where(below <= 0, (1 - below) << 7 | mantissa, small)
    return tl.where(exponent > 0, field, 0)


@triton.jit
def _words(given):
    """Join bytes [n, h] to words of four, [n, h / 4]."""
    shifts = (8 * tl.arange(0, 4))[None, None, :]
    return tl.sum(given.reshape([given.shape[0], given.shape[1] // 4, 4]) << shifts, 2)


@triton.jit
def pack(a, b):
    """Pack n vectors, given as their two halves [n, h]: bfloat16, or float32 that bfloat16 represents exactly.

    -> the low bytes of either half, int32 [n, h / 4] each; the upper bits of both, int32 [n, h / 4]; the exponents,
       int32 [n]. `store_packed` has their addresses.
    """
    a, b = _bits(a), _bits(b)
    largest = tl.max(tl.maximum(a >> 7 & 0xFF, b >> 7 & 0xFF), 1)
    first, second = _fields(a, largest[:, None]), _fields(b, largest[:, None])
    upper = _words(a >> 8 & 0x80 | first >> 8)
    turned = _words(b >> 8 & 0x80 | second >> 8)
    upper = upper | turned << 4 | (turned >> 28 & 0xF)
    return _words(first & 0xFF), _words(second & 0xFF), upper, largest


@triton.jit
def store_packed(a, b, words, exponents, ok):
    """Pack n vectors as `pack` does and write the vectors that are `ok`, [n, 1].

    words      pointers [n, 1] to the words of each
    exponents  pointers [n, 1] to the exponent of each
    """
    low_a, low_b, upper, largest = pack(a, b)
    WORDS: tl.constexpr = a.shape[1] // 4
    w = tl.arange(0, WORDS)[None, :]
    low = words + (w // 2 * 4 + w % 2)
    tl.store(low, low_a, mask=ok)
    tl.store(low + 2, low_b, mask=ok)
    tl.store(words + 2 * WORDS + w, upper, mask=ok)
    tl.store(exponents, largest.to(tl.uint8)[:, None], mask=ok)
