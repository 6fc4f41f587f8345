"""QuantisedWeight: a weight as codes of 4 or 8 bits with a scale per group of inputs, in one form for every format.

Readers of files (core/model) bring each format into this form without rounding; kernels read its fields. `dense` gives
the values of formats that no kernel multiplies. All of this runs when a model is loaded, once a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch

from graftlm.kernels.weight import ALL, Weight

Table = Literal["e4m3", "e2m1", "nf4", "iq4_nl"]

VALUES: dict[Table, tuple[float, ...]] = {
    "e2m1": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "iq4_nl": (
        -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0
    ),
}  # fmt: skip
"""The values of 4-bit codes; the values of "e4m3" are those of torch.float8_e4m3fn."""

_CODES = "8 bits (integers, e4m3) or 4 bits (integers, e2m1, nf4, iq4_nl)"

_PIECE = {"cpu": (1 << 15) - 1, "cuda": 1 << 24}
"""Values that are computed in float32 at a time, by device: on a CPU fewer than torch divides among threads, since
these would wait for each other at every operation."""


@dataclass(frozen=True, eq=False)
class QuantisedWeight:
    """A weight [n, k] with w[o, i] = scale[o // block_n, i // group] * (table[code[o, i]] - zero) + minimum.

    The arithmetic is that of float32, rounded once to `dtype`.

    codes    uint8: [n, k] of 8 bits; [n, k / 2] of 4 bits, where the low nibble is the code of the even input
    bits     4 or 8
    table    the values of codes; None for unsigned integers
    group    inputs of a scale, a divisor of k
    block_n  outputs of a scale
    scale    [ceil(n / block_n), k / group], in the dtype of the file
    zero     None, an integer for all codes, or a tensor [n, k / group]
    minimum  None, or a tensor [n, k / group]
    order    None, or int32 [k]: the input that the code at each position belongs to (GPTQ's act-order)
    dtype    of `dense`, and of the rows that the weight multiplies
    factors  None, or float16 [n, k / 256]: numbers that scale and minimum are small whole multiples of

    Raises ValueError for tensors that contradict each other.
    """

    codes: torch.Tensor
    bits: Literal[4, 8]
    table: Table | None
    group: int
    block_n: int
    scale: torch.Tensor
    zero: torch.Tensor | int | None = None
    minimum: torch.Tensor | None = None
    order: torch.Tensor | None = None
    dtype: torch.dtype = torch.bfloat16
    factors: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def __post_init__(self) -> None:
        n, k = self.shape
        allowed: tuple[Table | None, ...] = {8: (None, "e4m3"), 4: (None, *VALUES)}.get(self.bits, ())
        if self.codes.dtype is not torch.uint8 or self.table not in allowed:
            raise ValueError(f"codes are {self.bits} bits of {self.table} in {self.codes.dtype}; use {_CODES} in uint8")
        if self.group < 1 or k % self.group:
            raise ValueError(f"a weight {(n, k)} has no groups of {self.group} inputs")
        expected = {"scale": (-(-n // self.block_n), k // self.group), "order": (k,)}
        for name in ("scale", "zero", "minimum", "order"):
            found, shape = getattr(self, name), expected.get(name, (n, k // self.group))
            if isinstance(found, torch.Tensor) and tuple(found.shape) != shape:
                raise ValueError(f"{name} of a weight {(n, k)} is {tuple(found.shape)}, expected {shape}")

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * (8 // self.bits)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def to(self, device: torch.device) -> QuantisedWeight:
        """Return this weight on a device."""
        if device == self.device:
            return self
        names = ("codes", "scale", "zero", "minimum", "order")
        moved: dict[str, Any] = {
            name: found.to(device) for name in names if isinstance(found := getattr(self, name), torch.Tensor)
        }
        return replace(self, factors=None, **moved)

    @property
    def num_bytes(self) -> int:
        tensors = self.codes, self.scale, self.zero, self.minimum, self.order
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))

    @property
    def fallback(self) -> Weight | None:
        return None  # its values take more memory

    def dense(self, rows: slice = ALL) -> torch.Tensor:
        start, stop, step = rows.indices(self.shape[0])
        if step != 1:
            raise ValueError(f"rows are {rows}; use neighbouring outputs")
        k = self.shape[1]
        values = torch.empty(max(stop - start, 0), k, dtype=self.dtype, device=self.device)
        count = max(_PIECE.get(self.device.type, 1 << 20) // k, 1)
        for first in range(start, stop, count):
            last = min(first + count, stop)
            piece = self._values(first, last)
            if self.order is not None:
                piece = torch.empty_like(piece).index_copy_(1, self.order.long(), piece)
            values[first - start : last - start] = piece
        return values

    def _values(self, start: int, stop: int) -> torch.Tensor:
        """Return the values of outputs [start, stop) in float32, inputs in the order of the codes."""
        values = self._codes(start, stop).view(stop - start, -1, self.group)
        if isinstance(self.zero, torch.Tensor):
            values -= self.zero[start:stop, :, None].float()
        elif self.zero is not None:
            values -= self.zero
        values *= self._scale(start, stop)[:, :, None].float()
        if self.minimum is not None:
            values += self.minimum[start:stop, :, None].float()
        return values.view(stop - start, -1)

    def _codes(self, start: int, stop: int) -> torch.Tensor:
        """Return a new tensor float32 [stop - start, k]: the values of codes, or codes without a table."""
        codes = self.codes[start:stop]
        if self.table == "e4m3":
            return codes.view(torch.float8_e4m3fn).float()
        if self.table is not None:
            pairs = _pairs(self.table, self.device)
            return pairs.index_select(0, codes.reshape(-1).int()).view(stop - start, -1)
        if self.bits == 4:  # both nibbles in the two bytes of an int16, the low one first
            wide = codes.to(torch.int16)
            codes = wide.bitwise_or_(wide << 4).bitwise_and_(0x0F0F).view(torch.uint8)
        return codes.float()

    def _scale(self, start: int, stop: int) -> torch.Tensor:
        """Return the scales of outputs [start, stop), a row an output."""
        if self.block_n == 1:
            return self.scale[start:stop]
        block = torch.arange(start, stop, device=self.device) // self.block_n
        return self.scale.contiguous().view(torch.uint8)[block].view(self.scale.dtype)

    def concat(self, others: Sequence[Weight]) -> Weight:
        """Return one weight of codes if the formats are equal, else a weight of parts.

        Raises ValueError if the weights differ in dtype or inputs.
        """
        weights = [self, *(w for w in others if isinstance(w, QuantisedWeight) and self._like(w))]
        if len(weights) <= len(others):
            return PartedWeight((self, *others))
        block_n = self.block_n if all(w.block_n == self.block_n for w in weights) else 1
        if any(w.shape[0] % block_n for w in weights[:-1]):
            block_n = 1
        zeros = [w.zero for w in weights]
        same = not any(isinstance(zero, torch.Tensor) for zero in zeros) and len(set(zeros)) == 1
        return replace(
            self,
            codes=torch.cat([w.codes for w in weights]),
            block_n=block_n,
            scale=_cat([w.scale if w.block_n == block_n else w._scale(0, w.shape[0]) for w in weights]),
            zero=self.zero if same else torch.cat([w._zeros() for w in weights]),
            minimum=None if self.minimum is None else torch.cat([w.minimum for w in weights if w.minimum is not None]),
            factors=None,
        )

    def _like(self, other: QuantisedWeight) -> bool:
        """Return True if the codes of both can be one tensor."""
        mine, theirs = (
            (w.bits, w.table, w.group, w.shape[1], w.dtype, w.scale.dtype, w.zero is None, w.minimum is None, w.device)
            for w in (self, other)
        )
        if self.order is None or other.order is None:
            return mine == theirs and self.order is other.order
        return mine == theirs and torch.equal(self.order, other.order)

    def _zeros(self) -> torch.Tensor:
        """Return the zero points as a tensor [n, k / group]."""
        if isinstance(self.zero, torch.Tensor):
            return self.zero
        groups = self.shape[0], self.shape[1] // self.group
        return torch.full(groups, self.zero or 0, dtype=torch.uint8, device=self.device)

    def split(self, sizes: Sequence[int]) -> list[Weight]:
        weights: list[Weight] = []
        start = 0
        for size in sizes:
            weights.append(self.outputs(start, start + size))
            start += size
        return weights

    def outputs(self, start: int, stop: int) -> QuantisedWeight:
        """Return the weight of outputs [start, stop); its codes share memory with this one."""
        block_n, scale = self.block_n, self.scale
        if start % block_n:
            block_n, scale = 1, self._scale(start, stop)
        else:
            scale = scale[start // block_n : -(-stop // block_n)]
        rest: dict[str, Any] = {
            name: found[start:stop] if isinstance(found := getattr(self, name), torch.Tensor) else found
            for name in ("zero", "minimum")
        }
        return replace(self, codes=self.codes[start:stop], block_n=block_n, scale=scale, factors=None, **rest)

    def shard(self, axis: int, rank: int, size: int) -> QuantisedWeight:
        """Return part `rank` of `size` equal parts of the outputs (axis 0) or inputs (axis 1), in memory of its own.

        Raises ValueError if the axis is no multiple of `size`, inputs of a part are no multiple of a group, or inputs
        are in another order.
        """
        length = self.shape[axis]
        if length % size:
            raise ValueError(f"axis {axis} of a weight {self.shape} has {length} entries, no multiple of {size} ranks")
        part = length // size
        found = self.outputs(rank * part, (rank + 1) * part) if axis == 0 else self._inputs(rank * part, part)
        own: dict[str, Any] = {
            name: tensor.clone(memory_format=torch.contiguous_format)
            for name in ("codes", "scale", "zero", "minimum", "order")
            if isinstance(tensor := getattr(found, name), torch.Tensor)
        }
        return replace(found, **own)

    def _inputs(self, start: int, count: int) -> QuantisedWeight:
        if self.order is not None:
            raise ValueError(
                f"inputs of a weight {self.shape} are in another order (act-order): its groups have no shard"
            )
        if (count % self.group and self.group % count) or count % (8 // self.bits):
            raise ValueError(f"{count} inputs of a weight {self.shape} are no multiple of its groups of {self.group}")
        group = min(self.group, count)
        groups = slice(start // self.group, -(-(start + count) // self.group))
        rest: dict[str, Any] = {
            name: found[:, groups] if isinstance(found := getattr(self, name), torch.Tensor) else found
            for name in ("scale", "zero", "minimum")
        }
        per_byte = 8 // self.bits
        codes = self.codes[:, start // per_byte : (start + count) // per_byte]
        return replace(self, codes=codes, group=group, factors=None, **rest)


@dataclass(frozen=True, eq=False)
class PartedWeight:
    """The outputs of several weights of different formats, one after the other.

    Raises ValueError if they differ in dtype or inputs.
    """

    parts: tuple[Weight, ...]

    def __post_init__(self) -> None:
        first = self.parts[0]
        for part in self.parts:
            if (part.shape[1], part.dtype, part.device) != (first.shape[1], first.dtype, first.device):
                raise ValueError(
                    f"a weight {first.shape} in {first.dtype} on {first.device} has no concatenation with one "
                    f"{part.shape} in {part.dtype} on {part.device}"
                )

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def fallback(self) -> Weight | None:
        return None  # its values take more memory

    def dense(self, rows: slice = ALL) -> torch.Tensor:
        start, stop, _ = rows.indices(self.shape[0])
        pieces = [part.dense(slice(a, b)) for part, a, b in self._cut(start, stop)]
        return torch.cat(pieces) if pieces else self.parts[0].dense(slice(0, 0))

    def _cut(self, start: int, stop: int) -> list[tuple[Weight, int, int]]:
        """Return the parts that have outputs in [start, stop), each with its own range of outputs."""
        cut: list[tuple[Weight, int, int]] = []
        at = 0
        for part in self.parts:
            a, b = max(start - at, 0), min(stop - at, part.shape[0])
            if a < b:
                cut.append((part, a, b))
            at += part.shape[0]
        return cut

    def concat(self, others: Sequence[Weight]) -> PartedWeight:
        more = [part for other in others for part in (other.parts if isinstance(other, PartedWeight) else (other,))]
        return replace(self, parts=(*self.parts, *more))

    def split(self, sizes: Sequence[int]) -> list[Weight]:
        weights: list[Weight] = []
        start = 0
        for size in sizes:
            weights.append(self._outputs(start, start + size))
            start += size
        return weights

    def _outputs(self, start: int, stop: int) -> Weight:
        parts = [part.split([a, b - a, part.shape[0] - b])[1] for part, a, b in self._cut(start, stop)]
        return parts[0] if len(parts) == 1 else replace(self, parts=tuple(parts))

    def shard(self, axis: int, rank: int, size: int) -> Weight:
        if axis == 1:
            return replace(self, parts=tuple(part.shard(axis, rank, size) for part in self.parts))
        n = self.shape[0]
        if n % size:
            raise ValueError(f"axis 0 of a weight {self.shape} has {n} entries, no multiple of {size} ranks")
        found = self._outputs(rank * n // size, (rank + 1) * n // size)
        parts = found.parts if isinstance(found, PartedWeight) else (found,)
        own = [part.shard(0, 0, 1) for part in parts]
        return own[0] if len(own) == 1 else replace(self, parts=tuple(own))


@cache
def _pairs(table: Table, device: torch.device) -> torch.Tensor:
    """Return the values of both codes of a byte, float32 [256, 2]."""
    values = torch.tensor(VALUES[table], dtype=torch.float32, device=device)
    byte = torch.arange(256, device=device)
    return torch.stack([values[byte & 15], values[byte >> 4]], 1)


def _cat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors of equal dtype, of 8 bits too, for which torch has no `cat` on some devices."""
    return torch.cat([tensor.contiguous().view(torch.uint8) for tensor in tensors]).view(tensors[0].dtype)
