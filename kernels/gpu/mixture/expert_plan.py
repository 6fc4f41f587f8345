"""ExpertPlan: the kernels for a mixture's experts, by the average tokens of an expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from graftlm.kernels.codes.expert_codes import ExpertCodes
from graftlm.kernels.gpu.mixture.expert_blocks import ExpertBlocks
from graftlm.kernels.gpu.mixture.grouped_matmul import Gate, Tile, grouped_down, grouped_gate_up
from graftlm.kernels.gpu.pdl import MAX_ROWS
from graftlm.kernels.gpu.support import card_of
from graftlm.kernels.weight import PlainWeight

MAX_FLOAT_ROWS = 512
"""Tokens up to which the outputs of a token's experts are summed in float32; with more, in the dtype of x."""


class ExpertWeights(NamedTuple):
    """The weights of a mixture's experts, as views of any strides.

    gate_up  [num_experts, 2 n, k] (n without a gate), gate_up_bias [num_experts, 2 n] or None
    down     [num_experts, k, n], down_bias [num_experts, k] or None
    held_as  the format of the weights: plain, or a format that kernels of few tokens hold beside the tensors
    codes    gate_up and down as quantised weights, whose tensors above have their shapes only; None for plain ones
    """

    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    gate: Gate
    held_as: type[PlainWeight] = PlainWeight
    codes: tuple[ExpertCodes, ExpertCodes] | None = None

    def dense(self) -> ExpertWeights:
        """Return the weights with dense copies of their codes."""
        if self.codes is None:
            return self
        gate_up, down = self.codes
        return self._replace(gate_up=gate_up.values(), down=down.values())

    @property
    def fallback(self) -> ExpertWeights | None:
        """Return the weights in the plain format; None if they have it already."""
        return self._replace(held_as=PlainWeight) if self.held_as is not PlainWeight else None


class ExpertTiles(NamedTuple):
    """The tiles for up to `density` pairs of a token and an expert, averaged over experts."""

    density: float
    gate_up: Tile
    down: Tile


@dataclass(frozen=True)
class ExpertPlan:
    """The kernels for the experts of one layer.

    tiles    in order of density; the first that reaches a step's density is used
    compact  runs steps of up to `density` with 12-bit or quantised weights: x, experts, scales -> parts; None without
             such weights
    """

    weights: ExpertWeights
    tiles: tuple[ExpertTiles, ...]
    compact: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    density: float = 0.0

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kernels by name, from the fewest tokens to the most."""
        compact = "bits12" if self.weights.codes is None else "codes"
        return ("grouped",) if self.compact is None else (compact, "grouped")

    @property
    def num_experts(self) -> int:
        return self.weights.down.shape[0]

    def parts(
        self, x: torch.Tensor, experts: torch.Tensor, scales: torch.Tensor, *, scale_input: bool = False
    ) -> torch.Tensor:
        """Run each token through its experts.

        x            [num_tokens, k], last dimension dense
        experts      int32 [num_tokens, top_k], contiguous
        scales       [num_tokens, top_k], contiguous: the factor of each output, or of each input
        -> [top_k, num_tokens, k], the sum over whose first dimension is the output; float32 for few tokens
        """
        num_tokens, top_k = experts.shape
        density = num_tokens * top_k / self.num_experts
        if self.compact is not None and density <= self.density and num_tokens <= MAX_ROWS and not scale_input:
            return self.compact(x, experts, scales.float())
        weights = self.weights.dense()
        tiles = next((t for t in self.tiles if density <= t.density), self.tiles[-1])
        gate_up = fitted(tiles.gate_up, weights.gate_up, x, 2 if weights.gate.gated else 1)
        down = fitted(tiles.down, weights.down, x, 1)
        blocks = ExpertBlocks.of(experts, self.num_experts, gate_up.pairs)
        hidden = grouped_gate_up(
            x,
            weights.gate_up,
            weights.gate_up_bias,
            blocks,
            top_k,
            weights.gate,
            gate_up,
            scales if scale_input else None,
        )
        dtype = torch.float32 if num_tokens <= MAX_FLOAT_ROWS or len(self.tiles) == 1 else x.dtype
        return grouped_down(
            hidden, weights.down, weights.down_bias, None if scale_input else scales, blocks, top_k, down, dtype
        )


def fitted(tile: Tile, weight: torch.Tensor, x: torch.Tensor, factors: int) -> Tile:
    """Return `tile` with as many stages as shared memory holds, without options that weight or card do not support.

    factors  tiles of the weight in a stage: 2 with a gate
    """
    k = weight.shape[2]
    inputs = tile.inputs * 2 // x.element_size()
    while inputs > 16 and inputs >= 2 * k:
        inputs //= 2
    one_read = (tile.outputs * factors + tile.pairs) * inputs * x.element_size()
    stages = max(min(tile.stages, card_of(x.device).shared_memory // one_read), 1)
    return replace(tile, inputs=inputs, stages=stages, tma=tile.tma and takes_tma(weight))


def takes_tma(weight: torch.Tensor) -> bool:
    """Return True if the tensor memory accelerator can read `weight` [num_experts, n, k]."""
    if weight.device.type == "cuda" and torch.cuda.get_device_capability(weight.device) < (9, 0):
        return False
    aligned = all(stride * weight.element_size() % 16 == 0 for stride in weight.stride()[:2])
    return weight.stride(2) == 1 and aligned and weight.data_ptr() % 16 == 0 and weight.element_size() == 2
