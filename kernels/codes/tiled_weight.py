"""TiledWeight: a quantised weight whose codes lie in the layout of a first factor of Hopper's matrix units.

A tile is 64 outputs by 128 inputs, a box one half of its inputs, as in bits12/weight_codec.py. A word of a thread holds
codes of outputs m and m + 8, with inputs j, j + 1, j + 8 and j + 9: all eight of them with 4 bits, the halves of the
inputs in two words with 8 bits. Scales lie by tile beside the codes, so that the copy engine reads both in one stream.
A value is scale * code + minimum, where codes of integers are signed: a zero point other than the middle of the codes
is part of the minimum. Two kinds of numbers are the operands of instructions that decode: zero points of 4-bit
integers, and scales that are powers of two, of which the exponents are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from graftlm.kernels.hopper.support import gluon_kernel, takes
from graftlm.kernels.quantised_weight import PartedWeight, QuantisedWeight, Table
from graftlm.kernels.weight import ALL, PlainWeight, Weight

OUTPUTS = 64
"""Outputs of a tile."""
INPUTS = 128
"""Inputs of a tile."""
FEW_ROWS = 64
"""The largest number of rows of codes/matmul.py."""
MIDDLE = {4: 8, 8: 128}
"""The code of the value 0, by bits, of integers without a zero point of their own."""

Kind = Literal["scale", "minimum", "zero", "power"]

_BYTES = 4
"""Bytes of a word."""
_GROUPS = (16, 32, 64)
"""Groups smaller than a tile; others are its multiples."""
_TABLES: tuple[Table | None, ...] = (None, "e4m3", "e2m1")
_NAN = 0x7F
"""The code of NaN in e4m3, beside the sign."""
_AT_ONCE = 1 << 25
"""Codes that are arranged at once, which bounds the temporary memory."""


@dataclass(frozen=True, eq=False)
class TiledWeight:
    """A weight [n, k] in tiles.

    codes   int32 [tiles * lines, 32], where a tile has 32 lines with 4 bits and 64 with 8: the tiles of the first 64
            outputs, then of the next
    scales  of groups: float32 [tiles * lines + 8, 32], where a tile has its scales [groups, 64] and then its minima;
            else float32 [outputs in whole tiles], one for each output
    groups  scales of an output in a tile; 0: one for all inputs
    kind    the numbers of a group: "scale"; "minimum", a scale and a minimum; "zero", a scale and a word of twice the
            bfloat16 number 128 plus the zero point; "power", a byte, the exponent of 2^126 times the scale as bfloat16
            has it: a word holds those of four groups, from the lowest byte
    bits    of a code; table: the values of codes, None for signed integers
    order   None, or int64 [k]: the input at each position
    outputs None, or int64 [n]: the output at each position
    gates   whether eight gates and their eight ups alternate
    in_fp8  whether steps of many rows multiply activations that are rounded to E4M3
    """

    codes: torch.Tensor
    scales: torch.Tensor
    groups: int
    kind: Kind
    bits: int
    table: Table | None
    num_outputs: int
    num_inputs: int
    order: torch.Tensor | None = None
    outputs: torch.Tensor | None = None
    gates: bool = False
    in_fp8: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_outputs, self.num_inputs

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def num_bytes(self) -> int:
        tensors = self.codes, self.scales, self.order, self.outputs
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @property
    def fallback(self) -> Weight | None:
        return None  # its values take more memory

    @property
    def lines(self) -> int:
        """Return the lines of a tile's codes."""
        return 8 * self.bits

    @property
    def scale_lines(self) -> int:
        """Return the lines of a tile's scales and minima."""
        if self.kind == "power":
            return 2 * -(-self.groups // _BYTES)
        return self.groups * 2 * (2 if self.kind in ("minimum", "zero") else 1)

    @property
    def blocks(self) -> int:
        """Return the number of blocks of 64 outputs."""
        return -(-self.num_outputs // OUTPUTS)

    def dense(self, rows: slice = ALL) -> torch.Tensor:
        from graftlm.kernels.codes.widen import widened

        start, stop, _ = rows.indices(self.num_outputs)
        return widened(self, start, max(stop, start))

    def bytes_by_output(self) -> torch.Tensor:
        """Return the codes of a weight in E4M3, as numbers of that type, [n, k]."""
        from graftlm.kernels.codes.widen import bytes_by_output

        return bytes_by_output(self).view(torch.float8_e4m3fn)

    def concat(self, others: Sequence[Weight]) -> Weight:
        raise ValueError("weights are concatenated before they are tiled")

    def split(self, sizes: Sequence[int]) -> list[Weight]:
        """Return the weights of `sizes` outputs each: tiles of this one, or values where these end inside a tile."""
        weights: list[Weight] = []
        start = 0
        for size in sizes:
            whole = self.outputs is None and start % OUTPUTS == 0
            weights.append(self._blocks(start, size) if whole else PlainWeight(self.dense(slice(start, start + size))))
            start += size
        return weights

    def _blocks(self, start: int, size: int) -> TiledWeight:
        first, count, tiles = start // OUTPUTS, -(-size // OUTPUTS), -(-self.num_inputs // INPUTS)
        lines = tiles * self.lines
        codes = self.codes[first * lines : (first + count) * lines]
        if self.groups:
            each = tiles * self.scale_lines
            scales = self.scales[first * each : (first + count) * each + 8]
        else:
            scales = self.scales[first * OUTPUTS : (first + count) * OUTPUTS]
        return replace(self, codes=codes, scales=scales, num_outputs=size)

    def shard(self, axis: int, rank: int, size: int) -> Weight:
        raise ValueError("weights are divided among ranks before they are tiled")


@dataclass(frozen=True, eq=False)
class TiledParts:
    """The outputs of several tiled weights, one after the other."""

    parts: tuple[TiledWeight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.num_outputs for part in self.parts), self.parts[0].num_inputs

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def fallback(self) -> Weight | None:
        return None

    def dense(self, rows: slice = ALL) -> torch.Tensor:
        return torch.cat([part.dense() for part in self.parts])[rows]

    def concat(self, others: Sequence[Weight]) -> Weight:
        raise ValueError("weights are concatenated before they are tiled")

    def split(self, sizes: Sequence[int]) -> list[Weight]:
        if tuple(sizes) == tuple(part.num_outputs for part in self.parts):
            return list(self.parts)
        return PlainWeight(self.dense()).split(sizes)

    def shard(self, axis: int, rank: int, size: int) -> Weight:
        raise ValueError("weights are divided among ranks before they are tiled")


def problem(weight: Weight) -> str | None:
    """Return the reason why the kernels do not multiply a weight in its own format; None if they do."""
    if isinstance(weight, PartedWeight):
        return next((reason for part in weight.parts if (reason := problem(part)) is not None), None)
    if not isinstance(weight, QuantisedWeight):
        return f"{type(weight).__name__} has no codes"
    k = weight.shape[1]
    if weight.dtype is not torch.bfloat16:
        return f"a model in {str(weight.dtype)[6:]}"
    if weight.table not in _TABLES:
        return f"codes of {weight.table}"
    if k % 64 or k < 2 * INPUTS:
        return f"{k} inputs, no multiple of 64 from 256 on"
    if weight.group != k and weight.group not in _GROUPS and weight.group % INPUTS:
        return f"groups of {weight.group} inputs"
    return None


def coded_problem(gate_up: Weight, down: Weight, num_experts: int) -> str | None:
    """Return the reason why the kernels do not multiply experts [num_experts * n, k] as codes; None if they do."""
    for weight in (gate_up, down):
        if (reason := problem(weight)) is not None:
            return reason
        if weight.shape[0] % (OUTPUTS * num_experts):
            return f"{weight.shape[0] // num_experts} outputs of an expert, no multiple of {OUTPUTS}"
    return None


def runs_on(device: torch.device) -> bool:
    """Return True if the kernels run on `device`: Hopper, with Triton 3.6 or newer."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    return takes(torch.empty(64, 256, dtype=torch.bfloat16, device=device)) and gluon_kernel("codes.matmul") is not None


@torch.no_grad()
def tiled(
    weight: Weight, *, gates: bool = False, outputs: torch.Tensor | None = None, fp8: bool = False
) -> TiledWeight | TiledParts | None:
    """Return a quantised weight in tiles, in memory of its own; None if the kernels do not multiply it.

    gates    outputs are gates and ups: halves that are a multiple of 8, unless `outputs` says otherwise
    outputs  int64 [n]: the output at each position, where eight gates and their eight ups alternate
    fp8      round activations of many rows to E4M3, where the weight is in E4M3
    """
    if problem(weight) is not None:
        return None
    if isinstance(weight, PartedWeight):
        parts = [tiled(part, fp8=fp8) for part in weight.parts] if not gates and outputs is None else []
        return TiledParts(tuple(p for p in parts if isinstance(p, TiledWeight))) if parts and all(parts) else None
    assert isinstance(weight, QuantisedWeight)
    n, k = weight.shape
    if gates and outputs is None:
        if n % 16:
            return None
        outputs = in_eights(torch.arange(n, device=weight.device)[:, None])[:, 0]
    if weight.table == "e4m3" and bool(((weight.codes & _NAN) == _NAN).any()):
        return None
    kind, numbers = numbers_of(weight)
    codes = weight.codes
    if outputs is not None:
        codes, numbers = codes[outputs], numbers[:, outputs]
    at_once = max(_AT_ONCE // k // OUTPUTS, 1) * OUTPUTS
    per_output = weight.group == k and kind == "scale"
    groups = 0 if per_output else max(INPUTS // weight.group, 1)
    twos = in_twos(weight.table, groups)
    lines = torch.cat([arranged(some, weight.bits, twos) for some in codes.split(at_once)])
    if per_output:
        scales = torch.nn.functional.pad(numbers[0, :, 0], (0, -n % OUTPUTS))
    else:
        scales = numbers_by_tile(numbers, weight.group, k)
    order = weight.order.long() if weight.order is not None else None
    in_fp8 = fp8 and weight.table == "e4m3" and groups <= 1 and kind == "scale"
    return TiledWeight(lines, scales, groups, kind, weight.bits, weight.table, n, k, order, outputs, gates, in_fp8)


def numbers_of(weight: QuantisedWeight) -> tuple[Kind, torch.Tensor]:
    """Return the numbers of a weight's groups: float32, or int32 for powers, [1 or 2, n, k / group]."""
    scale = weight._scale(0, weight.shape[0]).float()
    minimum = weight.minimum.float() if weight.minimum is not None else None
    middle = MIDDLE[weight.bits] if weight.table is None else 0
    zero = weight.zero if weight.zero is not None else 0
    zeros = zero.float() if isinstance(zero, torch.Tensor) else torch.full_like(scale, zero)
    if bool((zeros != middle).any()):
        whole = bool(((zeros == zeros.round()) & (zeros >= 0) & (zeros < 128)).all())
        if minimum is None and (weight.bits, weight.table) == (4, None) and whole:
            return "zero", torch.stack([scale, _twice(128 + zeros)])
        shift = scale * (middle - zeros)
        minimum = shift if minimum is None else minimum + shift
    if minimum is not None:
        return "minimum", torch.stack([scale, minimum])
    if weight.table == "e2m1" and weight.group != weight.shape[1] and _are_powers(scale):
        return "power", (torch.frexp(scale).exponent + 252)[None]
    return "scale", scale[None]


def _are_powers(scale: torch.Tensor) -> bool:
    """Return True if all scales are powers of two that bfloat16 has, even 2^126 times as large."""
    mantissa, exponent = torch.frexp(scale)
    return bool(((mantissa == 0.5) & (exponent <= 2) & (exponent >= -120)).all())


def _twice(numbers: torch.Tensor) -> torch.Tensor:
    """Return float32 numbers whose two halves are the bits of `numbers` in bfloat16."""
    bits = numbers.to(torch.bfloat16).view(torch.int16).int() & 0xFFFF
    return (bits | bits << 16).view(torch.float32)


def in_eights(x: torch.Tensor) -> torch.Tensor:
    """Return x [2 n, k] with eight outputs of the first half, eight of the second, and so on."""
    n, k = x.shape[0] // 2, x.shape[1]
    return x.view(2, n // 8, 8, k).transpose(0, 1).reshape(2 * n, k)


def in_twos(table: Table | None, groups: int) -> bool:
    """Return True if words are `interleaved`: codes in E2M1 of whose box a thread has two words or more."""
    return table == "e2m1" and groups <= 4


def arranged(codes: torch.Tensor, bits: int, twos: bool = False) -> torch.Tensor:
    """Return codes uint8 [n, k * bits / 8] of neighbouring inputs in tiles, each two words `interleaved` or not.

    -> int32 [tiles * lines, 32]
    """
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
    n, k = codes.shape
    codes = torch.nn.functional.pad(codes, (0, -k % INPUTS, 0, -n % OUTPUTS))
    n, k = codes.shape
    outputs, warp, eight, row, other_row, inputs, box, by_32, by_16, by_8, column, half = range(12)
    codes = codes.view(n // OUTPUTS, 4, 2, 4, 2, k // INPUTS, 2, 2, 2, 2, 4, 2)
    line, word = (warp, row), (other_row, column, by_32, by_16)
    if bits == 8:  # bytes of a word from the lowest: outputs m + 8 and m of input j, then of j + 1
        codes = codes.flip(2).permute(outputs, inputs, box, by_8, *line, *word, half, eight)
        return codes.reshape(-1, 128).contiguous().view(torch.int32)
    # nibbles of a word from the lowest: outputs m and m + 8 of inputs j, of j + 8; then likewise of j + 1 and j + 9
    codes = codes.permute(outputs, inputs, box, *line, *word, half, by_8, eight).reshape(-1, 2)
    words = (codes[:, 0] | codes[:, 1] << 4).view(-1, 128).view(torch.int32)
    return interleaved(words) if twos else words


def interleaved(words: torch.Tensor) -> torch.Tensor:
    """Return words of codes in E2M1, each two with their bits where an `and` leaves a pair in bfloat16's places.

    A pair are two codes 16 bits apart, signs in bits 15, the others in 8 to 6, rotated right: those of a word by 0, 6
    and 10. The fourth pairs share the bits that are left, that of the first word rotated by 2, the other's by 12, and
    then, in the second word, by 2 more.
    """
    pairs = words.view(-1, 2, 1) >> torch.arange(0, 16, 4, device=words.device, dtype=torch.int32)
    pairs = (pairs & 0x80008) << 12 | (pairs & 0x70007) << 6
    turns = torch.tensor([[0, 6, 10, 2], [0, 6, 10, 12]], dtype=torch.int32, device=words.device)
    above = (pairs >> turns) & ~(-1 << 32 - turns.clamp(min=1))
    pairs = torch.where(turns == 0, pairs, above | pairs << 32 - turns.clamp(min=1))
    shared = pairs[:, 0, 3] | pairs[:, 1, 3]
    own = pairs[:, :, 0] | pairs[:, :, 1] | pairs[:, :, 2]
    rest = torch.stack([shared & 0x0C180C18, (shared & ~0x0C180C18) >> 2 & 0x3FFFFFFF], 1)
    return (own | rest).view(words.shape)


def numbers_by_tile(numbers: torch.Tensor, group: int, k: int) -> torch.Tensor:
    """Return numbers [1 or 2, n, k / group] by tile, and eight lines of zeros. -> float32 [lines, 32]

    Integers are bytes of words.
    """
    per_tile, tiles = max(INPUTS // group, 1), -(-k // INPUTS)
    if group > INPUTS:
        numbers = numbers.repeat_interleave(group // INPUTS, 2)
    numbers = torch.nn.functional.pad(numbers, (0, tiles * per_tile - numbers.shape[2], 0, -numbers.shape[1] % OUTPUTS))
    numbers = numbers.view(len(numbers), -1, OUTPUTS, tiles, per_tile)
    if not numbers.is_floating_point():
        numbers = torch.nn.functional.pad(numbers, (0, -per_tile % _BYTES)).to(torch.uint8).view(torch.float32)
    numbers = numbers.permute(1, 3, 0, 4, 2)
    return torch.nn.functional.pad(numbers.reshape(-1, 32), (0, 0, 0, 8)).contiguous()
