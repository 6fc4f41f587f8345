"""Whole decoder layers as few kernels: matmuls add to the residual stream in their epilogues, rope stores KV.

A layer of the common shape (norm, attention, norm, MLP, each half added to its input) is run as

    qkv = norm(x) @ Wqkv;  rotate and store;  attend;  x += o @ Wo;  x += (silu and product)(norm(x) @ Wgu) @ Wd

with x overwritten in place. In steps of few tokens gates are fused into the matmuls, and the next norm, that of the
next layer included, computes the sums. Attention of another kind (latent, or with a rotation that no kernel has) is run
by the model's own code up to its last projection, and so is a module with a state. Only steps of the paged lane use a
fused layer, and only if its output equals the layer's own on random input; a layer of another shape keeps its own
forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from graftlm.core.execution.cache_name import cache_in
from graftlm.core.execution.paged import (
    AttentionCall,
    AttentionSwitch,
    OutputTokens,
    PackedCall,
    output_tokens_after,
    packed_step,
    step_at_hand,
)
from graftlm.core.execution.routing import has_experts
from graftlm.core.fusion.layer_mlp import LayerMlp, MakeMlp, MlpBeforeLayerInput, layer_mlps
from graftlm.core.fusion.layer_parts import Parts, Recognised, decoder_stacks
from graftlm.core.fusion.layer_probe import ROUTED_TRIES, LayerProbe, answer, causal
from graftlm.core.fusion.linears import Fusions
from graftlm.kernels.attention import ROTATIONS, PackedQKV, Rotation
from graftlm.kernels.attention_params import AttentionParams
from graftlm.kernels.bits12.weight import Bits12Weight
from graftlm.kernels.gpu.attention.qkv_rope_store import rotate_store
from graftlm.kernels.gpu.elementwise import sigmoid_gate_
from graftlm.kernels.gpu.norm import norm_rows, norm_rows_
from graftlm.kernels.linear_dispatch import AllClose, Linear, LinearPlan, plan
from graftlm.kernels.norm import Norm

_PROBED = 5
"""Tokens of the random inputs."""


@dataclass(frozen=True)
class Heads:
    """The heads of a layer's attention, and the arguments of its call in the probe.

    whole_norms  whether queries are normed over all heads together, and keys likewise
    gated        whether the sigmoid of a gate, projected with each query head, multiplies the head's output
    v_norm       whether values are normed without a weight, head by head
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    params: AttentionParams
    rotation: Rotation = "halves"
    whole_norms: bool = False
    gated: bool = False
    v_norm: bool = False

    def packed(
        self, x: torch.Tensor, product: LinearPlan, cos: torch.Tensor, sin: torch.Tensor, parts: Parts
    ) -> PackedQKV:
        """Return the arguments of the attention for x [num_tokens, hidden_size] and the packed projection."""
        q_norm, k_norm = parts.q_norm, parts.k_norm
        cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (cos, sin))
        qkv = product.matmul(x) if self.whole_norms or self.gated else product.product(x)
        if self.whole_norms and q_norm is not None and k_norm is not None:
            q, k, _ = qkv.split([n * self.head_dim for n in (self.num_heads, *[self.num_kv_heads] * 2)], -1)
            norm_rows_(q, q_norm)
            norm_rows_(k, k_norm)
            q_norm = k_norm = None
        heads = self.num_heads, self.num_kv_heads, self.head_dim
        make = partial(PackedQKV, gated=self.gated, v_norm=self.v_norm)
        if qkv.dim() == 2:
            return make(qkv, *heads, cos, sin, q_norm, k_norm, self.rotation)
        whole = torch.empty(qkv.shape[1:], dtype=x.dtype, device=x.device)
        return make(whole, *heads, cos, sin, q_norm, k_norm, self.rotation, qkv, product.bias)


class PrenormedResidual:
    """The residual stream after the next layer's norm, computed by the kernel that sums it."""

    def __init__(self) -> None:
        self._hidden: torch.Tensor | None = None
        self._normed: torch.Tensor | None = None

    def give(self, hidden: torch.Tensor, normed: torch.Tensor | None) -> None:
        """Keep `hidden` together with its norm."""
        self._hidden, self._normed = hidden, normed

    def take(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return the norm of `hidden`; None if another tensor is kept."""
        normed = self._normed if self._hidden is hidden else None
        self._hidden = self._normed = None
        return normed


@dataclass(frozen=True)
class Projections:
    """The linear layers of a decoder layer's attention. qkv: None if its own code runs them"""

    qkv: LinearPlan | None
    out: LinearPlan

    @classmethod
    def of(cls, parts: Parts, choose: Callable[..., LinearPlan]) -> Projections:
        qkv = choose(parts.qkv.weight, "qkv", parts.qkv.bias) if parts.qkv is not None else None
        return cls(qkv, choose(parts.out.weight, "add", parts.out.bias, reduce=parts.out.reduce))

    @property
    def plans(self) -> tuple[LinearPlan, ...]:
        return (self.out,) if self.qkv is None else (self.qkv, self.out)


@dataclass(frozen=True)
class FusedLayer:
    """The replacement of a layer's forward.

    following  the norm after the layer: the first of the next layer
    prenormed  shared by all layers
    num_others  as LayerProbe.num_others: no step uses them
    """

    parts: Parts
    heads: Heads | None
    original: Callable[..., Any]
    linears: Projections
    mlp: LayerMlp
    following: Norm | None = None
    prenormed: PrenormedResidual = field(default_factory=PrenormedResidual)
    num_others: int | None = None

    @property
    def kernels(self) -> tuple[tuple[str, ...], ...]:
        """Return the kernels of the linear layers, torch's excepted."""
        return *(linear_plan.kinds for linear_plan in self.linears.plans), *self.mlp.kernels

    @property
    def plans(self) -> tuple[LinearPlan, ...]:
        """Return the linear layers, experts excluded."""
        return *self.linears.plans, *self.mlp.plans

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
        step = packed_step()
        embeddings = options.get("position_embeddings")
        if step is None or embeddings is None or not self._takes(hidden_states, args, options):
            return self.original(hidden_states, *args, **options)
        cos, sin = embeddings
        normed = self.prenormed.take(hidden_states)
        wanted = output_tokens_after(self.parts.attention)
        self.give_input(*args, wanted=wanted)
        out, normed = self.run(hidden_states[0], cos[0], sin[0], step, wanted, normed)
        return self._given(out[None], normed)

    def _given(self, out: torch.Tensor, normed: torch.Tensor | None) -> Any:
        """Return the layer's output [1, num_tokens, hidden_size] as its own forward does, and keep its norm."""
        self.prenormed.give(out, normed)
        return out if self.num_others is None else (out, *[None] * self.num_others)

    def _takes(self, hidden_states: torch.Tensor, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """Return True for the arguments of a step: one row without mask and cache, and the layer's own input if any."""
        plain = options.get("attention_mask") is None and cache_in(options) is None and hidden_states.shape[0] == 1
        return plain and [arg is not None for arg in args] in ([[True]] if self._has_input else [[], [False]])

    @property
    def _has_input(self) -> bool:
        return isinstance(self.mlp, MlpBeforeLayerInput)

    def give_input(self, layer_input: torch.Tensor | None = None, *, wanted: OutputTokens | None = None) -> None:
        """Hand a layer's own input [1, num_tokens, size] to its MLP, of the `wanted` tokens."""
        if isinstance(self.mlp, MlpBeforeLayerInput) and layer_input is not None:
            self.mlp.layer_input = layer_input[0] if wanted is None else layer_input[0, wanted.tokens]

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

        normed  x after the layer's first norm, if it is computed already
        -> x, valid for `wanted` only, and x after the following norm or None
        """
        parts, heads = self.parts, self.heads
        assert heads is not None and self.linears.qkv is not None
        normed = self._normed(x, normed)
        packed = heads.packed(normed, self.linears.qkv, cos, sin, parts)
        last_token_only = wanted is not None and wanted.last_token_only
        call = PackedCall(parts.attention, packed, heads.params, last_token_only)
        attended = step(call).flatten(1)
        if heads.gated:
            sigmoid_gate_(attended, packed.gates[wanted.tokens] if wanted and last_token_only else packed.gates)
        return self._wanted(x, attended, normed, wanted, last_token_only)

    def _normed(self, x: torch.Tensor, normed: torch.Tensor | None) -> torch.Tensor:
        """Return x after the layer's first norm."""
        if normed is not None or self.parts.before_attention is None:
            return x if normed is None else normed
        return norm_rows(x, self.parts.before_attention)

    def _wanted(
        self,
        x: torch.Tensor,
        attended: torch.Tensor,
        normed: torch.Tensor,
        wanted: OutputTokens | None,
        last_token_only: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Finish the layer for the `wanted` tokens; last_token_only: `attended` has no others."""
        if wanted is None:
            return self._finish(x, attended, normed)
        tokens = wanted.tokens
        rest, _ = self._finish(
            x.index_select(0, tokens), attended if last_token_only else attended[tokens], normed[tokens]
        )
        return x.index_copy_(0, tokens, rest), None

    def _finish(
        self, x: torch.Tensor, attended: torch.Tensor, normed: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the layer after its attention on x [n, hidden_size], overwritten, and attended [n, heads * dim].

        normed  the attention's input
        -> x, and x after the following norm or None
        """
        parts, linears = self.parts, self.linears
        summed = linears.out.add_norm(attended, x, parts.before_mlp, parts.add_attention)
        if not parts.parallel:
            normed = summed if summed is not None else norm_rows(x, parts.before_mlp) if parts.before_mlp else x
        # after the last layer, a norm whose result is unused takes no longer than the sum alone
        following = self.mlp.add_norm(normed, x, self.following or parts.before_attention, parts.add_mlp)
        return x, following if self.following is not None else None


class OwnOutput:
    """The forward of an attention's last projection, which hands on its input while `skipped`."""

    def __init__(self, own: Callable[..., torch.Tensor]) -> None:
        self._own, self.skipped = own, False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.skipped else self._own(x)


@dataclass(frozen=True)
class LayerAroundAttention(FusedLayer):
    """The replacement of a layer's forward that leaves attention to the model's own code, up to its last projection.

    A module with a state in the place of attention is left to its own code likewise, in steps to our forward of it.
    """

    output: OwnOutput = field(default_factory=lambda: OwnOutput(nn.Identity()))

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
        if step_at_hand() is None or not self._takes(hidden_states, args, options):
            return self.original(hidden_states, *args, **options)
        normed, wanted = self.prenormed.take(hidden_states), output_tokens_after(self.parts.attention)
        self.give_input(*args, wanted=wanted)
        out, normed = self.run_around(hidden_states[0], options, wanted, normed)
        return self._given(out[None], normed)

    def run_around(
        self,
        x: torch.Tensor,
        options: dict[str, Any],
        wanted: OutputTokens | None = None,
        normed: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `run`. options: the arguments of the layer beside x, which its attention takes too"""
        normed = self._normed(x, normed)
        self.output.skipped = True
        try:
            found = self.parts.attention(hidden_states=normed[None], **(options if self.parts.attends else {}))
        finally:
            self.output.skipped = False
        attended = found[0] if isinstance(found, tuple) else found
        return self._wanted(x, attended[0], normed, wanted, last_token_only=False)


def fuse_layers(
    model: nn.Module,
    found: Recognised,
    fusions: Fusions,
    agree: AllClose,
    *,
    max_rows: int | None = None,
    linear: Linear | None = None,
) -> None:
    """Replace the forward of every layer that has a fused equivalent; note the reason for all other layers.

    max_rows  the largest number of rows for kernels of few rows; None takes the measured rule
    linear    multiplies all rows in one order of sums (strict mode)
    """
    switch = AttentionSwitch(model)
    for layers, rotary in decoder_stacks(model):
        prenormed = PrenormedResidual()
        all_parts = [found.parts(layer) for layer in layers]
        for layer, parts, behind in zip(layers, all_parts, [*all_parts[1:], None], strict=True):
            if isinstance(parts, str):
                fusions.unfused.append(parts)
                continue
            following = behind.before_attention if isinstance(behind, Parts) else None
            make = partial(FusedLayer, following=following, prenormed=prenormed)
            choose = partial(plan, agree=agree, max_rows=max_rows, linear=linear)
            fused = _fused(layer, rotary, parts, switch, agree, make, choose)
            if isinstance(fused, str):
                around = partial(LayerAroundAttention, following=following, prenormed=prenormed)
                own = _around(layer, rotary, parts, switch, agree, around, choose)
                fused = fused if own is None else own
            if isinstance(fused, str):
                fusions.unfused.append(fused)
            else:
                if isinstance(fused, LayerAroundAttention):
                    fusions.num_around += parts.attends
                    fusions.add(_put(parts.out_module, fused.output))
                fusions.num_compact += sum(linear_plan.reads(Bits12Weight) for linear_plan in fused.plans)
                layer.forward = fused
                fusions.add(partial(delattr, layer, "forward"))
                fusions.num_fused += 1


def _fused(
    layer: nn.Module,
    rotary: nn.Module,
    parts: Parts,
    switch: AttentionSwitch,
    agree: AllClose,
    make: Callable[..., FusedLayer],
    choose: Callable[..., LinearPlan],
) -> FusedLayer | str:
    """Return the fused equivalent of `layer` by `make`, or the reason why there is none."""

    if parts.qkv is None:
        return "projections of other names" if parts.attends else "a module with a state"

    def probe() -> LayerProbe | str:
        assert parts.qkv is not None
        try:
            found = LayerProbe.of(layer, rotary, parts.qkv.weight.dense(slice(0, 1))[0], _PROBED, switch)
        except Exception as error:  # its arguments or outputs differ: it keeps its own forward
            return f"{type(layer).__name__} is called otherwise: {type(error).__name__}"
        return found if found is not None else f"{type(layer).__name__} does not attend once"

    first = probe()
    if isinstance(first, str):
        return first
    if first.embeddings is None:
        return "queries and keys are not rotated"
    heads = _heads(first.call, parts)
    heads = _rotated(first, parts, heads, agree) if isinstance(heads, Heads) else heads
    if isinstance(heads, str):
        return heads
    probes: list[LayerProbe | str] = [first]
    routes = any(has_experts(module) for module in layer.modules())
    for form, make_mlp in _forms(parts):
        try:
            mlp = make_mlp(choose)
            fused = make(form, heads, layer.forward, Projections.of(form, choose), mlp, num_others=first.num_others)
            for attempt in range(ROUTED_TRIES if routes else 1):
                probes += [probe()] if attempt == len(probes) else []
                found = probes[attempt]
                same = partial(_same, fused=fused, agree=agree, routes=routes)
                if isinstance(found, LayerProbe) and same(found) and same(found.first(1)):
                    return fused
        except Exception:  # a kernel refuses these shapes, or the MLP returns another type
            continue
    return f"{type(layer).__name__} computes something else between its modules"


def _around(
    layer: nn.Module,
    rotary: nn.Module,
    parts: Parts,
    switch: AttentionSwitch,
    agree: AllClose,
    make: Callable[..., LayerAroundAttention],
    choose: Callable[..., LinearPlan],
) -> LayerAroundAttention | None:
    """Return the equivalent of `layer` around its own attention; None if there is none."""
    routes = any(has_experts(module) for module in layer.modules())
    output = OwnOutput(parts.out_module.forward)
    undo = _put(parts.out_module, output)
    form = replace(parts, qkv=None)
    try:
        for make_mlp in layer_mlps(form):
            fused = make(form, None, layer.forward, Projections.of(form, choose), make_mlp(choose), output=output)
            for _ in range(ROUTED_TRIES if routes else 1):
                like = parts.out.weight.dense(slice(0, 1))[0].new_empty(parts.out.weight.shape[0])
                probe = LayerProbe.of(layer, rotary, like, _PROBED, switch, num_calls=int(parts.attends))
                if probe is not None and _same_around(probe, fused, switch, agree, routes=routes):
                    return replace(fused, num_others=probe.num_others)
    except Exception:  # its arguments differ, or a kernel refuses these shapes
        return None
    finally:
        undo()
    return None


def _same_around(
    probe: LayerProbe, fused: LayerAroundAttention, switch: AttentionSwitch, agree: AllClose, *, routes: bool
) -> bool:
    """Return True if the layer around its own attention reproduces the probe, whole and in part."""
    agree_out = partial(_mostly, agree) if routes and probe.hidden.dtype != torch.float32 else agree
    positions = torch.arange(probe.hidden.shape[1], device=probe.hidden.device)
    options = {"attention_mask": None, "position_ids": positions[None], "position_embeddings": probe.embeddings}
    wanted = OutputTokens(fused.parts.attention, positions[::3], last_token_only=False)
    with switch(answer):
        fused.give_input(probe.layer_input)
        out, normed = fused.run_around(probe.hidden[0].clone(), options | probe.shared)
        fused.give_input(probe.layer_input, wanted=wanted)
        part, _ = fused.run_around(probe.hidden[0].clone(), options | probe.shared, wanted)
    agreeing = agree_out(probe.expected[0], out) and agree_out(probe.expected[0, ::3], part[wanted.tokens])
    if normed is not None and fused.following is not None:
        agreeing = agreeing and agree(norm_rows(out, fused.following), normed)
    return agreeing


def _put(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Set the forward of `module`. -> a function that restores the one before"""
    before = vars(module).get("forward")
    setattr(module, "forward", forward)  # noqa: B010
    return partial(delattr, module, "forward") if before is None else partial(setattr, module, "forward", before)


def _forms(parts: Parts) -> Iterator[tuple[Parts, MakeMlp]]:
    """Yield the forms of a fused layer, the fastest first: each MLP with the weights as they are, then fallbacks."""
    weights = [form for form in (parts, parts.fallback) if form is not None]
    for mlps in zip(*map(layer_mlps, weights), strict=True):
        yield from zip(weights, mlps, strict=True)


def _heads(call: AttentionCall, parts: Parts) -> Heads | str:
    """Return the heads of a layer's attention call, or the reason why the call has another shape."""
    num_heads, num_kv_heads, dim = call.q.shape[1], call.k.shape[1], call.q.shape[-1]
    same_dims = call.k.shape[-1] == call.v.shape[-1] == dim
    norms = [n for n in (parts.q_norm, parts.k_norm) if n is not None]
    assert parts.qkv is not None
    gated = parts.qkv.weight.shape[0] == 2 * (num_heads + num_kv_heads) * dim
    if not same_dims or not (gated or parts.qkv.weight.shape[0] == (num_heads + 2 * num_kv_heads) * dim):
        return "heads of queries, keys and values differ in size"
    whole = [n.weight.shape[0] for n in norms] == [num_heads * dim, num_kv_heads * dim] != [dim, dim]
    if (gated and whole) or (not whole and any(n.weight.shape != (dim,) for n in norms)):
        return "norms of queries and keys are of another size than heads"
    if any((n.eps, n.rounded) != (norms[0].eps, norms[0].rounded) or n.centered or n.bias is not None for n in norms):
        return "norms of queries and keys that no kernel has"
    return Heads(num_heads, num_kv_heads, dim, call.params, whole_norms=whole, gated=gated, v_norm=parts.v_norm)


def _rotated(probe: LayerProbe, parts: Parts, heads: Heads, agree: AllClose) -> Heads | str:
    """Return `heads` with the rotation that yields the probe's queries and keys, or the reason why there is none."""
    assert parts.qkv is not None
    normed = probe.hidden[0] if parts.before_attention is None else parts.before_attention(probe.hidden[0])
    for rotation in ROTATIONS:
        candidate = replace(heads, rotation=rotation)
        plain = LinearPlan(parts.qkv.weight, parts.qkv.bias)
        q, k, v = (x[0].transpose(0, 1) for x in (probe.call.q, probe.call.k, probe.call.v))
        store, slots = (torch.empty_like(k), torch.empty_like(v)), torch.arange(len(q), device=q.device)
        try:
            found = rotate_store(
                candidate.packed(normed, plain, probe.cos[0], probe.sin[0], parts), *store, slots.int()
            )
        except Exception:  # a kernel refuses this shape
            continue
        if agree(q, found[0]) and agree(k, store[0]) and agree(v, store[1]):
            return candidate
    return "queries and keys are rotated or scaled in a way that no kernel has"


def _mostly(agree: AllClose, expected: torch.Tensor, found: torch.Tensor) -> bool:
    """Return True if at least half of the tokens agree: rounding may have routed the remaining ones differently."""
    agreeing = [agree(a, b) for a, b in zip(expected, found, strict=True)]
    return 2 * sum(agreeing) >= len(agreeing)


def _same(probe: LayerProbe, fused: FusedLayer, agree: AllClose, *, routes: bool = False) -> bool:
    """Return True if the fused layer reproduces the probe: queries, keys, values and output, whole and in part.

    routes  whether the layer routes its tokens to experts
    """
    agree_out = partial(_mostly, agree) if routes and probe.hidden.dtype != torch.float32 else agree
    assert fused.heads is not None
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

    fused.give_input(probe.layer_input)
    out, normed = fused.run(probe.hidden[0].clone(), probe.cos[0], probe.sin[0], step)
    found = [queries[0], *store]
    expected = [x[0].transpose(0, 1) for x in (probe.call.q, probe.call.k, probe.call.v)]
    wanted = OutputTokens(fused.parts.attention, slots[::3].long(), last_token_only=False)
    fused.give_input(probe.layer_input, wanted=wanted)
    part, _ = fused.run(probe.hidden[0].clone(), probe.cos[0], probe.sin[0], step, wanted)
    agreeing = agree_out(probe.expected[0], out) and agree_out(probe.expected[0, ::3], part[wanted.tokens])
    if normed is not None and fused.following is not None:
        agreeing = agreeing and agree(norm_rows(out, fused.following), normed)
    return agreeing and all(agree(a, b) for a, b in zip(expected, found, strict=True))
