"""A decoder layer's output for random input: the reference of its fused layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from graftlm.core.execution.cache_name import cache_name
from graftlm.core.execution.paged import AttentionCall, AttentionSwitch
from graftlm.kernels.cpu.attention.backend import attend

ROUTED_TRIES = 4
"""Random inputs of a layer that routes its tokens: in half precision rounding may change the experts of a few."""

_FIRST_POSITION = 7


@dataclass(frozen=True)
class LayerProbe:
    """A random input of a layer, the layer's calls of its attention (none if it has a state), and its output.

    hidden    [1, num_tokens, hidden_size]
    cos, sin  [1, num_tokens, rotary_dim]; both the whole where the rotary embedding is one tensor; of no dimensions
              where nothing is turned
    embeddings  as the rotary embedding returns them
    expected  like hidden
    layer_input  [1, num_tokens, size] of a layer that has an input of its own for each token (Gemma 4); else None
    shared  the argument by which layers pass on keys and values, if the layer has it
    num_others  what the layer returns beside its output, in one tuple with it (Bamba: attention weights); None without
                a tuple
    """

    hidden: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    expected: torch.Tensor
    calls: tuple[AttentionCall, ...]
    embeddings: Any
    layer_input: torch.Tensor | None = None
    shared: dict[str, Any] = field(default_factory=dict)
    num_others: int | None = None

    @property
    def call(self) -> AttentionCall:
        """Return the only call of a layer that attends."""
        (call,) = self.calls
        return call

    @classmethod
    def of(
        cls,
        layer: nn.Module,
        rotary: nn.Module,
        like: torch.Tensor,
        num_tokens: int,
        switch: AttentionSwitch,
        *,
        num_calls: int = 1,
        compared: bool = True,
    ) -> LayerProbe | None:
        """Run the layer on random input; None if it attends another number of times. The layer's exceptions propagate.

        like      [hidden_size]: its dtype and device are those of the input
        compared  whether the output will be compared; else the attention call alone is wanted
        """
        hidden = torch.randn(1, num_tokens, like.shape[0], device=like.device, dtype=torch.float32).to(like.dtype)
        positions = torch.arange(_FIRST_POSITION, _FIRST_POSITION + num_tokens, device=like.device)[None]
        embeddings = rotations(rotary, hidden, positions, **kind_of(layer, rotary))
        cos, sin = embeddings if isinstance(embeddings, tuple) else (embeddings, embeddings)
        if cos is None:
            cos = sin = hidden[..., :0]
        layer_input, shared = _input_of(layer, hidden), _shared_kv(layer, hidden)
        calls, out, others = _run(layer, hidden, embeddings, switch, layer_input, shared)
        if compared:
            # Scale the residual stream to the size of the addends. A larger one would hide an error of the sum; the
            # rounding of a smaller one would count as an error.
            share = float((out - hidden).float().norm() / hidden.float().norm())
            hidden = hidden * min(max(share, 1e-2), 1.0)
            calls, out, others = _run(layer, hidden, embeddings, switch, layer_input, shared)
        if len(calls) != num_calls:
            return None
        return cls(hidden, cos, sin, out, tuple(calls), embeddings, layer_input, shared, others)

    def first(self, num_tokens: int) -> LayerProbe:
        """Return the probe of the first tokens alone: attention is causal, so no later token affects them."""
        q, k, v = (x[:, :, :num_tokens] for x in (self.call.q, self.call.k, self.call.v))
        hidden, cos, sin, expected = (x[:, :num_tokens] for x in (self.hidden, self.cos, self.sin, self.expected))
        embeddings = (cos, sin) if isinstance(self.embeddings, tuple) else cos
        layer_input = self.layer_input[:, :num_tokens] if self.layer_input is not None else None
        call = self.call._replace(q=q, k=k, v=v)
        return LayerProbe(hidden, cos, sin, expected, (call,), embeddings, layer_input, self.shared)


def rotations(rotary: Callable[..., Any], x: torch.Tensor, positions: torch.Tensor, **kind: str) -> Any:
    """Return the rotary embedding of positions [1, n]; of one that takes three coordinates only, with all three equal.

    Vision models have such embeddings in some versions of transformers; their decoder expands positions of text.
    """
    try:
        found = rotary(x, positions, **kind)
    except (IndexError, RuntimeError):
        return rotary(x, positions[None].expand(3, -1, -1), **kind)
    cos = found[0] if isinstance(found, tuple) else found
    if cos is None:
        return found
    if cos.dim() == 3 and cos.shape[:2] == positions.shape:
        return found
    return rotary(x, positions[None].expand(3, -1, -1), **kind)


def kind_of(layer: nn.Module, rotary: nn.Module) -> dict[str, str]:
    """Return the arguments that select this layer's rotation where a rotary embedding has several."""
    if "layer_type" not in inspect.signature(rotary.forward).parameters:
        return {}
    kinds = (getattr(m, name, None) for m in layer.modules() for name in ("layer_type", "attention_type"))
    found = next((kind for kind in kinds if isinstance(kind, str)), None)
    if found is None:  # the model reads it from its configuration
        number = next(i for m in layer.modules() if isinstance(i := getattr(m, "layer_idx", None), int))
        config: Any = rotary.config
        found = config.layer_types[number]
    return {"layer_type": found}


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute causal attention of a probe: q [1, num_heads, num_tokens, head_dim], k and v of num_kv_heads.

    -> [num_tokens, num_heads, head_dim]. Without window, softcap and sinks, which the kernel applies.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return attend(q, k, v, scale=scale, causal=True).out[0].transpose(0, 1)


def answer(call: AttentionCall) -> torch.Tensor:
    """Answer the call of a probe's attention, in the way of `causal`."""
    k, v = call.k, call.v
    if call.latent is not None:
        k, v = (x.transpose(0, 1)[None] for x in call.latent.expand(k[0, 0]))
    return causal(call.q, k, v, call.params.scale)


def _input_of(layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor | None:
    """Return random inputs of the tokens of `hidden` for a layer that takes such beside the residual stream."""
    gate = getattr(layer, "per_layer_input_gate", None)
    size = getattr(layer, "hidden_size_per_layer_input", 0)
    return torch.randn_like(hidden[..., :1].expand(-1, -1, size)) if gate is not None and size else None


def _shared_kv(layer: nn.Module, hidden: torch.Tensor) -> dict[str, Any]:
    """Return the argument by which layers pass on keys and values, with random ones for a layer that reads them."""
    attention: Any = getattr(layer, "self_attn", None)
    if "shared_kv_states" not in inspect.signature(layer.forward).parameters:
        return {}
    if not getattr(attention, "is_kv_shared_layer", False):
        return {"shared_kv_states": {}}
    num_heads = attention.q_proj.out_features // attention.head_dim // attention.num_key_value_groups
    shape = 1, num_heads, hidden.shape[1], attention.head_dim
    k, v = (torch.randn(shape, device=hidden.device, dtype=torch.float32).to(hidden.dtype) for _ in "kv")
    return {"shared_kv_states": {attention.layer_type: (k, v)}}


def _run(
    layer: nn.Module,
    hidden: torch.Tensor,
    embeddings: Any,
    switch: AttentionSwitch,
    layer_input: torch.Tensor | None = None,
    shared: dict[str, Any] | None = None,
) -> tuple[list[AttentionCall], torch.Tensor, int | None]:
    """Run a layer. -> its calls of attention, its output, and LayerProbe.num_others"""
    calls: list[AttentionCall] = []

    def step(call: AttentionCall) -> torch.Tensor:
        calls.append(call)
        return answer(call)

    positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
    name = cache_name(layer.forward)
    no_cache = {name: None} if name is not None else {}
    with switch(step):
        out: Any = layer(
            hidden.clone(), *([layer_input] if layer_input is not None else []), attention_mask=None,
            position_ids=positions, use_cache=False, position_embeddings=embeddings, **no_cache, **(shared or {}),
        )  # fmt: skip
    return (calls, out[0], len(out) - 1) if isinstance(out, tuple) else (calls, out, None)
