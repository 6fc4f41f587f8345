"""What a decoder layer of the common shape consists of, found by name: norm, attention, norm, MLP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from graftlm.kernels.gpu.elementwise import Norm

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]

Agree = Callable[[torch.Tensor, torch.Tensor], bool]
"""Whether two results of the same are as near as they have to be."""


@dataclass(frozen=True)
class Product:
    """A linear layer: weight [n, k] and bias [n]."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    @classmethod
    def of(cls, module: nn.Module | None) -> Product | None:
        """That of a plain linear layer; None for any other."""
        return cls(module.weight, module.bias) if type(module) is nn.Linear else None


@dataclass(frozen=True)
class Parts:
    """What a layer consists of. Without `gate_up` its MLP is called as it is."""

    attention: nn.Module
    mlp: nn.Module
    before_attention: Norm
    before_mlp: Norm
    qkv: Product
    out: Product
    q_norm: Norm | None
    k_norm: Norm | None
    gate_up: Product | None
    down: Product | None


@dataclass(frozen=True)
class Recognised:
    """What was fused before, by module: norms of the usual arithmetic, and projections that became one product."""

    norms: dict[nn.Module, Norm]
    products: dict[nn.Module, Product]
    gated: set[nn.Module]

    def parts(self, layer: nn.Module) -> Parts | None:
        """The parts of `layer` if it has the common shape."""
        attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
        first, second = (self._norm(layer, name) for name in ("input_layernorm", "post_attention_layernorm"))
        if not isinstance(attention, nn.Module) or not isinstance(mlp, nn.Module) or first is None or second is None:
            return None
        qkv = self.products.get(attention) or Product.of(getattr(attention, "qkv_proj", None))
        out = Product.of(getattr(attention, "o_proj", None))
        q_norm, k_norm = self._norm(attention, "q_norm"), self._norm(attention, "k_norm")
        if qkv is None or out is None or (q_norm is None) != (k_norm is None):
            return None
        gate_up, down = self._gated(mlp), Product.of(getattr(mlp, "down_proj", None))
        if gate_up is None or down is None:
            gate_up = down = None
        return Parts(attention, mlp, first, second, qkv, out, q_norm, k_norm, gate_up, down)

    def _norm(self, module: nn.Module, name: str) -> Norm | None:
        child = getattr(module, name, None)
        return self.norms.get(child) if isinstance(child, nn.Module) else None

    def _gated(self, mlp: nn.Module) -> Product | None:
        if mlp in self.gated:
            return self.products.get(mlp)
        activation = getattr(mlp, "activation_fn", getattr(mlp, "act_fn", None))
        return Product.of(getattr(mlp, "gate_up_proj", None)) if is_silu(activation) else None


def is_silu(activation: object) -> bool:
    return isinstance(activation, nn.SiLU) or "silu" in type(activation).__name__.lower()
