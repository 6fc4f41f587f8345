"""A tiled weight in bfloat16, or its codes of 8 bits: the operand of matmuls of many rows, one weight at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from graftlm.kernels.codes.tiled_weight import TiledWeight


@triton.jit
def value_of(code, BITS: tl.constexpr, TABLE: tl.constexpr):
    """Return the values of codes in float32."""
    if TABLE == "e4m3":
        return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    if TABLE == "e2m1":
        exponent, odd = (code >> 1) & 3, (code & 1).to(tl.float32)
        size = tl.where(exponent == 0, 0.5 * odd, (1.0 + 0.5 * odd) * (1 << exponent).to(tl.float32) * 0.5)
        return tl.where(code >= 8, -size, size)
    # 2^23 plus the code, by its bits: cards convert integers at a fraction of their rate
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + (8 if BITS == 4 else 128))


@triton.jit
def _widen(
    codes, scales, order, outputs, out, start, stop, k, tiles,
    BITS: tl.constexpr, TABLE: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr, ORDER: tl.constexpr,
    OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Program (tile of inputs, block of outputs from `start` on)."""
    tile = tl.program_id(0)
    block = tl.program_id(1) + start // 64
    # outputs, groups, inputs of a group: numbers of a group are read once for all of its inputs
    EACH: tl.constexpr = 128 // GROUPS if GROUPS > 0 else 128
    o = tl.arange(0, 64)[:, None, None]
    g = tl.arange(0, 128 // EACH)[None, :, None]
    i = g * EACH + tl.arange(0, EACH)[None, None, :]
    line = (o >> 4) * 4 + ((o >> 1) & 3)
    word = (o & 1) * 16 + ((i >> 1) & 3) * 4 + ((i >> 5) & 1) * 2 + ((i >> 4) & 1)
    lower, eight, half = (i >> 3) & 1, (o >> 3) & 1, i & 1
    if BITS == 4:
        line += (i >> 6) * 16
        shift = (lower * 2 + eight) * 4 + half * 16
    else:
        line += (i >> 6) * 32 + lower * 16
        shift = (1 - eight) * 8 + half * 16
    first = (block * tiles + tile).to(tl.int64)
    place = codes + first * (8 * BITS * 32) + line * 32
    if TABLE == "e2m1" and GROUPS <= 4:  # as `interleaved` has it
        one, other = tl.load(place + word // 2 * 2), tl.load(place + word // 2 * 2 + 1)
        pair, second = lower * 2 + eight, word & 1
        turn = tl.where(pair == 3, 2 + 10 * second, (0xA60 >> pair * 4) & 15)
        both = (one & 0x0C180C18) | ((other << 2) & ~0x0C180C18)
        found = tl.where(pair == 3, both, tl.where(second == 1, other, one)).to(tl.uint32, bitcast=True).to(tl.uint64)
        found = (found << turn | found >> (32 - turn)) >> (half * 16)
        value = ((found >> 12) & 8 | (found >> 6) & 7).to(tl.int32)
    else:
        value = (tl.load(place + word) >> shift) & ((1 << BITS) - 1)
    value = value_of(value, BITS, TABLE)
    if GROUPS == 0:
        value *= tl.load(scales + block * 64 + o)
    else:
        PAIR: tl.constexpr = KIND == "minimum" or KIND == "zero"
        if KIND == "power":
            words = tl.load(scales + first * ((GROUPS + 3) // 4 * 64) + (g // 4 * 64 + o)).to(tl.int32, bitcast=True)
            power = ((words >> (g % 4 * 8)) & 0xFF) << 23
            value *= power.to(tl.float32, bitcast=True) * 1.1754943508222875e-38
        else:
            at = scales + first * (GROUPS * 64 * (2 if PAIR else 1)) + (g * 64 + o)
            number = tl.load(at)
            if KIND == "zero":
                zero = (tl.load(at + GROUPS * 64).to(tl.int32, bitcast=True) & 0x7F) - 8
                value = (value - zero.to(tl.float32)) * number
            else:
                value *= number
            if KIND == "minimum":
                value += tl.load(at + GROUPS * 64)
    output, column = block * 64 + o, tile * 128 + i
    ok = (output >= start) & (output < stop) & (column < k)
    if OUTPUTS:
        output = tl.load(outputs + output, mask=output < stop, other=0)
    if ORDER:
        column = tl.load(order + column, mask=column < k, other=0)
    tl.store(out + (output - start).to(tl.int64) * k + column, value.to(out.dtype.element_ty), mask=ok)


@triton.jit
def _bytes(codes, outputs, out, n, k, tiles, OUTPUTS: tl.constexpr):
    """Program (tile of inputs, block of outputs): each word of codes of 8 bits is two inputs of outputs m and m + 8."""
    tile, block = tl.program_id(0), tl.program_id(1)
    o = tl.arange(0, 32)[:, None]
    pair = tl.arange(0, 64)[None, :]
    line = (pair >> 5) * 32 + ((pair >> 2) & 1) * 16 + (o >> 3) * 4 + ((o >> 1) & 3)
    word = (o & 1) * 16 + (pair & 3) * 4 + ((pair >> 4) & 1) * 2 + ((pair >> 3) & 1)
    found = tl.load(codes + (block * tiles + tile).to(tl.int64) * 2048 + (line * 32 + word))
    column = tile * 64 + pair
    for eight in tl.static_range(2):
        both = (found >> 8 if eight == 0 else found) & 0x00FF00FF
        output = block * 64 + (o >> 3) * 16 + eight * 8 + (o & 7)
        ok = (output < n) & (2 * column < k)
        if OUTPUTS:
            output = tl.load(outputs + output, mask=output < n, other=0)
        tl.store(out + output.to(tl.int64) * (k // 2) + column, (both | both >> 8).to(tl.int16), mask=ok)


def bytes_by_output(weight: TiledWeight) -> torch.Tensor:
    """Return the codes of 8 bits of a weight in the order of its inputs. -> int8 [n, k]"""
    n, k = weight.shape
    out = torch.empty(n, k, dtype=torch.int8, device=weight.device)
    tiles, order, outputs = triton.cdiv(k, 128), weight.order, weight.outputs
    _bytes[(tiles, weight.blocks)](
        weight.codes, outputs if outputs is not None else weight.codes, out.view(torch.int16), n, k, tiles,
        OUTPUTS=outputs is not None, num_warps=4,
    )  # fmt: skip
    return out if order is None else torch.empty_like(out).index_copy_(1, order, out)


def widened(weight: TiledWeight, start: int, stop: int) -> torch.Tensor:
    """Return the values of outputs [start, stop). -> bfloat16 [stop - start, k]"""
    n, k = weight.shape
    if weight.outputs is not None and (start, stop) != (0, n):
        return widened(weight, 0, n)[start:stop]
    out = torch.empty(stop - start, k, dtype=torch.bfloat16, device=weight.device)
    tiles, order, outputs = triton.cdiv(k, 128), weight.order, weight.outputs
    if stop > start:
        _widen[(tiles, triton.cdiv(stop, 64) - start // 64)](
            weight.codes, weight.scales, order if order is not None else weight.codes,
            outputs if outputs is not None else weight.codes,
            out, start, stop, k, tiles,
            BITS=weight.bits, TABLE=weight.table or "", GROUPS=weight.groups, KIND=weight.kind,
            ORDER=order is not None, OUTPUTS=outputs is not None, num_warps=4,
        )  # fmt: skip
    return out
