"""Attention over cached tokens whose K and V have 12 bits a number; see bits12/kv_codec.py.

A number is unpacked in registers: its sixteen bits, as bfloat16, are a number whose exponent counts from 0, perhaps
subnormal, and one multiplication by a power of two yields its value. The value is scaled by 2^-64, so that the power is
a bfloat16 for vectors of any exponent up to 2^79. Numbers from 2^-62 on are exact, smaller ones lose bits; vectors with
numbers from 2^80 on become too small.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graftlm.kernels.bits12.kv_codec import EIGHT
from graftlm.kernels.gpu.attention.online_softmax import attend_block

SCALE = tl.constexpr(2.0**64)
"""Scale of the values of `read_vectors`."""

_EIGHT = tl.constexpr("{" + EIGHT + "".join(f"mul.rn.bf16x2 ${i}, ${i}, $7;" for i in range(4)) + "}")
"""EIGHT, times the power of two $7 (twice in a word)."""


@triton.jit
def power_of(exponent):
    """Return the factors for numbers of vectors with these exponents, int32 [N]: two bfloat16 in an int32."""
    return tl.minimum(exponent, 206) * 0x800080 + 0x18001800  # 2^(exponent - 15 - 64)


@triton.jit
def read_vectors(records, power, N: tl.constexpr, D: tl.constexpr, ASM: tl.constexpr):
    """Read N vectors of D numbers. records uint8 pointers [N], power int32 [N] of their exponents.

    Returns: [N, D], 2^-64 of the stored numbers; bfloat16, or float32 without ASM, which is for an interpreter. The
    numbers are finite for any bytes.
    """
    low = tl.load(records[:, None] + tl.arange(0, D)[None, :])
    first, second = tl.split(tl.permute(tl.reshape(low, [N, D // 16, 2, 8]), (0, 1, 3, 2)))
    d = tl.arange(0, D // 2)
    rest = tl.reshape(tl.load(records[:, None] + D + d[None, :]), [N, D // 16, 8])
    if ASM:
        first, second = tl.inline_asm_elementwise(
            _EIGHT,
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r",
            [first, second, rest, power[:, None, None]],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        after = tl.reshape(tl.load(records[:, None] + D + (d // 4 * 4 + (d + 1) % 4)[None, :]), [N, D // 16, 8])
        rest, after = rest.to(tl.int32), after.to(tl.int32)
        factor = (power & -65536).to(tl.float32, bitcast=True)[:, None, None]
        first = (((rest & 0x87) << 8 | first.to(tl.int32)) << 16).to(tl.float32, bitcast=True) * factor
        rest = (rest >> 4 | after << 4) & 0x87
        second = ((rest << 8 | second.to(tl.int32)) << 16).to(tl.float32, bitcast=True) * factor
    return tl.reshape(tl.permute(tl.join(first, second), (0, 3, 1, 2)), [N, D])


@triton.jit
def slots_of(slots, first, last, N: tl.constexpr):
    """Return the slots of tokens [first, first + N) of the table, 0 from `last` on."""
    n = first + tl.arange(0, N)
    return tl.load(slots + n, mask=n < last, other=0)


@triton.jit
def attend_records(
    q, k, v, exponents, slots, slot, first, last, position, window, m, total, acc, scale, softcap, k_slot, v_slot,
    N: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Attend queries q [M, D] at `position` [M] to tokens [first, last) of the table, which begin with `slot` [N].

    k, v       uint8 pointers to the records of slot 0 of a head, k_slot and v_slot bytes apart
    exponents  int16 pointer to slot 0 of the head: K's in the lower byte, V's in the upper one
    MASKED     last - first may be any number instead of a multiple of N; required with WINDOW
    acc, scale acc in units of 1 / SCALE, scale multiplied by SCALE

    Slots and exponents are prefetched. `attend_block` describes m, total, acc and softcap.
    """
    exponent = tl.load(exponents + slot)
    later = slots_of(slots, first + N, last, N)
    for n in tl.range(first, last, N, num_stages=STAGES):
        here = slot.to(tl.int64)
        both = exponent.to(tl.int32)
        keys = read_vectors(k + here * k_slot, power_of(both & 0xFF), N, q.shape[1], ASM)
        values = read_vectors(v + here * v_slot, power_of(both >> 8 & 0xFF), N, q.shape[1], ASM)
        exponent = tl.load(exponents + later)
        slot = slots_of(slots, n + N, last, N)
        later = slots_of(slots, n + 2 * N, last, N)
        column = n + tl.arange(0, N)
        ok = (column < last)[None, :]
        if WINDOW:
            ok = ok & (column[None, :] > position[:, None] - window)
        m, total, acc = attend_block(q, keys, values, ok, m, total, acc, scale, softcap, MASKED, SOFTCAP, PRECISION)
    return m, total, acc
