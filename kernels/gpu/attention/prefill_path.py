"""Prefill attention is one of several kernels: the first path of a list that takes the step, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from graftlm.kernels.attention_params import AttentionParams
from graftlm.kernels.gpu.attention.step_buffers import DeviceStep
from graftlm.kernels.wire_plan import WirePlan


@dataclass(frozen=True)
class PrefillCall:
    """The prefill rows of one layer of a step; their K and V are in the store already.

    q, k, v  [num_tokens, heads, dim], of the whole step
    out      [num_tokens, num_heads, v_dim], of the whole step
    rows     the prefill rows: those of several new tokens, behind the decode rows
    extend   attends the given rows by the extend kernel, which takes everything, and writes them to `out`
    """

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    params: AttentionParams
    step: DeviceStep
    out: torch.Tensor
    rows: slice
    extend: Callable[[slice], None]


class PrefillPath(Protocol):
    """One way to attend the prefill rows of a step."""

    def prepare(self, plan: WirePlan, first_row: int) -> None:
        """Lay out what all layers of a step share, whose rows [first_row, ...) are prefilled."""
        ...

    def forget(self) -> None:
        """Discard the prepared layout: the next step differs from it."""
        ...

    def takes(self, call: PrefillCall) -> bool:
        """Whether the step goes this way in this layer."""
        ...

    def run(self, call: PrefillCall) -> torch.Tensor:
        """Attend the prefill rows. -> `call.out`, or another tensor in its place."""
        ...
