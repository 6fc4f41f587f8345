"""Recognise a mixture's experts: weights of all experts in one tensor, and the gate of their projections.

transformers declares the layout (`is_transposed`, `is_concatenated`, `has_gate`, `has_bias`); the gate is the candidate
whose output equals that of the module's own function.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from graftlm.core.fusion.layer_parts import allclose
from graftlm.kernels.codes.expert_codes import codes_of
from graftlm.kernels.gpu.mixture.expert_plan import ExpertWeights
from graftlm.kernels.gpu.mixture.grouped_matmul import Activation, Gate
from graftlm.kernels.weight import held_as

_SCALE = 4.0
"""The scale of the random inputs that a gate is probed with: large enough to reach its limits."""

_FUNCTIONS: dict[Activation, Any] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "relu": nn.functional.relu,
    "relu2": lambda x: nn.functional.relu(x).square(),
    "none": lambda x: x,
}


def expert_weights(module: nn.Module) -> ExpertWeights | str:
    """Return the weights of a module of experts, or the reason why no kernel here supports them."""
    if getattr(module, "has_post_expert_norm", False):
        return "each expert's output is normed"
    if getattr(module, "_is_expert_parallel", False):
        return "the experts are spread over devices"
    gated = getattr(module, "has_gate", True)
    up = getattr(module, "gate_up_proj" if gated else "up_proj", None)
    down: Any = module.down_proj
    if not isinstance(up, nn.Parameter) or up.dim() != 3:
        return "gate and up projections are not one tensor"
    if up.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"weights in {str(up.dtype).removeprefix('torch.')}"
    if len(up) != len(down):  # LongCat's zero experts; kernels would read weights that are not there
        return f"{len(up)} experts, of which {len(down)} have all weights"
    transposed = getattr(module, "is_transposed", up.shape[1] == down.shape[2] != up.shape[2])
    views = [weight.detach().transpose(1, 2) if transposed else weight.detach() for weight in (up, down)]
    if views[0].shape[2] != views[1].shape[1] or views[0].shape[1] != (2 if gated else 1) * views[1].shape[2]:
        return f"weights of shapes {tuple(up.shape)} and {tuple(down.shape)}"
    biases = [
        getattr(module, name, None) for name in ("gate_up_proj_bias" if gated else "up_proj_bias", "down_proj_bias")
    ]
    if (biases[0] is None) != (biases[1] is None) and getattr(module, "has_bias", False):
        return "only one of the projections has a bias"
    gate = _gate_of(module, views[0], gated=gated)
    if gate is None:
        return "its gate is not known"
    up_bias, down_bias = (bias.detach() if isinstance(bias, torch.Tensor) else None for bias in biases)
    codes = codes_of(module)
    both = (codes["gate_up_proj"], codes["down_proj"]) if codes else None
    return ExpertWeights(views[0], up_bias, views[1], down_bias, gate, held_as(module), both)


def apply_gate(gate: Gate, both: torch.Tensor) -> torch.Tensor:
    """Compute the gated output of gate and up projections [..., 2 n] (n without a gate), by definition. -> [..., n]"""
    function = _FUNCTIONS[gate.activation]
    if not gate.gated:
        out: torch.Tensor = function(both)
        return out
    first, up = (both[..., ::2], both[..., 1::2]) if gate.interleaved else both.chunk(2, -1)
    if gate.limit is not None:
        first, up = first.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
    active = first * torch.sigmoid(gate.alpha * first) if gate.activation == "silu" else function(first)
    return active * (up + gate.shift)


def _gate_of(module: nn.Module, weight: torch.Tensor, *, gated: bool) -> Gate | None:
    """Return the gate whose output equals the module's own on random numbers; None if no gate does."""
    own = getattr(module, "_apply_gate", None) if gated else getattr(module, "act_fn", None)
    if own is None:
        own = _plain_gate(module)
    both = _SCALE * torch.randn(4, min(weight.shape[1], 256), device=weight.device, dtype=torch.float32)
    try:
        expected = own(both)
    except Exception:  # its arguments differ
        return None
    return next((gate for gate in _candidates(module, gated) if allclose(expected, apply_gate(gate, both), 1e-5)), None)


def _plain_gate(module: nn.Module) -> Any:
    def gate(both: torch.Tensor) -> torch.Tensor:
        first, up = both.chunk(2, -1)
        out: torch.Tensor = getattr(module, "act_fn")(first) * up  # noqa: B009
        return out

    return gate


def _candidates(module: nn.Module, gated: bool) -> Iterator[Gate]:
    if not gated:
        yield from (Gate(activation, gated=False) for activation in _FUNCTIONS)
        return
    numbers = {name: value for name, value in vars(module).items() if type(value) in (int, float)}
    config = getattr(module, "config", None)
    limits: list[float | None] = [None, *(float(v) for n, v in numbers.items() if "limit" in n)]
    limits += [float(v) for n, v in vars(config).items() if "limit" in n and type(v) in (int, float)] if config else []
    alphas = [1.0, *(float(v) for n, v in numbers.items() if "alpha" in n)]
    turns = (False, True) if getattr(module, "is_concatenated", True) else (True, False)
    for interleaved, limit, shift in itertools.product(turns, limits, (0.0, 1.0)):
        for alpha in alphas:
            yield Gate("silu", alpha, limit, shift, interleaved=interleaved)
        for activation in _FUNCTIONS:
            if activation != "silu":
                yield Gate(activation, 1.0, limit, shift, interleaved=interleaved)
