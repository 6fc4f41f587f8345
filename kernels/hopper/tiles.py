"""Shared parts of the kernels in Gluon: tiles of a matrix for the copy engine, gates, pairs.

Only kernels in Gluon import this module: not every supported Triton has Gluon (hopper/support.py).
"""

from __future__ import annotations

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# names since Triton 3.7, and before
load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_memory = gl.shared_memory_descriptor
reinterpret = _memory.reinterpret if hasattr(_memory, "reinterpret") else _memory._reinterpret

K = 64
"""Inputs of a tile: 128 bytes, the widest rows in the copy engine's layout for the matrix units."""


@functools.cache
def shared_layout(*shape: int) -> gl.NVMMASharedLayout:
    """Return the layout in shared memory of a tile of any type of 16 bits."""
    return gl.NVMMASharedLayout.get_default_for(list(shape), gl.float16)


def tiled(x: torch.Tensor, *tile: int) -> TensorDescriptor:
    """Return the copy engine's descriptor of x, of 16 bits, by tiles. Elements outside are read as 0, never written."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(tile), shared_layout(*tile))


def rounds(num_tiles: int, device: torch.device) -> int:
    """Return the largest number of tiles of a program, with one program on each multiprocessor."""
    num_sms: int = torch.cuda.get_device_properties(device).multi_processor_count
    return -(-num_tiles // num_sms)


@gluon.jit
def gated(sums, kind: gl.constexpr, ACTIVATION: gl.constexpr):
    """Compute activation(gate) * up of sums [64, rows]: eight gates, their eight ups, and so on. -> kind [32, rows]"""
    rows: gl.constexpr = sums.shape[1]
    gates, ups = gl.split(gl.permute(gl.reshape(sums, [4, 2, 8, rows]), [0, 2, 3, 1]))
    # rounded as in separate kernels
    gates, ups = gates.to(kind).to(gl.float32), ups.to(kind).to(gl.float32)
    x = gates
    if ACTIVATION == "gelu_tanh":  # as in kernels/gpu/activation.py
        x = gates * (1.5957691216057308 + 0.07135481627260025 * gates * gates)
    return gl.reshape(((gates / (1.0 + gl.exp(-x))).to(kind).to(gl.float32) * ups).to(kind), [32, rows])


@gluon.jit
def place(tile, across, down, BAND: gl.constexpr):
    """Return row and column of a tile in a grid of `down` x `across` tiles, ordered in bands of BAND rows."""
    first = tile // (across * BAND) * BAND
    height = gl.minimum(down - first, BAND)
    within = tile - first * across
    return first + within % height, within // height


_NEGATED = {
    "silu": "mul.f32 c, a, 0fBFB8AA3B; mul.f32 d, b, 0fBFB8AA3B;",  # -log2(e)
    "gelu_tanh": """
        mul.f32 c, a, a; mul.f32 d, b, b;
        fma.rn.f32 c, c, 0fBDD2D3E8, 0fC0135761; fma.rn.f32 d, d, 0fBDD2D3E8, 0fC0135761;
        mul.f32 c, c, a; mul.f32 d, d, b;""",  # -log2(e) * (1.5957691 + 0.071354816 x^2) * x
}
"""PTX of the sigmoid's argument, negated and in base 2, for gates a and b."""


def _gate_mul(activation: str, kind: str, unpack: str) -> str:
    """Return PTX of activation(gate) * up for two pairs, rounded as in separate kernels.

    Gluon's own operations round one gate at a time and divide, at an eighth of the card's other rates: 8,192 rows by
    14,336 gates of 4,096 inputs would take 2,379 instead of 2,349 us.
    """
    return f"""{{
        .reg .b32 gates, ups; .reg .b16 x, y; .reg .f32 a, b, c, d;
        cvt.rn.{kind}x2.f32 gates, $2, $1;
        cvt.rn.{kind}x2.f32 ups, $4, $3;
        {unpack}
        {_NEGATED[activation]}
        ex2.approx.ftz.f32 c, c; ex2.approx.ftz.f32 d, d;
        add.f32 c, c, 0f3F800000; add.f32 d, d, 0f3F800000;
        rcp.approx.ftz.f32 c, c; rcp.approx.ftz.f32 d, d;
        mul.f32 a, a, c; mul.f32 b, b, d;
        cvt.rn.{kind}x2.f32 gates, b, a;
        mul.rn.{kind}x2 $0, gates, ups;
    }}"""


_BFLOAT16 = "bf16", "shl.b32 a, gates, 16; and.b32 b, gates, 0xffff0000;"
_FLOAT16 = "f16", "mov.b32 {x, y}, gates; cvt.f32.f16 a, x; cvt.f32.f16 b, y;"
_SILU_BFLOAT16 = gl.constexpr(_gate_mul("silu", *_BFLOAT16))
_SILU_FLOAT16 = gl.constexpr(_gate_mul("silu", *_FLOAT16))
_GELU_BFLOAT16 = gl.constexpr(_gate_mul("gelu_tanh", *_BFLOAT16))
_GELU_FLOAT16 = gl.constexpr(_gate_mul("gelu_tanh", *_FLOAT16))


@gluon.jit
def gated_across(sums, to, ACTIVATION: gl.constexpr):
    """Compute activation(gate) * up of sums [rows, n]: eight gates, their eight ups, and so on.

    -> [rows, n / 2], dtype of `to`, in shared memory
    """
    rows: gl.constexpr = sums.shape[0]
    n: gl.constexpr = sums.shape[1]
    gates, ups = gl.split(gl.permute(gl.reshape(sums, [rows, n // 16, 2, 8]), [0, 1, 3, 2]))
    silu: gl.constexpr = _SILU_BFLOAT16 if to.dtype == gl.bfloat16 else _SILU_FLOAT16
    gelu: gl.constexpr = _GELU_BFLOAT16 if to.dtype == gl.bfloat16 else _GELU_FLOAT16
    asm: gl.constexpr = silu if ACTIVATION == "silu" else gelu
    found = gl.inline_asm_elementwise(asm, "=r,r,r,r,r", [gates, ups], dtype=to.dtype, is_pure=True, pack=2)
    return gl.reshape(found, [rows, n // 2])


@gluon.jit
def halves(pair):
    """Split each pair into its two numbers of 16 bits. -> [..., 2]"""
    first, second = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pair], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    return gl.join(first, second)
