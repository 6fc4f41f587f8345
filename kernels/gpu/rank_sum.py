"""Sums over the GPUs of one host: each rank writes its part where the others read it, and adds all parts in one order.

One kernel a sum, for tensors that fit into a slab, or a sum with the addition to the residual stream and the next norm;
both can be captured in CUDA graphs. Each program stores its part in its own slab, tells the same program of every peer,
waits for theirs, and reads their slabs over NVLink; the rows of a decode step are stored at the peers instead, where no
flag follows them. All ranks add in the order of the ranks, in float32, so they get the same bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from graftlm.kernels.gpu.norm import normed_row
from graftlm.kernels.gpu.pdl import grid_wait, launch_dependents, pdl_options
from graftlm.kernels.jit.precompile import is_dry
from graftlm.kernels.norm import Norm

REGION = 8192
"""Bytes of a slab that each program of a plain sum has, whatever the dtype: a program's sums alternate between two."""

FLAG_WORDS = tl.constexpr(8)
"""Words of a program's flags, one for each rank, so at most 8 ranks: 32 bytes, which the memory moves at once."""

SUM_PROGRAMS = NORM_PROGRAMS = 264
"""Programs of a sum, and of one with a norm: all of them run at once on a Hopper GPU. Each has several regions of a
large tensor, always the same ones."""


FEW_ROWS = 264
"""Rows of a sum with a norm that are sent to the peers, as data that is its own flag; more are fetched from them."""

ROW_BYTES = tl.constexpr(16_384)
"""Bytes of the longest such row: 8,192 numbers of two bytes."""

SLOTS = tl.constexpr(3)
"""Places for each row of a peer. A sum fills one, and empties the one before it, which is filled two sums later."""

LOOKS = tl.constexpr(4096)
"""Looks at a place between two looks at the abort word."""

EMPTY = -(0x7FFF << 16) - 0x8000
"""The int32 0x80008000 of two empty numbers of two bytes (-0.0), or of an empty one of four bytes."""


@triton.jit
def _tell(flags, program, count, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Tell this program of every peer that the part is in the slab."""
    tl.debug_barrier()
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            theirs = tl.load(flags + peer).to(tl.pointer_type(tl.int32)) + program * FLAG_WORDS + RANK
            tl.atomic_xchg(theirs, count + 1, sem="release", scope="sys")


@triton.jit
def _wait(flag, wanted, abort):
    """Let one thread look until an int32 that a peer stores reaches `wanted`, or the abort word is set.

    Every 4,096 looks it reads the abort word, which lies in host memory. Loads after the next barrier see what the peer
    has stored before. One thread looks: the loads of many threads keep the peers' stores from arriving.
    """
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred %done;
            .reg .b32 %seen, %tries, %rest;
            mov.u32 %rest, %tid.x;
            setp.ne.u32 %done, %rest, 0;
            @%done bra WAITED;
            mov.u32 %tries, 0;
            LOOK:
            ld.acquire.sys.global.b32 %seen, [$1];
            setp.ge.s32 %done, %seen, $2;
            @%done bra WAITED;
            add.u32 %tries, %tries, 1;
            and.b32 %rest, %tries, 4095;
            setp.ne.u32 %done, %rest, 0;
            @%done bra LOOK;
            ld.volatile.global.b32 %rest, [$3];
            setp.eq.u32 %done, %rest, 0;
            @%done bra LOOK;
            WAITED:
            mov.u32 $0, 0;
        }
        """,
        "=r,l,r,l",
        [flag, wanted, abort],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _await(flags, program, count, abort, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Wait until all peers have told, or the abort word is set."""
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            mine = tl.load(flags + RANK) + (program * FLAG_WORDS + peer).to(tl.int64) * 4
            _wait(mine, count + 1, tl.cast(abort, tl.int64))
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
def _own(parts, at, ok, part_stride, PARTS: tl.constexpr, WIDE: tl.constexpr):
    """Add the parts of this rank."""
    value = tl.load(parts + at, mask=ok, other=0).to(WIDE)
    for part in tl.static_range(1, PARTS):
        value += tl.load(parts + part * part_stride + at, mask=ok, other=0).to(WIDE)
    return value


@triton.jit
def _sum(
    part, out, slabs, flags, counters, abort, n, part_stride, slab_numbers,
    PARTS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, LOOPS: tl.constexpr,
):  # fmt: skip
    """Program (p): blocks p, p + num_programs, ...; only with LOOPS more than one.

    slabs, flags: int64 [SIZE], addresses on each rank; counters: int32, sums of each program. A program's sums
    alternate between two slabs: it writes one again after the peers have told of the sum between. A block belongs to
    the same program in all sums.
    """
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    kind = out.dtype.element_ty
    count = tl.load(counters + program)
    half = (count % 2).to(tl.int64) * slab_numbers
    here = tl.load(slabs + RANK).to(tl.pointer_type(kind)) + half
    if LOOPS:
        for block in range(program, tl.cdiv(n, BLOCK), tl.num_programs(0)):
            i = tl.cast(block, tl.int64) * BLOCK + lane
            value = _own(part, i, i < n, part_stride, PARTS, WIDE).to(kind)
            tl.store(tl.multiple_of(here + i, 16), value, mask=i < n)
        _tell(flags, program, count, RANK, SIZE)
        _await(flags, program, count, abort, RANK, SIZE)
        for block in range(program, tl.cdiv(n, BLOCK), tl.num_programs(0)):
            i = tl.cast(block, tl.int64) * BLOCK + lane
            own = tl.load(tl.multiple_of(here + i, 16), mask=i < n, other=0)
            tl.store(out + i, _total(own, slabs, half + i, i < n, RANK, SIZE, WIDE).to(kind), mask=i < n)
    else:
        i = program.to(tl.int64) * BLOCK + lane
        ok = i < n
        own = _own(part, i, ok, part_stride, PARTS, WIDE).to(kind)
        tl.store(tl.multiple_of(here + i, 16), own, mask=ok)
        _tell(flags, program, count, RANK, SIZE)
        _await(flags, program, count, abort, RANK, SIZE)
        tl.store(out + i, _total(own, slabs, half + i, ok, RANK, SIZE, WIDE).to(kind), mask=ok)
    tl.store(counters + program, count + 1)


@triton.jit
def _normed(
    total, before, at_row, residual, scale, shift, out, i, ok, n, eps,
    NORM: tl.constexpr, ROUNDED: tl.constexpr, CENTERED: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Add the sum of all ranks to one row of the residual, and norm it."""
    kind = residual.dtype.element_ty
    rounded = (total + before).to(kind)
    tl.store(residual + at_row, rounded, mask=ok)
    if NORM:
        value = normed_row(rounded.to(tl.float32), ok, scale, n, eps, ROUNDED, CENTERED, kind)
        if SHIFTED:
            value += tl.load(shift + i, mask=ok, other=0.0).to(tl.float32)
        tl.store(out + at_row, value.to(kind), mask=ok)


@triton.jit(do_not_specialize=["num_rows"])
def _sum_norm(
    parts, residual, weight, shift, out, slabs, flags, counters, abort, num_rows, n, part_stride, slab_numbers, eps,
    PARTS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, NORM: tl.constexpr,
    ROUNDED: tl.constexpr, CENTERED: tl.constexpr, SHIFTED: tl.constexpr, BLOCK: tl.constexpr, LOOPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (p): add the parts of all ranks to rows p, p + num_programs, ... of the residual, and norm them.

    LOOPS, slabs, flags, counters: as of _sum. Parts are exchanged in the residual's dtype, a row in 4 * n bytes of a
    slab.
    """
    launch_dependents(PDL)
    program = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    ok = i < n
    held = residual.dtype.element_ty
    scale = tl.load(weight + i, mask=ok & NORM, other=0.0)
    stride = 4 * n // (held.primitive_bitwidth // 8)
    here = tl.load(slabs + RANK).to(tl.pointer_type(held))
    grid_wait(PDL)
    count = tl.load(counters + program)  # which an earlier sum may have written until now
    half = (count % 2).to(tl.int64) * slab_numbers + i
    if LOOPS:
        for row in range(program, num_rows, tl.num_programs(0)):
            at_row = tl.cast(row, tl.int64) * n + i
            value = _own(parts, at_row, ok, part_stride, PARTS, tl.float32).to(held)
            tl.store(tl.multiple_of(here + half + tl.cast(row, tl.int64) * stride, 16), value, mask=ok)
        _tell(flags, program, count, RANK, SIZE)
        _await(flags, program, count, abort, RANK, SIZE)
        for row in range(program, num_rows, tl.num_programs(0)):
            at_row, at = tl.cast(row, tl.int64) * n + i, half + tl.cast(row, tl.int64) * stride
            own = tl.load(tl.multiple_of(here + at, 16), mask=ok, other=0)
            before = tl.load(residual + at_row, mask=ok, other=0.0).to(tl.float32)
            total = _total(own, slabs, at, ok, RANK, SIZE, tl.float32)
            _normed(total, before, at_row, residual, scale, shift, out, i, ok, n, eps, NORM, ROUNDED, CENTERED, SHIFTED)
    else:
        at_row, at = program.to(tl.int64) * n + i, half + program.to(tl.int64) * stride
        own = _own(parts, at_row, ok, part_stride, PARTS, tl.float32).to(held)
        tl.store(tl.multiple_of(here + at, 16), own, mask=ok)
        _tell(flags, program, count, RANK, SIZE)
        before = tl.load(residual + at_row, mask=ok, other=0.0).to(tl.float32)
        _await(flags, program, count, abort, RANK, SIZE)
        total = _total(own, slabs, at, ok, RANK, SIZE, tl.float32)
        _normed(total, before, at_row, residual, scale, shift, out, i, ok, n, eps, NORM, ROUNDED, CENTERED, SHIFTED)
    tl.store(counters + program, count + 1)


@triton.jit
def _gather(
    part, out, slabs, flags, counters, abort, n, num_cols, slab_numbers,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (block): store numbers of part [rows, num_cols] in rank 0's slab, which puts all parts beside each other.

    Arguments as of _sum; `slab_numbers` of each rank's share of a slab, which is written again two gathers later: rank
    0 has read it then, because sums of all ranks are between.
    """
    block = tl.program_id(0)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < n
    kind = out.dtype.element_ty
    count = tl.load(counters + block)
    share = ((count % 2) * SIZE).to(tl.int64)
    own = tl.load(part + at, mask=ok, other=0)
    if RANK != 0:
        there = tl.load(slabs).to(tl.pointer_type(kind)) + (share + RANK) * slab_numbers + at
        tl.store(tl.multiple_of(there, 16), own, mask=ok)
        tl.debug_barrier()
        flag = tl.load(flags).to(tl.pointer_type(tl.int32)) + block * FLAG_WORDS + RANK
        tl.atomic_xchg(flag, count + 1, sem="release", scope="sys")
    else:
        to = at // num_cols * num_cols * SIZE + at % num_cols
        tl.store(out + to, own, mask=ok)
        _await(flags, block, count, abort, RANK, SIZE)
        for peer in tl.static_range(1, SIZE):
            here = tl.load(slabs).to(tl.pointer_type(kind)) + (share + peer) * slab_numbers + at
            value = tl.load(tl.multiple_of(here, 16), mask=ok, other=0, cache_modifier=".cg")
            tl.store(out + to + peer * num_cols, value, mask=ok)
    tl.store(counters + block, count + 1)


@triton.jit
def _is_empty(value):
    """Whether numbers are those of an empty place."""
    if value.dtype.primitive_bitwidth == 16:
        empty = value.to(tl.int16, bitcast=True) == -32768
    else:
        empty = value.to(tl.int32, bitcast=True) == -2147450880
    return empty


@triton.jit
def _arrived(here, at, ok, abort):
    """Return the numbers that a peer stores at `here + at`, once all have arrived or the abort word is set.

    Volatile loads are made again each time, past the caches that do not see what a peer stores.
    """
    place = tl.multiple_of(here + at, 16)
    value = tl.load(place, mask=ok, other=0.0, volatile=True)
    tries = 0
    ended = 0
    while (tl.max(_is_empty(value).to(tl.int32), 0) > 0) & (ended == 0):
        value = tl.load(place, mask=ok, other=0.0, volatile=True)
        tries += 1
        if tries % LOOKS == 0:
            ended = tl.load(tl.cast(abort, tl.int64).to(tl.pointer_type(tl.int32)), volatile=True)
    return value


@triton.jit
def _sum_norm_few(
    parts, residual, weight, shift, out, places, counters, abort, n, part_stride, eps,
    PARTS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, NORM: tl.constexpr, ROUNDED: tl.constexpr,
    CENTERED: tl.constexpr, SHIFTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row): add the parts of all ranks to a row of the residual, and norm it.

    places: int64 [SIZE], the address of [SLOTS, SIZE, ROWS, ROW_BYTES] on each rank; counters: int32, sums of each
    row. A row is stored in the places of its peers, and is there when none of its numbers is empty: nobody waits for a
    flag behind the numbers, nor for a read over NVLink.
    """
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    ok = i < n
    kind = residual.dtype.element_ty
    row_numbers: tl.constexpr = ROW_BYTES // (kind.primitive_bitwidth // 8)
    scale = tl.load(weight + i, mask=ok & NORM, other=0.0)
    grid_wait(PDL)
    count = tl.load(counters + row)  # which an earlier sum may have written until now
    at_row = row * n + i
    own = _own(parts, at_row, ok, part_stride, PARTS, tl.float32).to(kind)
    own = tl.where(_is_empty(own), 0.0, own).to(kind)
    filled = (count % SLOTS) * SIZE
    emptied = ((count + SLOTS - 1) % SLOTS) * SIZE
    at = row * row_numbers + i
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            there = tl.load(places + peer).to(tl.pointer_type(kind))
            there += (filled + RANK).to(tl.int64) * (ROWS * row_numbers) + at
            tl.store(tl.multiple_of(there, 16), own, mask=ok)
    before = tl.load(residual + at_row, mask=ok, other=0.0).to(tl.float32)
    here = tl.load(places + RANK).to(tl.pointer_type(kind))
    total = own.to(tl.float32) * 0
    for peer in tl.static_range(SIZE):
        if peer == RANK:
            total += own.to(tl.float32)
        else:
            empty = here + (emptied + peer).to(tl.int64) * (ROWS * row_numbers) + at
            if kind.primitive_bitwidth == 16:
                nothing = tl.full([BLOCK], -32768, tl.int16).to(kind, bitcast=True)
            else:
                nothing = tl.full([BLOCK], -2147450880, tl.int32).to(kind, bitcast=True)
            tl.store(tl.multiple_of(empty, 16), nothing, mask=ok)
            place = here + (filled + peer).to(tl.int64) * (ROWS * row_numbers)
            total += _arrived(place, at, ok, abort).to(tl.float32)
    _normed(total, before, at_row, residual, scale, shift, out, i, ok, n, eps, NORM, ROUNDED, CENTERED, SHIFTED)
    tl.store(counters + row, count + 1)


class Area(NamedTuple):
    """Memory of all ranks for one kind of sums.

    slabs, flags  int64 [num_ranks], addresses on every rank: two slabs of `slab_bytes`; int32 [programs, FLAG_WORDS]
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
    def num_bytes(slab_bytes: int, programs: int) -> int:
        return 2 * slab_bytes + 4 * int(FLAG_WORDS.value) * programs


class RankSum:
    """Sums of tensors over the ranks of one host.

    bases       addresses of this memory on every rank, in the order of the ranks: of `num_bytes`, after `clear`
    abort       address of an int32 in host memory: not 0 ends all waiting
    slab_bytes  of the largest tensor
    """

    NORM_BYTES = 128 << 20
    """Bytes of the rows of a sum with a norm, in float32: 8,192 rows of 4,096 numbers."""

    GATHERED_BYTES = 36 << 20
    """Largest part of a rank that is gathered, the logits of 256 rows of half a vocabulary of 128,000 and some."""

    def __init__(self, rank: int, bases: list[int], abort: int, slab_bytes: int, device: torch.device) -> None:
        if len(bases) > FLAG_WORDS.value:
            raise ValueError(f"{len(bases)} ranks, the kernels take {FLAG_WORDS.value}")
        self._rank, self._size, self._abort = rank, len(bases), abort
        areas, offset = [], 0
        for area_bytes, programs in self._areas(slab_bytes, len(bases)):
            areas.append(Area.at([base + offset for base in bases], area_bytes, programs, device))
            offset += Area.num_bytes(area_bytes, programs)
        self._blocks, self._rows, self._columns = areas
        self._places = torch.tensor([base + offset for base in bases], dtype=torch.int64, device=device)
        self._row_counters = torch.zeros(FEW_ROWS, dtype=torch.int32, device=device)
        self._width: int | None = None  # of rows that are normed: all of a model have one

    @classmethod
    def _areas(cls, slab_bytes: int, num_ranks: int) -> list[tuple[int, int]]:
        """Return bytes of a slab, and programs: of sums, of sums with a norm, and of gathers."""
        gathers = cls.GATHERED_BYTES * num_ranks, cls.GATHERED_BYTES // REGION
        return [(slab_bytes, SUM_PROGRAMS), (cls.NORM_BYTES, NORM_PROGRAMS), gathers]

    @classmethod
    def num_bytes(cls, slab_bytes: int, num_ranks: int) -> int:
        """Bytes of memory for sums of up to `slab_bytes`."""
        areas = (Area.num_bytes(area_bytes, programs) for area_bytes, programs in cls._areas(slab_bytes, num_ranks))
        return sum(areas) + cls._num_place_bytes(num_ranks)

    @staticmethod
    def _num_place_bytes(num_ranks: int) -> int:
        return int(SLOTS.value) * num_ranks * FEW_ROWS * int(ROW_BYTES.value)

    @classmethod
    def clear(cls, memory: torch.Tensor, num_ranks: int) -> None:
        """Fill the memory of a rank with what it must hold before the first sum. memory: int32 [num_bytes // 4]"""
        memory.zero_()
        memory[-(cls._num_place_bytes(num_ranks) // 4) :] = EMPTY

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
        num_blocks = triton.cdiv(n, block)
        _sum[(min(num_blocks, SUM_PROGRAMS),)](
            parts, out, slabs, flags, counters, self._abort, n, n, slab_bytes // dtype.itemsize,
            PARTS=len(parts), RANK=self._rank, SIZE=self._size,
            WIDE=tl.float32 if dtype.is_floating_point else tl.int64, BLOCK=block,
            LOOPS=num_blocks > SUM_PROGRAMS, num_warps=8,
        )  # fmt: skip
        return out

    def gathers(self, part: torch.Tensor) -> bool:
        """Whether `gather` takes a part."""
        return part.numel() * part.itemsize <= self.GATHERED_BYTES

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Put part [num_rows, n] of all ranks beside each other. -> [num_rows, size * n] on rank 0, anything elsewhere

        A sum of all ranks must be between this gather and the next but one.
        """
        part = part.contiguous()
        num_rows, num_cols = part.shape
        make = torch.zeros if is_dry() else torch.empty
        out = make(num_rows, num_cols * self._size, dtype=part.dtype, device=part.device)
        block = REGION // part.itemsize
        slabs, flags, counters, _ = self._columns
        _gather[(triton.cdiv(part.numel(), block),)](
            part, out, slabs, flags, counters, self._abort, part.numel(), num_cols,
            self.GATHERED_BYTES // part.itemsize, RANK=self._rank, SIZE=self._size, BLOCK=block,
            num_warps=8,
        )  # fmt: skip
        return out

    def norms(self, parts: torch.Tensor) -> bool:
        """Whether `add_norm` takes parts [num_parts, num_rows, n]."""
        _, num_rows, n = parts.shape
        fits = 4 * num_rows * n <= self._rows.slab_bytes
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
        few = num_rows <= FEW_ROWS and n * residual.itemsize <= int(ROW_BYTES.value)
        slabs, flags, counters, slab_bytes = self._rows
        block = triton.next_power_of_2(n)
        operands = (
            parts, residual, norm.weight if norm is not None else residual,
            norm.bias if norm is not None and norm.bias is not None else residual, out,
        )  # fmt: skip
        options: dict[str, Any] = {
            "PARTS": num_parts, "RANK": self._rank, "SIZE": self._size, "NORM": norm is not None,
            "ROUNDED": norm is not None and norm.rounded, "CENTERED": norm is not None and norm.centered,
            "SHIFTED": norm is not None and norm.bias is not None, "BLOCK": block,
            "num_warps": 16 if n > 2048 else max(block // 128, 4), **pdl_options(residual),
        }  # fmt: skip
        eps = norm.eps if norm is not None else 0.0
        if few:
            places = self._places, self._row_counters, self._abort
            _sum_norm_few[(num_rows,)](*operands, *places, n, num_rows * n, eps, ROWS=FEW_ROWS, **options)
        else:
            _sum_norm[(min(num_rows, NORM_PROGRAMS),)](
                *operands, slabs, flags, counters, self._abort, num_rows, n, num_rows * n,
                slab_bytes // residual.itemsize, eps, LOOPS=num_rows > NORM_PROGRAMS, **options,
            )  # fmt: skip
        return out
