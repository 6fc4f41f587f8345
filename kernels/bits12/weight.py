"""Bits12Weight: a bfloat16 weight with a 12-bit form beside its 16 bits, for steps of few tokens on Hopper."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graftlm.kernels.bits12.weight_codec import INPUTS, CompactWeight, compacted
from graftlm.kernels.hopper.support import gluon_kernel, takes
from graftlm.kernels.weight import PlainWeight

_SIZE = 0.77
"""Bytes of a weight in 12 bits for each byte of its bfloat16 original, exception list included."""


@dataclass(frozen=True, eq=False)
class Bits12Weight(PlainWeight):
    """A bfloat16 weight whose kernels also hold its codes: a quarter fewer bytes to read, without loss.

    values  [n, k], bfloat16: the operand of kernels of many rows
    """

    @staticmethod
    def suits(values: torch.Tensor) -> bool:
        """Return True if `values` [n, k] could have codes: bfloat16 on Hopper, dense, k in 64s and at least 256."""
        suited = values.dtype is torch.bfloat16 and takes(values) and values.shape[1] >= 2 * INPUTS
        return suited and gluon_kernel("bits12.matmul") is not None

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + int(_SIZE * self.values.nbytes)

    @property
    def fallback(self) -> PlainWeight:
        return PlainWeight(self.values)

    def codes(self, *, gates: bool) -> CompactWeight | None:
        """Encode the weight; None if it does not suit, or gains nothing. Encoding is slow: the caller keeps the codes.

        gates  the first half of the outputs are gates, which alternate with their ups in eights in the codes
        """
        return compacted(self.values, gates=gates) if self.suits(self.values) else None
