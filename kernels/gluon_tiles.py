"""What the kernels in Gluon share: how the copy engine reads tiles of a matrix and writes them, a tile's gates.

Only kernels in Gluon import this module: it is not there in every Triton that ours run on (gluon_support.py).
"""

from __future__ import annotations

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# as they are called since Triton 3.7, and before
load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

K = 64
"""Inputs of a tile: 128 bytes, the widest rows that the copy engine lays out for the matrix units."""


@functools.cache
def shared_layout(*shape: int) -> gl.NVMMASharedLayout:
    """How a tile of any type of 16 bits lies in shared memory."""
    return gl.NVMMASharedLayout.get_default_for(list(shape), gl.float16)


def tiled(x: torch.Tensor, *tile: int) -> TensorDescriptor:
    """x, of 16 bits, as the copy engine reads or writes it tile by tile. What lies outside is 0, and not written."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(tile), shared_layout(*tile))


@gluon.jit
def gated(sums, kind: gl.constexpr):
    """silu(gate) * up of sums [64, rows]: eight gates, the eight that they are for, and so on. -> kind [32, rows]"""
    rows: gl.constexpr = sums.shape[1]
    gates, ups = gl.split(gl.permute(gl.reshape(sums, [4, 2, 8, rows]), [0, 2, 3, 1]))
    # rounded where separate kernels round
    gates, ups = gates.to(kind).to(gl.float32), ups.to(kind).to(gl.float32)
    return gl.reshape(((gates / (1.0 + gl.exp(-gates))).to(kind).to(gl.float32) * ups).to(kind), [32, rows])
