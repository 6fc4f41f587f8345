"""The selective scan of Mamba 2 over a pool of states: token by token for decode rows, in chunks for the other rows.

A head's state S [head_dim, state_dim] decays by exp(dt a) at each token, adds dt x B^T, and is read as S C.

Source: Transformers are SSMs, arXiv 2405.21060, section 6.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from graftlm.kernels.gpu.support import triton_problem
from graftlm.kernels.recurrent.state_step import MAX_CHUNK, MIN_CHUNK, RaggedRows, StateStep


class ScanInputs(NamedTuple):
    """Inputs of the scan.

    x      [num_tokens, num_heads, head_dim]
    dt     float32 [num_tokens, num_heads]: length of each token's time step
    b, c   [num_tokens, num_groups, state_dim]; each group serves num_heads / num_groups consecutive heads
    """

    x: torch.Tensor
    dt: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor

    def part(self, first: int, last: int | None) -> ScanInputs:
        """Return the inputs of tokens [first, last)."""
        return ScanInputs(*(tensor[first:last] for tensor in self))


def selective_scan(
    inputs: ScanInputs, a: torch.Tensor, skip: torch.Tensor, states: torch.Tensor, step: StateStep
) -> torch.Tensor:
    """Run each row's new tokens from its state on, and store the state after the last of them.

    a       float32 [num_heads], negative
    skip    [num_heads]: the factor of x that is added to the output
    states  float32 [num_slots, num_heads, head_dim, state_dim], written
    -> float32 [num_tokens, num_heads, head_dim]
    """
    parts = []
    if step.num_decode:
        parts.append(_decode(inputs.part(0, step.num_decode), a, states, step.slots))
    if step.ragged is not None:
        parts.append(_chunked(inputs.part(step.num_decode, None), a, states, step.ragged))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.addcmul_(inputs.x.float(), skip.float()[:, None])


def _decode(inputs: ScanInputs, a: torch.Tensor, states: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Run one token of each row. -> float32 [num_rows, num_heads, head_dim]"""
    if triton_problem(states.device) is None:
        from graftlm.kernels.gpu.recurrent_decode import scan

        return scan(*inputs, a, states, slots)
    group = inputs.x.shape[1] // inputs.b.shape[1]
    b, c = (x.float().repeat_interleave(group, 1) for x in (inputs.b, inputs.c))
    state = states.index_select(0, slots) * (inputs.dt * a).exp()[..., None, None]
    state += (inputs.x.float() * inputs.dt[..., None])[..., None] * b[:, :, None]
    states.index_copy_(0, slots, state)
    return (state @ c[..., None])[..., 0]


def scan_bytes(num_heads: int, head_dim: int, state_dim: int) -> int:
    """Return the bytes of a token's intermediate tensors in `_chunked`."""
    states = -(-head_dim * state_dim // MIN_CHUNK)  # what a chunk adds to the state
    return 4 * num_heads * (5 * state_dim + 6 * head_dim + 4 * MAX_CHUNK + states)


def _chunked(inputs: ScanInputs, a: torch.Tensor, states: torch.Tensor, rows: RaggedRows) -> torch.Tensor:
    """Run rows of several tokens, chunk by chunk. -> float32 [num_tokens, num_heads, head_dim]"""
    chunks = rows.chunks
    group = inputs.x.shape[1] // inputs.b.shape[1]

    def cut(x: torch.Tensor) -> torch.Tensor:  # [num_chunks, num_heads, size, ...], zeros where there is no token
        return F.pad(x.float(), (0, 0) * (x.dim() - 1) + (0, 1))[chunks.tokens].transpose(1, 2)

    b, c = (cut(x).repeat_interleave(group, 1) for x in (inputs.b, inputs.c))
    decay = cut(inputs.dt * a).cumsum(-1)
    x = cut(inputs.x.float() * inputs.dt[..., None])
    later = torch.ones(chunks.size, chunks.size, dtype=torch.bool, device=rows.device).triu(1)
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill_(later, -torch.inf).exp_()
    out = (c @ b.transpose(-1, -2)).mul_(between) @ x
    c_grown = c * decay.exp()[..., None]
    added = (x * (decay[..., -1:] - decay).exp()[..., None]).transpose(-1, -2) @ b
    whole = decay[..., -1].exp()[..., None, None]

    state = states.index_select(0, rows.slots)
    first = 0
    for num_rows in chunks.active:
        here, now = slice(first, first + num_rows), state[:num_rows]
        out[here] += c_grown[here] @ now.transpose(-1, -2)
        state[:num_rows] = now * whole[here] + added[here]
        first += num_rows
    states.index_copy_(0, rows.slots, state)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, chunks.places)
