"""Gate and up projections with their activation in one kernel, for more than 512 rows, on Hopper.

A prefill of Llama 8B takes 2 % longer without it: 8,192 tokens run at 0.980x, 16 x 512 tokens at 0.981x on an H200.

One warp loads tiles of both factors by TMA, two groups of warps multiply them, 64 rows each. Each eight gates of the
weight are interleaved with their eight ups, so that a thread holds both factors of a pair among its sums: the output
of the matmul, twice the size of the result, is never stored. A program loads its next tile while it gates the last
one. Concurrent programs work on tiles of few rows of either factor: less traffic from memory leaves more of the card's
power to the matrix units.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from graftlm.kernels.activation import Activation
from graftlm.kernels.hopper.tiles import K, barrier, gated_across, load, place, store, tiled

ROWS = 128
"""Rows of a tile."""

GATES = 128
"""Gates of a tile, and as many ups."""

STAGES = 4
"""Stages in shared memory, of K inputs each."""

BAND = 16
"""Tiles of rows whose rows of x stay in the second-level cache while the weight is read."""


@gluon.jit
def _read(x, weight, shared, across, down, BAND: gl.constexpr, STEPS: gl.constexpr):
    """Fill the stages with this program's tiles in order, as stages become free."""
    xs, ws, ready, free = shared
    STAGES: gl.constexpr = ws.shape[0]
    K: gl.constexpr = xs.shape[2]
    at = 0
    for tile in range(gl.program_id(0), across * down, gl.num_programs(0)):
        row, gate = place(tile, across, down, BAND)
        for step in range(STEPS):
            s = at % STAGES
            mbarrier.wait(free.index(s), (at // STAGES & 1) ^ 1)
            mbarrier.expect(ready.index(s), (128 + 256) * K * 2)
            load(weight, [gate * 16, 0, 0, step * K], ready.index(s), ws.index(s))
            for group in gl.static_range(2):
                load(x, [(row * 2 + group) * 64, step * K], ready.index(s), xs.index(s * 2 + group))
            at += 1


@gluon.jit
def _gate(sums, to, out, row, gate, ACTIVATION: gl.constexpr):
    """Store the gated form of sums [64, 256] (eight gates, their eight ups, and so on) through shared memory `to`."""
    found = gated_across(sums, to, ACTIVATION)
    tma.store_wait(0)
    barrier()
    to.store(found)
    fence_async_shared()
    barrier()
    store(out, [row, gate], to)


@gluon.jit
def _multiply(
    shared, to, out, across, down,
    GROUP: gl.constexpr, BAND: gl.constexpr, STEPS: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Compute this group's 64 rows of each of the program's tiles."""
    xs, ws, ready, free = shared
    STAGES: gl.constexpr = ws.shape[0]
    K: gl.constexpr = xs.shape[2]
    at = 0
    for tile in range(gl.program_id(0), across * down, gl.num_programs(0)):
        sums = warpgroup_mma_init(
            gl.zeros([64, 256], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
        )
        for step in range(STEPS):
            s = at % STAGES
            mbarrier.wait(ready.index(s), at // STAGES & 1)
            w = ws.index(s).reshape([256, K]).permute((1, 0))
            sums = warpgroup_mma(xs.index(s * 2 + GROUP), w, sums, use_acc=step > 0, is_async=True)
            # waits for the previous step's matmul, not for this one's
            sums = warpgroup_mma_init(warpgroup_mma_wait(1, deps=(sums,)))
            mbarrier.arrive(free.index((at + STAGES - 1) % STAGES), pred=step > 0)
            at += 1
        done = warpgroup_mma_wait(0, deps=(sums,))
        mbarrier.arrive(free.index((at + STAGES - 1) % STAGES))
        row, gate = place(tile, across, down, BAND)
        _gate(done, to.index(GROUP), out, (row * 2 + GROUP) * 64, gate * 128, ACTIVATION)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["across", "down"])
def _gated(
    x, weight, out, across, down,
    K: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Program (some of the tiles of 128 rows, 128 gates and their 128 ups)."""
    kind: gl.constexpr = x.dtype
    xs = gl.allocate_shared_memory(kind, [STAGES * 2, 64, K], x.layout)
    ws = gl.allocate_shared_memory(kind, [STAGES, 16, 2, 8, K], weight.layout)
    to = gl.allocate_shared_memory(kind, [2, 64, 128], out.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    shared = (xs, ws, ready, free)
    gl.warp_specialize(
        [
            (_multiply, (shared, to, out, across, down, 0, BAND, STEPS, ACTIVATION)),
            (_multiply, (shared, to, out, across, down, 1, BAND, STEPS, ACTIVATION)),
            (_read, (x, weight, shared, across, down, BAND, STEPS)),
        ],
        [4, 1],  # warps
        [240, 24],  # registers of a thread
    )


def launch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, activation: Activation = "silu") -> None:
    """Compute out [num_rows, n] = activation(gate) * up of x [num_rows, k] @ weight [2 n, k].T, gates first.

    All contiguous and of one type of 16 bits, n in eights, k in 64s.
    """
    (num_rows, k), n = x.shape, out.shape[1]
    across, down = triton.cdiv(n, GATES), triton.cdiv(num_rows, ROWS)
    num_sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    beside = weight.view(2, n // 8, 8, k).transpose(0, 1)  # eight gates, then their ups
    _gated[(min(across * down, num_sms),)](
        tiled(x, 64, K), tiled(beside, 16, 2, 8, K), tiled(out, 64, GATES), across, down,
        K=K, STEPS=k // K, STAGES=STAGES, BAND=BAND, ACTIVATION=activation, num_warps=4,
    )  # fmt: skip


def gate_up(x: torch.Tensor, weight: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """Compute activation(gate) * up of x [num_rows, k] @ weight [2 n, k].T, gates first. -> [num_rows, n]"""
    out = torch.empty(x.shape[0], weight.shape[0] // 2, dtype=x.dtype, device=x.device)
    launch(x, weight, out, activation)
    return out
