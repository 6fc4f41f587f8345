"""Sums over the GPUs of one host: each rank writes its part where the others read it, and adds all parts in one order.

One kernel a sum, for tensors that fit into a slab; it can be captured in a CUDA graph. Each program handles one block:
it stores its part in its own slab, tells the same program of every peer, waits for theirs, and reads their slabs over
NVLink. All ranks add in the order of the ranks, in float32, so they get the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 2048
"""Numbers of a program."""

TRIES = 512
"""Looks at a peer's flag between two looks at the abort word, which lies in host memory."""


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
    tl.debug_barrier()
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            theirs = tl.load(flags + peer).to(tl.pointer_type(tl.int32)) + block * SIZE + RANK
            tl.atomic_xchg(theirs, count + 1, sem="release", scope="sys")
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            mine = tl.load(flags + RANK).to(tl.pointer_type(tl.int32)) + block * SIZE + peer
            seen = tl.atomic_add(mine, 0, sem="acquire", scope="sys")
            tries = 0
            while seen < count + 1:
                seen = tl.atomic_add(mine, 0, sem="acquire", scope="sys")
                tries += 1
                if tries % TRIES == 0:  # noqa: SIM102, Triton evaluates both sides of `and`
                    if tl.load(abort.to(tl.pointer_type(tl.int32)), volatile=True) != 0:
                        seen = count + 1
    tl.debug_barrier()
    total = tl.zeros([BLOCK], WIDE)
    for peer in tl.static_range(SIZE):
        if peer == RANK:
            total += own.to(WIDE)
        else:
            there = tl.load(slabs + peer).to(tl.pointer_type(kind)) + at
            total += tl.load(tl.multiple_of(there, 16), mask=ok, other=0, cache_modifier=".cg").to(WIDE)
    tl.store(out + i, total.to(kind), mask=ok)
    tl.store(counters + block, count + 1)


class RankSum:
    """Sums of tensors of up to `slab_bytes` over the ranks of one host.

    slabs, flags   addresses on every rank, in the order of the ranks: two slabs each; int32 [programs, ranks], zeros
    abort          address of an int32 in host memory: not 0 ends all waiting
    """

    def __init__(
        self, rank: int, slabs: list[int], flags: list[int], abort: int, slab_bytes: int, device: torch.device
    ) -> None:
        self.slab_bytes = slab_bytes
        self._rank, self._size, self._abort = rank, len(slabs), abort
        self._slabs = torch.tensor(slabs, dtype=torch.int64, device=device)
        self._flags = torch.tensor(flags, dtype=torch.int64, device=device)
        self._counters = torch.zeros(num_programs(slab_bytes), dtype=torch.int32, device=device)

    def takes(self, shape: torch.Size, dtype: torch.dtype) -> bool:
        """Whether a sum of this shape fits."""
        return shape.numel() * dtype.itemsize <= self.slab_bytes

    def __call__(self, parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Sum parts [num_parts, ...] of this rank, and those of all ranks. -> [...] in `dtype`"""
        parts = parts.contiguous()
        out = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
        n = out.numel()
        wide = tl.int64 if not dtype.is_floating_point else tl.float32
        _sum[(triton.cdiv(n, BLOCK),)](
            parts, out, self._slabs, self._flags, self._counters, self._abort, n, n, self.slab_bytes // dtype.itemsize,
            PARTS=len(parts), RANK=self._rank, SIZE=self._size, WIDE=wide, TRIES=TRIES, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
        return out


def num_programs(slab_bytes: int) -> int:
    """The most programs of a sum, of numbers of two bytes at least."""
    return triton.cdiv(slab_bytes // 2, BLOCK)
