"""ShortConvolution: a gated causal convolution of a few tokens (LFM2). Its state is the convolution's last inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from graftlm.core.state_layers.state_layer import conv_bytes, conv_shape, conv_weight
from graftlm.kernels.recurrent.convolution import causal_convolution
from graftlm.kernels.recurrent.state_pool import StateShape
from graftlm.kernels.recurrent.state_step import StateStep


class ShortConvolution:
    """A short convolution: out_proj(c * convolution(b * x)), with b, c and x of one projection."""

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        self.shapes: tuple[StateShape, ...] = (conv_shape(self.module.conv),)
        self.token_bytes = conv_bytes(self.module.conv)

    def forward(self, x: torch.Tensor, states: tuple[torch.Tensor, ...], step: StateStep) -> torch.Tensor:
        """As StateLayer.forward."""
        module = self.module
        b, c, value = module.in_proj(x).chunk(3, -1)
        conv = module.conv
        mixed = causal_convolution(b * value, states[0], step, conv_weight(conv), conv.bias, silu=False)
        result: torch.Tensor = module.out_proj(c * mixed)
        return result
