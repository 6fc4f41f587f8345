"""Whole decoder layers as few kernels: the residual stream is added to where the products end, rope stores KV.

A layer of the common shape (norm, attention, norm, MLP, each half added to its input) is run as

    qkv = norm(x) @ Wqkv;  rotate and store;  attend;  x += o @ Wo;  x += (silu and product)(norm(x) @ Wgu) @ Wd

with x overwritten in place. In steps of few tokens gates are inside the products, and sums are left to the norm behind
them, that of the next layer too. All this is used in steps of the paged lane only, and only if the layer gave the same
on random input; a layer of another shape keeps what it has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
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
from graftlm.core.fusion.expert_modules import has_experts
from graftlm.core.fusion.layer_mlp import LayerMlp, layer_mlps
from graftlm.core.fusion.layer_parts import Parts, Recognised, decoder_stacks
from graftlm.core.fusion.layer_probe import LayerProbe, causal
from graftlm.core.fusion.linears import Fusions
from graftlm.kernels.attention import PackedQKV
from graftlm.kernels.attention_params import AttentionParams
from graftlm.kernels.gpu.elementwise import rms_norm
from graftlm.kernels.gpu.qkv_rope_store import rotate_store
from graftlm.kernels.linear_dispatch import AllClose, Linear, LinearPlan, plan
from graftlm.kernels.rms_norm import Norm

_PROBED = 5
"""Tokens of the random inputs."""

_ROUTED_TRIES = 4
"""Random inputs of a layer that routes its tokens: in half precision some may be routed otherwise."""


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
class Projections:
    """The linear layers of a decoder layer's attention."""

    qkv: LinearPlan
    out: LinearPlan

    @classmethod
    def of(cls, parts: Parts, choose: Callable[..., LinearPlan]) -> Projections:
        qkv, out = choose(parts.qkv.weight, "qkv", parts.qkv.bias), choose(parts.out.weight, "add", parts.out.bias)
        return cls(qkv, out)


@dataclass(frozen=True)
class FusedLayer:
    """Takes the place of a layer's forward.

    following  the norm that comes after the layer, in the next one
    handoff    one for all layers
    """

    parts: Parts
    heads: Heads
    original: Callable[..., Any]
    linears: Projections
    mlp: LayerMlp
    following: Norm | None = None
    handoff: Handoff = field(default_factory=Handoff)

    @property
    def kernels(self) -> tuple[tuple[str, ...], ...]:
        """Which kernels its linear layers use beside torch's."""
        return self.linears.qkv.kinds, self.linears.out.kinds, *self.mlp.kernels

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
        normed = normed if normed is not None else rms_norm(x, *parts.before_attention)
        packed = PackedQKV(
            self.linears.qkv.matmul(normed),
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

    def _finish(self, x: torch.Tensor, attended: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What comes after the attention, for x [n, hidden_size], overwritten, and attended [n, heads * dim].

        -> x, and perhaps x after the norm that follows
        """
        parts, linears = self.parts, self.linears
        normed = linears.out.add_norm(attended, x, parts.before_mlp)
        normed = normed if normed is not None else rms_norm(x, *parts.before_mlp)
        # behind the last layer, a norm that nobody asks for is as quick as a sum alone
        normed = self.mlp.add_norm(normed, x, self.following or parts.before_attention)
        return x, normed if self.following is not None else None


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

    max_rows  up to how many rows kernels for few rows are used; None takes the measured rule
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
            following = behind.before_attention if behind is not None else None
            make = partial(FusedLayer, following=following, handoff=handoff)
            choose = partial(plan, agree=agree, max_rows=max_rows, linear=linear)
            fused = _fused(layer, rotary, parts, switch, agree, make, choose, compact=compact)
            if fused is not None:
                fusions.num_compact += sum("bits12" in kinds for kinds in fused.kernels)
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
    make: Callable[[Parts, Heads, Callable[..., Any], Projections, LayerMlp], FusedLayer],
    choose: Callable[..., LinearPlan],
    *,
    compact: bool,
) -> FusedLayer | None:
    """The fused equal of `layer`, as `make` makes it; None if there is none."""

    def probe() -> LayerProbe | None:
        try:
            return LayerProbe.of(layer, rotary, parts.qkv.weight[0], _PROBED, switch)
        except Exception:  # it takes or gives something else: it keeps its own forward
            return None

    probes = [probe()]
    heads = _heads(probes[0].call, parts) if probes[0] is not None else None
    if heads is None:
        return None
    routes = any(has_experts(module) for module in parts.mlp.modules())
    for make_mlp, hold in [(form, hold) for form in layer_mlps(parts) for hold in (True, False) if compact or not hold]:
        try:
            chosen = partial(choose, compact=hold)
            fused = make(parts, heads, layer.forward, Projections.of(parts, chosen), make_mlp(chosen))
            for attempt in range(_ROUTED_TRIES if routes else 1):
                probes += [probe()] if attempt == len(probes) else []
                found = probes[attempt]
                same = partial(_same, fused=fused, agree=agree, routes=routes)
                if found is not None and same(found) and same(found.first(1)):
                    return fused
        except Exception:  # a kernel refuses these shapes, or the MLP gives something else
            continue
    return None


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


def _mostly(agree: AllClose, expected: torch.Tensor, found: torch.Tensor) -> bool:
    """Whether half of the tokens agree, or more: the others were perhaps given to other experts."""
    agreeing = [agree(a, b) for a, b in zip(expected, found, strict=True)]
    return 2 * sum(agreeing) >= len(agreeing)


def _same(probe: LayerProbe, fused: FusedLayer, agree: AllClose, *, routes: bool = False) -> bool:
    """Whether the fused layer gives this output, by way of these queries, keys and values; all of it and a part.

    routes  whether the layer routes its tokens to experts
    """
    agree_out = partial(_mostly, agree) if routes and probe.hidden.dtype != torch.float32 else agree
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
    agreeing = agree_out(probe.expected[0], out) and agree_out(probe.expected[0, ::3], part[wanted.tokens])
    if normed is not None and fused.following is not None:
        agreeing = agreeing and agree(rms_norm(out, *fused.following), normed)
    return agreeing and all(agree(a, b) for a, b in zip(expected, found, strict=True))
