"""Sums over the GPUs of one host: each rank writes its part where the others read it, and adds all parts in one order.

One kernel a sum, for tensors that fit into a slab, or a sum with the addition to the residual stream and the next norm;
both can be captured in CUDA graphs. Each program stores its part in its own slab, tells the same program of every peer,
waits for theirs, and reads their slabs over NVLink. All ranks add in the order of the ranks, in float32, so they get
the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from graftlm.kernels.gpu.norm import normed_row
from graftlm.kernels.gpu.pdl import grid_wait, launch_dependents, pdl_options
from graftlm.kernels.jit.precompile import is_dry
from graftlm.kernels.norm import Norm

REGION = 8192
"""Bytes of a slab that each program of a plain sum has, whatever the dtype: a program's sums alternate between two."""

TRIES = 512
"""Looks at a peer's flag between two looks at the abort word, which lies in host memory."""


@triton.jit
def _tell(flags, program, count, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Tell this program of every peer that the part is in the slab."""
    tl.debug_barrier()
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            theirs = tl.load(flags + peer).to(tl.pointer_type(tl.int32)) + program * SIZE + RANK
            tl.atomic_xchg(theirs, count + 1, sem="release", scope="sys")


@triton.jit
def _await(flags, program, count, abort, RANK: tl.constexpr, SIZE: tl.constexpr, TRIES: tl.constexpr):
    """Wait until all peers have told, or the abort word is set."""
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            mine = tl.load(flags + RANK).to(tl.pointer_type(tl.int32)) + program * SIZE + peer
            seen = tl.atomic_add(mine, 0, sem="acquire", scope="sys")
            tries = 0
            while seen < count + 1:
                seen = tl.atomic_add(mine, 0, sem="acquire", scope="sys")
                tries += 1
                if tries % TRIES == 0:  # noqa: SIM102, Triton evaluates both sides of `and`
                    if tl.load(abort.to(tl.pointer_type(tl.int32)), volatile=True) != 0:
                        seen = count + 1
    tl.debug_barrier()


@triton.jit
def _total(own, slabs, at, ok, RANK: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr):
    """Add the parts of all ranks, in their order. own: as it lies in the slab"""
    total = own.to(WIDE) * 0
    for peer in tl.static_range(SIZE):
        if peer == RANK:
            total += own.to(WIDE)
        else:
            there = tl.load(slabs + peer).to(tl.pointer_type(own.dtype)) + at
            total += tl.load(tl.multiple_of(there, 16), mask=ok, other=0, cache_modifier=".cg").to(WIDE)
    return total


@triton.jit
def _sum(
    part, out, slabs, flags, counters, abort, n, part_stride, slab_numbers,
    PARTS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, TRIES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (block). slabs, flags: int64 [SIZE], addresses on each rank; counters: int32, sums of each program.

    A program's sums alternate between two slabs: it writes one again after the peers have told of the sum between.
    """
    block = tl.program_id(0)
    i = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = i < n
    kind = out.dtype.element_ty
    value = tl.load(part + i, mask=ok, other=0).to(WIDE)
    for other in tl.static_range(1, PARTS):
        value += tl.load(part + other * part_stride + i, mask=ok, other=0).to(WIDE)
    own = value.to(kind)
    count = tl.load(counters + block)
    at = (count % 2).to(tl.int64) * slab_numbers + i
    here = tl.load(slabs + RANK).to(tl.pointer_type(kind)) + at
    tl.store(tl.multiple_of(here, 16), own, mask=ok)
    _tell(flags, block, count, RANK, SIZE)
    _await(flags, block, count, abort, RANK, SIZE, TRIES)
    tl.store(out + i, _total(own, slabs, at, ok, RANK, SIZE, WIDE).to(kind), mask=ok)
    tl.store(counters + block, count + 1)


@triton.jit
def _sum_norm(
    parts, residual, weight, shift, out, slabs, flags, counters, abort, n, part_stride, slab_numbers, eps,
    PARTS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, TRIES: tl.constexpr, NORM: tl.constexpr,
    ROUNDED: tl.constexpr, CENTERED: tl.constexpr, SHIFTED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row): add the parts of all ranks to the residual, and norm it. slabs, flags, counters: as of _sum

    Parts are exchanged in their own dtype, each row in 4 * n bytes of a slab.
    """
    launch_dependents(PDL)
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    ok = i < n
    kind = residual.dtype.element_ty
    held = parts.dtype.element_ty
    at_row = row.to(tl.int64) * n + i
    if NORM:
        scale = tl.load(weight + i, mask=ok, other=0.0)
    grid_wait(PDL)
    value = tl.load(parts + at_row, mask=ok, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        value += tl.load(parts + part * part_stride + at_row, mask=ok, other=0.0).to(tl.float32)
    own = value.to(held)
    count = tl.load(counters + row)
    at = (count % 2).to(tl.int64) * slab_numbers + row.to(tl.int64) * (4 * n // (held.primitive_bitwidth // 8)) + i
    here = tl.load(slabs + RANK).to(tl.pointer_type(held)) + at
    tl.store(tl.multiple_of(here, 16), own, mask=ok)
    _tell(flags, row, count, RANK, SIZE)
    before = tl.load(residual + at_row, mask=ok, other=0.0).to(tl.float32)
    _await(flags, row, count, abort, RANK, SIZE, TRIES)
    rounded = (_total(own, slabs, at, ok, RANK, SIZE, tl.float32) + before).to(kind)
    tl.store(residual + at_row, rounded, mask=ok)
    if NORM:
        value = normed_row(rounded.to(tl.float32), ok, scale, n, eps, ROUNDED, CENTERED, kind)
        if SHIFTED:
            value += tl.load(shift + i, mask=ok, other=0.0).to(tl.float32)
        tl.store(out + at_row, value.to(kind), mask=ok)
    tl.store(counters + row, count + 1)


class Area(NamedTuple):
    """Memory of all ranks for one kind of sums.

    slabs, flags  int64 [num_ranks], addresses on every rank: two slabs of `slab_bytes`; int32 [programs, ranks], zeros
    counters      int32 [programs], sums of each program
    """

    slabs: torch.Tensor
    flags: torch.Tensor
    counters: torch.Tensor
    slab_bytes: int

    @classmethod
    def at(cls, bases: list[int], slab_bytes: int, programs: int, device: torch.device) -> Area:
        """An area that begins at these addresses. device: of this rank"""
        slabs = torch.tensor(bases, dtype=torch.int64, device=device)
        return cls(slabs, slabs + 2 * slab_bytes, torch.zeros(programs, dtype=torch.int32, device=device), slab_bytes)

    @staticmethod
    def num_bytes(slab_bytes: int, programs: int, num_ranks: int) -> int:
        return 2 * slab_bytes + -(-4 * programs * num_ranks // 256) * 256


class RankSum:
    """Sums of tensors over the ranks of one host.

    bases       addresses of this memory on every rank, in the order of the ranks: zeros, of `num_bytes`
    abort       address of an int32 in host memory: not 0 ends all waiting
    slab_bytes  of the largest tensor
    """

    MAX_ROWS = 1024
    """Rows of a sum with a norm."""

    def __init__(self, rank: int, bases: list[int], abort: int, slab_bytes: int, device: torch.device) -> None:
        self._rank, self._size, self._abort = rank, len(bases), abort
        self._blocks = Area.at(bases, slab_bytes, slab_bytes // REGION, device)
        after = Area.num_bytes(slab_bytes, slab_bytes // REGION, len(bases))
        self._rows = Area.at([base + after for base in bases], slab_bytes, self.MAX_ROWS, device)
        self._width: int | None = None  # of rows that are normed: all of a model have one

    @classmethod
    def num_bytes(cls, slab_bytes: int, num_ranks: int) -> int:
        """Bytes of memory for sums of up to `slab_bytes`."""
        programs = slab_bytes // REGION, cls.MAX_ROWS
        return sum(Area.num_bytes(slab_bytes, number, num_ranks) for number in programs)

    def takes(self, shape: torch.Size, dtype: torch.dtype) -> bool:
        """Whether a sum of this shape fits."""
        return shape.numel() * dtype.itemsize <= self._blocks.slab_bytes

    def __call__(self, parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Sum parts [num_parts, ...] of this rank, and those of all ranks. -> [...] in `dtype`"""
        parts = parts.contiguous()
        # a dry run launches nothing, but token ids of rank 0 are still looked up in the embedding
        make = torch.zeros if is_dry() else torch.empty
        out = make(parts.shape[1:], dtype=dtype, device=parts.device)
        n, block = out.numel(), REGION // dtype.itemsize
        slabs, flags, counters, slab_bytes = self._blocks
        _sum[(triton.cdiv(n, block),)](
            parts, out, slabs, flags, counters, self._abort, n, n, slab_bytes // dtype.itemsize,
            PARTS=len(parts), RANK=self._rank, SIZE=self._size,
            WIDE=tl.float32 if dtype.is_floating_point else tl.int64, TRIES=TRIES, BLOCK=block, num_warps=8,
        )  # fmt: skip
        return out

    def norms(self, parts: torch.Tensor) -> bool:
        """Whether `add_norm` takes parts [num_parts, num_rows, n]."""
        _, num_rows, n = parts.shape
        fits = num_rows <= self.MAX_ROWS and 4 * num_rows * n <= self._rows.slab_bytes
        return fits and n % 8 == 0 and self._width in (None, n)

    def forget_width(self) -> None:
        """Let rows of another width be normed: no sum of them is under way."""
        self._width = None

    def add_norm(self, parts: torch.Tensor, residual: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """Add the parts of all ranks to the residual [num_rows, n], in place.

        parts  [num_parts, num_rows, n] of this rank
        -> the residual after `norm`; the residual itself without one
        """
        num_parts, num_rows, n = parts.shape
        parts = parts.contiguous()
        self._width = n
        out = torch.empty_like(residual) if norm is not None else residual
        slabs, flags, counters, slab_bytes = self._rows
        block = triton.next_power_of_2(n)
        _sum_norm[(num_rows,)](
            parts, residual, norm.weight if norm is not None else residual,
            norm.bias if norm is not None and norm.bias is not None else residual, out, slabs, flags, counters,
            self._abort, n, num_rows * n, slab_bytes // parts.itemsize, norm.eps if norm is not None else 0.0,
            PARTS=num_parts, RANK=self._rank, SIZE=self._size, TRIES=TRIES, NORM=norm is not None,
            ROUNDED=norm is not None and norm.rounded, CENTERED=norm is not None and norm.centered,
            SHIFTED=norm is not None and norm.bias is not None, BLOCK=block,
            num_warps=16 if n > 2048 else max(block // 128, 4), **pdl_options(residual),
        )  # fmt: skip
        return out
