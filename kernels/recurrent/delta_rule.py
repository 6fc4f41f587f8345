"""The gated delta rule over a pool of states: token by token for decode rows, in chunks for the other rows.

A head's state S [k_dim, v_dim] maps keys to values. A token decays it, S <- exp(decay) S, writes the difference between
its value and the value that the state holds for its key, S <- S + beta k (v - k S), and reads it, o = q S.

A decay is of a head, or of each channel of its keys (Kimi delta attention).

Source: Gated DeltaNet, arXiv 2412.06464; the chunked form with the inverse of a triangular matrix is its section 3.3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from graftlm.kernels.recurrent.state_step import MAX_CHUNK, RaggedRows, StateStep

EPSILON = 1e-6
"""Added to the squared length of q and k before they are divided by it."""


class DeltaInputs(NamedTuple):
    """Inputs of the delta rule.

    q, k         [num_tokens, num_k_heads, k_dim]; each serves num_heads / num_k_heads consecutive heads
    v            [num_tokens, num_heads, v_dim]
    decay, beta  float32 [num_tokens, num_heads]: decay <= 0, in log space, or [num_tokens, num_heads, k_dim]; beta from
                 0 to 1, perhaps 2
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor

    def part(self, first: int, last: int | None) -> DeltaInputs:
        """Return the inputs of tokens [first, last)."""
        return DeltaInputs(*(tensor[first:last] for tensor in self))


def delta_rule(inputs: DeltaInputs, states: torch.Tensor, step: StateStep) -> torch.Tensor:
    """Run each row's new tokens from its state on, and store the state after the last of them.

    states  float32 [num_slots, num_heads, k_dim, v_dim], written
    -> [num_tokens, num_heads, v_dim], dtype of v
    """
    normal = inputs._replace(q=_unit(inputs.q) * inputs.q.shape[-1] ** -0.5, k=_unit(inputs.k))
    parts = []
    if step.num_decode:
        parts.append(_decode(normal.part(0, step.num_decode), states, step.slots))
    if step.ragged is not None:
        parts.append(_chunked(normal.part(step.num_decode, None), states, step.ragged))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.to(inputs.v.dtype)


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Scale heads to length 1, in float32."""
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPSILON)


def _decode(inputs: DeltaInputs, states: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Run one token of each row. -> float32 [num_rows, num_heads, v_dim]"""
    group = inputs.v.shape[1] // inputs.k.shape[1]
    q, k = (x.repeat_interleave(group, 1)[:, :, None] for x in (inputs.q, inputs.k))
    decay = inputs.decay[..., None] if inputs.decay.dim() == 2 else inputs.decay
    state = states.index_select(0, slots) * decay.exp()[..., None]
    change = (inputs.v.float()[:, :, None] - k @ state) * inputs.beta[..., None, None]
    state += k.transpose(2, 3) * change
    states.index_copy_(0, slots, state)
    return (q @ state)[:, :, 0]


def rule_bytes(num_heads: int, k_dim: int, v_dim: int, *, by_channel: bool = False) -> int:
    """Return the bytes of a token's intermediate tensors in `_chunked`, which takes more than the kernels do.

    by_channel  whether each channel of a key has a decay
    """
    return 4 * num_heads * ((16 if by_channel else 9) * k_dim + 6 * v_dim + 4 * MAX_CHUNK)


def _chunked(inputs: DeltaInputs, states: torch.Tensor, rows: RaggedRows) -> torch.Tensor:
    """Run rows of several tokens, chunk by chunk. -> float32 [num_tokens, num_heads, v_dim]"""
    chunks = rows.chunks
    group = inputs.v.shape[1] // inputs.k.shape[1]

    def cut(x: torch.Tensor) -> torch.Tensor:  # [num_chunks, num_heads, size, ...], zeros where there is no token
        return F.pad(x.float(), (0, 0) * (x.dim() - 1) + (0, 1))[chunks.tokens].transpose(1, 2)

    q, k = (cut(x).repeat_interleave(group, 1) for x in (inputs.q, inputs.k))
    beta = cut(inputs.beta)[..., None]
    decay = cut(inputs.decay if inputs.decay.dim() == 3 else inputs.decay[..., None]).cumsum(-2)
    k_beta, grown = k * beta, decay.exp()
    system, scores = _products((k_beta, q), k, decay)

    # (I + A) [new, read] = [beta v, beta k decay]: the values that each token writes, less its read of the state before
    known = torch.cat([cut(inputs.v) * beta, k_beta * grown], -1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    new, read = solved.split([inputs.v.shape[-1], inputs.k.shape[-1]], -1)
    q_grown = q * grown
    k_left = (k * (decay[..., -1:, :] - decay).exp()).transpose(-1, -2)
    whole = decay[..., -1, :].exp()[..., None]

    state = states.index_select(0, rows.slots)
    out = torch.empty_like(new)
    first = 0
    for num_rows in chunks.active:
        here, now = slice(first, first + num_rows), state[:num_rows]
        written = new[here] - read[here] @ now
        out[here] = q_grown[here] @ now + scores[here] @ written
        state[:num_rows] = now * whole[here] + k_left[here] @ written
        first += num_rows
    states.index_copy_(0, rows.slots, state)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, chunks.places)


_BLOCK = 16
"""Tokens among which products with decays by channel are computed one by one: others' factors would overflow."""


def _products(lefts: tuple[torch.Tensor, ...], k: torch.Tensor, decay: torch.Tensor) -> list[torch.Tensor]:
    """Multiply each of `lefts` with the keys up to its token, decayed since. -> [..., size, size] each; later keys 0

    lefts, k  [..., size, k_dim]
    decay     [..., size, 1 or k_dim], summed up from the first token
    """
    size = k.shape[-2]
    later = torch.ones(size, size, dtype=torch.bool, device=k.device).triu(1)
    if decay.shape[-1] == 1:
        between = (decay - decay.transpose(-1, -2)).masked_fill_(later, -torch.inf).exp_()
        return [(left @ k.transpose(-1, -2)).mul_(between) for left in lefts]
    outs = [k.new_zeros(*k.shape[:-1], size) for _ in lefts]
    for first in range(0, size, _BLOCK):
        here = slice(first, first + _BLOCK)
        since = decay[..., here, :]
        if first:  # from the last token before the block both factors fall
            last = decay[..., first - 1 : first, :]
            before = (k[..., :first, :] * (last - decay[..., :first, :]).exp()).transpose(-1, -2)
            for left, out in zip(lefts, outs, strict=True):
                out[..., here, :first] = (left[..., here, :] * (since - last).exp()) @ before
        for token in range(first, min(first + _BLOCK, size)):
            key = k[..., token : token + 1, :] * (since - decay[..., token : token + 1, :]).clamp_(max=0.0).exp_()
            for left, out in zip(lefts, outs, strict=True):
                out[..., here, token] = (left[..., here, :] * key).sum(-1)
    return [out.masked_fill_(later, 0.0) for out in outs]
