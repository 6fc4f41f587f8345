"""The decoder of a model on a CPU as one compiled call, where all of its layers are fused and the rest is plain."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from graftlm.core.fusion.cpu_layers import FusedCpuLayer, skinny_head
from graftlm.core.fusion.layer_parts import decoder_stacks
from graftlm.kernels.cpu.huge_pages import move_later
from graftlm.kernels.norm import Norm

if TYPE_CHECKING:
    from graftlm.core.loaded_model import LoadedModel
    from graftlm.kernels.cpu.decoder.decoder_stack import DecoderStack


def stack_layers(loaded: LoadedModel, difference: Callable[[], str | None]) -> None:
    """Run steps of few tokens in one compiled call, unless `difference` then says how the model answers otherwise."""
    loaded.stack = stack_of(loaded.model, loaded.max_model_len)
    reason = difference() if loaded.stack is not None else None
    if reason is not None:
        loaded.stack = None
        loaded.fusions.reasons[type(loaded.model).__name__] = reason
    if loaded.stack is not None:
        move_later(loaded.stack.memory)


def stack_of(model: nn.Module, max_positions: int) -> DecoderStack | None:
    """The decoder of `model` from token ids to logits; None if it has parts that the compiled code does not know.

    What lies between the parts, such as a factor for the logits, does not show: the caller compares what comes out.
    """
    stacks = list(decoder_stacks(model))
    if len(stacks) != 1 or any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()):
        return None
    ((modules, rotary),) = stacks
    owner = next(m for m in model.modules() if getattr(m, "layers", None) is modules)
    layers = [getattr(layer, "forward", None) for layer in modules]
    fused = [layer for layer in layers if isinstance(layer, FusedCpuLayer)]
    norm = Norm.of(getattr(owner, "norm", None))
    embedding: Any = getattr(model, "get_input_embeddings", lambda: None)()
    head = skinny_head(model)
    if not fused or len(fused) < len(layers) or norm is None or not norm.is_plain or head is None:
        return None
    compiled = fused[0].decode.layers
    if [layer.decode for layer in fused] != [(compiled, i) for i in range(len(compiled.weights))]:
        return None
    if type(embedding) is not nn.Embedding or "layer_type" in inspect.signature(rotary.forward).parameters:
        return None
    table = embedding.weight.detach()
    if table.dtype != compiled.dtype or not table.is_contiguous() or len(table) < head.num_out:
        return None
    params = [layer.params for layer in fused]
    if any(p.sinks is not None for p in params) or len({w.hidden_size for w in compiled.weights}) > 1:
        return None

    def rotations(num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = rotary(table[:1, None], torch.arange(num_positions)[None])
        return cos[0], sin[0]

    from graftlm.kernels.cpu.decoder.decoder_stack import DecoderStack

    return DecoderStack(compiled, params, table, rotations, norm, head, max_positions)
