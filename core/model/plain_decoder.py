"""The common decoder without transformers: RMSNorm, rotated attention, SwiGLU MLP, each half added to the stream.

The import of transformers takes most of the time of a start. If a first load finds that this decoder reproduces the
model's own code (known_models.py), later processes build the model here. Modules have the usual names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from graftlm.core.execution.paged import IMPLEMENTATION, attention_function

State = Mapping[str, torch.Tensor]


class Unlike(Exception):
    """A state or configuration that this decoder does not support; the message has the reason."""


@dataclass(frozen=True)
class Rotations:
    """The parameters of the rotary embedding: frequencies [head_dim / 2] and a factor of cosine and sine."""

    frequencies: tuple[float, ...]
    factor: float


class PlainLogits(NamedTuple):
    logits: torch.Tensor


class PlainConfig(SimpleNamespace):
    """transformers' configuration, defaults included. `_attn_implementation_internal` chooses attention."""

    def __init__(self, described: Mapping[str, Any]) -> None:
        super().__init__(**described)
        self._attn_implementation_internal = "sdpa"


class PlainRMSNorm(nn.Module):
    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight = _parameter(weight)
        self.variance_epsilon = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = x.to(torch.float32)
        value = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        normed: torch.Tensor = self.weight * value.to(x.dtype)
        return normed


class PlainRotary(nn.Module):
    """Cosines and sines of positions [batch, num_tokens], each [batch, num_tokens, head_dim] in the dtype of x."""

    inv_freq: torch.Tensor

    def __init__(self, rotations: Rotations) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.tensor(rotations.frequencies, dtype=torch.float32), persistent=False)
        self.attention_scaling = rotations.factor

    @torch.no_grad()
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq.float()
        both = torch.cat((angles, angles), dim=-1)
        return (both.cos() * self.attention_scaling).to(x.dtype), (both.sin() * self.attention_scaling).to(x.dtype)


class PlainAttention(nn.Module):
    def __init__(self, config: PlainConfig, state: State, prefix: str, layer: int) -> None:
        super().__init__()
        self.config = config
        self.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self.scaling = self.head_dim**-0.5
        self.sliding_window = _window(config, layer)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            _linear(state, f"{prefix}.{name}") for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        )
        q, k = (state.get(f"{prefix}.{name}.weight") for name in ("q_norm", "k_norm"))
        self.q_norm, self.k_norm = (
            PlainRMSNorm(weight, config.rms_norm_eps) if weight is not None else nn.Identity() for weight in (q, k)
        )

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        heads = (*x.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q, k = (part * cos + _half_turn(part) * sin for part in (q, k))
        if self.config._attn_implementation_internal == IMPLEMENTATION:
            out, _ = attention_function(
                self, q, k, v, scaling=self.scaling, sliding_window=self.sliding_window, is_causal=True
            )
        else:
            out = self._attend(q, k, v).transpose(1, 2)
        projected: torch.Tensor = self.o_proj(out.reshape(*x.shape[:-1], -1).contiguous())
        return projected

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        mask = None
        if self.sliding_window is not None and self.sliding_window < q.shape[2]:
            seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device)
            mask = seen.tril_().triu_(1 - self.sliding_window)
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scaling)


class PlainMLP(nn.Module):
    def __init__(self, state: State, prefix: str) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            _linear(state, f"{prefix}.{name}") for name in ("gate_proj", "up_proj", "down_proj")
        )
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out


class PlainLayer(nn.Module):
    def __init__(self, config: PlainConfig, state: State, prefix: str, layer: int) -> None:
        super().__init__()
        self.self_attn = PlainAttention(config, state, f"{prefix}.self_attn", layer)
        self.mlp = PlainMLP(state, f"{prefix}.mlp")
        self.input_layernorm, self.post_attention_layernorm = (
            PlainRMSNorm(_taken(state, f"{prefix}.{name}.weight"), config.rms_norm_eps)
            for name in ("input_layernorm", "post_attention_layernorm")
        )

    def forward(
        self, hidden_states: torch.Tensor, *, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: Any
    ) -> torch.Tensor:
        x = hidden_states
        x = x + self.self_attn(self.input_layernorm(x), *position_embeddings)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class PlainStack(nn.Module):
    def __init__(self, config: PlainConfig, state: State, rotations: Rotations) -> None:
        super().__init__()
        table = _taken(state, "model.embed_tokens.weight")
        self.embed_tokens = nn.Embedding(table.shape[0], table.shape[1], _weight=_parameter(table))
        numbers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList([PlainLayer(config, state, f"model.layers.{i}", i) for i in numbers])
        self.norm = PlainRMSNorm(_taken(state, "model.norm.weight"), config.rms_norm_eps)
        self.rotary_emb = PlainRotary(rotations)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(input_ids)
        rotations = self.rotary_emb(x, position_ids)
        for layer in self.layers:
            x = layer(x, position_embeddings=rotations)
        normed: torch.Tensor = self.norm(x)
        return normed


class PlainDecoder(nn.Module):
    """A decoder over the tensors of `state`, in place.

    described  the model's configuration, defaults included
    tied       whether the head is the embedding
    Raises Unlike for unexpected or missing tensors.
    """

    def __init__(
        self,
        described: Mapping[str, Any],
        state: State,
        rotations: Rotations,
        *,
        tied: bool,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.config = PlainConfig(described)
        self.generation_config = SimpleNamespace(eos_token_id=list(eos_token_ids))
        self.model = PlainStack(self.config, state, rotations)
        self.lm_head = _linear({"lm_head.weight": self.model.embed_tokens.weight} if tied else state, "lm_head")
        unknown = sorted(set(state) - set(self.state_dict()))
        if unknown:
            raise Unlike(f"it has tensors of other parts, {unknown[0]!r} first")
        self.eval()

    @property
    def dtype(self) -> torch.dtype:
        return self.model.norm.weight.dtype

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        use_cache: bool = False,
        logits_to_keep: torch.Tensor | None = None,
    ) -> PlainLogits:
        """Compute the logits of all tokens, or of the tokens that `logits_to_keep` lists.

        input_ids, position_ids  [batch, num_tokens]. No cache is kept, whatever the value of `use_cache`.
        """
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        hidden = self.model(input_ids, position_ids)
        return PlainLogits(self.lm_head(hidden if logits_to_keep is None else hidden[:, logits_to_keep]))


def _window(config: PlainConfig, layer: int) -> int | None:
    """Return the number of tokens that a query of this layer sees, its own included; None for all."""
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    if kinds is not None:
        return window if kinds[layer] == "sliding_attention" else None
    return window if getattr(config, "use_sliding_window", True) else None


def _half_turn(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def _taken(state: State, name: str) -> torch.Tensor:
    if name not in state:
        raise Unlike(f"it has no {name!r}")
    return state[name]


def _parameter(tensor: torch.Tensor) -> nn.Parameter:
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)


def _linear(state: State, name: str) -> nn.Linear:
    weight, bias = _taken(state, f"{name}.weight"), state.get(f"{name}.bias")
    if weight.dim() != 2:
        raise Unlike(f"{name!r} is no matrix")
    linear = nn.Linear.__new__(nn.Linear)  # its own __init__ would draw random weights
    nn.Module.__init__(linear)
    linear.out_features, linear.in_features = weight.shape
    linear.weight = _parameter(weight)
    linear.register_parameter("bias", _parameter(bias) if bias is not None else None)
    return linear
