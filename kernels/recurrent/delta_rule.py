"""The gated delta rule over a pool of states: token by token for decode rows, in chunks for the other rows.

A head's state S [k_dim, v_dim] maps keys to values. A token decays it, S <- exp(decay) S, writes the difference between
its value and the value that the state holds for its key, S <- S + beta k (v - k S), and reads it, o = q S.

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
    decay, beta  float32 [num_tokens, num_heads]: decay <= 0, in log space; beta from 0 to 1, perhaps 2
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
    state = states.index_select(0, slots) * inputs.decay.exp()[..., None, None]
    change = (inputs.v.float()[:, :, None] - k @ state) * inputs.beta[..., None, None]
    state += k.transpose(2, 3) * change
    states.index_copy_(0, slots, state)
    return (q @ state)[:, :, 0]


def rule_bytes(num_heads: int, k_dim: int, v_dim: int) -> int:
    """Return the bytes of a token's intermediate tensors in `_chunked`, which takes more than the kernels do."""
    return 4 * num_heads * (9 * k_dim + 6 * v_dim + 4 * MAX_CHUNK)


def _chunked(inputs: DeltaInputs, states: torch.Tensor, rows: RaggedRows) -> torch.Tensor:
    """Run rows of several tokens, chunk by chunk. -> float32 [num_tokens, num_heads, v_dim]"""
    chunks = rows.chunks
    group = inputs.v.shape[1] // inputs.k.shape[1]

    def cut(x: torch.Tensor) -> torch.Tensor:  # [num_chunks, num_heads, size, ...], zeros where there is no token
        return F.pad(x.float(), (0, 0) * (x.dim() - 1) + (0, 1))[chunks.tokens].transpose(1, 2)

    q, k = (cut(x).repeat_interleave(group, 1) for x in (inputs.q, inputs.k))
    beta, decay = cut(inputs.beta)[..., None], cut(inputs.decay).cumsum(-1)
    k_beta, grown = k * beta, decay.exp()[..., None]
    later = torch.ones(chunks.size, chunks.size, dtype=torch.bool, device=rows.device).triu(1)
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill_(later, -torch.inf).exp_()

    # (I + A) [new, read] = [beta v, beta k decay]: the values that each token writes, less its read of the state before
    system = (k_beta @ k.transpose(-1, -2)).mul_(between)
    known = torch.cat([cut(inputs.v) * beta, k_beta * grown], -1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    new, read = solved.split([inputs.v.shape[-1], inputs.k.shape[-1]], -1)
    scores = (q @ k.transpose(-1, -2)).mul_(between)
    q_grown = q * grown
    k_left = (k * (decay[..., -1:] - decay).exp()[..., None]).transpose(-1, -2)
    whole = decay[..., -1].exp()[..., None, None]

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
