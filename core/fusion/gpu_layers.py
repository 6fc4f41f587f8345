"""Whole decoder layers as few kernels: the residual stream is added to where the products end, rope stores KV.

A layer of the common shape (norm, attention, norm, MLP, each half added to its input) is run as

    qkv = norm(x) @ Wqkv;  rotate and store;  attend;  x += o @ Wo;  x += (silu and product)(norm(x) @ Wgu) @ Wd

with x overwritten in place. In steps of few tokens gates are inside the products, and sums are left to the norm behind
them, that of the next layer too. All this is used in steps of the paged lane only, and only if the layer gave the same
on random input; a layer of another shape keeps what it has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from graftlm.core.execution.paged import (
    AttentionCall,
    AttentionSwitch,
    OutputTokens,
    PackedCall,
    output_tokens_after,
    packed_step,
)
from graftlm.core.fusion.compact_weights import CompactWeights, compact_layer
from graftlm.core.fusion.layer_parts import AllClose, Linear, Parts, Product, Recognised, decoder_stacks
from graftlm.core.fusion.layer_probe import LayerProbe, causal
from graftlm.core.fusion.linears import Fusions
from graftlm.kernels.attention import PackedQKV
from graftlm.kernels.attention_params import AttentionParams
from graftlm.kernels.bits12.compact_product import (
    MAX_ROWS as COMPACT_ROWS,
    compact_gate,
    compact_parts,
    compact_product,
)
from graftlm.kernels.bits12.weight_codec import CompactWeight
from graftlm.kernels.gpu.elementwise import add_norm, rms_norm, silu_mul
from graftlm.kernels.gpu.pdl import can_chain
from graftlm.kernels.gpu.qkv_rope_store import rotate_store
from graftlm.kernels.gpu.skinny_matmul import MAX_ROWS as FEW_ROWS, gated_product, product_parts, stream_product
from graftlm.kernels.hopper.flow_product import MAX_ROWS as FLOW_ROWS, can_flow, flow_parts, flow_product
from graftlm.kernels.hopper.wide_gate import ONE_OF_EACH, can_gate, is_gated, wide_gate
from graftlm.kernels.rms_norm import Norm

_PROBED = 5
"""Tokens of the random inputs."""


@dataclass(frozen=True)
class Heads:
    """The heads of a layer's attention, and how it was called when it was probed."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    params: AttentionParams


class Handoff:
    """What a layer has normed already for the next one, while it summed."""

    def __init__(self) -> None:
        self._hidden: torch.Tensor | None = None
        self._normed: torch.Tensor | None = None

    def give(self, hidden: torch.Tensor, normed: torch.Tensor | None) -> torch.Tensor:
        """Keep what `hidden` is when it is normed. -> hidden"""
        self._hidden, self._normed = hidden, normed
        return hidden

    def take(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """`hidden` normed; None if that is not what was kept."""
        normed = self._normed if self._hidden is hidden else None
        self._hidden = self._normed = None
        return normed


@dataclass(frozen=True)
class FusedLayer:
    """Takes the place of a layer's forward.

    max_rows   up to how many tokens of a step the products take in gates, and leave sums to the norm that comes next
    flows      whether up to so many all products but that for gates are read without a pause (hopper/flow_product.py)
    gates      whether the product for gates takes them in for more tokens too, where that is faster (wide_gate.py)
    compact    what is read instead of the weights in steps of few tokens (compact_product.py)
    linear     every other product; None is torch's own, with the sum in its epilogue
    following  the norm that comes after the layer, in the next one
    handoff    one for all layers
    """

    parts: Parts
    heads: Heads
    original: Callable[..., Any]
    max_rows: int
    flows: bool = False
    gates: bool = False
    compact: CompactWeights = field(default_factory=CompactWeights)
    linear: Linear | None = None
    following: Norm | None = None
    handoff: Handoff = field(default_factory=Handoff)

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
        step = packed_step()
        embeddings = options.get("position_embeddings")
        plain = options.get("attention_mask") is None and options.get("past_key_values") is None and not args
        if step is None or embeddings is None or not plain or hidden_states.shape[0] != 1:
            return self.original(hidden_states, *args, **options)
        cos, sin = embeddings
        normed = self.handoff.take(hidden_states)
        wanted = output_tokens_after(self.parts.attention)
        out, normed = self.run(hidden_states[0], cos[0], sin[0], step, wanted, normed)
        return self.handoff.give(out[None], normed)

    def run(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        step: Callable[[PackedCall], torch.Tensor],
        wanted: OutputTokens | None = None,
        normed: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the layer on x [num_tokens, hidden_size], overwriting it.

        normed  x after the layer's first norm, where that is known
        -> x, of which only `wanted` means anything, and perhaps x after the norm that follows
        """
        parts, heads = self.parts, self.heads
        packed = PackedQKV(
            self._qkv(x, normed),
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            cos,
            sin,
            parts.q_norm.weight if parts.q_norm is not None else None,
            parts.k_norm.weight if parts.k_norm is not None else None,
            parts.q_norm.eps if parts.q_norm is not None else 0.0,
        )
        last_token_only = wanted is not None and wanted.last_token_only
        call = PackedCall(parts.attention, packed, heads.params, last_token_only)
        attended = step(call).flatten(1)
        if wanted is None:
            return self._finish(x, attended)
        rest, _ = self._finish(
            x.index_select(0, wanted.tokens), attended if last_token_only else attended[wanted.tokens]
        )
        return x.index_copy_(0, wanted.tokens, rest), None

    def _qkv(self, x: torch.Tensor, normed: torch.Tensor | None) -> torch.Tensor:
        normed = normed if normed is not None else rms_norm(x, *self.parts.before_attention)
        if not self._few(x):
            return self._product(normed, self.parts.qkv)
        if self.compact.qkv is not None and len(x) <= COMPACT_ROWS:
            return compact_product(normed, self.compact.qkv, self.parts.qkv.bias)
        return (flow_product if self.flows else stream_product)(normed, *_pair(self.parts.qkv))

    def _finish(self, x: torch.Tensor, attended: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What comes after the attention, for x [n, hidden_size], overwritten, and attended [n, heads * dim].

        -> x, and perhaps x after the norm that follows
        """
        parts = self.parts
        normed = self._add(x, attended, parts.out, self.compact.out, parts.before_mlp)
        normed = normed if normed is not None else rms_norm(x, *parts.before_mlp)
        if parts.gate_up is None or parts.down is None:
            return x.add_(parts.mlp(normed[None])[0]), None
        if self.compact.gate_up is not None and len(x) <= COMPACT_ROWS:
            gate = compact_gate(normed, self.compact.gate_up)
        elif self.gates and is_gated(x.shape[0]):
            gate = wide_gate(normed, parts.gate_up.weight)
        elif self._few(x) and parts.gate_up.bias is None:
            gate = gated_product(normed, parts.gate_up.weight)
        else:
            gate = silu_mul(self._product(normed, parts.gate_up))
        # behind the last layer, a norm that nobody asks for is as quick as a sum alone
        normed = self._add(x, gate, parts.down, self.compact.down, self.following or parts.before_attention)
        return x, normed if self.following is not None else None

    def _few(self, x: torch.Tensor) -> bool:
        return x.shape[0] <= self.max_rows

    def _product(self, x: torch.Tensor, product: Product) -> torch.Tensor:
        return (self.linear or nn.functional.linear)(x, product.weight, product.bias)

    def _add(
        self, residual: torch.Tensor, x: torch.Tensor, product: Product, compact: CompactWeight | None, norm: Norm
    ) -> torch.Tensor | None:
        """residual += x @ weight.T + bias, in place. -> perhaps the residual after `norm`"""
        if compact is not None and len(x) <= COMPACT_ROWS:
            return add_norm(compact_parts(x, compact), residual, *norm)
        if self._few(x) and product.bias is None:
            return add_norm((flow_parts if self.flows else product_parts)(x, product.weight), residual, *norm)
        if product.bias is None and self.linear is None:
            residual.addmm_(x, product.weight.t())
        else:
            residual.add_(self._product(x, product))
        return None


def max_rows_of(weight: torch.Tensor) -> int:
    """Up to how many rows such a product is faster through our kernels; measured where launches can be chained."""
    if weight.dtype not in (torch.bfloat16, torch.float16):
        return 0
    return FEW_ROWS if can_chain(weight.device) else 1


def _pair(product: Product) -> tuple[torch.Tensor, torch.Tensor | None]:
    return product.weight, product.bias


def fuse_layers(
    model: nn.Module,
    found: Recognised,
    fusions: Fusions,
    agree: AllClose,
    *,
    max_rows: int | None = None,
    compact: bool = False,
    linear: Linear | None = None,
) -> int:
    """Replace the forward of every layer of the common shape. -> how many.

    max_rows  None takes the measured rule; see FusedLayer.
    compact   whether weights that have a compact form are held in that too
    """
    switch = AttentionSwitch(model)
    num_fused = 0
    for layers, rotary in decoder_stacks(model):
        handoff = Handoff()
        all_parts = [found.parts(layer) for layer in layers]
        for layer, parts, behind in zip(layers, all_parts, [*all_parts[1:], None], strict=True):
            if parts is None:
                continue
            few = max_rows if max_rows is not None else max_rows_of(parts.qkv.weight) if linear is None else 0
            following = behind.before_attention if behind is not None else None
            make = partial(
                FusedLayer,
                max_rows=few,
                linear=linear,
                following=following,
                handoff=handoff,
            )
            fused = _fused(layer, rotary, parts, switch, agree, make, compact=compact and few > 1)
            if fused is not None:
                fusions.num_compact += sum(fused.compact.held)
                layer.forward = fused
                fusions.add(partial(delattr, layer, "forward"))
                num_fused += 1
    return num_fused


def _fused(
    layer: nn.Module,
    rotary: nn.Module,
    parts: Parts,
    switch: AttentionSwitch,
    agree: AllClose,
    make: Callable[[Parts, Heads, Callable[..., Any]], FusedLayer],
    *,
    compact: bool,
) -> FusedLayer | None:
    """The fused equal of `layer`, as `make` makes it; None if there is none."""
    try:
        probe = LayerProbe.of(layer, rotary, parts.qkv.weight[0], _PROBED, switch)
    except Exception:  # it takes or gives something else: it keeps its own forward
        return None
    heads = _heads(probe.call, parts) if probe is not None else None
    if probe is None or heads is None:
        return None
    plain_mlp = replace(parts, gate_up=None, down=None)
    candidates = [parts, plain_mlp] if parts.gate_up is not None else [parts]
    forms = [(candidate, hold) for candidate in candidates for hold in (True, False) if compact or not hold]
    for candidate, hold in forms:
        fused = make(candidate, heads, layer.forward)
        try:
            if hold:  # before anything runs: kernels that are not needed then are not compiled
                fused = replace(fused, compact=compact_layer(candidate, agree))
            if _same(probe, fused, agree) and (not fused.max_rows or _same(probe.first(1), fused, agree)):
                if fused.max_rows <= 1:
                    return fused
                flows = fused.max_rows <= FLOW_ROWS and _flows(candidate, fused.compact, agree)
                return replace(fused, flows=flows, gates=_takes_gates(candidate.gate_up, agree))
        except Exception:  # a kernel refuses these shapes, or the MLP gives something else
            continue
    return None


def _flows(parts: Parts, compact: CompactWeights, agree: AllClose) -> bool:
    """Whether all products of few rows, but that for gates, can be read without a pause, and then give the same."""
    sums = [
        (product.weight, held)
        for product, held in ((parts.out, compact.out), (parts.down, compact.down))
        if product is not None and product.bias is None
    ]
    try:
        if not all(can_flow(weight) for weight in (parts.qkv.weight, *(weight for weight, _ in sums))):
            return False
        for weight, held in ((parts.qkv.weight, compact.qkv), *sums):
            is_sum = weight is not parts.qkv.weight
            bias = None if is_sum else parts.qkv.bias
            x = torch.randn(FLOW_ROWS, weight.shape[1], device=weight.device).to(weight.dtype)
            expected = nn.functional.linear(x, weight, bias)
            for rows in [x] if held is not None else [x[:16], x[:32], x]:
                found = flow_parts(rows, weight).sum(0).to(x.dtype) if is_sum else flow_product(rows, weight, bias)
                if not agree(expected[: len(rows)], found):
                    return False
    except Exception:  # Triton has another form of what the kernel is written in
        return False
    return True


def _takes_gates(product: Product | None, agree: AllClose) -> bool:
    """Whether this product can take in its gates, and then gives what the product and a gate do."""
    if product is None or product.bias is not None:
        return False
    weight = product.weight
    try:
        if not can_gate(weight):
            return False
        x = torch.randn(max(ONE_OF_EACH), weight.shape[1], device=weight.device).to(weight.dtype)
        expected = silu_mul(nn.functional.linear(x, weight))
        return all(agree(expected[:n], wide_gate(x[:n], weight)) for n in ONE_OF_EACH)
    except Exception:  # Triton has another form of what the kernels are written in
        return False


def _heads(call: AttentionCall, parts: Parts) -> Heads | None:
    """How a layer of these parts calls its attention; None if that has another shape."""
    num_heads, num_kv_heads, dim = call.q.shape[1], call.k.shape[1], call.q.shape[-1]
    same_dims = call.k.shape[-1] == call.v.shape[-1] == dim
    norms = [n for n in (parts.q_norm, parts.k_norm) if n is not None]
    if not same_dims or parts.qkv.weight.shape[0] != (num_heads + 2 * num_kv_heads) * dim:
        return None
    if any(n.weight.shape != (dim,) or n.eps != norms[0].eps for n in norms):
        return None
    return Heads(num_heads, num_kv_heads, dim, call.params)


def _same(probe: LayerProbe, fused: FusedLayer, agree: AllClose) -> bool:
    """Whether the fused layer gives this output, by way of these queries, keys and values; all of it and a part."""
    num_tokens = probe.hidden.shape[1]
    shape = (num_tokens, fused.heads.num_kv_heads, fused.heads.head_dim)
    store = [torch.zeros(shape, dtype=probe.hidden.dtype, device=probe.hidden.device) for _ in "kv"]
    slots = torch.arange(num_tokens, dtype=torch.int32, device=probe.hidden.device)
    queries: list[torch.Tensor] = []

    def step(call: PackedCall) -> torch.Tensor:
        q, _, _ = rotate_store(call.packed, store[0], store[1], slots)
        queries.append(q)
        k, v = (x.transpose(0, 1)[None] for x in store)
        return causal(q.transpose(0, 1)[None], k, v, call.params.scale)

    out, normed = fused.run(probe.hidden[0].clone(), probe.cos[0], probe.sin[0], step)
    found = [queries[0], *store]
    expected = [x[0].transpose(0, 1) for x in (probe.call.q, probe.call.k, probe.call.v)]
    wanted = OutputTokens(fused.parts.attention, slots[::3].long(), last_token_only=False)
    part, _ = fused.run(probe.hidden[0].clone(), probe.cos[0], probe.sin[0], step, wanted)
    agreeing = agree(probe.expected[0], out) and agree(probe.expected[0, ::3], part[wanted.tokens])
    if normed is not None and fused.following is not None:
        agreeing = agreeing and agree(rms_norm(out, *fused.following), normed)
    return agreeing and all(agree(a, b) for a, b in zip(expected, found, strict=True))
