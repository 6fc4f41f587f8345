"""Multi-head latent attention (DeepSeek): the projections between heads and the latent that is cached of each token.

The store holds one vector of rank + rope_dim numbers a token: the latent, normed, and the rotated key that all heads
share. A key of a head is `up_k` times the latent, and the shared key; a value is `up_v` times the latent. Absorbed
attention moves `up_k` to the queries and `up_v` behind the sum: it is attention with one KV head whose value is the
first part of its key. Source: arXiv 2405.04434.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LatentHeads:
    """The heads of one layer. up_k [num_heads, nope_dim, rank], up_v [num_heads, v_dim, rank]."""

    up_k: torch.Tensor
    up_v: torch.Tensor
    rope_dim: int

    @property
    def rank(self) -> int:
        return self.up_k.shape[2]

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        """Turn queries of expanded keys into queries of the latent.

        q  [num_tokens, num_heads, nope_dim + rope_dim]
        -> [num_tokens, num_heads, rank + rope_dim]
        """
        nope = self.up_k.shape[1]
        out = torch.empty(*q.shape[:2], self.rank + self.rope_dim, dtype=q.dtype, device=q.device)
        torch.bmm(q[..., :nope].transpose(0, 1), self.up_k, out=out[..., : self.rank].transpose(0, 1))
        out[..., self.rank :] = q[..., nope:]
        return out

    def project(self, out: torch.Tensor) -> torch.Tensor:
        """Turn sums of latents [num_tokens, num_heads, rank] into sums of values [num_tokens, num_heads, v_dim]."""
        return torch.bmm(out.transpose(0, 1), self.up_v.transpose(1, 2)).transpose(0, 1)

    def expand(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of all heads.

        latent  [num_tokens, rank + rope_dim]
        -> [num_tokens, num_heads, nope_dim + rope_dim] and [num_tokens, num_heads, v_dim]
        """
        num_heads, nope, rank = self.up_k.shape
        keys = torch.empty(len(latent), num_heads, nope + self.rope_dim, dtype=latent.dtype, device=latent.device)
        keys[..., :nope] = (latent[:, :rank] @ self.up_k.flatten(0, 1).T).view(len(latent), num_heads, nope)
        keys[..., nope:] = latent[:, None, rank:]
        values = latent[:, :rank] @ self.up_v.flatten(0, 1).T
        return keys, values.view(len(latent), num_heads, -1)
