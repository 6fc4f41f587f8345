"""AttentionParams: the scale, window, softcap and sinks of an attention layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class AttentionParams:
    """The parameters of a layer's attention beside q, k and v, constant over all steps.

    scale    scores are `scale` times the dot products of queries and keys.
    window   sliding window: a token sees itself and the `window - 1` tokens before it; None sees all.
    softcap  scores become softcap * tanh(scores / softcap); None leaves scores unchanged.
    sinks    [num_heads]: one more logit per head takes part in the softmax and adds nothing to the output.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
