"""StateLayers: all layers with a state of one model, run by our own forward while a step is under way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from graftlm.core.execution.paged import state_step
from graftlm.core.state_layers.gated_delta_net import GatedDeltaNet, KimiDelta
from graftlm.core.state_layers.mamba2 import Mamba2
from graftlm.core.state_layers.short_convolution import ShortConvolution
from graftlm.core.state_layers.state_layer import StateLayer, UnknownVariant
from graftlm.kernels.recurrent.state_pool import StatePool, StateShape, slot_bytes
from graftlm.kernels.recurrent.state_step import MAX_CHUNK, StateStep

FAMILIES: dict[str, Callable[[nn.Module], StateLayer]] = {
    "Qwen3NextGatedDeltaNet": GatedDeltaNet,
    "Qwen3_5GatedDeltaNet": GatedDeltaNet,
    "Qwen3_5MoeGatedDeltaNet": GatedDeltaNet,
    "OlmoHybridGatedDeltaNet": GatedDeltaNet,
    "Lfm2ShortConv": ShortConvolution,
    "Lfm2MoeShortConv": ShortConvolution,
    "Lfm3ShortConv": ShortConvolution,
    "BambaMixer": Mamba2,
    "GraniteMoeHybridMambaLayer": Mamba2,
    "NemotronHMamba2Mixer": Mamba2,
    "FalconH1Mixer": Mamba2,
    "KimiLinearDeltaAttention": KimiDelta,
    "BailingHybridDeltaAttention": KimiDelta,
}
"""The kind of each class of transformers that has a state."""

SERIAL = {
    "MambaMixer": "Mamba 1",
    "MambaBlock": "Mamba 1",
    "JambaMambaMixer": "Mamba 1",
    "FalconMambaMixer": "Mamba 1",
    "Glm5NextTextLinearAttention": "Kimi delta attention",
    "MiniMaxLightningAttention": "lightning attention",
    "RecurrentGemmaRecurrentBlock": "a gated linear recurrence",
}
"""Kinds of layers with a state that no kernel here runs in batches, by the class of transformers."""

PADDED_ROWS = 16
"""Rows of a prefill step whose padding has memory reserved."""


def serial_kind(model: nn.Module) -> str | None:
    """Return the kind of layers that keeps `model` from batches; None if it has no such layers."""
    return next((SERIAL[name] for m in model.modules() if (name := type(m).__name__) in SERIAL), None)


def has_states(model: nn.Module) -> bool:
    """Return True if `model` has layers with a state of a known kind."""
    return any(type(module).__name__ in FAMILIES for module in model.modules())


class StateLayers:
    """The layers with a state of one model, in the order of its modules.

    Outside of a step their modules run as they were, so that a model that its user handed over still generates.
    """

    def __init__(self, layers: dict[nn.Module, StateLayer]) -> None:
        self.layers = layers
        for index, module in enumerate(layers):
            module.forward = partial(_forward, index, module.forward)

    @classmethod
    def of(cls, model: nn.Module) -> StateLayers | None:
        """Take over the layers with a state of `model`; None if it has none. Raises UnknownVariant."""
        found: dict[nn.Module, StateLayer] = {}
        for module in model.modules():
            kind = FAMILIES.get(type(module).__name__)
            if kind is not None:
                try:
                    found[module] = kind(module)
                except AttributeError as error:
                    raise UnknownVariant(f"{type(module).__name__} has other parts: {error}") from error
        return cls(found) if found else None

    def undo(self) -> None:
        """Restore the modules' own forward."""
        for module in self.layers:
            del module.forward

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def shapes(self) -> list[tuple[StateShape, ...]]:
        """Return the tensors of each layer's state."""
        return [layer.shapes for layer in self.layers.values()]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the states of one sequence."""
        return slot_bytes(self.shapes)

    def work_bytes(self, num_tokens: int) -> int:
        """Return the bytes of intermediate tensors of a prefill: one layer's, for its tokens and padding of chunks.

        Each row's last chunk is padded; a step of more than PADDED_ROWS short prompts takes more.
        """
        places = num_tokens + PADDED_ROWS * MAX_CHUNK
        return places * max((layer.token_bytes for layer in self.layers.values()), default=0)

    def pool(self, num_slots: int, device: torch.device) -> StatePool:
        """Allocate a pool of `num_slots` slots, reserved ones included."""
        return StatePool(self.shapes, num_slots, device)

    def runner(self, pool: StatePool, step: StateStep) -> Callable[[int, torch.Tensor], torch.Tensor]:
        """Return a function that runs layer `index` of one step. hidden  [1, num_tokens, hidden_size]"""
        layers = list(self.layers.values())

        def run(index: int, hidden: torch.Tensor) -> torch.Tensor:
            return layers[index].forward(hidden[0], pool.layers[index], step)[None]

        return run


def _forward(index: int, original: Callable[..., Any], hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
    """The forward of a module with a state: our own within a step, else its original one."""
    run = state_step()
    if run is None:
        return original(hidden_states, *args, **options)
    return run(index, hidden_states)
