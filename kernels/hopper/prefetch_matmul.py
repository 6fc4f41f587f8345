"""The matmul of up to 64 rows with a large weight on Hopper, with reads that overlap the previous kernel.

Decoding a batch of so few rows takes as long as reading the weights if memory is never idle. Memory is idle while one
kernel ends and the next begins. Hence one warp fills all of shared memory with the weight by the copy engine before it
waits for earlier kernels, as soon as a multiprocessor is free: while the last programs of the previous kernel run, and
during the small kernel between two matmuls. A group of warps multiplies, the weight as the first factor. The kernel is
in Gluon, the level below Triton: on Hopper Triton cannot assign loads and matmuls to different warps.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from graftlm.kernels.gpu.pdl import grid_wait, launch_dependents, pdl_options
from graftlm.kernels.hopper.tiles import K, load, tiled

OUTPUTS = 64
"""Outputs of one tile: the rows of a first factor of the matrix units."""
BOXES = 2
"""Adjacent boxes of each factor in a stage: reads of more than 128 contiguous bytes of a row are faster."""
_MAX_PARTS = 8
_SHARED = 200 * 1024
"""Bytes of shared memory for the stages of a program."""
_REGISTERS = 64
"""Registers of a thread: few, so that this kernel and the previous one fit on a multiprocessor together."""


@gluon.jit
def _read(x, weight, shared, num_tiles, num_items, steps, PDL: gl.constexpr):
    """Fill the stages with this program's items in order, as stages become free."""
    xs, ws, ready, free = shared
    STAGES: gl.constexpr = ready.shape[0]
    BOXES: gl.constexpr = xs.shape[0] // STAGES
    K: gl.constexpr = xs.shape[2]
    BYTES: gl.constexpr = (xs.shape[1] + ws.shape[1]) * BOXES * K * 2
    OUTPUTS: gl.constexpr = ws.shape[1]
    first, num_programs = gl.program_id(0), gl.num_programs(0)
    launch_dependents(PDL)
    for stage in gl.static_range(STAGES):  # no kernel before writes the weight
        mbarrier.expect(ready.index(stage), BYTES)
        for box in gl.static_range(BOXES):
            i = stage * BOXES + box
            place = [first % num_tiles * OUTPUTS, (first // num_tiles * steps * BOXES + i) * K]
            load(weight, place, ready.index(stage), ws.index(i))
    grid_wait(PDL)
    at = 0
    for item in range(first, num_items, num_programs):
        tile, begin = item % num_tiles, item // num_tiles * steps
        for step in range(steps):
            s, later = at % STAGES, at >= STAGES
            mbarrier.wait(free.index(s), (at // STAGES & 1) ^ 1)
            mbarrier.expect(ready.index(s), BYTES, pred=later)
            for box in gl.static_range(BOXES):
                inputs = ((begin + step) * BOXES + box) * K
                load(weight, [tile * OUTPUTS, inputs], ready.index(s), ws.index(s * BOXES + box), pred=later)
            for box in gl.static_range(BOXES):
                inputs = ((begin + step) * BOXES + box) * K
                load(x, [0, inputs], ready.index(s), xs.index(s * BOXES + box))
            at += 1


@gluon.jit
def _multiply(shared, bias, out, num_rows, n, num_tiles, num_items, steps, BIAS: gl.constexpr):
    """Compute each of the program's items: a tile of outputs, from one part of the inputs."""
    xs, ws, ready, free = shared
    STAGES: gl.constexpr = ready.shape[0]
    BOXES: gl.constexpr = xs.shape[0] // STAGES
    ROWS: gl.constexpr = xs.shape[1]
    OUTPUTS: gl.constexpr = ws.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    at = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        sums = warpgroup_mma_init(gl.zeros([OUTPUTS, ROWS], gl.float32, layout))
        for step in range(steps):
            s = at % STAGES
            mbarrier.wait(ready.index(s), at // STAGES & 1)
            for box in gl.static_range(BOXES):
                i = s * BOXES + box
                more = (step > 0) | (box > 0)
                sums = warpgroup_mma(ws.index(i), xs.index(i).permute((1, 0)), sums, use_acc=more, is_async=True)
            # waits for the previous step's matmul, not for this one's
            sums = warpgroup_mma_init(warpgroup_mma_wait(BOXES, deps=(sums,)))
            mbarrier.arrive(free.index((at + STAGES - 1) % STAGES), pred=step > 0)
            at += 1
        found = warpgroup_mma_wait(0, deps=(sums,))
        mbarrier.arrive(free.index((at + STAGES - 1) % STAGES))
        i = item % num_tiles * OUTPUTS + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, layout))
        row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
        if BIAS:
            found += gl.load(bias + i, mask=i < n, other=0.0).to(gl.float32)[:, None]
        target = out + (item // num_tiles * num_rows + row)[None, :] * n + i[:, None]
        gl.store(target, found.to(out.dtype.element_ty), mask=(row < num_rows)[None, :] & (i < n)[:, None])


@gluon.jit(do_not_specialize=["num_rows", "num_tiles", "num_items", "steps"])
def _prefetch(
    x, weight, bias, out, num_rows, n, num_tiles, num_items, steps,
    ROWS: gl.constexpr, OUTPUTS: gl.constexpr, K: gl.constexpr, BOXES: gl.constexpr, STAGES: gl.constexpr,
    BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program (some of the items: a tile of outputs, a part of the inputs)."""
    xs = gl.allocate_shared_memory(x.dtype, [STAGES * BOXES, ROWS, K], x.layout)
    ws = gl.allocate_shared_memory(x.dtype, [STAGES * BOXES, OUTPUTS, K], weight.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    shared = (xs, ws, ready, free)
    gl.warp_specialize(
        [
            (_multiply, (shared, bias, out, num_rows, n, num_tiles, num_items, steps, BIAS)),
            (_read, (x, weight, shared, num_tiles, num_items, steps, PDL)),
        ],
        [1],  # warps
        [24],  # registers of a thread
    )


def stages_of(rows: int) -> int:
    """Return the number of stages that fit in shared memory."""
    return _SHARED // ((rows + OUTPUTS) * K * BOXES * 2)


def launch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Compute out [num_parts, num_rows, n], whose sum over parts is x [num_rows, k] @ weight [n, k].T + bias [n].

    x and the weight contiguous and of one type of 16 bits that `takes` of hopper/support.py accepts; num_rows up to 64,
    k at least 128 * num_parts, one part with a bias.
    """
    (num_rows, k), (num_parts, _, n) = x.shape, out.shape
    rows, num_tiles = max(16, triton.next_power_of_2(num_rows)), triton.cdiv(n, OUTPUTS)
    steps, num_items = triton.cdiv(k, num_parts * K * BOXES), num_tiles * num_parts  # zeros follow the inputs
    num_sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    _prefetch[(min(num_items, num_sms),)](
        tiled(x, rows, K), tiled(weight, OUTPUTS, K), bias if bias is not None else x, out,
        num_rows, n, num_tiles, num_items, steps,
        ROWS=rows, OUTPUTS=OUTPUTS, K=K, BOXES=BOXES, STAGES=min(stages_of(rows), steps), BIAS=bias is not None,
        num_warps=4, maxnreg=_REGISTERS, **pdl_options(x),
    )  # fmt: skip


def num_parts(n: int, k: int, device: torch.device) -> int:
    """Return the number of parts of k inputs for n outputs: the most with which all programs run concurrently."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return min(max(sms // -(-n // OUTPUTS), 1), _MAX_PARTS, -(-k // (K * BOXES)))


def prefetch_matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute x [num_rows, k] @ weight [n, k].T + bias [n]. -> [num_rows, n], dtype of x. Sums are in float32."""
    out = torch.empty(1, x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    launch(x, weight, out, bias)
    return out[0]


def prefetch_parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute the parts whose sum is x [num_rows, k] @ weight [n, k].T. -> float32 [num_parts, num_rows, n]"""
    n, k = weight.shape
    out = torch.empty(num_parts(n, k, x.device), x.shape[0], n, dtype=torch.float32, device=x.device)
    launch(x, weight, out)
    return out
