"""StateLayer: one layer with a state, as a kind of layer implements it."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from graftlm.kernels.recurrent.state_pool import StateShape
from graftlm.kernels.recurrent.state_step import StateStep


class UnknownVariant(Exception):
    """A module of a known family has a feature that its kind of layer does not compute; the message names it."""


class StateLayer(Protocol):
    """One layer with a state over a module of transformers, whose weights and sub-modules it uses.

    shapes       the tensors of the layer's state
    token_bytes  of intermediate tensors that a prefill holds for each token, in any of its implementations
    """

    shapes: tuple[StateShape, ...]
    token_bytes: int

    def __init__(self, module: nn.Module) -> None:
        """Raises UnknownVariant for a module that `forward` would compute in another way than the module itself."""
        ...

    def forward(self, x: torch.Tensor, states: tuple[torch.Tensor, ...], step: StateStep) -> torch.Tensor:
        """Run a ragged step.

        x       [num_tokens, hidden_size]
        states  one tensor of the pool for each of `shapes`, [num_slots, *shape]; written
        -> as x
        """
        ...


def conv_weight(convolution: Any) -> torch.Tensor:
    """Return the weight of a depthwise convolution, [num_channels, kernel_size]."""
    weight: torch.Tensor = convolution.weight
    return weight[:, 0]


def conv_shape(convolution: Any) -> StateShape:
    """Return the shape of the inputs that a causal convolution keeps for the next token."""
    weight: torch.Tensor = convolution.weight
    return StateShape((weight.shape[0], weight.shape[2] - 1), weight.dtype)


def conv_bytes(convolution: Any) -> int:
    """Return the bytes of a token's intermediate tensors in a causal convolution: inputs, float32 sums, outputs."""
    weight: torch.Tensor = convolution.weight
    return weight.shape[0] * (12 + 6 * weight.itemsize)


def check_silu(activation: object) -> None:
    """Raise UnknownVariant unless an activation's name is that of SiLU."""
    if activation not in ("silu", "swish"):
        raise UnknownVariant(f"its convolution has the activation {activation!r}")
