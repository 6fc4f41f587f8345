"""Bits12Weight: a bfloat16 weight that has a form in 12 bits beside its own 16, for steps of few tokens on Hopper."""

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
    """A weight in bfloat16 whose kernels hold its codes too: they read a quarter less, and lose nothing.

    values  [n, k], bfloat16: what kernels of many rows read
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
        """Encode the weight; None if it does not suit, or gains nothing. Takes a while, and the caller keeps the codes.

        gates  the first half of the outputs are gates; the codes have them in turns of eight with what they are for
        """
        return compacted(self.values, gates=gates) if self.suits(self.values) else None
