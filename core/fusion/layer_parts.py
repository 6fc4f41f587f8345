"""Recognise decoder layers of the common shape: norm, attention, norm, MLP, each half added to the residual stream.

Layers are recognised by the names that transformers gives their modules. CPUs and GPUs share this and differ in what
they take from the modules: packed weights or plain ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from graftlm.kernels.rms_norm import Norm

if TYPE_CHECKING:
    from graftlm.core.fusion.mixtures import Mixture


def allclose(expected: torch.Tensor, found: torch.Tensor, tolerance: float) -> bool:
    """Whether `found` has the shape of `expected` and a relative error, in the Euclidean norm, below `tolerance`."""
    if expected.shape != found.shape:
        return False
    return float((found.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-30)) < tolerance


def is_silu(activation: object) -> bool:
    return isinstance(activation, nn.SiLU) or "silu" in type(activation).__name__.lower()


def decoder_stacks(model: nn.Module) -> Iterator[tuple[nn.ModuleList, nn.Module]]:
    """The stacks of decoder layers in `model`, each with the rotary embedding that is computed for its layers."""
    for owner in list(model.modules()):
        layers, rotary = getattr(owner, "layers", None), getattr(owner, "rotary_emb", None)
        if isinstance(layers, nn.ModuleList) and isinstance(rotary, nn.Module):
            yield layers, rotary


@dataclass(frozen=True)
class LayerModules:
    """The modules of a decoder layer, by their usual names.

    qkv      q_proj, k_proj and v_proj, or one qkv_proj
    gate_up  gate_proj and up_proj, or one gate_up_proj; empty if the MLP is no SwiGLU (silu(gate) * up)
    down     None with an empty gate_up
    """

    attention: nn.Module
    mlp: nn.Module
    input_norm: nn.Module
    mlp_norm: nn.Module
    qkv: tuple[nn.Module, ...]
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    out: nn.Module
    gate_up: tuple[nn.Module, ...]
    down: nn.Module | None

    @classmethod
    def of(cls, layer: nn.Module) -> LayerModules | None:
        """None if `layer` has no self-attention, MLP and two norms under the usual names."""
        attention, mlp = _child(layer, "self_attn"), _child(layer, "mlp") or _child(layer, "block_sparse_moe")
        first, second = _child(layer, "input_layernorm"), _child(layer, "post_attention_layernorm")
        out = _child(attention, "o_proj")
        qkv = _children(attention, "q_proj", "k_proj", "v_proj") or _children(attention, "qkv_proj")
        if attention is None or mlp is None or first is None or second is None or out is None or not qkv:
            return None
        down, activation = _child(mlp, "down_proj"), getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None))
        gate_up = _children(mlp, "gate_proj", "up_proj") or _children(mlp, "gate_up_proj")
        if down is None or not is_silu(activation):
            gate_up = ()
        q_norm, k_norm = _child(attention, "q_norm"), _child(attention, "k_norm")
        return cls(attention, mlp, first, second, qkv, q_norm, k_norm, out, gate_up, down if gate_up else None)


def _child(module: nn.Module | None, name: str) -> nn.Module | None:
    child = getattr(module, name, None)
    return child if isinstance(child, nn.Module) else None


def _children(module: nn.Module | None, *names: str) -> tuple[nn.Module, ...]:
    """The children of these names; empty if one is missing."""
    found = [child for name in names if (child := _child(module, name)) is not None]
    return tuple(found) if len(found) == len(names) else ()


@dataclass(frozen=True)
class Product:
    """A linear layer: weight [n, k] and bias [n]."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    @classmethod
    def of(cls, modules: tuple[nn.Module, ...]) -> Product | None:
        """That of one plain linear layer; None for any other, and for several."""
        (module,) = modules if len(modules) == 1 else (None,)
        return cls(module.weight, module.bias) if type(module) is nn.Linear else None


@dataclass(frozen=True)
class Parts:
    """What a fused GPU layer computes with. Without `gate_up` and `mixture` its MLP is called as it is."""

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
    mixture: Mixture | None = None


@dataclass(frozen=True)
class Recognised:
    """The modules that were fused before: norms whose arithmetic was checked, projections packed into one, mixtures."""

    norms: dict[nn.Module, Norm]
    products: dict[nn.Module, Product]
    mixtures: dict[nn.Module, Mixture] = field(default_factory=dict)

    def parts(self, layer: nn.Module) -> Parts | None:
        """The parts of `layer` if it has the common shape and its norms were fused."""
        found = LayerModules.of(layer)
        if found is None:
            return None
        first, second = self.norms.get(found.input_norm), self.norms.get(found.mlp_norm)
        q_norm, k_norm = (self.norms.get(m) if m is not None else None for m in (found.q_norm, found.k_norm))
        qkv = self.products.get(found.attention) or Product.of(found.qkv)
        out = Product.of((found.out,))
        if first is None or second is None or qkv is None or out is None or (q_norm is None) != (k_norm is None):
            return None
        gate_up = (self.products.get(found.mlp) or Product.of(found.gate_up)) if found.gate_up else None
        down = Product.of((found.down,)) if found.down is not None and gate_up is not None else None
        gate_up = gate_up if down is not None else None
        mixture = self.mixtures.get(found.mlp)
        return Parts(found.attention, found.mlp, first, second, qkv, out, q_norm, k_norm, gate_up, down, mixture)
