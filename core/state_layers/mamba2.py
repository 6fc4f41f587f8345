"""Mamba2: the selective state space layer (Granite 4 hybrid, Bamba, Nemotron-H, Falcon-H1)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from graftlm.core.state_layers.state_layer import check_silu, conv_bytes, conv_shape, conv_weight
from graftlm.kernels.recurrent.convolution import causal_convolution
from graftlm.kernels.recurrent.selective_scan import ScanInputs, scan_bytes, selective_scan
from graftlm.kernels.recurrent.state_pool import StateShape
from graftlm.kernels.recurrent.state_step import StateStep


class Mamba2:
    """A Mamba 2 layer: projection, causal convolution of x, B and C, selective scan, gated norm, projection.

    Falcon-H1 has factors at the input and at each projected number, and may have a gate without a norm.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        module_: Any = module
        check_silu(module_.activation)
        shape = (module_.num_heads, module_.head_dim, module_.ssm_state_size)
        self.shapes: tuple[StateShape, ...] = (conv_shape(module_.conv1d), StateShape(shape, torch.float32))
        self.token_bytes = conv_bytes(module_.conv1d) + scan_bytes(*shape)
        self._has_norm = not isinstance(module_.norm, nn.Identity)

    def forward(self, x: torch.Tensor, states: tuple[torch.Tensor, ...], step: StateStep) -> torch.Tensor:
        """As StateLayer.forward."""
        module, (cached, recurrent) = self.module, states
        gate, mixed, dt = self._project(x).split([module.intermediate_size, module.conv_dim, module.num_heads], -1)
        conv = module.conv1d
        mixed = causal_convolution(mixed, cached, step, conv_weight(conv), conv.bias, silu=True)
        width = module.n_groups * module.ssm_state_size
        inner, b, c = mixed.split([module.intermediate_size, width, width], -1)
        low, high = module.time_step_limit
        inputs = ScanInputs(
            inner.unflatten(1, (-1, module.head_dim)),
            F.softplus(dt.float() + module.dt_bias.float()).clamp(low, high),
            b.unflatten(1, (-1, module.ssm_state_size)),
            c.unflatten(1, (-1, module.ssm_state_size)),
        )
        out = selective_scan(inputs, -module.A_log.float().exp(), module.D, recurrent, step).flatten(1)
        out = module.norm(out, gate) if self._has_norm else out * F.silu(gate.float())
        result: torch.Tensor = module.out_proj(out.to(x.dtype))
        return result

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        module = self.module
        factors = getattr(module, "mup_vector", None)
        if factors is None:
            projected: torch.Tensor = module.in_proj(x)
            return projected
        scaled: torch.Tensor = module.in_proj(x * module.ssm_in_multiplier) * factors.view(-1)
        return scaled
