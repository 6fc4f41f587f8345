"""Shared by the kernels in Gluon: how the copy engine reads tiles of a matrix and writes them, gates, pairs.

Only kernels in Gluon import this module: it is not there in every Triton that ours run on (hopper/support.py).
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


def rounds(num_tiles: int, device: torch.device) -> int:
    """How many of the tiles a program has at most, with one program on each multiprocessor."""
    num_sms: int = torch.cuda.get_device_properties(device).multi_processor_count
    return -(-num_tiles // num_sms)


@gluon.jit
def gated(sums, kind: gl.constexpr, ACTIVATION: gl.constexpr):
    """activation(gate) * up of sums [64, rows]: eight gates, their eight ups, and so on. -> kind [32, rows]"""
    rows: gl.constexpr = sums.shape[1]
    gates, ups = gl.split(gl.permute(gl.reshape(sums, [4, 2, 8, rows]), [0, 2, 3, 1]))
    # rounded where separate kernels round
    gates, ups = gates.to(kind).to(gl.float32), ups.to(kind).to(gl.float32)
    x = gates
    if ACTIVATION == "gelu_tanh":  # as kernels/gpu/activation.py has it
        x = gates * (1.5957691216057308 + 0.07135481627260025 * gates * gates)
    return gl.reshape(((gates / (1.0 + gl.exp(-x))).to(kind).to(gl.float32) * ups).to(kind), [32, rows])


@gluon.jit
def place(tile, across, down, BAND: gl.constexpr):
    """The row and the column of a tile in a grid of `down` x `across` tiles, which are taken in bands of BAND rows."""
    first = tile // (across * BAND) * BAND
    height = gl.minimum(down - first, BAND)
    within = tile - first * across
    return first + within % height, within // height


@gluon.jit
def halves(pair):
    """The two numbers of each pair, as 16 bits each, side by side."""
    first, second = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pair], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    return gl.join(first, second)
