"""The MLP of a fused decoder layer: from the norm after the attention to the layer's last sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from graftlm.core.fusion.layer_parts import LayerExtras, Parts
from graftlm.kernels.gpu.mixture.expert_router import route
from graftlm.kernels.gpu.mixture.router import Router
from graftlm.kernels.gpu.norm import Beside, add_norm, norm_rows
from graftlm.kernels.linear_dispatch import LinearPlan
from graftlm.kernels.norm import Addition, Norm


class LayerMlp(Protocol):
    """An MLP that adds its output to the residual stream."""

    @property
    def kernels(self) -> tuple[tuple[str, ...], ...]:
        """Return the kernels of each matmul, torch's excepted."""
        ...

    @property
    def plans(self) -> tuple[LinearPlan, ...]:
        """Return the linear layers, experts excluded."""
        ...

    def add_norm(
        self, normed: torch.Tensor, residual: torch.Tensor, norm: Norm | None, addition: Addition | None = None
    ) -> torch.Tensor | None:
        """Add mlp(normed [num_rows, n]) to the residual [num_rows, n], in place, as `addition` says.

        -> the residual after `norm`, if the norm computes the sum; else None
        """
        ...


@dataclass(frozen=True)
class DenseMlp:
    """Gate and up projections with their activation, and down."""

    gate_up: LinearPlan
    down: LinearPlan

    @property
    def kernels(self) -> tuple[tuple[str, ...], ...]:
        return self.gate_up.kinds, self.down.kinds

    @property
    def plans(self) -> tuple[LinearPlan, ...]:
        return self.gate_up, self.down

    def add_norm(
        self, normed: torch.Tensor, residual: torch.Tensor, norm: Norm | None, addition: Addition | None = None
    ) -> torch.Tensor | None:
        return self.down.add_norm(self.gate_up.gate_up(normed), residual, norm, addition)


@dataclass(frozen=True)
class ModuleMlp:
    """The model's own module."""

    module: nn.Module
    kernels: tuple[tuple[str, ...], ...] = ()
    plans: tuple[LinearPlan, ...] = ()

    def add_norm(
        self, normed: torch.Tensor, residual: torch.Tensor, norm: Norm | None, addition: Addition | None = None
    ) -> torch.Tensor | None:
        out = self.module(normed[None])[0]
        if addition is not None:
            return add_norm(out[None], residual, norm, addition=addition)
        residual.add_(out)
        return None


@dataclass(frozen=True)
class LayerRouter:
    """The router of Gemma 4's experts in three kernels: of a normed input, with a factor for each expert.

    factors  [num_experts], of the weights; read in the kernel, since torch would stop at indices of kernels that are
             compiled and not yet run
    """

    norm: Norm
    rule: Router
    factors: torch.Tensor
    strict: bool = False

    @classmethod
    def of(cls, module: nn.Module, *, strict: bool = False) -> LayerRouter | None:
        """Return the kernels' form of a router; None for one that has other parts."""
        router: Any = module
        try:
            weight, root = router.proj.weight.detach(), float(router.scalar_root_size)
            norm = Norm(router.scale.detach().float() * root, float(router.norm.eps))
            rule = Router(weight, int(router.config.top_k_experts), logits_dtype=weight.dtype, renormalize=True)
            return cls(norm, rule, router.per_expert_scale.detach(), strict)
        except AttributeError:
            return None

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Route x [num_tokens, hidden_size]. -> experts, weights [num_tokens, top_k]"""
        return route(norm_rows(x, self.norm), self.rule, strict=self.strict, factors=self.factors)


@dataclass(frozen=True)
class MlpBesideExperts:
    """An MLP whose output is added to that of experts, which take the residual stream (Gemma 4)."""

    dense: DenseMlp
    extras: LayerExtras
    router: LayerRouter | None = None

    @property
    def kernels(self) -> tuple[tuple[str, ...], ...]:
        return self.dense.kernels

    @property
    def plans(self) -> tuple[LinearPlan, ...]:
        return self.dense.plans

    def add_norm(
        self, normed: torch.Tensor, residual: torch.Tensor, norm: Norm | None, addition: Addition | None = None
    ) -> torch.Tensor | None:
        router, experts = self.extras.experts
        after_mlp, before, after = self.extras.expert_norms
        if self.router is not None:
            chosen, weights = self.router(residual)
        else:
            _, weights, chosen = router(residual)
        routed = norm_rows(experts(norm_rows(residual, before), chosen, weights), after)
        out = norm_rows(self.dense.down.matmul(self.dense.gate_up.gate_up(normed)), after_mlp)
        return add_norm(out[None], residual, norm, addition=addition, beside=Beside(routed))


@dataclass
class MlpBeforeLayerInput:
    """An MLP after which the gated input of the layer is added to the residual stream (Gemma 4).

    layer_input  [num_rows, size], set before each call
    """

    mlp: LayerMlp
    extras: LayerExtras
    layer_input: torch.Tensor | None = None

    @property
    def kernels(self) -> tuple[tuple[str, ...], ...]:
        return self.mlp.kernels

    @property
    def plans(self) -> tuple[LinearPlan, ...]:
        return self.mlp.plans

    def add_norm(
        self, normed: torch.Tensor, residual: torch.Tensor, norm: Norm | None, addition: Addition | None = None
    ) -> torch.Tensor | None:
        addition = addition or Addition()
        self.mlp.add_norm(normed, residual, None, addition._replace(scale=1.0))
        gate, projection = self.extras.gate
        act: Callable[[torch.Tensor], torch.Tensor] = self.extras.layer.act_fn  # type: ignore[assignment]
        given, self.layer_input = self.layer_input, None
        assert given is not None
        out = projection(act(gate(residual)) * given)
        return add_norm(out[None], residual, norm, addition=Addition(self.extras.after_gate, 1.0, addition.scale))


Choose = Callable[..., LinearPlan]
"""Chooses the kernels of a linear layer: weight, role, bias -> LinearPlan."""


MakeMlp = Callable[[Choose], LayerMlp]
"""Makes one form of a layer's MLP."""


def layer_mlps(parts: Parts) -> list[MakeMlp]:
    """Return the constructors of a layer's possible MLPs, the fastest first."""
    forms: list[MakeMlp] = [lambda choose: ModuleMlp(parts.mlp)]
    gate_up, down = parts.gate_up, parts.down
    if gate_up is not None and down is not None:

        def dense(choose: Choose) -> LayerMlp:
            plan = choose(gate_up.weight, "gate_up", gate_up.bias, activation=parts.activation)
            return DenseMlp(plan, choose(down.weight, "add", down.bias, reduce=down.reduce))

        forms.insert(0, dense)
    if (mixture := parts.mixture) is not None:
        forms.insert(0, lambda choose: mixture)
    extras = parts.extras
    if extras is not None and extras.experts:
        forms = [partial(_beside_experts, make, extras, own) for own in (False, True) for make in forms[:-1]]
    if extras is not None and extras.gate:
        forms = [partial(_before_input, make, extras) for make in forms]
    return forms


def _beside_experts(make: MakeMlp, extras: LayerExtras, own_router: bool, choose: Choose) -> LayerMlp:
    dense = make(choose)
    assert isinstance(dense, DenseMlp)
    router, experts = extras.experts
    # torch's experts would index by routes of kernels that are compiled and not yet run
    own_router = own_router or "forward" not in vars(experts)
    found = None if own_router else LayerRouter.of(router, strict=dense.down.strict)
    return MlpBesideExperts(dense, extras, found)


def _before_input(make: MakeMlp, extras: LayerExtras, choose: Choose) -> LayerMlp:
    return MlpBeforeLayerInput(make(choose), extras)
