"""Modules of a mixture's experts whose weights are quantised, all experts' as one weight.

The module keeps its class's forward, which widens the weights for one call: the reference of the fusion, which
multiplies the codes. In place of the parameters are tensors of their shape without memory of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graftlm.kernels.weight import Weight


@dataclass(eq=False)
class ExpertCodes:
    """The weights of all experts in one projection.

    weight      [num_experts * n, k]; a fusion puts them in another form
    transposed  whether the module's parameter is [num_experts, k, n]
    """

    weight: Weight
    num_experts: int
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the shape of the module's parameter."""
        n, k = self.weight.shape[0] // self.num_experts, self.weight.shape[1]
        return (self.num_experts, k, n) if self.transposed else (self.num_experts, n, k)

    def values(self) -> torch.Tensor:
        """Return a dense copy, [num_experts, n, k]."""
        return self.weight.dense().view(self.num_experts, -1, self.weight.shape[1])

    def parameter(self) -> nn.Parameter:
        """Return a dense copy in the shape of the module's parameter."""
        values = self.values()
        return nn.Parameter(values.transpose(1, 2) if self.transposed else values, requires_grad=False)

    def placeholder(self) -> nn.Parameter:
        """Return a tensor in the shape of the module's parameter that takes no memory."""
        zero = torch.zeros((), dtype=self.weight.dtype, device=self.weight.device)
        return nn.Parameter(zero.expand(self.shape), requires_grad=False)


class _Coded(nn.Module):
    """The part of a class of experts that holds codes."""

    expert_codes: dict[str, ExpertCodes]

    def forward(self, *args: Any, **options: Any) -> Any:
        try:
            for name, codes in self.expert_codes.items():
                self._parameters[name] = codes.parameter()
            return super().forward(*args, **options)
        finally:
            for name, codes in self.expert_codes.items():
                self._parameters[name] = codes.placeholder()


def put_experts(model: nn.Module, codes: Mapping[str, ExpertCodes]) -> None:
    """Give modules of experts in `model` quantised weights.

    codes  by the names of the replaced parameters: "model.layers.0.mlp.experts.gate_up_proj"
    Raises KeyError for a name that is no parameter of this shape.
    """
    for name, held in codes.items():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        own = module._parameters.get(leaf)
        if own is None or tuple(own.shape) != held.shape:
            raise KeyError(f"{name!r} is no parameter {held.shape}")
        if not isinstance(module, _Coded):
            kind = type(module)
            module.__class__ = type(f"Coded{kind.__name__}", (_Coded, kind), {"__module__": kind.__module__})
            setattr(module, "expert_codes", {})  # noqa: B010
        codes_of(module)[leaf] = held
        module._parameters[leaf] = held.placeholder()


def codes_of(module: nn.Module) -> dict[str, ExpertCodes]:
    """Return the quantised weights of a module of experts by parameter; empty for other modules."""
    return module.expert_codes if isinstance(module, _Coded) else {}
