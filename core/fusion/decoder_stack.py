"""The decoder of a model on a CPU as one compiled call, if all of its layers are fused and the other modules plain."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from graftlm.core.fusion.cpu_layers import FusedCpuLayer, rms_norm_of, skinny_head
from graftlm.core.fusion.layer_parts import decoder_stacks
from graftlm.core.fusion.layer_probe import kind_of, rotations as rotations_of
from graftlm.kernels.cpu.huge_pages import move_later
from graftlm.kernels.cpu.linear.packed_codes import PackedRows

if TYPE_CHECKING:
    from graftlm.core.loaded_model import LoadedModel
    from graftlm.kernels.cpu.decoder.decoder_stack import DecoderStack


def stack_layers(loaded: LoadedModel, difference: Callable[[], str | None]) -> None:
    """Run steps of few tokens in one compiled call, unless `difference` reports different outputs with it."""
    found = stack_of(loaded.model, loaded.max_model_len)
    reason = found if isinstance(found, str) else None
    if not isinstance(found, str):
        loaded.stack = found
        reason = None if loaded.fusions.trusted else difference()
        loaded.fusions.num_refused += reason is not None
    if reason is not None:
        loaded.stack = None
        if not loaded.fusions.unfused:  # `unfused` gives the reason already
            loaded.fusions.reasons["decode steps are not one call"] = reason
    if loaded.stack is not None:
        move_later(loaded.stack.memory, loaded.stack)


def stack_of(model: nn.Module, max_positions: int) -> DecoderStack | str:
    """Return the decoder of `model` from token ids to logits, or the part that the compiled code does not support.

    Operations between the parts, such as a factor of the logits, are not visible here: the caller compares the outputs.
    """
    stacks = list(decoder_stacks(model))
    if len(stacks) != 1:
        return f"{len(stacks)} stacks of decoder layers"
    ((modules, rotary),) = stacks
    owner = next(m for m in model.modules() if getattr(m, "layers", None) is modules)
    # transformers leaves hooks in the encoder of a vision model, which the decoder never runs
    within = {*owner.modules(), *(m for m in model.modules() if owner in m.modules())}
    hooked = next(
        (name for name, m in model.named_modules() if m in within and (m._forward_hooks or m._forward_pre_hooks)), None
    )
    if hooked is not None:
        return f"{hooked or 'the model'} has a hook"
    layers = [getattr(layer, "forward", None) for layer in modules]
    fused = [layer for layer in layers if isinstance(layer, FusedCpuLayer)]
    if not fused or len(fused) < len(layers):
        return f"{len(layers) - len(fused)} of {len(layers)} layers keep their own forward"
    norm = rms_norm_of(getattr(owner, "norm", None))
    embedding: Any = getattr(model, "get_input_embeddings", lambda: None)()
    head = skinny_head(model)
    if norm is None:
        return "no RMSNorm after the last layer"
    if head is None:
        return "a head that is no linear layer in panels, or in rows of a multiple of 16"
    compiled = fused[0].decode.layers
    if [layer.decode for layer in fused] != [(compiled, i) for i in range(len(compiled.weights))]:
        return "layers in another order"
    scale = _scale_of(embedding)
    if scale is None:
        return f"an embedding of type {type(embedding).__name__}"
    table = embedding.panels if isinstance(embedding, PackedRows) else embedding.weight.detach()
    num_rows, dense = embedding.num_embeddings, not isinstance(table, torch.Tensor) or table.is_contiguous()
    if table.dtype != compiled.dtype or not dense or num_rows < head.num_out:
        return f"an embedding of {num_rows:,} {str(table.dtype)[6:]} rows under {head.num_out:,} logits"
    params = [layer.params for layer in fused]
    sinks = next((i for i, p in enumerate(params) if p.sinks is not None), None)
    if sinks is not None:
        return f"layer {sinks} has attention sinks"
    sizes = [w.hidden_size for w in compiled.weights]
    if len(set(sizes)) > 1:
        return f"layers of sizes {', '.join(map(str, sorted(set(sizes))))}"

    like = torch.zeros(1, 1, embedding.embedding_dim, dtype=table.dtype)

    kinds = [kind_of(layer, rotary) for layer in modules]
    each = [dict(items) for items in dict.fromkeys(tuple(kind.items()) for kind in kinds)]

    def rotations(num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(num_positions)[None]
        found = [rotations_of(rotary, like, positions, **kind) for kind in each]
        return torch.stack([cos[0] for cos, _ in found]), torch.stack([sin[0] for _, sin in found])

    if len({cos.shape[-1] for kind in each for cos in rotations_of(rotary, like, torch.arange(1)[None], **kind)}) > 1:
        return "rotations of several sizes"

    from graftlm.kernels.cpu.decoder.decoder_stack import DecoderStack, Rotations, ScaledEmbedding

    tables = [each.index(kind) for kind in kinds]
    embedded = ScaledEmbedding(table, scale)
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    turns, cap = Rotations(rotations, tables), getattr(text, "final_logit_softcapping", None)
    return DecoderStack(compiled, params, embedded, turns, norm, head, max_positions, cap)


def _scale_of(embedding: Any) -> float | None:
    """Return the factor of an embedding's rows (Gemma's), rounded to their dtype; None for an unknown embedding."""
    if type(embedding) is nn.Embedding or isinstance(embedding, PackedRows):
        return 1.0
    scale = getattr(embedding, "embed_scale", None)
    if not isinstance(embedding, nn.Embedding) or not isinstance(scale, torch.Tensor | float | int):
        return None
    ids = torch.arange(min(8, embedding.num_embeddings))
    rounded = torch.as_tensor(scale, dtype=embedding.weight.dtype)
    same = torch.equal(embedding(ids), embedding.weight[ids] * rounded)
    return float(rounded) if same else None
