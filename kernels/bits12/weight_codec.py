"""bfloat16 weights in 12 bits each, without loss, in the layout of bits12/matmul.py.

Nearly all weights of an output have one of 16 exponents, which take four bits; sign and mantissa take eight. The few
remaining weights, most of them near zero, are listed beside the codes. The time of a step of few tokens is that of
reading the weights, here a quarter fewer bytes. The low entropy of exponents is an observation of DFloat11, arXiv
2504.11651, whose codes vary in length; codes of one length are read like any tile.

A tile is 64 outputs by 128 inputs, a box one half of its inputs. The layout of a box is that of a first factor for the
matrix units in the threads of a warp group: each thread has eight weights in two words of bytes and one word of the
rest. The byte of a weight is the lowest bit of its code, then the mantissa. The sign and the higher bits of the code
have the positions of a bfloat16's upper byte, for both weights of a pair, once the third word is rotated by four bits
for each earlier pair.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

OUTPUTS = 64
"""Outputs of a tile."""
INPUTS = 128
"""Inputs of a tile."""
LINES = 96
"""Lines of a tile, 32 words each: 32 lines of bytes for each box, then 16 lines of the rest for each."""
MAX_LISTED = 48
"""The largest number of weights of one output without a code."""
SENTINEL = 2.0
"""Value of the code of a listed weight: the smallest, before scaling."""

LARGEST_TILE_LIST = 31
"""The largest number of listed weights of one tile in `listed_by_tile`."""

_CODES = 16
_EXPONENT = 128
"""Exponent of code 0, before scaling."""
_HIGHEST = 200
"""The largest exponent for code 0: scales and quotients stay far from the limits of float32."""
_LARGEST_LIST = 1 / 2000
"""The largest share of weights without a code: with 1 in 2,700 a matmul of 32 rows takes as long as with 16-bit
weights, and fewer rows still take less."""
_AT_ONCE = 1 << 24
"""Weights that are encoded at once, which bounds the temporary memory."""


@dataclass(frozen=True)
class CompactWeight:
    """A weight [num_outputs, num_inputs]; n is num_outputs padded to whole tiles.

    codes   int32 [num_tiles * 96, 32]  the tiles of the first 64 outputs, then of the next
    starts  int32 [n + 1]               offsets of the listed weights of each output
    most    int32 [n / 64]              the largest number of listed weights of an output in each tile of outputs
    inputs  int32 [num_listed]          the input of each
    values  float32 [num_listed]        each divided by the scale of its output
    scales  float32 [n]                 powers of two; 0 for an output whose weights are all 0
    """

    codes: torch.Tensor
    starts: torch.Tensor
    most: torch.Tensor
    inputs: torch.Tensor
    values: torch.Tensor
    scales: torch.Tensor
    num_outputs: int
    num_inputs: int

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.codes, self.starts, self.most, self.inputs, self.values, self.scales))


def encode(weight: torch.Tensor) -> CompactWeight | None:
    """Encode `weight` [num_outputs, num_inputs]; None if it is not bfloat16, not finite, or lacks too many codes."""
    n, k = weight.shape
    if weight.dtype is not torch.bfloat16 or not n or not k:
        return None
    at_once = max(_AT_ONCE // k // OUTPUTS, 1) * OUTPUTS
    found = [_code(some) for some in weight.split(at_once)]
    if any(x is None for x in found):
        return None
    columns = zip(*(x for x in found if x is not None), strict=True)
    codes, counts, inputs, values, scales = (torch.cat(column) for column in columns)
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    most = counts.view(-1, OUTPUTS).amax(1).to(torch.int32)
    return CompactWeight(codes, starts, most, inputs, values, scales, n, k)


def decode(weight: CompactWeight) -> torch.Tensor:
    """Return the encoded weight, exact to the bit. -> bfloat16 [num_outputs, num_inputs]"""
    tiles = weight.codes.view(len(weight.most), -1, LINES, 32)
    low = tiles[:, :, :64].unflatten(2, (2, 2, 16))  # [outputs, inputs, box, word, line, 32]
    rest = tiles[:, :, 64:].unflatten(2, (2, 16)).long() & 0xFFFFFFFF
    bits = torch.empty(*rest.shape, 4, 2, dtype=torch.int32, device=rest.device)
    for pair in range(4):
        turned = rest >> 4 * pair | rest << 32 - 4 * pair
        for half in range(2):
            byte = low[:, :, :, pair // 2] >> 8 * (pair % 2 + 2 * half) & 0xFF
            bits[..., pair, half] = (turned >> 16 * half & 0x8700).int() | 0x4000 | byte
    # outputs, inputs, box, warp, row, row, input, input, input, input, output, half
    bits = bits.view(*tiles.shape[:2], 2, 4, 4, 2, 4, 2, 2, 2, 2, 2).permute(0, 3, 10, 4, 5, 1, 2, 7, 8, 9, 6, 11)
    found = (bits.reshape(len(weight.scales), -1) << 16).view(torch.float32)
    output = torch.repeat_interleave(torch.arange(len(weight.scales), device=bits.device), weight.starts.diff())
    found[output, weight.inputs.long()] = weight.values
    found = found * weight.scales[:, None]
    return found[: weight.num_outputs, : weight.num_inputs].to(torch.bfloat16)


def compacted(weight: torch.Tensor, *, gates: bool = False) -> CompactWeight | None:
    """Return the compact form of a weight; None if it has none, a long list, or little gain in size.

    gates  for gate and up projections: [2 n, k], the gates first, n in eights
    """
    if gates:
        n, k = weight.shape[0] // 2, weight.shape[1]
        if n % 8:
            return None
        weight = weight.view(2, n // 8, 8, k).transpose(0, 1).reshape(2 * n, k)
    found = encode(weight)
    if found is None or len(found.inputs) > _LARGEST_LIST * weight.numel() or found.nbytes > 0.9 * weight.nbytes:
        return None
    return found


def listed_by_tile(weight: CompactWeight) -> torch.Tensor | None:
    """Return the listed weights by tile; None if a scaled one is not a bfloat16, or a tile has too many.

    -> int32 [num_tiles, 32]. Word 0 has the count of a tile's first box plus 256 times the tile's count. One word for
    each weight follows, box by box: its input in the box, 64 times its output in the tile, and its bfloat16 bits in the
    upper half.
    """
    tiles, num_blocks = -(-weight.num_inputs // INPUTS), len(weight.most)
    values = weight.values.to(torch.bfloat16)
    if bool((values.float() != weight.values).any()):
        return None
    output = torch.repeat_interleave(torch.arange(len(weight.scales), device=values.device), weight.starts.diff())
    column = weight.inputs.long()
    tile, box = output // OUTPUTS * tiles + column // INPUTS, column % INPUTS // 64
    words = column % 64 | output % OUTPUTS << 6 | values.view(torch.int16).long() << 16
    counts = torch.bincount(tile, minlength=num_blocks * tiles)
    if int(counts.max()) > LARGEST_TILE_LIST:
        return None
    order = (tile * 2 + box).argsort(stable=True)
    tile = tile[order]
    place = torch.arange(len(tile), device=tile.device) - (counts.cumsum(0) - counts)[tile]
    found = torch.zeros(num_blocks * tiles, LARGEST_TILE_LIST + 1, dtype=torch.int64, device=tile.device)
    found[tile, place + 1] = words[order]
    found[:, 0] = torch.bincount(tile[box[order] == 0], minlength=len(found)) | counts << 8
    return found.to(torch.int32)


def _code(weight: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """Encode some outputs. -> codes, number of listed weights of each, their inputs and values, scales"""
    n, k = weight.shape
    weight = torch.nn.functional.pad(weight, (0, -k % INPUTS, 0, -n % OUTPUTS))
    low, high = weight.view(torch.uint8).unflatten(1, (-1, 2)).unbind(2)  # bytes take a quarter of the time of ints
    exponents = high << 1 | low >> 7
    if int(exponents.max()) == 255:
        return None  # infinite or NaN
    lowest = _lowest(exponents[:, :k])
    code = exponents - lowest.to(torch.uint8)[:, None]  # exponents below the lowest wrap to large codes
    zero = (weight == 0).all(1)
    listed = (code >= _CODES) & ~zero[:, None]
    listed[n:], listed[:, k:] = False, False
    counts = listed.sum(1)
    scales = torch.where(zero, 0.0, torch.exp2((lowest - _EXPONENT).float()))
    output, column = listed.nonzero().unbind(1)
    exact = weight[output, column].float()
    values = exact / scales[output]
    if int(counts.max()) > MAX_LISTED or bool((values * scales[output] != exact).any()):
        return None
    listed[:, k:] = True  # padding of the last tile
    code.masked_fill_(listed | zero[:, None], 0)
    byte = (low & 0x7F | code << 7).masked_fill_(listed, 0)
    rest = (code >> 1 | high >> 7 << 3).masked_fill_(listed, 0)
    return _laid_out(byte, rest), counts, column.int(), values, scales


def _lowest(exponents: torch.Tensor) -> torch.Tensor:
    """Return the exponent of code 0 for each output with which most weights have a code. -> int32 [n]"""
    n = exponents.shape[0]
    seen = torch.zeros(n, 256, dtype=torch.int32, device=exponents.device)
    one = torch.ones(1, 1, dtype=torch.int32, device=exponents.device)
    seen.scatter_add_(1, exponents.long(), one.expand(exponents.shape))
    up_to = torch.nn.functional.pad(seen.cumsum(1), (1, 0))
    return 1 + (up_to[:, 1 + _CODES :] - up_to[:, 1:-_CODES])[:, :_HIGHEST].argmax(1).int()


def _laid_out(byte: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Arrange weights [n, k], uint8 bytes and four bits of the rest, in tiles. -> int32 [num_tiles * 96, 32]

    A thread has four columns of a line. Its eight weights are of outputs m and m + 8, with inputs j and j + 1, then
    j + 8 and j + 9. The weights of inputs j and j + 1 are a pair: the halves of a register.
    """
    n, k = byte.shape
    outputs, warp, eight, row, other_row, inputs, box, by_32, by_16, by_8, column, half = range(12)
    shape = (n // OUTPUTS, 4, 2, 4, 2, k // INPUTS, 2, 2, 2, 2, 4, 2)
    thread = (warp, row, other_row, column, by_32, by_16)
    low = byte.view(shape).permute(outputs, inputs, box, by_8, *thread, half, eight)
    low = low.reshape(n // OUTPUTS, k // INPUTS, 64, 128)
    # codes and signs have the kernel's positions once the word is rotated by four bits for each earlier pair
    eights = rest.view(shape).permute(outputs, inputs, box, *thread, half, by_8, eight).reshape(-1, 8)
    turned = (eights & 7).roll(2, 1) | (eights & 8).roll(3, 1)
    upper = (turned[:, 0::2] | turned[:, 1::2] << 4).view(n // OUTPUTS, k // INPUTS, 32, 128)
    return torch.cat([low, upper], 2).view(-1, 128).view(torch.int32)
