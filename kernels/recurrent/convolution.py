"""Causal depthwise convolution of a ragged step, over the inputs that each row has cached."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from graftlm.kernels.gpu.support import triton_problem
from graftlm.kernels.recurrent.state_step import StateStep


def causal_convolution(
    x: torch.Tensor,
    cached: torch.Tensor,
    step: StateStep,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    silu: bool,
) -> torch.Tensor:
    """Convolve each row's new tokens with its last inputs before them, and cache the last inputs of each row.

    x       [num_tokens, num_channels]
    cached  [num_slots, num_channels, kernel_size - 1], written
    weight  [num_channels, kernel_size]; bias [num_channels]
    silu    apply SiLU to the output
    -> as x. Sums in float32.
    """
    first = step.num_decode
    parts = []
    if first and triton_problem(x.device) is None and weight.shape[1] > 1:
        from graftlm.kernels.gpu.recurrent_decode import convolve

        decoded = convolve(x[:first], cached, step.slots, weight, bias, silu=silu)
        if step.ragged is None:
            return decoded
        rest = step._replace(num_decode=0, slots=step.slots[:0])
        return torch.cat([decoded, causal_convolution(x[first:], cached, rest, weight, bias, silu=silu)])
    if first:
        parts.append(_decode(x[:first], cached, step.slots, weight))
    if step.ragged is not None:
        rows = step.ragged
        taps = rows.taps(weight.shape[1])
        kept = cached.index_select(0, rows.slots).transpose(1, 2)
        inputs = torch.cat([kept.reshape(-1, x.shape[1]), x[first:]])
        cached.index_copy_(0, rows.slots, inputs[taps.last].transpose(1, 2))
        out = inputs[taps.inputs[:, 0]].float() * weight[:, 0].float()
        for tap in range(1, weight.shape[1]):
            out.addcmul_(inputs[taps.inputs[:, tap]].float(), weight[:, tap].float())
        parts.append(out)
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    if bias is not None:
        out += bias.float()
    out = out.to(x.dtype)
    return F.silu(out) if silu else out


def _decode(x: torch.Tensor, cached: torch.Tensor, slots: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Convolve one token of each row. -> float32 [num_rows, num_channels]"""
    window = torch.cat([cached.index_select(0, slots), x[:, :, None]], dim=2)
    cached.index_copy_(0, slots, window[:, :, 1:])
    return (window.float() * weight.float()).sum(2)
