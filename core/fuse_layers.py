"""Whole decoder layers as few kernels: the residual stream is added to where the products end, rope stores KV.

A layer of the common shape (norm, attention, norm, MLP, each half added to its input) is run as

    qkv = norm(x) @ Wqkv;  rotate and store;  attend;  x += o @ Wo;  x += (silu and product)(norm(x) @ Wgu) @ Wd

with x overwritten in place, and in steps of one token with norms, gates and sums inside the products. It is used in
steps of the paged lane only, and only if the layer gave the same on random input; a layer of another shape keeps
what it has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from graftlm.core.fuse import Fusions
from graftlm.core.paged import AttentionCall, AttentionSwitch, PackedCall, Wanted, packed_step, wanted_after
from graftlm.kernels.attention import PackedQKV
from graftlm.kernels.torch_attention import attend
from graftlm.kernels.triton_elementwise import rms_norm, silu_mul
from graftlm.kernels.triton_packed_qkv import rotate_store
from graftlm.kernels.triton_row import Norm, row_product

ROW_DTYPES = (torch.bfloat16, torch.float16)
"""Of models whose steps of one row go through a kernel of their own."""

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


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


@dataclass(frozen=True)
class Scoring:
    """How the layer's attention was called when it was probed."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


@dataclass(frozen=True)
class FusedLayer:
    """Takes the place of a layer's forward.

    single  whether the products of a step of one token take in the norms, gates and sums around them
    linear  every other product; None is torch's own, with the sum in its epilogue
    """

    parts: Parts
    scoring: Scoring
    original: Callable[..., Any]
    single: bool
    linear: Linear | None = None

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
        step = packed_step()
        embeddings = options.get("position_embeddings")
        plain = options.get("attention_mask") is None and options.get("past_key_values") is None and not args
        if step is None or embeddings is None or not plain or hidden_states.shape[0] != 1:
            return self.original(hidden_states, *args, **options)
        cos, sin = embeddings
        return self.run(hidden_states[0], cos[0], sin[0], step, wanted_after(self.parts.attention))[None]

    def run(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        step: Callable[[PackedCall], torch.Tensor],
        wanted: Wanted | None = None,
    ) -> torch.Tensor:
        """Run the layer on x [num_tokens, hidden_size], overwriting it. -> x, of which only `wanted` means anything."""
        parts, scoring = self.parts, self.scoring
        packed = PackedQKV(
            self._after_norm(x, parts.before_attention, parts.qkv),
            scoring.num_heads,
            scoring.num_kv_heads,
            scoring.head_dim,
            cos,
            sin,
            parts.q_norm.weight if parts.q_norm is not None else None,
            parts.k_norm.weight if parts.k_norm is not None else None,
            parts.q_norm.eps if parts.q_norm is not None else 0.0,
        )
        ends = wanted is not None and wanted.ends
        call = PackedCall(parts.attention, packed, scoring.scale, scoring.window, scoring.softcap, scoring.sinks, ends)
        attended = step(call).flatten(1)
        if wanted is None:
            return self._finish(x, attended)
        rest = self._finish(x.index_select(0, wanted.tokens), attended if ends else attended[wanted.tokens])
        return x.index_copy_(0, wanted.tokens, rest)

    def _finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """What comes after the attention, for x [n, hidden_size], overwritten, and attended [n, heads * dim]. -> x"""
        parts = self.parts
        self._add(x, attended, parts.out)
        if parts.gate_up is None or parts.down is None:
            return x.add_(parts.mlp(rms_norm(x, *parts.before_mlp)[None])[0])
        if self.single and x.shape[0] == 1:
            gate = row_product(x, *_pair(parts.gate_up), norm=parts.before_mlp, gated=True)
        else:
            gate = silu_mul(self._after_norm(x, parts.before_mlp, parts.gate_up))
        self._add(x, gate, parts.down)
        return x

    def _after_norm(self, x: torch.Tensor, norm: Norm, product: Product) -> torch.Tensor:
        if self.single and x.shape[0] == 1:
            return row_product(x, *_pair(product), norm=norm)
        return (self.linear or nn.functional.linear)(rms_norm(x, *norm), product.weight, product.bias)

    def _add(self, residual: torch.Tensor, x: torch.Tensor, product: Product) -> None:
        """residual += x @ weight.T + bias, in place."""
        if self.single and x.shape[0] == 1:
            row_product(x, *_pair(product), residual=residual)
        elif product.bias is None and self.linear is None:
            residual.addmm_(x, product.weight.t())
        else:
            residual.add_((self.linear or nn.functional.linear)(x, product.weight, product.bias))


def _pair(product: Product) -> tuple[torch.Tensor, torch.Tensor | None]:
    return product.weight, product.bias


def fuse_layers(
    model: nn.Module,
    found: Recognised,
    fusions: Fusions,
    agree: Callable[[torch.Tensor, torch.Tensor], bool],
    *,
    single: bool | None = None,
    linear: Linear | None = None,
) -> int:
    """Replace the forward of every layer of the common shape. -> how many.

    single  None takes the measured rule; see FusedLayer.
    """
    switch = AttentionSwitch(model)
    num_fused = 0
    for owner in list(model.modules()):
        layers, rotary = getattr(owner, "layers", None), getattr(owner, "rotary_emb", None)
        if not isinstance(layers, nn.ModuleList) or not isinstance(rotary, nn.Module):
            continue
        for layer in layers:
            parts = found.parts(layer)
            if parts is None:
                continue
            alone = parts.qkv.weight.dtype in ROW_DTYPES and linear is None if single is None else single
            fused = _fused(layer, rotary, parts, switch, agree, alone, linear)
            if fused is not None:
                layer.forward = fused
                fusions.add(partial(delattr, layer, "forward"))
                num_fused += 1
    return num_fused


def _fused(
    layer: nn.Module,
    rotary: nn.Module,
    parts: Parts,
    switch: AttentionSwitch,
    agree: Callable[[torch.Tensor, torch.Tensor], bool],
    single: bool,
    linear: Linear | None,
) -> FusedLayer | None:
    """The fused equal of `layer`; None if there is none."""
    try:
        probe = Probe.of(layer, rotary, parts, switch)
    except Exception:  # it takes or gives something else: it keeps its own forward
        return None
    if probe is None:
        return None
    plain_mlp = replace(parts, gate_up=None, down=None)
    for candidate in [parts, plain_mlp] if parts.gate_up is not None else [parts]:
        fused = FusedLayer(candidate, probe.scoring, layer.forward, single, linear)
        try:
            if probe.same(fused, agree) and (not single or probe.first().same(fused, agree)):
                return fused
        except Exception:  # a kernel refuses these shapes, or the MLP gives something else
            continue
    return None


@dataclass(frozen=True)
class Probe:
    """A random input of a layer, and what the layer's own forward makes of it."""

    hidden: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    expected: torch.Tensor
    call: AttentionCall
    scoring: Scoring

    @classmethod
    def of(cls, layer: nn.Module, rotary: nn.Module, parts: Parts, switch: AttentionSwitch) -> Probe | None:
        """None if its attention does not have the shape of `parts`. Raises what the layer raises."""
        weight = parts.qkv.weight
        hidden = torch.randn(1, 5, weight.shape[1], device=weight.device).to(weight.dtype)
        positions = torch.arange(7, 12, device=weight.device)[None]
        cos, sin = rotary(hidden, positions)
        _, out = _own(layer, hidden, cos, sin, switch)
        # A residual as large as what is added to it: otherwise it would hide an error, or the error of its rounding
        # would look like one.
        share = float((out - hidden).float().norm() / hidden.float().norm())
        hidden = hidden * min(max(share, 1e-2), 1.0)
        calls, out = _own(layer, hidden, cos, sin, switch)
        if len(calls) != 1:
            return None
        (call,) = calls
        num_heads, num_kv_heads, dim = call.q.shape[1], call.k.shape[1], call.q.shape[-1]
        same_dims = (
            call.k.shape[-1] == call.v.shape[-1] == dim and weight.shape[0] == (num_heads + 2 * num_kv_heads) * dim
        )
        norms = [n for n in (parts.q_norm, parts.k_norm) if n is not None]
        if not same_dims or any(n.weight.shape != (dim,) or n.eps != norms[0].eps for n in norms):
            return None
        scoring = Scoring(num_heads, num_kv_heads, dim, call.scale, call.window, call.softcap, call.sinks)
        return cls(hidden, cos, sin, out, call, scoring)

    def first(self) -> Probe:
        """The first token by itself, which sees no other."""
        q, k, v = (x[:, :, :1] for x in (self.call.q, self.call.k, self.call.v))
        call = self.call._replace(q=q, k=k, v=v)
        hidden, cos, sin, expected = (x[:, :1] for x in (self.hidden, self.cos, self.sin, self.expected))
        return Probe(hidden, cos, sin, expected, call, self.scoring)

    def same(self, fused: FusedLayer, agree: Callable[[torch.Tensor, torch.Tensor], bool]) -> bool:
        """Whether the fused layer gives this output, by way of these queries, keys and values; all of it and a part."""
        num_tokens = self.hidden.shape[1]
        shape = (num_tokens, self.scoring.num_kv_heads, self.scoring.head_dim)
        store = [torch.zeros(shape, dtype=self.hidden.dtype, device=self.hidden.device) for _ in "kv"]
        slots = torch.arange(num_tokens, dtype=torch.int32, device=self.hidden.device)
        queries: list[torch.Tensor] = []

        def step(call: PackedCall) -> torch.Tensor:
            q, _, _ = rotate_store(call.packed, store[0], store[1], slots)
            queries.append(q)
            k, v = (x.transpose(0, 1)[None] for x in store)
            return _causal(q.transpose(0, 1)[None], k, v, call.scale)

        out = fused.run(self.hidden[0].clone(), self.cos[0], self.sin[0], step)
        found = [queries[0], *store]
        expected = [x[0].transpose(0, 1) for x in (self.call.q, self.call.k, self.call.v)]
        wanted = Wanted(fused.parts.attention, slots[::3].long(), ends=False)
        part = fused.run(self.hidden[0].clone(), self.cos[0], self.sin[0], step, wanted)[wanted.tokens]
        agreeing = agree(self.expected[0], out) and agree(self.expected[0, ::3], part)
        return agreeing and all(agree(a, b) for a, b in zip(expected, found, strict=True))


def _own(
    layer: nn.Module, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, switch: AttentionSwitch
) -> tuple[list[AttentionCall], torch.Tensor]:
    calls: list[AttentionCall] = []

    def step(call: AttentionCall) -> torch.Tensor:
        calls.append(call)
        return _causal(call.q, call.k, call.v, call.scale)

    positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
    with switch(step):
        out: torch.Tensor = layer(
            hidden.clone(), attention_mask=None, position_ids=positions, past_key_values=None, use_cache=False,
            position_embeddings=(cos, sin),
        )  # fmt: skip
    return calls, out


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q [1, heads, n, d], k, v [1, kv_heads, n, d] -> [n, heads, d]. Window, cap and sinks are the kernel's affair."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return attend(q, k, v, scale=scale, causal=True).out[0].transpose(0, 1)
