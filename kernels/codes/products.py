"""The matmul of a quantised weight in tiles as one layer's product, by the kernel of each number of rows."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch

from graftlm.kernels.activation import Activation
from graftlm.kernels.codes.fp8_rows import Fp8Rows, fp8_rows
from graftlm.kernels.codes.tiled_weight import FEW_ROWS, TiledParts, TiledWeight
from graftlm.kernels.gpu.elementwise import gate_mul

_ANY_ROWS = 128
"""Rows by which the parts are chosen that all numbers of rows have."""


@dataclass(frozen=True)
class CodesProduct:
    """The product of rows with a quantised weight; its sums are in float32.

    kernel      codes.matmul or codes.wide_matmul
    bias        [n]; added where the result is no parts
    activation  of a weight with gates; None for other weights
    in_parts    return parts, as the next norm sums them; else only where these are faster
    one_order   the sums of a row have one order for every number of rows (codes.wide_matmul)
    """

    kernel: ModuleType
    weight: TiledWeight | TiledParts
    bias: torch.Tensor | None
    activation: Activation | None
    in_parts: bool
    one_order: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [num_rows, k]. -> [num_rows, n], gated [num_rows, n / 2], or float32 [num_parts, num_rows, n]"""
        weight, gated = self.weight, self.activation is not None
        n = weight.shape[0] // (2 if gated else 1)
        num_rows = _ANY_ROWS if self.one_order else len(x)
        parts = 1 if gated else self.kernel.parts_of(num_rows, weight, summed=not self.in_parts)
        summed = parts == 1 and not self.in_parts
        out = torch.empty(parts, len(x), n, dtype=x.dtype if summed else torch.float32, device=x.device)
        bias, start = self.bias if summed else None, 0
        for part in weight.parts if isinstance(weight, TiledParts) else (weight,):
            stop = n if gated else start + part.num_outputs
            own = bias[start:stop] if bias is not None else None
            self.kernel.launch(self._rows(x, part), part, out[:, :, start:stop], own, activation=self.activation)
            start = stop
        return out[0] if summed else out

    def _rows(self, x: torch.Tensor, weight: TiledWeight) -> torch.Tensor | Fp8Rows:
        if weight.order is not None:
            x = x.index_select(1, weight.order)
        in_fp8 = weight.in_fp8 and len(x) > FEW_ROWS and not self.one_order
        return fp8_rows(x, in_tiles=True) if in_fp8 else x


@dataclass(frozen=True)
class ScaledProduct:
    """The product of many rows in E4M3 with a weight in E4M3, by torch's library.

    scales  float32 [1, n], in the order of the outputs
    """

    weight: TiledWeight
    scales: torch.Tensor
    bias: torch.Tensor | None
    activation: Activation | None
    in_parts: bool

    @classmethod
    def of(
        cls, weight: TiledWeight, bias: torch.Tensor | None, activation: Activation | None, *, in_parts: bool
    ) -> ScaledProduct:
        scales = weight.scales[: weight.num_outputs]
        if weight.outputs is not None:
            scales = torch.empty_like(scales).index_copy_(0, weight.outputs, scales)
        return cls(weight, scales[None], bias, activation, in_parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [num_rows, k]. -> [num_rows, n], gated [num_rows, n / 2], or [1, num_rows, n]"""
        rows = fp8_rows(x, in_tiles=False)
        found = torch._scaled_mm(
            rows.codes, self.weight.bytes_by_output().t(), rows.scale[:, None], self.scales,
            out_dtype=x.dtype, use_fast_accum=True,
        )  # fmt: skip
        if self.bias is not None and not self.in_parts:
            found += self.bias
        if self.activation is not None:
            return gate_mul(found, self.activation)
        return found[None] if self.in_parts else found
