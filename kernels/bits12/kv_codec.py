"""Keys and values in 12 bits a number: the format and its definition.

A vector of 64, 128 or 256 bfloat16 numbers stores the exponent of its largest number once. Each number stores its sign,
its mantissa and, in four bits, the distance of its exponent from the largest. Down to 2^-14 of the largest power of two
numbers are exact; a smaller number becomes the nearest multiple of 2^-21 of that power, a change of the size that
another order of summation makes. Attention reads three quarters of the bytes, and the same memory holds a third more
tokens. Numbers below 2^-126 become 0.

As bits, with `field` = exponent - largest exponent + 15, at least 0, then seven bits of mantissa, a vector of 2 h
numbers is 3 h / 4 words:

    h / 2 words  the low bytes of the fields: four dimensions a word; words of dimensions [8 g, 8 g + 8), then of
                 [h + 8 g, h + 8 g + 8), for g from 0 to h / 8 - 1
    h / 4 words  sign (bit 7) and upper three bits (bits 2 to 0) of dimensions [4 w, 4 w + 4), a byte each; those of
                 dimensions [h + 4 w, h + 4 w + 4), as a word turned left by four bits, lie in what these leave free
"""

from __future__ import annotations

import torch

DIMS = (64, 128, 256)
"""Supported numbers of dimensions of a vector."""

SIZES = f"{', '.join(map(str, DIMS[:-1]))} or {DIMS[-1]}"
"""`DIMS` as text for error messages."""


def words_of(dim: int) -> int:
    """Return the int32 words of a vector of `dim` numbers."""
    return dim * 3 // 8


def bytes_of(dim: int) -> int:
    """Return the bytes of a vector of `dim` numbers with its exponent."""
    return 4 * words_of(dim) + 1


EIGHT = """
.reg .b32 first, second;
and.b32 first, $6, 0x87878787;
shf.r.wrap.b32 second, $6, $6, 4;
and.b32 second, second, 0x87878787;
prmt.b32 $0, $4, first, 0x5140;
prmt.b32 $1, $4, first, 0x7362;
prmt.b32 $2, $5, second, 0x5140;
prmt.b32 $3, $5, second, 0x7362;
"""
"""PTX that unpacks eight numbers from a word of low bytes of either half, $4 and $5, and their word of upper bits, $6.

The first half's are in $0 and $1, the second's in $2 and $3: bfloat16, the stored numbers times 2^(15 - exponent).
"""

_UPPER = 0x87878787


def _low_word(dim: int) -> list[int]:
    """Return the words of the low bytes of dimensions [4 w, 4 w + 4) of either half."""
    return [(w >> 1) * 4 + half * 2 + (w & 1) for half in (0, 1) for w in range(dim // 8)]


def pack(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack x, bfloat16 [..., dim]. -> words int32 [..., words_of(dim)], exponents uint8 [...]"""
    dim = x.shape[-1]
    bits = x.view(torch.int16).int() & 0xFFFF
    exponent, mantissa = bits >> 7 & 0xFF, bits & 0x7F
    largest = exponent.amax(-1, keepdim=True)
    below = largest - 15 - exponent + 1  # 1 - the field's exponent
    shift = below.clamp(1, 12)
    small = ((mantissa | 0x80) + (1 << (shift - 1))) >> shift
    field = torch.where(below <= 0, (1 - below) << 7 | mantissa, small)
    field = torch.where(exponent > 0, field, 0)
    low = _words(field & 0xFF)
    upper = _words(bits >> 15 << 7 | field >> 8)
    first, second = upper.chunk(2, -1)
    words = torch.empty(*x.shape[:-1], words_of(dim), dtype=torch.int64, device=x.device)
    words[..., _low_word(dim)] = low
    words[..., dim // 4 :] = first | (second << 4 | second >> 28) & 0xFFFFFFFF
    return torch.where(words < 1 << 31, words, words - (1 << 32)).int(), largest[..., 0].to(torch.uint8)


def unpack(words: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Unpack words int32 [..., words_of(dim)] and exponents uint8 [...] of `pack`. -> float32 [..., dim]"""
    dim = words.shape[-1] * 8 // 3
    unsigned = words.long() & 0xFFFFFFFF
    upper = unsigned[..., dim // 4 :]
    upper = torch.cat([upper & _UPPER, (upper >> 4 | upper << 28) & _UPPER], -1)
    bits = _bytes(upper) << 8 | _bytes(unsigned[..., _low_word(dim)])
    field = bits & 0x7FFF
    whole = torch.where(field >= 0x80, field & 0x7F | 0x80, field)
    size = torch.ldexp(whole.double(), (field >> 7).clamp(min=1) - 7 + exponents.long()[..., None] - 15 - 127)
    found: torch.Tensor = torch.where(bits >> 15 > 0, -size, size)
    return found.float()


def _words(given: torch.Tensor) -> torch.Tensor:
    """Join bytes [..., n] to unsigned words of four, int64 [..., n / 4]."""
    shifts = torch.arange(0, 32, 8, device=given.device)
    words: torch.Tensor = (given.long().unflatten(-1, (-1, 4)) << shifts).sum(-1)
    return words


def _bytes(words: torch.Tensor) -> torch.Tensor:
    """Split words [..., n] into bytes, int64 [..., 4 n]: the inverse of `_words`."""
    shifts = torch.arange(0, 32, 8, device=words.device)
    return (words[..., None] >> shifts & 0xFF).flatten(-2)
