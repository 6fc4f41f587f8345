"""Recognise decoder layers: attention and MLP, normed before or after or both, added to the residual stream.

Layers are recognised by the names that transformers gives their modules, for CPUs (packed weights) and GPUs (plain
weights) alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from graftlm.core.tensor_parallel.ranks import REDUCE
from graftlm.kernels.activation import Activation, gate_by_torch
from graftlm.kernels.norm import Addition, Norm
from graftlm.kernels.weight import Weight, weight_of

if TYPE_CHECKING:
    from graftlm.core.fusion.mixtures import Mixture
    from graftlm.kernels.linear_dispatch import SumParts


def allclose(expected: torch.Tensor, found: torch.Tensor, tolerance: float) -> bool:
    """Return True if `found` has the shape of `expected` and a relative error (Euclidean norm) below `tolerance`."""
    if expected.shape != found.shape:
        return False
    return float((found.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-30)) < tolerance


def activation_of(function: object) -> Activation | None:
    """Return the activation that `function` computes, judged by its output; None if kernels do not support it."""
    if not callable(function):
        return None
    x = torch.linspace(-4.0, 4.0, 81, dtype=torch.float32)
    both = torch.cat([x, torch.ones_like(x)])
    try:
        with torch.no_grad():
            found = function(x)
    except Exception:  # its arguments differ
        return None
    kinds: tuple[Activation, ...] = ("silu", "gelu_tanh")
    return next((kind for kind in kinds if allclose(gate_by_torch(both, kind), found, 1e-5)), None)


class NoRotary(nn.Module):
    """The rotary embedding of a model whose attention turns nothing."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> None:
        return None


def decoder_stacks(model: nn.Module) -> Iterator[tuple[nn.ModuleList, nn.Module]]:
    """Yield the stacks of decoder layers in `model`, each with the rotary embedding that is computed for its layers."""
    for owner in list(model.modules()):
        layers, rotary = getattr(owner, "layers", None), getattr(owner, "rotary_emb", _child(owner, "pos_emb"))
        first = layers[0] if isinstance(layers, nn.ModuleList) and len(layers) else None
        plain = _children(first, "self_attn", "input_layernorm", "mlp") != ()
        if rotary is None and (hasattr(owner, "rotary_emb") or plain):
            rotary = NoRotary()
        if isinstance(layers, nn.ModuleList) and isinstance(rotary, nn.Module):
            yield layers, rotary


class NormNames(NamedTuple):
    """The names of a layer's norms; None for a norm that the layer lacks."""

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None


NORM_NAMES = (
    NormNames(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    ),  # Gemma 2 and 3
    NormNames("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),  # GLM 4
    NormNames("input_layernorm", None, "post_attention_layernorm", None),  # Llama
    NormNames("input_layernorm", None, "pre_ff_layernorm", None),  # Bamba
    NormNames("operator_norm", None, "ffn_norm", None),  # LFM2
    NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),  # OLMo 2, EXAONE 4
    NormNames("input_layernorm", None, None, None),  # Phi, Cohere: attention and MLP have the same input
)
"""Names of norms by family; the first entry whose names a layer has applies."""

MLP_NAMES = ("mlp", "block_sparse_moe", "feed_forward")
"""Names of the MLP, or of the mixture in its place."""

SHARED_MLP = "shared_mlp"
"""Name of the MLP beside a mixture of the same input, or alone (Granite 4)."""

OUT_NAMES = ("o_proj", "dense", "out_proj")
"""Names of the last projection of an attention or a module with a state."""

STATE_NAMES = ("linear_attn", "conv", "mamba")
"""Names of a module with a state in the place of attention."""

_FACTORS = ("residual_multiplier",)
"""Names of attributes that multiply the outputs which a layer adds to the residual stream."""


@dataclass(frozen=True)
class LayerModules:
    """The modules of a decoder layer, by their usual names.

    attention  the attention, or a module with a state in its place
    attends    False for a module with a state
    parallel  whether MLP and attention have one input
    factor    multiplies the outputs that attention and MLP add to the residual stream
    scale     multiplies the layer's output
    v_norm    whether values are normed, without a weight, head by head
    qkv       q_proj, k_proj and v_proj, or one qkv_proj; empty if the attention projects in another way
    gate_up   gate_proj and up_proj, or one gate_up_proj; empty if the MLP does not compute activation(gate) * up
    down      None with an empty gate_up
    """

    attention: nn.Module
    attends: bool
    mlp: nn.Module
    before_attention: nn.Module | None
    after_attention: nn.Module | None
    before_mlp: nn.Module | None
    after_mlp: nn.Module | None
    parallel: bool
    factor: float
    scale: float
    v_norm: bool
    qkv: tuple[nn.Module, ...]
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    out: nn.Module
    gate_up: tuple[nn.Module, ...]
    down: nn.Module | None
    activation: Activation | None

    @classmethod
    def of(cls, layer: nn.Module) -> LayerModules | str:
        """Return the modules, or the reason why `layer` lacks attention, MLP or norms under the usual names."""
        own = _child(layer, "self_attn")
        attention = own or next((found for name in STATE_NAMES if (found := _child(layer, name)) is not None), None)
        mlp = next((found for name in MLP_NAMES if (found := _child(layer, name)) is not None), None)
        mlp = mlp or _child(layer, SHARED_MLP)
        if attention is None or mlp is None:
            return "no self_attn and mlp"
        names = next((n for n in NORM_NAMES if all(_child(layer, name) is not None for name in n if name)), None)
        if names is None:
            return "norms of other names"
        before, after, second, last = (_child(layer, name) if name else None for name in names)
        out = next((found for name in OUT_NAMES if (found := _child(attention, name)) is not None), None)
        qkv = _children(attention, "q_proj", "k_proj", "v_proj") or _children(attention, "qkv_proj")
        if keys_are_values(attention):
            qkv = _children(attention, "q_proj", "k_proj")
        shared = getattr(getattr(attention, "config", None), "num_kv_shared_layers", 0)
        if shared and getattr(attention, "store_full_length_kv", False):  # later layers read its keys and values
            qkv = ()
        if out is None:
            return "projections of other names"
        down, function = _child(mlp, "down_proj"), getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None))
        gate_up = _children(mlp, "gate_proj", "up_proj") or _children(mlp, "gate_up_proj")
        activation = activation_of(function) if down is not None and gate_up else None
        if activation is None:
            gate_up, down = (), None
        factor = next((float(getattr(layer, name)) for name in _FACTORS if hasattr(layer, name)), 1.0)
        q_norm, k_norm = (_child(attention, f"{x}_norm") or _child(attention, f"{x}_layernorm") for x in ("q", "k"))
        scale = getattr(layer, "layer_scalar", None)
        scale = float(scale) if isinstance(scale, torch.Tensor) and scale.numel() == 1 else 1.0
        v_norm = _child(attention, "v_norm")
        if v_norm is not None and (any(True for _ in v_norm.parameters()) or q_norm is None):
            return f"{type(v_norm).__name__} of values is no norm that kernels have"
        parallel = names.before_mlp is None and names.after_mlp is None
        return cls(
            attention,
            own is not None and _child(own, "conv1d") is None,
            mlp,
            before,
            after,
            second,
            last,
            parallel,
            factor,
            scale,
            v_norm is not None,
            qkv,
            q_norm,
            k_norm,
            out,
            gate_up,
            down,
            activation,
        )


def keys_are_values(attention: nn.Module) -> bool:
    """Return True if the projection of keys is that of values too (Gemma 4)."""
    return hasattr(attention, "k_proj") and getattr(attention, "v_proj", True) is None


def _child(module: nn.Module | None, name: str) -> nn.Module | None:
    child = getattr(module, name, None)
    return child if isinstance(child, nn.Module) else None


def _children(module: nn.Module | None, *names: str) -> tuple[nn.Module, ...]:
    """Return the children called `names`; empty if one is missing."""
    found = [child for name in names if (child := _child(module, name)) is not None]
    return tuple(found) if len(found) == len(names) else ()


@dataclass(frozen=True)
class Product:
    """A linear layer: weight [n, k] and bias [n]. reduce: adds the parts of other ranks, None without any"""

    weight: Weight
    bias: torch.Tensor | None
    reduce: SumParts | None = None

    @classmethod
    def of(cls, modules: tuple[nn.Module, ...]) -> Product | None:
        """Return the linear layer of one module; None for a module of another kind, and for several modules."""
        weight = weight_of(modules[0]) if len(modules) == 1 else None
        if weight is None:
            return None
        return cls(weight, getattr(modules[0], "bias", None), getattr(modules[0], REDUCE, None))

    @property
    def fallback(self) -> Product | None:
        """Return the linear layer with its weight's fallback, if it has one."""
        weight = self.weight.fallback
        return replace(self, weight=weight) if weight is not None else None


_EXPERT_NORMS = ("post", 1), ("pre", 2), ("post", 2)


@dataclass(frozen=True)
class LayerExtras:
    """The parts of a layer of Gemma 4 beyond attention and MLP.

    experts       the router, which takes the residual stream, and the experts beside the MLP; empty without any
    expert_norms  of the MLP's output, of the experts' input and of their output
    gate          the projections of the layer's own input of each token; empty without such inputs
    layer         has the gate's activation, `act_fn`
    after_gate    the norm of the gated input
    """

    experts: tuple[nn.Module, ...]
    expert_norms: tuple[Norm, ...]
    gate: tuple[nn.Module, ...]
    layer: nn.Module
    after_gate: Norm | None = None


@dataclass(frozen=True)
class Parts:
    """The operands of a fused GPU layer. Without `gate_up` and `mixture` it calls the model's own MLP.

    attends  False for a layer with a state, whose module is in the place of `attention`
    qkv  None if the attention projects in another way
    out_module  the module of `out`
    add_attention  how the attention's output is added to the residual stream; None adds it unchanged. add_mlp likewise
    """

    attention: nn.Module
    attends: bool
    mlp: nn.Module
    before_attention: Norm | None
    before_mlp: Norm | None
    add_attention: Addition | None
    add_mlp: Addition | None
    parallel: bool
    qkv: Product | None
    out: Product
    out_module: nn.Module
    q_norm: Norm | None
    k_norm: Norm | None
    v_norm: bool
    gate_up: Product | None
    down: Product | None
    activation: Activation
    mixture: Mixture | None = None
    extras: LayerExtras | None = None

    @property
    def fallback(self) -> Parts | None:
        """Return the parts with the fallbacks of their weights; None if no weight has one."""
        products = self.qkv, self.out, self.gate_up, self.down
        if all(product is None or product.fallback is None for product in products):
            return None
        qkv, gate_up, down = ((x.fallback or x) if x is not None else None for x in (self.qkv, self.gate_up, self.down))
        return replace(self, qkv=qkv, out=self.out.fallback or self.out, gate_up=gate_up, down=down)


@dataclass(frozen=True)
class Recognised:
    """The modules that are already fused: norms whose arithmetic was checked, packed projections, mixtures."""

    norms: dict[nn.Module, Norm]
    products: dict[nn.Module, Product]
    mixtures: dict[nn.Module, Mixture] = field(default_factory=dict)

    def _extras(self, layer: nn.Module) -> LayerExtras | None:
        """Return what a layer of Gemma 4 has beyond attention and MLP; None if it has nothing."""
        experts = _children(layer, "router", "experts") if getattr(layer, "enable_moe_block", False) else ()
        around_experts = [_child(layer, f"{name}_feedforward_layernorm_{i}") for name, i in _EXPERT_NORMS if experts]
        gate = _children(layer, "per_layer_input_gate", "per_layer_projection")
        last = [_child(layer, "post_per_layer_input_norm")] if gate else []
        norms = [self.norms.get(module) for module in (*around_experts, *last) if module is not None]
        if not (experts or gate) or len(norms) != len(around_experts) + len(last):
            return None
        found = [norm for norm in norms if norm is not None]
        return LayerExtras(experts, tuple(found[: len(around_experts)]), gate, layer, *found[len(around_experts) :])

    def parts(self, layer: nn.Module) -> Parts | str:
        """Return the parts of `layer`, or the reason why it has none: another shape, or norms that were not fused."""
        found = LayerModules.of(layer)
        if isinstance(found, str):
            return found
        modules = (found.before_attention, found.after_attention, found.before_mlp, found.after_mlp)
        for module in (*modules, found.q_norm, found.k_norm):
            if module is not None and module not in self.norms:
                return f"{type(module).__name__} is no norm that kernels have"
        first, after_attention, second, after_mlp, q_norm, k_norm = (
            self.norms[m] if m is not None else None for m in (*modules, found.q_norm, found.k_norm)
        )
        qkv = (self.products.get(found.attention) or Product.of(found.qkv)) if found.qkv else None
        out = Product.of((found.out,))
        if (found.qkv and qkv is None) or out is None:
            return "its projections are no plain linear layers"
        if qkv is not None and (q_norm is None) != (k_norm is None):
            return "only one of queries and keys is normed"
        attended, gated = (
            Addition(post, found.factor, scale) if post is not None or (found.factor, scale) != (1.0, 1.0) else None
            for post, scale in ((after_attention, 1.0), (after_mlp, found.scale))
        )
        gate_up = (self.products.get(found.mlp) or Product.of(found.gate_up)) if found.gate_up else None
        down = Product.of((found.down,)) if found.down is not None and gate_up is not None else None
        gate_up = gate_up if down is not None else None
        mixture, beside = self.mixtures.get(found.mlp), _child(layer, SHARED_MLP)
        if mixture is not None and mixture.shared is None and beside is not None:
            mixture = replace(mixture, shared=beside)
        return Parts(
            found.attention, found.attends, found.mlp, first, second, attended, gated, found.parallel, qkv, out,
            found.out, q_norm, k_norm, found.v_norm, gate_up, down, found.activation or "silu",
            mixture, self._extras(layer),
        )  # fmt: skip
