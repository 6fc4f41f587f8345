"""The dispatcher of a mixture's experts: tiles and kernels by the number of tokens for each expert."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from graftlm.kernels.bits12.weight import Bits12Weight
from graftlm.kernels.codes.expert_codes import ExpertCodes
from graftlm.kernels.codes.tiled_weight import TiledWeight, tiled
from graftlm.kernels.gpu.mixture.expert_plan import ExpertPlan, ExpertTiles, ExpertWeights
from graftlm.kernels.gpu.mixture.grouped_matmul import Gate, Tile
from graftlm.kernels.hopper.support import gluon_kernel

EXPERT_TILES = (
    ExpertTiles(0.1, Tile(16, 32, 128, 4, 4), Tile(16, 64, 128, 4, 4, swap=True, tma=True)),
    ExpertTiles(3, Tile(16, 64, 128, 4, 3, swap=True, tma=True), Tile(16, 64, 128, 4, 3, tma=True)),
    ExpertTiles(12, Tile(16, 64, 128, 4, 2, swap=True, tma=True), Tile(16, 64, 128, 4, 2)),
    ExpertTiles(24, Tile(32, 64, 128, 4, 2, tma=True), Tile(32, 64, 128, 4, 3, swap=True, tma=True)),
    ExpertTiles(64, Tile(64, 64, 64, 4, 3, group=8, tma=True), Tile(64, 128, 64, 4, 4, group=8, tma=True)),
    ExpertTiles(sys.maxsize, Tile(128, 128, 64, 8, 4, group=8, tma=True), Tile(128, 256, 64, 8, 4, group=8, tma=True)),
)
"""Tiles for a mixture's experts, by the average tokens of an expert. Measured on an H200 with 128 experts of
768 of which a token has 8, hidden size 2,048, bfloat16 (python -m bench.gpu.experts)."""

ONE_EXPERT_TILE = (ExpertTiles(sys.maxsize, Tile(64, 64, 64, 4, 3, group=8), Tile(64, 64, 64, 4, 3, group=8)),)
"""For strict mode: one order of summation for every number of tokens."""

COMPACT_DENSITY = 24
"""Average tokens per expert up to which 12-bit weights are faster than 16-bit ones."""


CODED_DENSITY = 256
"""Average tokens per expert up to which codes are multiplied; with more tokens, they are widened first."""


def plan_experts(weights: ExpertWeights, *, strict: bool = False) -> ExpertPlan:
    """Choose the kernels for the experts of a mixture.

    strict  a token's result does not depend on the batch
    """
    if strict:
        return ExpertPlan(weights, ONE_EXPERT_TILE)
    if weights.codes is not None:
        return ExpertPlan(weights, EXPERT_TILES, _coded_experts(weights, *weights.codes), CODED_DENSITY)
    run = _compact_experts(weights) if weights.held_as is Bits12Weight and can_compact_experts(weights) else None
    return ExpertPlan(weights, EXPERT_TILES, run, COMPACT_DENSITY)


def can_compact_experts(weights: ExpertWeights) -> bool:
    """Return True if the weights could be held in 12 bits: bfloat16 on Hopper, dense, SiLU gates, no biases."""
    plain = weights.gate == Gate() and weights.gate_up_bias is None and weights.down_bias is None
    flat = [weight.flatten(0, 1) for weight in (weights.gate_up, weights.down) if weight.is_contiguous()]
    return (
        plain and len(flat) == 2 and all(map(Bits12Weight.suits, flat)) and gluon_kernel("bits12.experts") is not None
    )


def _compact_experts(weights: ExpertWeights) -> Callable[..., torch.Tensor] | None:
    kernel = gluon_kernel("bits12.experts")
    if kernel is None:
        return None
    gate_up = kernel.compact_experts(weights.gate_up, gates=True)
    down = kernel.compact_experts(weights.down, gates=False) if gate_up is not None else None
    if down is None:
        return None
    num_experts = len(weights.down)
    return lambda x, experts, scales: kernel.compact_parts(x, gate_up, down, experts, scales, num_experts)


def _coded_experts(
    weights: ExpertWeights, gate_up: ExpertCodes, down: ExpertCodes
) -> Callable[..., torch.Tensor] | None:
    """Put the codes of experts into tiles, and return the kernel; None for gates that it lacks."""
    kernel, gate, num_experts = gluon_kernel("codes.experts"), weights.gate, gate_up.num_experts
    if kernel is None or not gate.gated or gate.activation != "silu":
        return None
    n = gate_up.weight.shape[0] // num_experts
    device = gate_up.weight.device
    half = torch.arange(n // 2, device=device)
    rows = torch.stack([2 * half, 2 * half + 1] if gate.interleaved else [half, half + n // 2])
    rows = rows.view(2, -1, 8).transpose(0, 1).reshape(-1)  # eight gates, their eight ups
    outputs = (torch.arange(num_experts, device=device)[:, None] * n + rows).reshape(-1)
    tiles = tiled(gate_up.weight, gates=True, outputs=outputs), tiled(down.weight)
    if not all(isinstance(tile, TiledWeight) for tile in tiles):
        return None
    gate_up.weight, down.weight = tiles  # type: ignore[assignment]
    biases = weights.gate_up_bias, weights.down_bias
    up_bias = biases[0].reshape(-1)[outputs].float() if biases[0] is not None else None
    down_bias = biases[1].reshape(-1).float() if biases[1] is not None else None
    held = kernel.CodedExperts(tiles[0], up_bias, tiles[1], down_bias, num_experts, gate)
    return lambda x, experts, scales: kernel.coded_parts(x, held, experts, scales)
