"""GatedDeltaNet: linear attention by the gated delta rule (Qwen3-Next, Qwen3.5)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from graftlm.core.state_layers.state_layer import UnknownVariant, check_silu, conv_shape, conv_weight
from graftlm.kernels.gpu.support import triton_problem
from graftlm.kernels.recurrent.convolution import causal_convolution
from graftlm.kernels.recurrent.delta_rule import EPSILON, DeltaInputs, delta_rule
from graftlm.kernels.recurrent.state_pool import StateShape
from graftlm.kernels.recurrent.state_step import StateStep

Projected = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""q, k and v [num_tokens, num_channels], z [num_tokens, num_heads * v_dim], b, a [num_tokens, num_heads]."""


class GatedDeltaNet:
    """A gated delta net: projections, causal convolution of q, k and v, gated delta rule, gated norm, projection.

    Two ways of projecting: Qwen3-Next's two packed projections, grouped by key head, and Qwen3.5's four.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        module_: Any = module
        check_silu(module_.activation)
        if hasattr(module, "in_proj_qkvz"):
            self._project = self._project_packed
        elif all(hasattr(module, f"in_proj_{name}") for name in ("qkv", "z", "b", "a")):
            self._project = self._project_apart
        else:
            raise UnknownVariant("its projections have other names")
        weight, eps = getattr(module_.norm, "weight", None), getattr(module_.norm, "variance_epsilon", None)
        self._norm: tuple[torch.Tensor, float] | None = None  # weight and epsilon, for the kernel of decode rows
        if isinstance(weight, torch.Tensor) and isinstance(eps, float):
            self._norm = weight.detach(), eps
        heads, k_dim, v_dim = module_.num_v_heads, module_.head_k_dim, module_.head_v_dim
        recurrent = StateShape((heads, k_dim, v_dim), torch.float32)
        self.shapes: tuple[StateShape, ...] = (conv_shape(module_.conv1d), recurrent)

    def forward(self, x: torch.Tensor, states: tuple[torch.Tensor, ...], step: StateStep) -> torch.Tensor:
        """As StateLayer.forward."""
        module, (cached, recurrent) = self.module, states
        mixed, z, b, a = self._project(x)
        conv = module.conv1d
        mixed = causal_convolution(mixed, cached, step, conv_weight(conv), conv.bias, silu=True)
        first, parts = step.num_decode, []
        if first and self._norm is not None and triton_problem(x.device) is None:
            from graftlm.kernels.gpu.recurrent_decode import DeltaWeights, gated_delta

            gates = b[:first], a[:first], z[:first]
            weights = DeltaWeights(module.num_k_heads, module.A_log, module.dt_bias, *self._norm)
            parts.append(gated_delta(weights, mixed[:first], gates, recurrent, step.slots, EPSILON))
            mixed, z, b, a = mixed[first:], z[first:], b[first:], a[first:]
            step = step._replace(num_decode=0, slots=step.slots[:0])
        if len(mixed):
            parts.append(self._by_definition((mixed, z, b, a), recurrent, step))
        result: torch.Tensor = module.out_proj(parts[0] if len(parts) == 1 else torch.cat(parts))
        return result

    def _by_definition(self, projected: Projected, recurrent: torch.Tensor, step: StateStep) -> torch.Tensor:
        """Run the delta rule and the gated norm in torch. -> [num_tokens, num_heads * v_dim]"""
        module, (mixed, z, b, a) = self.module, projected
        q, k, v = mixed.split([module.key_dim, module.key_dim, module.value_dim], -1)
        decay = -module.A_log.float().exp() * F.softplus(a.float() + module.dt_bias)
        inputs = DeltaInputs(
            q.unflatten(1, (-1, module.head_k_dim)),
            k.unflatten(1, (-1, module.head_k_dim)),
            v.unflatten(1, (-1, module.head_v_dim)),
            decay.float(),
            b.sigmoid().float(),
        )
        out = delta_rule(inputs, recurrent, step)
        normed: torch.Tensor = module.norm(out.flatten(0, 1), z.reshape(-1, module.head_v_dim))
        return normed.view(len(mixed), -1)

    def _project_packed(self, x: torch.Tensor) -> Projected:
        module = self.module
        heads, group = module.num_k_heads, module.num_v_heads // module.num_k_heads
        sizes = [module.head_k_dim, module.head_k_dim, group * module.head_v_dim, group * module.head_v_dim]
        q, k, v, z = module.in_proj_qkvz(x).unflatten(1, (heads, -1)).split(sizes, -1)
        b, a = module.in_proj_ba(x).unflatten(1, (heads, 2 * group)).split([group, group], -1)
        mixed = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], -1)
        return mixed, z.flatten(1), b.flatten(1), a.flatten(1)

    def _project_apart(self, x: torch.Tensor) -> Projected:
        module = self.module
        return module.in_proj_qkv(x), module.in_proj_z(x), module.in_proj_b(x), module.in_proj_a(x)
