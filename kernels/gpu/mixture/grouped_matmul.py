"""Grouped matmuls of a mixture's experts: each block of tokens with the weights of its expert.

`gate_up` multiplies tokens with the gate and up projections of their experts and gates them; `down` multiplies the
result with the down projections and the routing weights. Each output is written by one program and summed in one order;
the next norm (norm.add_norm) or `sum_parts` computes the sum over a token's experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from graftlm.kernels.gpu.attention.online_softmax import precision
from graftlm.kernels.gpu.mixture.expert_blocks import ExpertBlocks
from graftlm.kernels.gpu.pdl import launch_and_wait, pdl_options

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "none"]


@dataclass(frozen=True)
class Gate:
    """The gate of an expert: activation(gate) * (up + shift), both clamped first.

    activation  of the gate; silu is gate * sigmoid(alpha * gate)
    limit       gate is clamped to (-inf, limit], up to [-limit, limit]; None does not clamp
    gated       False: there is no gate, and the activation is that of up
    interleaved whether gate and up alternate in the weight's rows; else all gates come first
    """

    activation: Activation = "silu"
    alpha: float = 1.0
    limit: float | None = None
    shift: float = 0.0
    gated: bool = True
    interleaved: bool = False


@dataclass(frozen=True)
class Tile:
    """The tile of a grouped matmul: pairs, outputs and inputs of a step, warps, stages.

    swap   whether the weight is the first factor of the matrix instruction, so that the pairs may be few
    group  number of blocks of pairs that share a tile of the weight in the second-level cache
    tma    whether the weight is read by the tensor memory accelerator (Hopper and later, inputs dense)
    """

    pairs: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    swap: bool = False
    group: int = 1
    tma: bool = False


@triton.jit
def _activate(x, alpha, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        x = x / (1.0 + tl.exp(-alpha * x))
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x * (1.0 - 1.0 / (1.0 + tl.exp(2.0 * inner)))
    elif ACTIVATION == "relu":
        x = tl.maximum(x, 0.0)
    elif ACTIVATION == "relu2":
        x = tl.maximum(x, 0.0)
        x = x * x
    return x


@triton.jit(do_not_specialize=["num_blocks"])
def _grouped(
    x, weight, bias, out, scales, pairs, block_expert, block_start, block_end, num_blocks,
    n_total, k_total, top_k, x_row, w_expert, w_n, w_k, b_expert, out_row, out_rank, alpha, limit, shift,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr, SWAP: tl.constexpr, GROUP: tl.constexpr,
    TMA: tl.constexpr, GATE: tl.constexpr, ACTIVATION: tl.constexpr, CLAMP: tl.constexpr, BIAS: tl.constexpr,
    DOWN: tl.constexpr, SCALED: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block of pairs, tile of outputs).

    GATE  0: one projection; 1: all gates, then all ups; 2: gates and ups alternate
    DOWN  input rows are sorted pairs and output rows are pairs; else input rows are tokens, output rows sorted pairs
    """
    launch_and_wait(PDL)
    n_tiles = tl.cdiv(n_total, N)
    program = tl.program_id(0)
    # blocks of one expert are consecutive: GROUP of them share a tile of its weight in the cache
    group = program // (GROUP * n_tiles)
    first_block = group * GROUP
    size = tl.minimum(num_blocks - first_block, GROUP)
    block = first_block + (program % (GROUP * n_tiles)) % size
    tile = (program % (GROUP * n_tiles)) // size
    expert = tl.load(block_expert + block)
    if expert >= 0:
        start, end = tl.load(block_start + block), tl.load(block_end + block)
        at = start + tl.arange(0, M)
        m_ok = at < end
        pair = tl.load(pairs + at, mask=m_ok, other=0)
        row = (at if DOWN else pair // top_k).to(tl.int64)
        kk = tl.arange(0, K)
        WIDTH: tl.constexpr = 2 * N if GATE == 2 else N
        n = tile * WIDTH + tl.arange(0, WIDTH)
        n_ok = n < (2 * n_total if GATE == 2 else n_total)
        if not TMA:
            base = weight + expert.to(tl.int64) * w_expert + n.to(tl.int64)[:, None] * w_n
        if SWAP:
            acc = tl.zeros([WIDTH, M], tl.float32)
            acc_up = tl.zeros([WIDTH, M], tl.float32)
        else:
            acc = tl.zeros([M, WIDTH], tl.float32)
            acc_up = tl.zeros([M, WIDTH], tl.float32)
        for first in tl.range(0, k_total, K, num_stages=STAGES):
            k = first + kk
            # the weight is loaded first: the rows of x wait for the table of pairs
            if TMA:
                w = tl.reshape(weight.load([expert, tile * WIDTH, first]), [WIDTH, K])
                if GATE == 1:
                    w_up = tl.reshape(weight.load([expert, n_total + tile * WIDTH, first]), [WIDTH, K])
            else:
                here = base + k.to(tl.int64)[None, :] * w_k
                w_mask = n_ok[:, None] if EVEN else n_ok[:, None] & (k < k_total)[None, :]
                w = tl.load(here, mask=w_mask, other=0.0)
                if GATE == 1:
                    w_up = tl.load(here + n_total.to(tl.int64) * w_n, mask=w_mask, other=0.0)
            x_mask = m_ok[:, None] if EVEN else m_ok[:, None] & (k < k_total)[None, :]
            value = tl.load(x + row[:, None] * x_row + k[None, :], mask=x_mask, other=0.0)
            if SWAP:
                acc = tl.dot(w, tl.trans(value), acc, input_precision=PRECISION)
                if GATE == 1:
                    acc_up = tl.dot(w_up, tl.trans(value), acc_up, input_precision=PRECISION)
            else:
                acc = tl.dot(value, tl.trans(w), acc, input_precision=PRECISION)
                if GATE == 1:
                    acc_up = tl.dot(value, tl.trans(w_up), acc_up, input_precision=PRECISION)
        if SWAP:
            acc = tl.trans(acc)
            acc_up = tl.trans(acc_up)
        if SCALED and not DOWN:  # routing weights apply to the tokens before the matmul
            scale = tl.load(scales + pair, mask=m_ok, other=0.0).to(tl.float32)
            acc *= scale[:, None]
            acc_up *= scale[:, None]
        if BIAS:
            biases = bias + expert.to(tl.int64) * b_expert + n
            acc += tl.load(biases, mask=n_ok, other=0.0).to(tl.float32)[None, :]
            if GATE == 1:
                acc_up += tl.load(biases + n_total, mask=n_ok, other=0.0).to(tl.float32)[None, :]
        kind = x.dtype.element_ty
        if DOWN:
            value = acc
            if SCALED:
                value = (
                    acc.to(kind).to(tl.float32) * tl.load(scales + pair, mask=m_ok, other=0.0).to(tl.float32)[:, None]
                )
            target = (pair % top_k).to(tl.int64) * out_rank + (pair // top_k).to(tl.int64) * out_row
        else:
            # rounded as in separate kernels
            if GATE == 2:
                gate, up = tl.split(tl.reshape(acc, [M, N, 2]))
                n = tile * N + tl.arange(0, N)
                n_ok = n < n_total
            else:
                gate, up = acc, acc_up
            gate, up = gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32)
            if CLAMP:
                gate = tl.minimum(gate, limit)
                up = tl.minimum(tl.maximum(up, -limit), limit)
            value = _activate(gate, alpha, ACTIVATION).to(kind).to(tl.float32)
            if GATE != 0:
                value = value * (up + shift).to(kind).to(tl.float32)
            target = at.to(tl.int64) * out_row
        tl.store(out + target[:, None] + n[None, :], value.to(out.dtype.element_ty), mask=m_ok[:, None] & n_ok[None, :])


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    scales: torch.Tensor | None,
    blocks: ExpertBlocks,
    top_k: int,
    tile: Tile,
    gate: Gate | None,
) -> None:
    """Launch with weight [num_experts, n, k], any strides; out [num_pairs, n], ungated [top_k, num_tokens, n]."""
    assert tile.pairs == blocks.block
    _, rows, k = weight.shape
    num_blocks = len(blocks.block_expert)
    form = 0 if gate is None or not gate.gated else 2 if gate.interleaved else 1
    n = rows if form == 0 else rows // 2
    gate = gate or Gate()
    held: Any = weight
    if tile.tma:
        held = TensorDescriptor.from_tensor(weight, [1, tile.outputs * (2 if form == 2 else 1), tile.inputs])
    _grouped[(num_blocks * triton.cdiv(n, tile.outputs),)](
        x, held, bias if bias is not None else x, out, scales if scales is not None else x, blocks.pairs,
        blocks.block_expert, blocks.block_start, blocks.block_end, num_blocks, n, k, top_k, x.stride(0),
        *weight.stride(), bias.stride(0) if bias is not None else 0, out.stride(-2),
        out.stride(0) if out.dim() == 3 else 0,
        gate.alpha, gate.limit or 0.0, gate.shift,
        M=tile.pairs, N=tile.outputs, K=tile.inputs, STAGES=tile.stages, SWAP=tile.swap, GROUP=tile.group, TMA=tile.tma,
        GATE=form, ACTIVATION=gate.activation, CLAMP=gate.limit is not None, BIAS=bias is not None, DOWN=out.dim() == 3,
        SCALED=scales is not None, EVEN=k % tile.inputs == 0, PRECISION=precision(x.dtype), num_warps=tile.warps,
        **pdl_options(x),
    )  # fmt: skip


def grouped_gate_up(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    blocks: ExpertBlocks,
    top_k: int,
    gate: Gate,
    tile: Tile,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply tokens with the gate and up projections of their experts, and gate the result.

    x       [num_tokens, k], last dimension dense
    weight  [num_experts, 2 n, k] (n without a gate), any strides; bias [num_experts, 2 n]
    scales  [num_tokens, top_k]: factors of the tokens, if routing weights apply to the input
    -> [num_pairs, n], rows in the order of `blocks.pairs`, dtype of x
    """
    n = weight.shape[1] // (2 if gate.gated else 1)
    out = torch.empty(len(blocks.pairs), n, dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, out, scales, blocks, top_k, tile, gate)
    return out


def grouped_down(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    blocks: ExpertBlocks,
    top_k: int,
    tile: Tile,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Multiply the result of `grouped_gate_up` with the down projections and the routing weights.

    weight  [num_experts, n, k], any strides; bias [num_experts, n]
    scales  [num_tokens, top_k]; None if they were applied to the input
    -> dtype [top_k, num_tokens, n]: the sum over the first dimension is the mixture's output
    """
    out = torch.empty(top_k, len(hidden) // top_k, weight.shape[1], dtype=dtype, device=hidden.device)
    _launch(hidden, weight, bias, out, scales, blocks, top_k, tile, None)
    return out


@triton.jit
def _sum_parts(parts, out, numel, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    launch_and_wait(PDL)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = i < numel
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(0, PARTS):
        total += tl.load(parts + part * numel + i, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + i, total.to(out.dtype.element_ty), mask=ok)


def sum_parts(parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Sum parts [num_parts, num_rows, n], contiguous, over the first dimension, in order, in float32. -> dtype"""
    out = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    block = 1024
    _sum_parts[(triton.cdiv(out.numel(), block),)](
        parts, out, out.numel(), PARTS=len(parts), BLOCK=block, num_warps=4, **pdl_options(out)
    )
    return out
