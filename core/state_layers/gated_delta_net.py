"""Linear attention by the gated delta rule: GatedDeltaNet (Qwen3-Next, Qwen3.5, OLMo hybrid), and KimiDelta (Kimi
Linear, Ling)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from graftlm.core.state_layers.state_layer import UnknownVariant, check_silu, conv_bytes, conv_shape, conv_weight
from graftlm.kernels.gpu.support import triton_problem
from graftlm.kernels.recurrent.convolution import causal_convolution
from graftlm.kernels.recurrent.delta_rule import EPSILON, DeltaInputs, delta_rule, rule_bytes
from graftlm.kernels.recurrent.state_pool import StateShape
from graftlm.kernels.recurrent.state_step import StateStep

if TYPE_CHECKING:
    from graftlm.kernels.gpu.recurrent_decode import DeltaWeights


class Projected(NamedTuple):
    """Projections of tokens.

    mixed  [num_tokens, num_channels]: q, k and v side by side; more channels where the layer has `columns`
    z      [num_tokens, num_k_heads, group * v_dim]; b, a  [num_tokens, num_k_heads, group]
    """

    mixed: torch.Tensor
    z: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor

    def part(self, first: int, last: int | None) -> Projected:
        """Return the projections of tokens [first, last)."""
        return Projected(*(tensor[first:last] for tensor in self))


class GatedDeltaNet:
    """A gated delta net: projections, causal convolution of q, k and v, gated delta rule, gated norm, projection.

    Three ways of projecting: Qwen3-Next's two packed projections, grouped by key head, Qwen3.5's four, and six (OLMo).

    columns  int64 [num_channels]: where a packed projection has q, k and v
    """

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        module_: Any = module
        check_silu(module_.activation)
        if hasattr(module, "in_proj_qkvz"):
            self._project = self._project_packed
            self.columns: torch.Tensor | None = self._packed_columns()
        elif all(hasattr(module, f"in_proj_{name}") for name in ("qkv", "z", "b", "a")):
            self._project = self._project_apart
            self.columns = None
        elif all(hasattr(module, f"{name}_proj") for name in "qkvgba"):
            self._project = self._project_singly
            self.columns = None
        else:
            raise UnknownVariant("its projections have other names")
        self._norm_module: Any = module_.norm if hasattr(module, "norm") else module_.o_norm
        self._last: Any = module_.out_proj if hasattr(module, "out_proj") else module_.o_proj
        self._max_beta = 2.0 if getattr(module, "allow_neg_eigval", False) else 1.0
        weight, eps = (getattr(self._norm_module, name, None) for name in ("weight", "variance_epsilon"))
        self._norm: tuple[torch.Tensor, float] | None = None  # weight and epsilon, for the kernel of decode rows
        if isinstance(weight, torch.Tensor) and isinstance(eps, float):
            self._norm = weight.detach(), eps
        heads, k_dim, v_dim = module_.num_v_heads, module_.head_k_dim, module_.head_v_dim
        recurrent = StateShape((heads, k_dim, v_dim), torch.float32)
        self.shapes: tuple[StateShape, ...] = (conv_shape(module_.conv1d), recurrent)
        self.token_bytes = conv_bytes(module_.conv1d) + rule_bytes(heads, k_dim, v_dim)

    def forward(self, x: torch.Tensor, states: tuple[torch.Tensor, ...], step: StateStep) -> torch.Tensor:
        """As StateLayer.forward."""
        projected, parts = self._project(x), []
        first = step.num_decode if self._norm is not None and triton_problem(x.device) is None else 0
        if first:
            parts.append(self._decode(projected.part(0, first), states, step.slots))
            step = step._replace(num_decode=0, slots=step.slots[:0])
        if first < len(x):
            run = self._prefill if self._has_prefill(x) else self._by_definition
            parts.append(run(projected.part(first, None), states, step))
        result: torch.Tensor = self._last(parts[0] if len(parts) == 1 else torch.cat(parts))
        return result

    def _decode(self, projected: Projected, states: tuple[torch.Tensor, ...], slots: torch.Tensor) -> torch.Tensor:
        """Run one token of each row by kernels. -> [num_rows, num_heads * v_dim]"""
        from graftlm.kernels.gpu.recurrent_decode import convolve, gated_delta

        (mixed, z, b, a), (cached, recurrent), conv = projected, states, self.module.conv1d
        mixed = convolve(mixed, cached, slots, conv_weight(conv), conv.bias, silu=True, columns=self.columns)
        return gated_delta(self._weights(), mixed, (b, a, z), recurrent, slots, EPSILON)

    def _has_prefill(self, x: torch.Tensor) -> bool:
        """Return True if kernels run rows of several tokens; in float32 they would compile for a minute."""
        if self._norm is None or x.dtype is torch.float32 or triton_problem(x.device) is not None:
            return False
        from graftlm.kernels.gpu.recurrent_prefill import runs_prefill

        return runs_prefill(x.device, self.module.head_k_dim, self.module.head_v_dim)

    def _prefill(self, projected: Projected, states: tuple[torch.Tensor, ...], step: StateStep) -> torch.Tensor:
        """Run rows of several tokens by kernels. -> [num_tokens, num_heads * v_dim]"""
        from graftlm.kernels.gpu.recurrent_decode import gated_norm
        from graftlm.kernels.gpu.recurrent_prefill import convolve_rows, delta_chunks

        (mixed, z, b, a), (cached, recurrent), conv = projected, states, self.module.conv1d
        assert step.ragged is not None
        mixed = convolve_rows(mixed, cached, step.ragged, conv_weight(conv), conv.bias, silu=True, columns=self.columns)
        out = delta_chunks(self._inputs(mixed, b, a), recurrent, step.ragged)
        return gated_norm(self._weights(), out.flatten(1), z)

    def _weights(self) -> DeltaWeights:
        from graftlm.kernels.gpu.recurrent_decode import DeltaWeights

        assert self._norm is not None
        module = self.module
        return DeltaWeights(module.num_k_heads, module.A_log, module.dt_bias, *self._norm, max_beta=self._max_beta)

    def _by_definition(self, projected: Projected, states: tuple[torch.Tensor, ...], step: StateStep) -> torch.Tensor:
        """Run the convolution, the delta rule and the gated norm in torch. -> [num_tokens, num_heads * v_dim]"""
        module, (mixed, z, b, a), (cached, recurrent) = self.module, projected, states
        conv = module.conv1d
        if self.columns is not None:
            mixed = mixed.index_select(1, self.columns)
        mixed = causal_convolution(mixed, cached, step, conv_weight(conv), conv.bias, silu=True)
        out = delta_rule(self._inputs(mixed, b, a), recurrent, step)
        normed: torch.Tensor = self._norm_module(out.flatten(0, 1), z.reshape(-1, module.head_v_dim))
        return normed.view(len(mixed), -1)

    def _inputs(self, mixed: torch.Tensor, b: torch.Tensor, a: torch.Tensor) -> DeltaInputs:
        """Return the inputs of the delta rule. mixed [num_tokens, ...]: q, k and v, after the convolution"""
        module = self.module
        q, k, v = mixed.split([module.key_dim, module.key_dim, module.value_dim], -1)
        decay = -module.A_log.float().exp() * F.softplus(a.flatten(1).float() + module.dt_bias)
        return DeltaInputs(
            q.unflatten(1, (-1, module.head_k_dim)),
            k.unflatten(1, (-1, module.head_k_dim)),
            v.unflatten(1, (-1, module.head_v_dim)),
            decay.float(),
            b.flatten(1).sigmoid().float() * self._max_beta,
        )

    def _project_packed(self, x: torch.Tensor) -> Projected:
        module = self.module
        heads, group = module.num_k_heads, module.num_v_heads // module.num_k_heads
        mixed, gates = module.in_proj_qkvz(x), module.in_proj_ba(x).unflatten(1, (heads, 2 * group))
        z = mixed.unflatten(1, (heads, -1))[..., 2 * module.head_k_dim + group * module.head_v_dim :]
        return Projected(mixed, z, gates[..., :group], gates[..., group:])

    def _packed_columns(self) -> torch.Tensor:
        module = self.module
        heads, k_dim, values = module.num_k_heads, module.head_k_dim, module.value_dim // module.num_k_heads
        places = torch.arange(heads * (2 * k_dim + 2 * values), device=module.A_log.device).view(heads, -1)
        q, k, v, _ = places.split([k_dim, k_dim, values, values], 1)
        return torch.cat([q.flatten(), k.flatten(), v.flatten()])

    def _project_apart(self, x: torch.Tensor) -> Projected:
        module = self.module
        mixed = module.in_proj_qkv(x)  # first: where the four are packed, it computes all of them
        gates = module.in_proj_z(x), module.in_proj_b(x), module.in_proj_a(x)
        return Projected(mixed, *(gate.unflatten(1, (module.num_k_heads, -1)) for gate in gates))

    def _project_singly(self, x: torch.Tensor) -> Projected:
        module = self.module
        mixed = torch.cat([module.q_proj(x), module.k_proj(x), module.v_proj(x)], -1)
        gates = module.g_proj(x), module.b_proj(x), module.a_proj(x)
        return Projected(mixed, *(gate.unflatten(1, (module.num_k_heads, -1)) for gate in gates))


class KimiDelta:
    """Kimi delta attention: projections, causal convolution of q, k and v, delta rule, gated norm, projection.

    Rows of several tokens run by the rule's definition in torch, with the module's own decays, gates and norm.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        module_: Any = module
        check_silu(module_.activation)
        heads, dim = module_.num_heads, module_.head_dim
        recurrent = StateShape((heads, dim, dim), torch.float32)
        self.shapes: tuple[StateShape, ...] = (conv_shape(module_.conv1d), recurrent)
        self.token_bytes = conv_bytes(module_.conv1d) + rule_bytes(heads, dim, dim, by_channel=True)
        self._bound = _BOUNDS.get(type(module_.forget_gate).__name__)

    def forward(self, x: torch.Tensor, states: tuple[torch.Tensor, ...], step: StateStep) -> torch.Tensor:
        """As StateLayer.forward."""
        module, (cached, recurrent) = self.module, states
        conv, heads = module.conv1d, (-1, module.head_dim)
        mixed = torch.cat([module.q_proj(x), module.k_proj(x), module.v_proj(x)], -1)
        mixed = causal_convolution(mixed, cached, step, conv_weight(conv), conv.bias, silu=True)
        beta, gate = module.b_proj(x), _projected(module, "g", x).unflatten(1, heads)
        first = step.num_decode if self._bound is not None and triton_problem(x.device) is None else 0
        parts = []
        if first:
            parts.append(self._decode(x[:first], mixed[:first], beta[:first], gate[:first], recurrent, step.slots))
            step = step._replace(num_decode=0, slots=step.slots[:0])
        if first < len(x):
            q, k, v = (part.unflatten(1, heads) for part in mixed[first:].split([module.qkv_dim] * 3, -1))
            decay = module.forget_gate(x[None, first:])[0].float()
            out = delta_rule(DeltaInputs(q, k, v, decay, beta[first:].sigmoid().float()), recurrent, step)
            parts.append(module.o_norm(out, gate[first:]).flatten(1))
        result: torch.Tensor = module.o_proj(parts[0] if len(parts) == 1 else torch.cat(parts))
        return result

    def _decode(
        self,
        x: torch.Tensor,
        mixed: torch.Tensor,
        beta: torch.Tensor,
        gate: torch.Tensor,
        recurrent: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """Run one token of each row by kernels. -> [num_rows, num_heads * head_dim]"""
        from graftlm.kernels.gpu.recurrent_decode import DeltaWeights, gated_delta

        module, forget, norm = self.module, self.module.forget_gate, self.module.o_norm
        assert self._bound is not None
        weights = DeltaWeights(
            module.num_heads, forget.A_log.view(-1), forget.dt_bias, norm.weight, norm.variance_epsilon,
            sigmoid=True, bound=self._bound(forget),
        )  # fmt: skip
        decays = _projected(forget, "f", x).unflatten(1, (-1, module.head_dim))
        return gated_delta(weights, mixed, (beta[..., None], decays, gate), recurrent, slots, EPSILON)


def _projected(module: Any, name: str, x: torch.Tensor) -> torch.Tensor:
    """Project x by the linear layer of this name, or by the two of a low rank."""
    if hasattr(module, f"{name}_proj"):
        whole: torch.Tensor = getattr(module, f"{name}_proj")(x)
        return whole
    low: torch.Tensor = getattr(module, f"{name}_a_proj")(x)
    out: torch.Tensor = getattr(module, f"{name}_b_proj")(low)
    return out


_BOUNDS: dict[str, Callable[[Any], float | None]] = {
    "KimiLinearForgetGate": lambda gate: None,
    "BailingHybridForgetGate": lambda gate: gate.lower_bound if gate.safe_gate else None,
}
"""Forget gate, by class, whose decays the kernel computes -> their bound."""
