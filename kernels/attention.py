"""The protocols of attention kernels. A step arrives as a WirePlan (wire_plan.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, get_args, runtime_checkable

import torch

from graftlm.kernels.attention_params import AttentionParams
from graftlm.kernels.latent import LatentHeads
from graftlm.kernels.norm import Norm
from graftlm.kernels.wire_plan import WirePlan


@dataclass(frozen=True)
class LayerSpec:
    """The shape of one attention layer, and which of `AttentionParams` it uses.

    latent  whether the key is a latent (latent.py), whose first v_dim numbers are the value
    """

    num_heads: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    latent: bool = False


Rotation = Literal["halves", "short", "pairs", "spread", "none"]
"""Rotary embedding of a head: number i with number i + rotary_dim / 2, by cosine i, both halves of cos equal (Llama);
the same rotation by a table of rotary_dim / 2 cosines (GPT-OSS);
number 2 i with number 2 i + 1, by the cosine i (GLM); the same, by the cosine 2 i (Cohere); not at all."""


ROTATIONS: tuple[Rotation, ...] = get_args(Rotation)


@dataclass(frozen=True)
class PackedQKV:
    """Queries, keys and values of one packed projection: the heads of q, then of k, then of v, not yet rotated.

    qkv     [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], last dimension dense
    cos     [num_tokens, rotary_dim <= head_dim], rotary_dim / 2 of a "short" rotation; sin likewise. The rest of a head
            is not rotated
    q_norm  RMSNorm of each head before it is rotated; k_norm likewise, with the same epsilon; both or none
    rotation  which numbers of a head are turned together
    parts   float32 [num_parts, num_tokens, as in qkv]: qkv is their sum, and that of `bias`, but holds nothing yet;
            None if it does
    gated   each head of q is followed by its gate, of as many numbers; without `parts`
    v_norm  whether heads of v are normed too, without a weight, with the epsilon of `q_norm`
    """

    qkv: torch.Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int
    cos: torch.Tensor
    sin: torch.Tensor
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    rotation: Rotation = "halves"
    parts: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    gated: bool = False
    v_norm: bool = False

    @property
    def num_angles(self) -> int:
        """Pairs of numbers of a head that are rotated."""
        return self.cos.shape[-1] // (1 if self.rotation == "short" else 2)

    def split(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [num_tokens, num_heads, head_dim], k and v [num_tokens, num_kv_heads, head_dim]; views."""
        heads = self.qkv.view(self.qkv.shape[0], -1, self.head_dim)
        step = 1 + self.gated
        first = step * self.num_heads
        kv = first + self.num_kv_heads
        return heads[:, :first:step], heads[:, first:kv], heads[:, kv:]

    @property
    def gates(self) -> torch.Tensor:
        """The gates of a gated projection, [num_tokens, num_heads, head_dim]; a view."""
        return self.qkv.view(self.qkv.shape[0], -1, self.head_dim)[:, 1 : 2 * self.num_heads : 2]


class Attention(Protocol):
    """Causal attention over the KV store, for a ragged batch.

    `prepare` is called once per step, `forward` or `forward_some` once per layer of it. A class that has this protocol
    as its base inherits `forward_some`, `forward_latent` and `reads_in_place`.
    """

    def supports(self, layer: LayerSpec) -> str | None:
        """Why this kernel cannot run `layer`; None if it can."""
        ...

    def prepare(self, plan: WirePlan) -> None:
        """Lay out what all layers of the step share."""
        ...

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: WirePlan | None,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Store `k` and `v` at the plan's slots, then attend each row's queries to all of its tokens.

        q      [num_tokens, num_heads, k_dim]
        k      [num_tokens, num_kv_heads, k_dim]
        v      [num_tokens, num_kv_heads, v_dim]
        plan   the prepared one; None while a CUDA graph is captured, which only a CapturableAttention is asked for
        -> [num_tokens, num_heads, v_dim], dtype of q. Softmax in float32.
        """
        ...

    def forward_some(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: WirePlan | None,
        params: AttentionParams,
        tokens: torch.Tensor,
    ) -> torch.Tensor:
        """As `forward`, but return the output of some tokens only.

        tokens  int64 [num_wanted], ascending
        -> [num_wanted, num_heads, v_dim]
        """
        return self.forward(layer, q, k, v, plan, params).index_select(0, tokens)

    def forward_latent(
        self,
        layer: int,
        heads: LatentHeads,
        q: torch.Tensor,
        latent: torch.Tensor,
        plan: WirePlan | None,
        params: AttentionParams,
    ) -> torch.Tensor:
        """As `forward`, for latent attention: absorbed.

        q       [num_tokens, num_heads, nope_dim + rope_dim], of expanded keys
        latent  [num_tokens, 1, rank + rope_dim]
        -> [num_tokens, num_heads, v_dim], of expanded values
        """
        absorbed, v = heads.absorb(q), latent[..., : heads.rank]
        return heads.project(self.forward(layer, absorbed, latent, v, plan, params))

    def reads_in_place(self, dtype: torch.dtype) -> bool:
        """Return True if the compiled step of a CPU (cpu/decoder) can read the store for a model in `dtype`."""
        return False


@runtime_checkable
class PackedAttention(Attention, Protocol):
    """An attention kernel that takes packed q, k and v, and applies the rotary embedding as it stores them."""

    def forward_packed(
        self,
        layer: int,
        packed: PackedQKV,
        plan: WirePlan | None,
        params: AttentionParams,
        *,
        last_token_only: bool = False,
    ) -> torch.Tensor:
        """As `forward`. Overwrites `packed.qkv`.

        last_token_only  attend the last token of each row only -> [num_rows, num_heads, v_dim]
        """
        ...


@runtime_checkable
class StrictAttention(Attention, Protocol):
    """An attention kernel that can give each token the same result, to the last bit, whatever else is in the step.

    strict  whether it does
    """

    strict: bool
